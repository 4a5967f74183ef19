"""The whole of a measurement, as it is kept in JSON and shown on terminal and page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from dflash_tools.bench_result import Comparison, ContextResult, ModeResult, row_name
from dflash_tools.bench_statistics import FASTER, FEWEST_ROUNDS, TOO_FEW, effect_text
from dflash_tools.device_conditions import DeviceConditions, MomentaryState
from dflash_tools.sizes import bytes_text

SCHEMA_VERSION = 1
BUSY_LOAD_SHARE = 0.5
"""Load before the start above which other work disturbs: half of the CPUs."""


@dataclasses.dataclass(frozen=True)
class PairFacts:
    """What was measured."""

    bundle: str
    target: str
    drafter: str | None
    drafter_block_size: int | None
    """What the drafter was trained for."""
    backend: str
    threads: int | None
    """None where every engine chose."""


@dataclasses.dataclass(frozen=True)
class PromptFacts:
    """What was asked."""

    name: str
    count: int
    """Requests, every turn of a conversation one."""
    picked: str
    wrapping: str
    thinking: str
    sha256: str
    prompt_tokens: list[int]
    max_new_tokens: int


@dataclasses.dataclass(frozen=True)
class MemoryFacts:
    """Memory of the engines."""

    weight_bytes: int
    kv_bytes: int
    engine_bytes: int
    peak_resident_bytes: dict[str, int]
    """Largest resident size of a process, by engine."""
    device_bytes: dict[str, int]
    """Memory of a process on the GPU, by engine, where nvidia-smi tells."""


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """Everything `bench` found."""

    schema_version: int
    command: str
    started: str
    """UTC, ISO 8601."""
    duration_s: float
    tool_version: str
    pair: PairFacts
    rounds: int
    prompts: PromptFacts
    conditions: DeviceConditions
    before: MomentaryState
    after: MomentaryState
    environment: dict[str, str]
    versions: dict[str, dict[str, str]]
    """Of each engine."""
    rows: list[ModeResult]
    comparisons: list[Comparison]
    contexts: list[ContextResult]
    memory: MemoryFacts
    power_source: str | None
    notes: list[str]
    """What a reader has to know before believing a number."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return dataclasses.asdict(self)


def few_rounds_notes(rounds: int) -> list[str]:
    """A note where there are too few rounds for a spread."""
    if rounds >= FEWEST_ROUNDS:
        return []
    return [f"Fewer than {FEWEST_ROUNDS} rounds cannot tell an effect from the spread; these are {rounds}."]


def disturbance_notes(conditions: DeviceConditions, before: MomentaryState, changed: Sequence[str]) -> list[str]:
    """Notes where other work ran when the measurement began, or the device's mode was not the same to the end.

    Args:
        conditions: At the begin.
        before: Load at the begin.
        changed: In what the conditions at the end differ, in words.
    """
    notes = [f"The device changed while it was measured: {words}. Measure again." for words in changed]
    load = before.load_average
    if load is not None and load > BUSY_LOAD_SHARE * conditions.num_cpus:
        notes.append(
            f"Other work ran on this machine: load average {load:.1f} on {conditions.num_cpus} CPUs before the start. "
            "Times are longer and less steady than on an idle machine."
        )
    return notes


def scripted_notes(rows: Sequence[ModeResult]) -> list[str]:
    """A note where acceptance was scripted."""
    if not any(row.scripted_tokens for row in rows):
        return []
    return [
        "Rows marked 'scripted N' do not show a drafter's quality: the drafter runs for its time, then its proposals "
        "are replaced so that every round commits N tokens."
    ]


def terminal_lines(report: BenchReport) -> Iterator[str]:
    """The report for a terminal."""
    pair = report.pair
    yield f"{pair.target} with {pair.drafter or 'no drafter'}, {pair.backend}, {setting_words(report)}"
    yield f"prompts: {prompt_words(report.prompts)}"
    yield f"device: {device_words(report)}"
    yield ""
    width = max(len(row_name(row)) for row in report.rows)
    head = "tokens/s (range)"
    yield f"{'':<{width}}  {head:<24} {'first token':>11}  {'token p50/p90/p99 ms':>21}  tokens a round  same words"
    for row in report.rows:
        yield _row_line(row, width)
    yield ""
    for comparison in report.comparisons:
        yield comparison_line(comparison)
    yield from _stage_lines(report)
    yield from _acceptance_lines(report)
    yield from _context_lines(report)
    yield from _memory_lines(report)
    for note in report.notes:
        yield f"note: {note}"


def setting_words(report: BenchReport) -> str:
    """Threads, rounds and length of the measurement."""
    count = report.pair.threads
    threads = "threads as each engine chooses" if count is None else "1 thread" if count == 1 else f"{count} threads"
    rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
    return f"{threads}, {rounds} of processes in turn, {report.duration_s:.0f} s"


def prompt_words(prompts: PromptFacts) -> str:
    """What was asked, in one line."""
    low, high = min(prompts.prompt_tokens), max(prompts.prompt_tokens)
    return (
        f"{prompts.name}, {prompts.count} requests of {low} to {high} tokens ({prompts.picked}), at most "
        f"{prompts.max_new_tokens} new tokens, thinking: {prompts.thinking}"
    )


