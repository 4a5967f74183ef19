"""Taps of all training texts on disk, so that the target is run over each text once and not once an epoch.

taps.bf16     rows [K*H] in bf16, text after text
taps.json     what they are of; written first, so that a killed run continues where it stopped
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_runtime.bundle import write_atomically
from dflash_runtime.errors import CheckpointError, OutputError
from dflash_tools.sizes import bytes_text
from dflash_tools.training_answers import Answers

TAPS_FILE, FACTS_FILE = "taps.bf16", "taps.json"
ITEM_BYTES = 2
MakeTaps = Callable[[Sequence[int]], Tensor]
"""Token ids -> taps [S, K*H] of every position."""
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class TapFileFacts:
    """What cached taps are of; taps of anything else are made anew."""

    answers_sha256: str
    target_sha256: str
    """Of the target's config and tensor headers."""
    layer_ids: tuple[int, ...]
    row_values: int
    """K*H"""


class CachedTaps:
    """The finished cache, mapped into memory."""

    def __init__(self, folder: Path, answers: Answers, row_values: int) -> None:
        self._starts = _starts(answers)
        rows = self._starts[-1]
        self._values = torch.from_file(
            str(folder / TAPS_FILE), shared=False, size=rows * row_values, dtype=torch.bfloat16
        ).view(rows, row_values)

    def of(self, number: int) -> Tensor:
        """[S, K*H] in bf16: of every position of a text but the last, whose tap no block can see."""
        return self._values[self._starts[number] : self._starts[number + 1]]


def cache_bytes(answers: Answers, row_values: int) -> int:
    """What the cache takes on disk."""
    return _starts(answers)[-1] * row_values * ITEM_BYTES


def _starts(answers: Answers) -> list[int]:
    starts = [0]
    for text in answers.texts:
        starts.append(starts[-1] + len(text.token_ids) - 1)
    return starts


def is_cached(folder: Path, answers: Answers, facts: TapFileFacts) -> bool:
    """Whether a folder holds all taps."""
    return _cached_texts(folder, answers, facts) == len(answers.texts)


def require_room(folder: Path, answers: Answers, facts: TapFileFacts) -> None:
    """Refuses before the work what the disk cannot hold.

    Raises:
        OutputError: both sizes are named.
    """
    there = folder / TAPS_FILE
    needed = cache_bytes(answers, facts.row_values) - (there.stat().st_size if there.is_file() else 0)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OutputError(
            f"the taps of {len(answers.texts)} texts need {bytes_text(needed)} more and {folder} has "
            f"{bytes_text(free)} free. Make room, or give fewer or shorter texts (--max-length)."
        )


def cache_taps(folder: Path, answers: Answers, facts: TapFileFacts, make_taps: MakeTaps, progress: Progress) -> None:
    """Makes every tap that is not cached yet.

    Args:
        folder: Where the cache lies; it exists.
        answers: The texts.
        facts: What the cache is of; another cache there is replaced.
        make_taps: Runs the target.
        progress: Called with stage, done, total.

    Raises:
        OutputError: the disk has no room.
    """
    done = _cached_texts(folder, answers, facts)
    if done == 0:
        (folder / TAPS_FILE).unlink(missing_ok=True)
        write_atomically(folder / FACTS_FILE, json.dumps(dataclasses.asdict(facts), indent=1) + "\n")
    require_room(folder, answers, facts)
    starts = _starts(answers)
    (folder / TAPS_FILE).touch()
    with (folder / TAPS_FILE).open("r+b") as stream:
        stream.truncate(starts[done] * facts.row_values * ITEM_BYTES)
        stream.seek(0, os.SEEK_END)
        for i in range(done, len(answers.texts)):
            progress("taps", i, len(answers.texts))
            taps = make_taps(answers.texts[i].token_ids[:-1])
            if tuple(taps.shape) != (starts[i + 1] - starts[i], facts.row_values):
                raise CheckpointError(
                    f"text {i} gave taps of shape {list(taps.shape)} where "
                    f"{[starts[i + 1] - starts[i], facts.row_values]} is expected."
                )
            stream.write(taps.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes())
        stream.flush()
        os.fsync(stream.fileno())
    progress("taps", len(answers.texts), len(answers.texts))


def _cached_texts(folder: Path, answers: Answers, facts: TapFileFacts) -> int:
    """Texts whose taps are there whole; 0 when the cache is of something else."""
    facts_path, taps_path = folder / FACTS_FILE, folder / TAPS_FILE
    if not facts_path.is_file() or not taps_path.is_file():
        return 0
    found = json.loads(facts_path.read_text(encoding="utf-8"))
    if found != json.loads(json.dumps(dataclasses.asdict(facts))):
        return 0
    rows = taps_path.stat().st_size // (facts.row_values * ITEM_BYTES)
    return sum(start <= rows for start in _starts(answers)[1:])
