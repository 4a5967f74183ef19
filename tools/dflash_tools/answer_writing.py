"""Prompts to a file of answers that grows in whole rounds, so that a killed run goes on as if nothing had been.

A round is a fixed set of prompts, answered from an empty cache: what a row is computed beside decides its last bits,
so rounds and not single answers are what a run can stop between and still give the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.bundle import write_atomically
from dflash_runtime.errors import OutputError, PromptError
from dflash_tools.answer_batch import AnswerBatch, AnswerRules
from dflash_tools.training_answers import ANSWERS_FILE
from dflash_tools.training_blocks import text_seed

FACTS_FILE = "data.json"
PROMPTS_PER_ROW = 16
"""Of a round: at its end rows run empty, which costs little against so many."""
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as the target gets it."""

    number: int
    """Line of the file, from 0."""
    ids: list[int]


def answering_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Longest first: neighbours are of like length, and memory is known to suffice after the first round."""
    return sorted(prompts, key=lambda prompt: (-len(prompt.ids), prompt.number))


def check_lengths(prompts: Sequence[Prompt], max_new_tokens: int, limit: int | None) -> None:
    """Refuses prompts that the target cannot read to their answer's end.

    Raises:
        PromptError: the first one is named.
    """
    for prompt in prompts:
        if not prompt.ids:
            raise PromptError(f"prompt {prompt.number + 1} has no tokens. Remove it.")
        if limit is not None and len(prompt.ids) + max_new_tokens > limit:
            raise PromptError(
                f"prompt {prompt.number + 1} has {len(prompt.ids)} tokens and its answer may have {max_new_tokens}; "
                f"the target reads {limit} in all. Shorten it, or lower --max-new-tokens."
            )


def claim_folder(out: Path, facts: dict[str, Any]) -> int:
    """Makes the folder, or finds in it the beginning of this very run.

    Args:
        out: Its place.
        facts: What decides the answers.

    Returns:
        Answers already there, in whole rounds.

    Raises:
        OutputError: something else is there.
    """
    path = out / FACTS_FILE
    if not path.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OutputError(f"{out} exists and holds something else. Choose another --out.")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{out} cannot be made: {error.strerror or error}.") from error
        write_atomically(path, json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        return 0
    found = json.loads(path.read_text(encoding="utf-8"))
    differing = sorted(key for key in found.keys() | facts.keys() if found.get(key) != facts.get(key))
    if differing:
        key = differing[0]
        raise OutputError(
            f"{out} holds answers made otherwise: {key} was {found.get(key)!r} and is {facts.get(key)!r}. Give the "
            "same options to go on, or choose another --out."
        )
    return _whole_rounds(out / ANSWERS_FILE, facts["batch_size"] * PROMPTS_PER_ROW, facts["num_prompts"])


def _whole_rounds(path: Path, round_size: int, num_prompts: int) -> int:
    """Cuts the file behind its last whole round."""
    if not path.is_file():
        return 0
    with path.open("r+b") as stream:
        ends, position = [0], 0
        for line in stream:
            position += len(line)
            if line.endswith(b"\n"):
                ends.append(position)
        lines = len(ends) - 1
        kept = lines if lines == num_prompts else lines // round_size * round_size
        stream.truncate(ends[kept])
    return kept


def write_answers(
    out: Path, prompts: Sequence[Prompt], done: int, model: Any, rules: AnswerRules, *, batch_size: int, seed: int,
    progress: Progress,
) -> None:  # fmt: skip
    """Answers what is not answered yet.

    Args:
        out: A claimed folder.
        prompts: In answering order.
        done: Answers already there.
        model: The target.
        rules: Of the answers.
        batch_size: Prompts answered at once.
        seed: Of sampled answers.
        progress: Called with stage, done, total.
    """
    if done >= len(prompts):
        return
    capacity = max(len(prompt.ids) for prompt in prompts) + rules.max_new_tokens
    batch = AnswerBatch(model, batch_size, capacity, rules)
    finished = [done]

    def count(length: int) -> None:
        finished[0] += 1
        progress("answers", finished[0], len(prompts))

    round_size = batch_size * PROMPTS_PER_ROW
    for start in range(done, len(prompts), round_size):
        part = prompts[start : start + round_size]
        answers = batch.answer([p.ids for p in part], [text_seed(seed, p.number) for p in part], count)
        lines = [
            json.dumps(
                {"number": prompt.number, "prompt_ids": prompt.ids, "answer_ids": answer,
                 "finish_reason": "stop" if answer[-1] in rules.stop_token_ids else "length"}
            )
            for prompt, answer in zip(part, answers, strict=True)
        ]  # fmt: skip
        with (out / ANSWERS_FILE).open("a", encoding="utf-8") as stream:
            stream.write("".join(line + "\n" for line in lines))
            stream.flush()
            os.fsync(stream.fileno())
