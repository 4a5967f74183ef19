"""From what the processes measured to the result: one row for each engine and mode, and what they compare to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from dflash_runtime.errors import DFlashError
from dflash_tools.acceptance import MeanAcceptance, mean_acceptance
from dflash_tools.bench_job import AUTHORS, OURS, SERVER, Answer, EngineRun, Mode
from dflash_tools.bench_rounds import Entrant
from dflash_tools.bench_statistics import Effect, Summary, compare, percentile, summarise
from dflash_tools.position_acceptance import count_positions, histogram, survival
from dflash_tools.stage_times import STAGES

Energy = Callable[[float, float], float | None]
PERCENTILES = (0.5, 0.9, 0.99)


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What became of the proposals, over all rounds of the measurement's first round (they are all the same)."""

    mean: MeanAcceptance
    histogram: list[int]
    """Rounds by accepted proposals, 0 to block size - 1."""
    reached: list[int]
    accepted: list[int]
    survival: list[float]
    """Chance that proposals are accepted up to and including each position."""


@dataclasses.dataclass(frozen=True)
class ModeResult:
    """One engine in one mode."""

    label: str
    engine: str
    mode: str
    block_size: int
    scripted_tokens: int | None
    precision: str
    tokens_per_s: Summary
    """Tokens after the first by the time of decoding, over all prompts; one value a round of the measurement."""
    time_to_first_token_ms: Summary
    """Median over the prompts; one value a round of the measurement."""
    token_ms: list[float]
    """Percentiles 50, 90, 99 of what a token took, tokens of one cycle sharing its time evenly."""
    arrival_ms: list[float]
    """The same percentiles of the time between arrivals of tokens, which is what a reader waits."""
    acceptance: Acceptance | None
    stages_ms: dict[str, float] | None
    """Mean of each stage of a cycle."""
    prefill_ms: float | None
    prefill_context_ms: float | None
    same_answers: int | None
    """Prompts answered token for token as by plain decoding here; None where the engine tells no tokens."""
    answers: int
    joules_per_token: float | None


@dataclasses.dataclass(frozen=True)
class ContextResult:
    """Time of a cycle at one length of context."""

    mode: str
    block_size: int
    context_tokens: int
    cycle_ms: Summary
    """Median of the cycles; one value a round of the measurement."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two rows, measured in the same rounds."""

    first: str
    second: str
    kind: str
    """`drafter` (a mode against plain decoding of the same engine) or `engine`."""
    block_size: int
    scripted_tokens: int | None
    effect: Effect
    same_rounds: str | None
    """Of two engines that draft: for how many prompts every round committed the same number of tokens."""


def mode_results(
    entrants: Sequence[Entrant], runs: Sequence[Sequence[EngineRun]], energy: Energy
) -> list[ModeResult]:
    """One row for each entrant and mode, ours first."""
    said = _plain_words(entrants, runs)
    rows = []
    for entrant, own in zip(entrants, runs, strict=True):
        for mode in entrant.modes:
            by_round = [_answers(run, mode) for run in own]
            rows.append(_row(entrant, mode, by_round, own[0].precision, said, energy))
    return rows


def context_results(entrant: Entrant, runs: Sequence[EngineRun]) -> list[ContextResult]:
    """Time of a cycle by mode and length of context; empty where none was measured."""
    rows = []
    lengths = sorted({length for run in runs for length in _lengths(run)})
    for mode in [mode for mode in entrant.modes if mode.scripted_tokens is None]:
        for length in lengths:
            medians = [
                percentile([ms for a in run.answers if a.mode == mode and a.context_tokens == length
                            for ms in a.round_ms], 0.5)
                for run in runs
            ]  # fmt: skip
            rows.append(ContextResult(mode.name, mode.block_size, length, summarise(medians)))
    return rows


def comparisons(
    entrants: Sequence[Entrant], runs: Sequence[Sequence[EngineRun]], rows: Sequence[ModeResult]
) -> list[Comparison]:
    """Every drafting mode against plain decoding of its engine; ours against every peer in the same mode."""
    made = []
    for row in rows:
        plain = _find(rows, row.label, "plain")
        if row.block_size > 1 and plain is not None:
            made.append(_comparison(row, plain, "drafter", None))
    ours = [row for row in rows if row.engine == OURS]
    for peer in [row for row in rows if row.engine != OURS]:
        if peer.engine == SERVER:
            best = max(ours, key=lambda row: row.tokens_per_s.median if not row.scripted_tokens else 0.0)
            made.append(_comparison(best, peer, "engine", None))
            continue
        match = _find(ours, ours[0].label, peer.mode)
        if match is not None:
            same = _same_rounds(entrants, runs, peer) if peer.engine == AUTHORS and peer.block_size > 1 else None
            made.append(_comparison(match, peer, "engine", same))
    return made


def row_name(row: ModeResult) -> str:
    """`dflash-export, block 8`."""
    return f"{row.label}, {row.mode}"