def device_words(report: BenchReport) -> str:
    """Device, mode and clocks in one line."""
    now, seen = report.conditions, report.before
    parts = [now.device] + ([now.cpu] if now.cpu != now.device else [])
    parts.append(f"{now.num_cpus} CPUs")
    parts.append(f"power mode {now.power_mode or 'not reported'}")
    if seen.cpu_clock_mhz:
        parts.append(f"CPU clock {seen.cpu_clock_mhz} MHz (allowed {now.highest_cpu_clock_mhz or 'not reported'})")
    if seen.gpu_clock_mhz:
        parts.append(f"GPU clock {seen.gpu_clock_mhz} MHz (allowed {now.highest_gpu_clock_mhz or 'not reported'})")
    parts += [f"{name}={value}" for name, value in report.environment.items()]
    return ", ".join(parts)


def comparison_line(comparison: Comparison) -> str:
    """One comparison in words, its spread included."""
    same = f"; the same tokens in every round for {comparison.same_rounds}" if comparison.same_rounds else ""
    return f"{comparison.first} against {comparison.second}: {effect_text(comparison.effect)}{same}"


def headline(report: BenchReport) -> str:
    """What the measurement says of the drafter, in one sentence that claims no more than it shows."""
    drafter = [c for c in report.comparisons if c.kind == "drafter" and not c.scripted_tokens and _is_ours(report, c)]
    if not drafter:
        return "No drafter was measured without a script."
    best = max(drafter, key=lambda c: (c.effect.verdict == FASTER, c.effect.ratio))
    if best.effect.verdict == FASTER:
        return f"With its drafter, block size {best.block_size}, against plain decoding: {effect_text(best.effect)}."
    if best.effect.verdict == TOO_FEW:
        return f"Too few rounds to call anything a speedup; block size {best.block_size}: {best.effect.ratio:.2f} x."
    return (
        f"No block size is faster than plain decoding here beyond the spread; the best, {best.block_size}: "
        f"{effect_text(best.effect)}."
    )


def _is_ours(report: BenchReport, comparison: Comparison) -> bool:
    return comparison.first.startswith(f"{report.rows[0].label}, ")


def _row_line(row: ModeResult, width: int) -> str:
    speed = row.tokens_per_s
    shown = f"{speed.median:.1f} ({speed.lowest:.1f} to {speed.highest:.1f})"
    latency = "/".join(f"{ms:.1f}" for ms in row.token_ms)
    mean = row.acceptance.mean if row.acceptance else None
    rounds = "-" if mean is None else f"{mean.over_rounds:.2f} / {mean.over_requests:.2f}"
    same = "-" if row.same_answers is None else f"{row.same_answers} of {row.answers}"
    first = f"{row.time_to_first_token_ms.median:.0f} ms"
    return f"{row_name(row):<{width}}  {shown:<24} {first:>11}  {latency:>21}  {rounds:>14}  {same}"


def _stage_lines(report: BenchReport) -> Iterator[str]:
    rows = [row for row in report.rows if row.stages_ms is not None]
    if rows:
        yield ""
        yield "milliseconds of a cycle (mean), and of a prefill with its context rows"
    for row in rows:
        stages = ", ".join(f"{name} {ms:.2f}" for name, ms in (row.stages_ms or {}).items())
        prefill = f"prefill {row.prefill_ms or 0:.1f} + {row.prefill_context_ms or 0:.1f}"
        energy = "" if row.joules_per_token is None else f"; {row.joules_per_token:.3f} J a token"
        yield f"  {row_name(row)}: {stages}; {prefill}{energy}"


def _acceptance_lines(report: BenchReport) -> Iterator[str]:
    rows = [row for row in report.rows if row.acceptance is not None]
    if rows:
        yield ""
        yield "tokens a round: mean over rounds / mean over requests; accepted up to each position; histogram"
    for row in rows:
        if row.acceptance is not None:
            mean = row.acceptance.mean
            chances = " ".join(f"{100 * chance:.0f} %" for chance in row.acceptance.survival)
            counts = " ".join(map(str, row.acceptance.histogram))
            yield f"  {row_name(row)}: {mean.over_rounds:.3f} / {mean.over_requests:.3f}; {chances}; {counts}"


def _context_lines(report: BenchReport) -> Iterator[str]:
    if report.contexts:
        yield ""
        yield "milliseconds of a cycle by context (median, range over the rounds)"
    for row in report.contexts:
        cycle = row.cycle_ms
        shown = f"{cycle.median:.2f} ({cycle.lowest:.2f} to {cycle.highest:.2f})"
        yield f"  {row.context_tokens:>6} tokens, {row.mode}: {shown}"


def _memory_lines(report: BenchReport) -> Iterator[str]:
    memory = report.memory
    yield ""
    yield (
        f"memory: weights {bytes_text(memory.weight_bytes)}, KV caches {bytes_text(memory.kv_bytes)} at full context, "
        f"engines {bytes_text(memory.engine_bytes)}"
    )
    for label, peak in memory.peak_resident_bytes.items():
        device = memory.device_bytes.get(label)
        yield f"  {label}: peak resident {bytes_text(peak)}" + (f", on the GPU {bytes_text(device)}" if device else "")
    yield f"energy: {report.power_source or 'not reported by this machine'}"
