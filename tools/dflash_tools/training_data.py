"""A training's texts and taps from several places: data made later is added without running the target over the old."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_export.json_file import read_json
from dflash_runtime.errors import CheckpointError
from dflash_tools.answer_writing import FACTS_FILE
from dflash_tools.training_answers import Answers, read_answers, split_answers
from dflash_tools.training_taps import CachedTaps


def read_parts(places: Sequence[Path], *, vocab_size: int, max_text_tokens: int) -> list[Answers]:
    """The answers of each place, nothing held out.

    Raises:
        CheckpointError: as `read_answers`; a place given twice.
    """
    if len({place.resolve() for place in places}) < len(places):
        raise CheckpointError(f"--data names a place twice: {', '.join(map(str, places))}.")
    return [
        read_answers(place, vocab_size=vocab_size, max_text_tokens=max_text_tokens, num_held_out=0) for place in places
    ]


def join_parts(parts: Sequence[Answers], num_held_out: int) -> Answers:
    """All texts, part after part; those to hold out are chosen among all of them.

    Raises:
        CheckpointError: none would be left to train on.
    """
    texts = [text for part in parts for text in part.texts]
    digest = parts[0].sha256
    if len(parts) > 1:
        digest = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
    return split_answers(texts, digest, sum(part.num_left_out for part in parts), num_held_out, "the training data")


class JoinedTaps:
    """Taps of all texts, from the cache of each part."""

    def __init__(self, parts: Sequence[Answers], caches: Sequence[CachedTaps]) -> None:
        self._places = [(cache, i) for part, cache in zip(parts, caches, strict=True) for i in range(len(part.texts))]

    def of(self, number: int) -> Tensor:
        """[S, K*H] in bf16, as `CachedTaps.of`."""
        cache, own = self._places[number]
        return cache.of(own)


def data_record(places: Sequence[Path]) -> dict[str, Any] | None:
    """How `make-data` made the answers, without the target's place on this machine; None where it made none.

    Raises:
        CheckpointError: answers to prompts in different chat template arguments; a drafter is trained for one.
    """
    records = [
        {key: value for key, value in read_json(place / FACTS_FILE).items() if key != "target"}
        for place in places
        if (place / FACTS_FILE).is_file()
    ]
    for record in records[1:]:
        first, other = (r.get("template_args", {}) for r in (records[0], record))
        if other != first:
            raise CheckpointError(
                f"--data holds answers made with the chat template arguments {json.dumps(first)} and others with "
                f"{json.dumps(other)}. Train one drafter for each."
            )
    return records[0] if records else None
