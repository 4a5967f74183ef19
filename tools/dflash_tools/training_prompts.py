"""Writes prompts for training a drafter, from public data: school mathematics and functions to be written.

    python -m dflash_tools.training_prompts --out prompts.jsonl --gsm8k train.jsonl --code 700 --held-out gsm8k=t.jsonl

Prompts are worded as the authors' benchmark words them. What is measured on later is given with --held-out and never
gets in.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import click

from dflash_runtime.bundle import write_atomically
from dflash_runtime.errors import PromptError
from dflash_tools.acceptance_prompts import all_prompts, set_option
from dflash_tools.docstring_prompts import docstring_prompts, source_folders
from dflash_tools.error_lines import DFlashCommand


@click.command(cls=DFlashCommand)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File to write, JSONL.")
@click.option("--gsm8k", type=click.Path(path_type=Path), help="Training questions of GSM8K, JSONL with `question`.")
@click.option("--questions", type=click.IntRange(0), help="Most of them.  [default: all]")
@click.option("--code", type=click.IntRange(0), default=0, show_default=True, help="Functions to be written.")
@click.option("--package", "packages", multiple=True, help="Source of functions beside the standard library.")
@click.option(
    "--held-out", multiple=True, callback=set_option, metavar="SET=FILE", help="Prompts that must not get in."
)
@click.option("--seed", type=int, default=0, show_default=True)
def main(
    out: Path, gsm8k: Path | None, questions: int | None, code: int, packages: tuple[str, ...],
    held_out: Sequence[tuple[str, Path]], seed: int,
) -> None:  # fmt: skip
    """Writes a file of prompts for make-data and prints how many of each kind there are."""
    barred = {prompt.text for name, path in held_out for prompt in all_prompts(name, path)}
    rows = [] if gsm8k is None else [{"kind": "gsm8k", "prompt": text} for text in _questions(gsm8k, questions, seed)]
    names = _function_names(barred)
    rows += [
        {"kind": "code", "prompt": text} for text in docstring_prompts(source_folders(packages), code, seed, names)
    ]
    kept = [row for row in rows if row["prompt"] not in barred]
    if not kept:
        raise PromptError("No prompts are left to write. Give --gsm8k, --code, or both.")
    random.Random(seed).shuffle(kept)
    write_atomically(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    counts = {kind: sum(row["kind"] == kind for row in kept) for kind in ("gsm8k", "code")}
    click.echo(json.dumps({"out": str(out), **counts, "held_out": len(rows) - len(kept)}))


def _questions(path: Path, count: int | None, seed: int) -> list[str]:
    found = [prompt.text for prompt in all_prompts("gsm8k", path)]
    random.Random(seed).shuffle(found)
    return found[:count]


def _function_names(barred: set[str]) -> set[str]:
    """Names of the functions that held-out prompts ask for."""
    return {line[4:].partition("(")[0].strip() for text in barred for line in text.splitlines() if line[:4] == "def "}


if __name__ == "__main__":
    main()
