"""The texts a drafter is trained on: prompts with the target's own answers, as token ids.

An answers file has one JSON object a line with `prompt_ids` and `answer_ids`; other keys are left alone.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.errors import CheckpointError

ANSWERS_FILE = "answers.jsonl"


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prompt and what the target says to it."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt_ids + self.answer_ids

    @property
    def answer_start(self) -> int:
        """Position of the first answer token."""
        return len(self.prompt_ids)


@dataclasses.dataclass(frozen=True)
class Answers:
    """All texts of a training, in the order of the file."""

    texts: tuple[Answer, ...]
    held_out: tuple[int, ...]
    """Numbers of the texts that are measured on and never trained on."""
    sha256: str
    """Of the texts as they are used."""
    num_left_out: int
    """Lines whose answer has fewer than two tokens, or whose prompt leaves no room for that."""

    @property
    def trained(self) -> tuple[int, ...]:
        """Numbers of the texts that are trained on."""
        held = set(self.held_out)
        return tuple(i for i in range(len(self.texts)) if i not in held)

    def num_answer_tokens(self, numbers: Sequence[int]) -> int:
        """Answer tokens of some texts."""
        return sum(len(self.texts[i].answer_ids) for i in numbers)


def answers_path(data: Path) -> Path:
    """The answers file that `--data` means: a file, or a folder made by `make-data`.

    Raises:
        CheckpointError: there is none.
    """
    path = data / ANSWERS_FILE if data.is_dir() else data
    if not path.is_file():
        raise CheckpointError(
            f"{data} holds no training data: give a file of answers, or a folder with {ANSWERS_FILE} as "
            "`dflash-export make-data` writes it."
        )
    return path


def read_answers(data: Path, *, vocab_size: int, max_text_tokens: int, num_held_out: int) -> Answers:
    """Reads and splits an answers file.

    Args:
        data: File or folder.
        vocab_size: Rows of the target's embedding.
        max_text_tokens: Longer texts are cut.
        num_held_out: Texts to keep for measuring, chosen by the hash of their prompt: the same ones whatever the
            order, and no prompt on both sides.

    Raises:
        CheckpointError: no such file, a line that is no answer, or too few texts.
    """
    path = answers_path(data)
    texts, left_out = [], 0
    digest = hashlib.sha256()
    for number, row in _rows(path):
        prompt, answer = (_ids(row, key, vocab_size, f"{path}:{number}") for key in ("prompt_ids", "answer_ids"))
        answer = answer[: max(0, max_text_tokens - len(prompt))]
        if len(answer) < 2 or not prompt:
            left_out += 1
            continue
        texts.append(Answer(prompt, answer))
        digest.update(json.dumps([prompt, answer]).encode())
    return split_answers(texts, digest.hexdigest(), left_out, num_held_out, str(path))


def split_answers(texts: Sequence[Answer], sha256: str, num_left_out: int, num_held_out: int, where: str) -> Answers:
    """Chooses the texts to hold out.

    Args:
        texts: All usable ones.
        sha256: Of them.
        num_left_out: Unusable ones.
        num_held_out: Texts to keep for measuring.
        where: Their place, for messages.

    Raises:
        CheckpointError: none would be left to train on.
    """
    held_out = _held_out(texts, num_held_out)
    if len(texts) <= len(held_out):
        raise CheckpointError(
            f"{where} has {len(texts)} usable texts and {num_held_out} are to be held out; none would be left to train "
            "on. Give more data or a smaller --held-out."
        )
    return Answers(tuple(texts), held_out, sha256, num_left_out)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as stream:
        lines = gzip.GzipFile(fileobj=stream) if path.suffix == ".gz" else stream
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise CheckpointError(f"{path}:{number} is no JSON ({error}).") from error
            if not isinstance(row, dict):
                raise CheckpointError(f"{path}:{number} is no JSON object.")
            yield number, row


def _ids(row: dict[str, Any], key: str, vocab_size: int, where: str) -> tuple[int, ...]:
    ids = row.get(key)
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(
            f"{where}: {key} must be a list of token ids. An answers file has prompt_ids and answer_ids on every "
            "line; `dflash-export make-data` writes one."
        )
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise CheckpointError(
            f"{where}: {key} holds token {outside[0]} and the target has {vocab_size} (0 to {vocab_size - 1}): the "
            "answers are another model's. Make them with this target."
        )
    return tuple(ids)


def _held_out(texts: Sequence[Answer], count: int) -> tuple[int, ...]:
    by_prompt: dict[str, list[int]] = {}
    for i, text in enumerate(texts):
        key = hashlib.sha256(json.dumps(text.prompt_ids).encode()).hexdigest()
        by_prompt.setdefault(key, []).append(i)
    chosen: list[int] = []
    for key in sorted(by_prompt):
        if len(chosen) + len(by_prompt[key]) > count:
            break
        chosen += by_prompt[key]
    return tuple(sorted(chosen))
