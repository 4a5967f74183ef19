"""The best block size by a speed profile: time of a cycle by tokens it commits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from dflash_runtime.errors import EngineError
from dflash_tools.position_acceptance import PositionCounts, expected_tokens, survival
from dflash_tools.speed_profile import BlockAcceptance, CycleCost, SpeedProfile


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What one block size is expected to take."""

    block_size: int
    """1 is plain decoding."""
    cycle_ms: float
    tokens_per_round: float
    relative_margin: float
    """Of the time a token takes, 95 %: twice the standard errors of cycle and acceptance together."""

    @property
    def ms_per_token(self) -> float:
        """Expected."""
        return self.cycle_ms / self.tokens_per_round


@dataclasses.dataclass(frozen=True)
class BlockChoice:
    """The block size to use, and what it was chosen from."""

    block_size: int
    """1 where plain decoding is the best."""
    context_tokens: int
    candidates: list[Candidate]
    """Fastest first."""
    reason: str


def choose_block_size(
    profile: SpeedProfile, context_tokens: int, block_sizes: Sequence[int] | None = None
) -> BlockChoice:
    """Chooses for a length of context.

    A drafting block size has to beat plain decoding by more than its own uncertainty; otherwise plain decoding stays.

    Args:
        profile: Of this pair on this device.
        context_tokens: Tokens of context to choose for.
        block_sizes: Sizes that may be chosen; None for all of the profile.

    Raises:
        EngineError: the profile has no costs of plain decoding.
    """
    candidates = [plain := _candidate(profile, 1, context_tokens)]
    for found in profile.acceptance:
        if block_sizes is None or found.block_size in block_sizes:
            candidates.append(_candidate(profile, found.block_size, context_tokens, found))
    ordered = sorted(candidates, key=lambda candidate: candidate.ms_per_token)
    best = ordered[0]
    shown = ", ".join(_words(candidate) for candidate in ordered)
    gain = plain.ms_per_token / best.ms_per_token - 1
    if best.block_size != 1 and gain <= best.relative_margin:
        why = f"no block size beats plain decoding by more than its uncertainty ({100 * best.relative_margin:.0f} %)"
        return BlockChoice(1, context_tokens, ordered, f"{why}; expected at {context_tokens} tokens: {shown}")
    why = "fastest" if len(ordered) > 1 else "the only one measured"
    return BlockChoice(best.block_size, context_tokens, ordered, f"{why}; expected at {context_tokens} tokens: {shown}")


def round_ms_at(profile: SpeedProfile, context_tokens: int) -> dict[int, float]:
    """Block size -> milliseconds of a cycle at a length of context: what a controller starts from."""
    sizes = sorted({cost.block_size for cost in profile.costs})
    return {
        size: cycle_ms_at([cost for cost in profile.costs if cost.block_size == size], context_tokens) for size in sizes
    }


def chances_by_position(profile: SpeedProfile) -> dict[int, list[float]]:
    """Block size -> chance of each proposal to be right when those before it are; as far as one was reached."""
    return {
        found.block_size: [a / r for a, r in zip(found.accepted, found.reached, strict=True) if r]
        for found in profile.acceptance
    }


def cycle_ms_at(costs: Sequence[CycleCost], context_tokens: int) -> float:
    """Time of a cycle between measured lengths on a straight line, beyond them that of the nearest.

    Args:
        costs: Of one block size, at least one.
        context_tokens: Wanted length.
    """
    ordered = sorted(costs, key=lambda cost: cost.context_tokens)
    if context_tokens <= ordered[0].context_tokens:
        return ordered[0].median_ms
    for low, high in itertools.pairwise(ordered):
        if context_tokens <= high.context_tokens:
            share = (context_tokens - low.context_tokens) / (high.context_tokens - low.context_tokens)
            return low.median_ms + share * (high.median_ms - low.median_ms)
    return ordered[-1].median_ms


def _candidate(
    profile: SpeedProfile, block_size: int, context_tokens: int, found: BlockAcceptance | None = None
) -> Candidate:
    costs = [cost for cost in profile.costs if cost.block_size == block_size]
    if not costs:
        raise EngineError(f"The speed profile has no times for block size {block_size}. Run: dflash-export tune")
    # The distance of the quartiles by the root of the count is about the standard error of a median.
    spread = max((cost.high_ms - cost.low_ms) / cost.median_ms / math.sqrt(cost.cycles) for cost in costs)
    if found is None:
        return Candidate(block_size, cycle_ms_at(costs, context_tokens), 1.0, 2 * spread)
    counts = PositionCounts(found.reached, found.accepted)
    tokens = expected_tokens(counts)
    margin = 2 * math.hypot(spread, standard_error(counts) / tokens)
    return Candidate(block_size, cycle_ms_at(costs, context_tokens), tokens, margin)


def standard_error(counts: PositionCounts) -> float:
    """Of the expected tokens of a round: the deviation of the accepted number by the root of the rounds."""
    chances = survival(counts)
    rounds = counts.reached[0] if counts.reached else 0
    if not rounds:
        return math.inf
    mean = sum(chances)
    # E[n^2] of a count with P(n >= i) = chance_i is the sum of (2i - 1) chance_i.
    square = sum((2 * i + 1) * chance for i, chance in enumerate(chances))
    return math.sqrt(max(square - mean * mean, 0.0) / rounds)


def _words(candidate: Candidate) -> str:
    name = "plain" if candidate.block_size == 1 else f"block {candidate.block_size}"
    return f"{name} {candidate.ms_per_token:.1f} ms a token"
