"""The first prompts of the sets DFlash drafters are measured on, wrapped as the authors' benchmark wraps them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dflash_runtime.errors import PromptError
from dflash_tools.text_lines import json_lines

_STEPS = "{text}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{text}\n```"
SETS = {"gsm8k": ("question", _STEPS), "humaneval": ("prompt", _CODE), "math500": ("problem", _STEPS),
        "mt-bench": ("turns", "{text}")}  # fmt: skip
"""Key of a row, and what the user is made to say with its text."""


@dataclasses.dataclass(frozen=True)
class AcceptancePrompt:
    """What the user says in one request."""

    set_name: str
    row: int
    """Row of the file, from 0."""
    text: str


def set_option(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Reads SET=FILE of an option that may be given several times."""
    found = []
    for value in values:
        name, _, path = value.partition("=")
        if name not in SETS or not path:
            raise click.BadParameter(f"{value!r} is not SET=FILE with one of {', '.join(SETS)}.")
        found.append((name, Path(path)))
    return found


def set_prompts(name: str, path: Path, count: int) -> list[AcceptancePrompt]:
    """The first prompts of a set, in file order; of a conversation its first turn.

    Args:
        name: One of `SETS`.
        path: JSONL as the set's authors publish it.
        count: How many.

    Raises:
        PromptError: the file cannot be read, a row lacks the set's key, or there are fewer rows.
    """
    rows = _rows(path)
    if len(rows) < count:
        raise PromptError(f"{path} holds {len(rows)} prompts, {count} were asked for. Lower --num-prompts.")
    return _wrapped(name, path, rows[:count])


def all_prompts(name: str, path: Path) -> list[AcceptancePrompt]:
    """Every prompt of a set; errors as `set_prompts`."""
    return _wrapped(name, path, _rows(path))


def _rows(path: Path) -> list[Any]:
    try:
        return json_lines(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PromptError(f"{path} cannot be read as JSONL ({error}).") from error


def _wrapped(name: str, path: Path, rows: Sequence[Any]) -> list[AcceptancePrompt]:
    key, wrapping = SETS[name]
    prompts = []
    for number, row in enumerate(rows):
        found = row.get(key) if isinstance(row, dict) else None
        text = found[0] if isinstance(found, list) and found else found
        if not isinstance(text, str) or not text:
            raise PromptError(f"{path}:{number + 1} has no text in {key!r}, where {name} has it.")
        prompts.append(AcceptancePrompt(name, number, wrapping.format(text=text)))
    return prompts
