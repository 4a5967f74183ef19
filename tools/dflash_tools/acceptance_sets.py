"""Mean acceptance length of a pair on sets of prompts, by this runtime and by the authors' package, round by round.

    pip install dflash==0.1.0
    python -m dflash_tools.acceptance_sets BUNDLE --model TARGET --drafter DRAFTER --set gsm8k=FILE --set humaneval=FILE

Prompts are the first ones of each file, wrapped as the authors' benchmark wraps them; greedy, fp32, on the CPU. Exit
code 1 when a round of ours commits another number of tokens than the authors', or a token differs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dflash_runtime import DFlashError, GenerationConfig, GenerationResult, Session
from dflash_tools.acceptance import mean_acceptance
from dflash_tools.acceptance_prompts import AcceptancePrompt, set_option, set_prompts
from dflash_tools.authors_loop import AuthorsLoop
from dflash_tools.error_lines import DFlashCommand, needs_extra
from dflash_tools.looping_answers import RULE, loops
from dflash_tools.progress import ProgressLine


@dataclasses.dataclass(frozen=True)
class Measured:
    """One prompt, decoded plainly, with the drafter, and by the authors."""

    set_name: str
    row: int
    """Row of the file, from 0."""
    tokens: int
    """Of the answer."""
    finish_reason: str
    looping: bool
    acceptance_lengths: list[int]
    authors_lengths: list[int] | None
    same_tokens: bool
    """Plain, drafted and, where they were asked, the authors' tokens are the same."""
    plain_s: float
    """Seconds of decoding after the first token, without the drafter."""
    drafted_s: float

    @property
    def equal(self) -> bool:
        """Whether ours and the authors' say the same, round by round."""
        return self.same_tokens and self.authors_lengths in (None, self.acceptance_lengths)


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--model", required=True, type=click.Path(path_type=Path), help="The target's checkpoint folder.")
@click.option("--drafter", required=True, type=click.Path(path_type=Path), help="The drafter's checkpoint folder.")
@click.option("--set", "files", multiple=True, required=True, callback=set_option, metavar="SET=FILE")
@click.option("--num-prompts", type=click.IntRange(1), default=8, show_default=True, help="First prompts of each set.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=256, show_default=True)
@click.option("--block-size", type=click.IntRange(2), help="[default: the drafter's own]")
@click.option("--threads", type=click.IntRange(1), help="[default: each library chooses]")
@click.option("--without-authors", is_flag=True, help="Measure this runtime alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path, model: Path, drafter: Path, files: list[tuple[str, Path]], num_prompts: int, max_new_tokens: int,
    block_size: int | None, threads: int | None, without_authors: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measures acceptance on the first prompts of each set, and speed over plain decoding."""
    prompts = [prompt for name, path in files for prompt in set_prompts(name, path, num_prompts)]
    authors = None
    if not without_authors:
        with needs_extra("export"):
            authors = AuthorsLoop(model, drafter, threads)
    rows = []
    with Session.open(bundle, threads=threads) as session, ProgressLine() as progress:
        size = block_size or GenerationConfig().fixed_block_size(session.bundle.manifest)
        for i, prompt in enumerate(prompts):
            progress("prompts", i, len(prompts))
            rows.append(measure(session, authors, prompt, max_new_tokens, size))
    report = summary(rows, block_size=size, num_prompts=num_prompts, max_new_tokens=max_new_tokens)
    if as_json:
        click.echo(json.dumps({**report, "prompts": [dataclasses.asdict(row) for row in rows]}))
    else:
        _print(report)
    different = [row for row in rows if not row.equal]
    if different:
        first = different[0]
        raise DFlashError(
            f"{len(different)} of {len(rows)} prompts differ, first row {first.row} of {first.set_name}: ours "
            f"{first.acceptance_lengths}, the authors' {first.authors_lengths}, same tokens: {first.same_tokens}."
        )


def measure(
    session: Session, authors: AuthorsLoop | None, prompt: AcceptancePrompt, max_new_tokens: int, block_size: int
) -> Measured:
    """Decodes one prompt in every way."""
    if session.tokenizer is None or not session.tokenizer.has_chat_template:
        raise DFlashError("The bundle has no chat template, with which the sets are asked.")
    ids = session.tokenizer.encode_messages([{"role": "user", "content": prompt.text}], None)
    config = GenerationConfig(max_new_tokens=max_new_tokens, block_size=block_size, reuse_prefix=False)
    plain = session.generate(ids, dataclasses.replace(config, block_size=None, plain=True))
    drafted = session.generate(ids, config)
    same, their_lengths = plain.token_ids == drafted.token_ids, None
    if authors is not None:
        stops = session.bundle.manifest.text.stop_token_ids
        theirs = authors.answer(ids, max_new_tokens, stops, block_size)
        same, their_lengths = same and theirs.token_ids == drafted.token_ids, theirs.acceptance_lengths
    return Measured(
        prompt.set_name, prompt.row, len(drafted.token_ids), drafted.finish_reason, loops(drafted.token_ids),
        drafted.acceptance_lengths, their_lengths, same, _decode_s(plain), _decode_s(drafted),
    )  # fmt: skip


def _decode_s(result: GenerationResult) -> float:
    return (len(result.token_ids) - 1) / result.tokens_per_s if result.tokens_per_s else 0.0


def summary(rows: Sequence[Measured], *, block_size: int, num_prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """Means of each set, over all answers and over those that do not loop."""
    names = dict.fromkeys(row.set_name for row in rows)
    sets = {name: _means([row for row in rows if row.set_name == name]) for name in names}
    return {
        "block_size": block_size, "num_prompts": num_prompts, "max_new_tokens": max_new_tokens, "loop": RULE,
        "equal": all(row.equal for row in rows) if any(row.authors_lengths is not None for row in rows) else None,
        "sets": sets,
    }  # fmt: skip


def _means(rows: Sequence[Measured]) -> dict[str, Any]:
    straight = [row for row in rows if not row.looping]
    return {"num_looping": len(rows) - len(straight), "all": _mean(rows), "without_looping": _mean(straight)}


def _mean(rows: Sequence[Measured]) -> dict[str, Any] | None:
    """None where no answer is left or nothing was drafted."""
    ours = mean_acceptance([row.acceptance_lengths for row in rows])
    if ours is None:
        return None
    theirs = mean_acceptance([row.authors_lengths for row in rows if row.authors_lengths is not None])
    drafted_s = sum(row.drafted_s for row in rows)
    return {
        "answers": len(rows), "tokens": sum(row.tokens for row in rows), "ours": dataclasses.asdict(ours),
        "authors": None if theirs is None else dataclasses.asdict(theirs),
        "speed_over_plain": round(sum(row.plain_s for row in rows) / drafted_s, 3) if drafted_s else None,
    }  # fmt: skip


def _print(report: dict[str, Any]) -> None:
    click.echo(
        f"block {report['block_size']}, first {report['num_prompts']} prompts of each set, greedy, at most "
        f"{report['max_new_tokens']} tokens; a looping answer: {report['loop']}"
    )
    click.echo(f"{'set':<12}{'answers':<18}{'tokens':>7}  {'ours':>12}  {'authors':>12}  {'over plain':>10}")
    for name, means in report["sets"].items():
        for key in ("all", "without_looping"):
            found = means[key]
            if found is None:
                click.echo(f"{name:<12}{key.replace('_', ' '):<18}no answer left")
                continue
            label = f"{found['answers']} {key.replace('_', ' ')}"
            click.echo(
                f"{name:<12}{label:<18}{found['tokens']:>7}  {_pair(found['ours']):>12}  "
                f"{_pair(found['authors']):>12}  {found['speed_over_plain'] or '-':>10}"
            )
    click.echo("acceptance length: mean over rounds / over requests")
    if report["equal"] is not None:
        click.echo(f"round by round {'equal to' if report['equal'] else 'DIFFERENT from'} the authors' package")


def _pair(means: dict[str, float] | None) -> str:
    return "-" if means is None else f"{means['over_rounds']:.2f} / {means['over_requests']:.2f}"


if __name__ == "__main__":
    main()
