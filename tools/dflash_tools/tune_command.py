"""`dflash-export tune`: which block size is the fastest here, measured and kept for `run`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from dflash_runtime.backend import AVAILABLE
from dflash_runtime.bundle import Bundle
from dflash_tools.bench_prompts import REFERENCE, find_prompts
from dflash_tools.bench_report import disturbance_notes
from dflash_tools.block_choice import choose_block_size
from dflash_tools.device_conditions import MomentaryState
from dflash_tools.engine_place import find_engine_place
from dflash_tools.error_lines import DFlashCommand
from dflash_tools.machine_probe import Machine
from dflash_tools.position_acceptance import PositionCounts, survival
from dflash_tools.progress import ProgressLine
from dflash_tools.speed_profile import SpeedProfile, write_profile
from dflash_tools.tune_measure import TuneOptions, measure_profile


@click.command("tune", cls=DFlashCommand, short_help="Measure which block size is the fastest on this device.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(AVAILABLE), default="ort-cpu", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="As they will be given to `run`. [default: backend chooses]")
@click.option("--block-size", "block_sizes", type=click.IntRange(2), multiple=True, help="Repeatable. [default: all]")
@click.option("--context", "contexts", type=click.IntRange(1), multiple=True, help="Length in tokens; repeatable.")
@click.option("--prompts", default=REFERENCE, show_default=True, metavar="SET|FILE", help="As `bench` takes them.")
@click.option("--num-prompts", type=click.IntRange(1), default=24, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=96, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Times each cycle is measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as one JSON object.")
def command(
    bundle: Path, backend: str, threads: int | None, block_sizes: tuple[int, ...], contexts: tuple[int, ...],
    prompts: str, num_prompts: int, max_new_tokens: int, rounds: int, as_json: bool,
) -> None:  # fmt: skip
    """Measures BUNDLE on this device and keeps the profile beside its engines.

    Two things are measured: the time of a cycle of each block size and of a plain step at several lengths of context,
    and how far into a block of each size the drafter's proposals are accepted on the reference prompts. From both `run`
    picks the block size when none is given. The profile records power mode, clocks and threads; in another mode it is
    not used, and `tune` keeps one for each.
    """
    machine, opened = Machine(), Bundle.open(bundle)
    place = find_engine_place(opened, backend, machine)
    options = TuneOptions(
        backend, threads, block_sizes, contexts, rounds, max_new_tokens, importlib.metadata.version("dflash-export")
    )
    chosen = find_prompts(prompts, num_prompts)
    with tempfile.TemporaryDirectory(prefix="dflash-tune-") as scratch, ProgressLine() as progress:
        profile = measure_profile(opened, place, chosen, options, Path(scratch), machine, progress)
    path = write_profile(place.folder, profile)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(profile), ensure_ascii=False))
        return
    for line in profile_lines(profile):
        click.echo(line)
    click.echo(f"Kept in {path}; `dflash-export run {bundle}` uses it when no --block-size is given.")


def profile_lines(profile: SpeedProfile) -> Iterator[str]:
    """The profile for a terminal."""
    now, count = profile.conditions, profile.threads
    threads = "threads as the backend chooses" if count is None else "1 thread" if count == 1 else f"{count} threads"
    yield f"{now.device}, power mode {now.power_mode or 'not reported'}, {profile.backend}, {threads}"
    yield "milliseconds of a cycle (median, quartiles)"
    for cost in profile.costs:
        name = "plain step" if cost.block_size == 1 else f"block {cost.block_size}"
        stages = ", ".join(f"{stage} {ms:.2f}" for stage, ms in cost.stages_ms.items())
        spread = f"({cost.low_ms:.2f} to {cost.high_ms:.2f})"
        yield f"  {cost.context_tokens:>6} tokens, {name}: {cost.median_ms:.2f} {spread}; {stages}"
    facts = profile.prompts
    yield f"tokens a round on {facts.count} prompts of {facts.name} (mean over rounds / over requests), by position"
    for found in profile.acceptance:
        chances = survival(PositionCounts(found.reached, found.accepted))
        shown = " ".join(f"{100 * chance:.0f} %" for chance in chances)
        mean = f"{found.tokens_per_round:.2f} / {found.tokens_per_round_by_request:.2f}"
        yield f"  block {found.block_size}: {mean}; {shown}"
    for length in sorted({cost.context_tokens for cost in profile.costs}):
        choice = choose_block_size(profile, length)
        name = "plain decoding" if choice.block_size == 1 else f"block size {choice.block_size}"
        yield f"best at {length} tokens: {name}; {choice.reason}"
    for note in disturbance_notes(now, MomentaryState(None, None, profile.load_average), []):
        yield f"note: {note}"