def _comparison(first: ModeResult, second: ModeResult, kind: str, same_rounds: str | None) -> Comparison:
    effect = compare(first.tokens_per_s.rounds, second.tokens_per_s.rounds)
    name, other = row_name(first), row_name(second)
    return Comparison(name, other, kind, first.block_size, first.scripted_tokens, effect, same_rounds)


def _row(
    entrant: Entrant, mode: Mode, by_round: list[list[Answer]], precision: str, said: dict[int, list[int]],
    energy: Energy,
) -> ModeResult:  # fmt: skip
    pooled = [answer for answers in by_round for answer in answers]
    tells = all(answer.token_ids for answer in pooled)
    arrivals = [ms for answer in pooled for ms in answer.round_ms] or [0.0]
    return ModeResult(
        label=entrant.label,
        engine=entrant.engine,
        mode="as served" if entrant.engine == SERVER else mode.name,
        block_size=mode.block_size,
        scripted_tokens=mode.scripted_tokens,
        precision=precision,
        tokens_per_s=summarise([_speed(answers) for answers in by_round]),
        time_to_first_token_ms=summarise(
            [percentile([a.time_to_first_token_ms for a in answers], 0.5) for answers in by_round]
        ),
        token_ms=[percentile(_token_ms(pooled) or [0.0], share) for share in PERCENTILES],
        arrival_ms=[percentile(arrivals, share) for share in PERCENTILES],
        acceptance=_acceptance(by_round[0], mode),
        stages_ms=_stages(pooled),
        prefill_ms=_mean([a.prefill_ms for a in pooled if a.prefill_ms is not None]),
        prefill_context_ms=_mean([a.prefill_context_ms for a in pooled if a.prefill_context_ms is not None]),
        same_answers=sum(a.token_ids == said.get(a.question) for a in by_round[0]) if tells else None,
        answers=len(by_round[0]),
        joules_per_token=_joules(pooled, energy),
    )


def _speed(answers: Sequence[Answer]) -> float:
    tokens, milliseconds = sum(sum(a.round_tokens) for a in answers), sum(sum(a.round_ms) for a in answers)
    if not tokens or milliseconds <= 0:
        raise DFlashError(f"{len(answers)} answers have no token after the first to time. Take other prompts.")
    return 1000 * tokens / milliseconds


def _token_ms(answers: Sequence[Answer]) -> list[float]:
    return [
        ms / count
        for answer in answers
        for ms, count in zip(answer.round_ms, answer.round_tokens, strict=True)
        for _ in range(count)
    ]


def _acceptance(answers: Sequence[Answer], mode: Mode) -> Acceptance | None:
    mean = mean_acceptance([a.round_tokens for a in answers if a.proposed_ids])
    if mean is None:
        return None
    rounds = [done for answer in answers for done in answer.rounds()]
    counts = count_positions(rounds, mode.block_size)
    return Acceptance(mean, histogram(rounds, mode.block_size), counts.reached, counts.accepted, survival(counts))


def _stages(answers: Sequence[Answer]) -> dict[str, float] | None:
    cycles = [stages for answer in answers for stages in answer.stages_ms or []]
    return {name: sum(c[name] for c in cycles) / len(cycles) for name in STAGES} if cycles else None


def _joules(answers: Sequence[Answer], energy: Energy) -> float | None:
    parts = [energy(a.started_s, a.ended_s) for a in answers]
    tokens = sum(1 + sum(a.round_tokens) for a in answers)
    known = [part for part in parts if part is not None]
    return sum(known) / tokens if known and len(known) == len(parts) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _answers(run: EngineRun, mode: Mode) -> list[Answer]:
    return [a for a in run.answers if a.mode == mode and a.context_tokens is None]


def _lengths(run: EngineRun) -> set[int]:
    return {a.context_tokens for a in run.answers if a.context_tokens is not None}


def _plain_words(entrants: Sequence[Entrant], runs: Sequence[Sequence[EngineRun]]) -> dict[int, list[int]]:
    for entrant, own in zip(entrants, runs, strict=True):
        if entrant.engine == OURS:
            return {a.question: a.token_ids for a in _answers(own[0], Mode(1))}
    return {}


def _find(rows: Sequence[ModeResult], label: str, mode: str) -> ModeResult | None:
    return next((row for row in rows if row.label == label and row.mode == mode), None)


def _same_rounds(entrants: Sequence[Entrant], runs: Sequence[Sequence[EngineRun]], peer: ModeResult) -> str:
    lengths: dict[str, dict[int, list[int]]] = {}
    for entrant, own in zip(entrants, runs, strict=True):
        if entrant.engine in (OURS, peer.engine):
            mode = next(mode for mode in entrant.modes if mode.name == peer.mode)
            lengths[entrant.engine] = {a.question: a.round_tokens for a in _answers(own[0], mode)}
    same = sum(lengths[OURS].get(n) == rounds for n, rounds in lengths[peer.engine].items())
    return f"{same} of {len(lengths[peer.engine])} prompts"
