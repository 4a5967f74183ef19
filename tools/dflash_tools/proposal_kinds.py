"""Which kind of proposals is faster above temperature 0: `python -m dflash_tools.proposal_kinds BUNDLE`.

Plain decoding and every kind answer the same prompts with the same seeds, in turn, in one session. Texts differ, so
that tokens per second are compared, over all prompts of a round; ratios are taken within a round. Beside the time on
the clock stands the processor's own, which other programs on the machine disturb less; it has the prefill in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from dflash_runtime import GenerationConfig, GenerationResult, Session
from dflash_runtime.generation import PROPOSALS
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.progress import ProgressLine
from dflash_tools.prompt_file import read_prompts
from dflash_tools.reference_prompts import REFERENCE_PROMPTS

PLAIN = "plain"
KINDS = (PLAIN, *PROPOSALS)


@dataclasses.dataclass(frozen=True)
class KindFigures:
    """One kind of proposals over all rounds."""

    kind: str
    tokens_per_s: float
    """Of decoding, on the clock; median of the rounds."""
    tokens_per_cpu_s: float
    """Of whole requests, by the processor's time, all threads together; median of the rounds."""
    tokens_per_round: float
    """Committed by a pass of the target, the first of a request left out."""
    against_argmax: float
    """Tokens per second of the processor's time as a multiple of those with the likeliest tokens proposed; median."""
    lowest: float
    """The smallest of these."""
    highest: float


class KindRound(NamedTuple):
    """All prompts once, with one kind of proposals."""

    answers: list[GenerationResult]
    cpu_s: float
    """The processor's time for them."""

    def tokens_per_s(self) -> float:
        """Of decoding, on the clock."""
        counts = [len(one.token_ids) - 1 for one in self.answers]
        return sum(counts) / sum(count / one.tokens_per_s for count, one in zip(counts, self.answers, strict=True))

    def tokens_per_cpu_s(self) -> float:
        """Of whole requests, by the processor's time."""
        return sum(len(one.token_ids) for one in self.answers) / self.cpu_s


@click.command(cls=DFlashCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--num-prompts", type=click.IntRange(1), default=4, show_default=True)
@click.option("--prompts", type=click.Path(path_type=Path), help="A prompt a line, .txt or .jsonl.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=64, show_default=True, metavar="N")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(0), default=0, help="[default: all]")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--block-size", type=int, metavar="N", help="[default: the drafter's own]")
@click.option("--raw", is_flag=True, help="Prompts go to the model as they are.")
@click.option("--backend", default="ort-cpu", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="[default: the backend chooses]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    bundle: Path, num_prompts: int, prompts: Path | None, max_new_tokens: int, rounds: int, temperature: float,
    top_k: int, top_p: float, block_size: int | None, raw: bool, backend: str, threads: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Measures plain decoding and every kind of proposals, round by round in turn."""
    texts = REFERENCE_PROMPTS if prompts is None else read_prompts(prompts)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, raw=raw, stop_token_ids=(),
        reuse_prefix=False,
    )  # fmt: skip
    results: dict[str, list[KindRound]] = {kind: [] for kind in KINDS}
    with Session.open(bundle, backend=backend, threads=threads) as session, ProgressLine() as progress:
        for number, place in itertools.product(range(rounds + 1), range(len(KINDS))):
            kind = KINDS[(number + place) % len(KINDS)]  # another one begins every time
            progress(kind, number, rounds + 1)
            chosen = dataclasses.replace(config, seed=number, plain=kind == PLAIN)
            if kind != PLAIN:
                chosen = dataclasses.replace(chosen, proposals=kind, block_size=block_size)
            started = time.process_time()
            answers = [session.generate(text, chosen) for text in texts[:num_prompts]]
            if number:  # the first round warms up
                results[kind].append(KindRound(answers, time.process_time() - started))
    figures = compare(results)
    if as_json:
        click.echo(json.dumps({"kinds": [dataclasses.asdict(one) for one in figures], "backend": backend}))
        return
    click.echo("proposals  tokens/s  by processor time  tokens a round  against argmax, by processor time")
    for one in figures:
        click.echo(f"{one.kind:9}  {one.tokens_per_s:8.2f}  {one.tokens_per_cpu_s:17.2f}  {one.tokens_per_round:14.2f}"
                   f"  {one.against_argmax:5.2f} ({one.lowest:.2f} to {one.highest:.2f})")


def compare(results: Mapping[str, Sequence[KindRound]]) -> list[KindFigures]:
    """The figures of every kind; ratios are of rounds that ran side by side."""
    speeds = {kind: [one.tokens_per_cpu_s() for one in rounds] for kind, rounds in results.items()}
    figures = []
    for kind, rounds in results.items():
        ratios = [own / likeliest for own, likeliest in zip(speeds[kind], speeds[PROPOSALS[0]], strict=True)]
        lengths = [length for one in rounds for answer in one.answers for length in answer.acceptance_lengths]
        figures.append(KindFigures(
            kind, statistics.median(one.tokens_per_s() for one in rounds), statistics.median(speeds[kind]),
            statistics.fmean(lengths or [1]), statistics.median(ratios), min(ratios), max(ratios),
        ))  # fmt: skip
    return figures


if __name__ == "__main__":
    main()
