"""How far into a block proposals are accepted: counts by position, survival, histogram."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from dflash_runtime.generation import GenerationResult


@dataclasses.dataclass(frozen=True)
class DraftedRound:
    """One round of draft and verify."""

    proposed: list[int]
    committed: list[int]
    """What the round gave to the output, the target's own token included; fewer where the output ended inside."""

    @property
    def accepted(self) -> int:
        """Proposals that are what the target said, as far as the output shows it."""
        count = 0
        for proposed, committed in zip(self.proposed, self.committed, strict=False):
            if proposed != committed:
                break
            count += 1
        return count

    @property
    def cut(self) -> bool:
        """The output ended while all was accepted: whether more would have been is unknown."""
        return self.accepted == len(self.committed)


@dataclasses.dataclass(frozen=True)
class PositionCounts:
    """Proposals 1 to block size - 1, first to last."""

    reached: list[int]
    """Rounds in which all proposals before this one were accepted and its own fate is known."""
    accepted: list[int]
    """Those of them in which it was accepted too."""


def drafted_rounds(
    token_ids: Sequence[int], lengths: Sequence[int], proposed_ids: Sequence[Sequence[int]]
) -> list[DraftedRound]:
    """Rounds of a request.

    Args:
        token_ids: New tokens; the first comes from the prefill.
        lengths: Tokens committed by each round.
        proposed_ids: What the drafter proposed in each of them.
    """
    rounds, place = [], 1
    for length, proposed in zip(lengths, proposed_ids, strict=True):
        rounds.append(DraftedRound(list(proposed), list(token_ids[place : place + length])))
        place += length
    return rounds


def rounds_of(result: GenerationResult) -> list[DraftedRound]:
    """Rounds of one of our requests."""
    return drafted_rounds(result.token_ids, result.acceptance_lengths, result.proposed_ids)


def count_positions(rounds: Iterable[DraftedRound], block_size: int) -> PositionCounts:
    """Counts each position where its fate is known; a round that ends early says nothing about what follows."""
    reached, accepted = [0] * (block_size - 1), [0] * (block_size - 1)
    for done in rounds:
        known = done.accepted if done.cut else done.accepted + 1
        for i in range(min(known, len(done.proposed))):
            reached[i] += 1
            accepted[i] += i < done.accepted
    return PositionCounts(reached, accepted)


def survival(counts: PositionCounts) -> list[float]:
    """Chance that a block's proposals are accepted up to and including each position (Kaplan-Meier).

    A position no round has reached survives with chance 0.
    """
    chances, chance = [], 1.0
    for reached, accepted in zip(counts.reached, counts.accepted, strict=True):
        chance *= accepted / reached if reached else 0.0
        chances.append(chance)
    return chances


def expected_tokens(counts: PositionCounts) -> float:
    """Tokens a whole round commits, the target's own included."""
    return 1 + sum(survival(counts))


def histogram(rounds: Iterable[DraftedRound], block_size: int) -> list[int]:
    """Rounds by number of accepted proposals, 0 to block size - 1; rounds the end of the output cut do not count."""
    counts = [0] * block_size
    for done in rounds:
        if not done.cut:
            counts[done.accepted] += 1
    return counts
