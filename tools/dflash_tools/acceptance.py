"""Mean acceptance length over many requests, in the two ways the field states it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class MeanAcceptance:
    """Tokens committed by a round of draft and verify, the target's own token included."""

    over_rounds: float
    """All rounds of all requests weigh the same: committed tokens by rounds (vLLM, AIPerf)."""
    over_requests: float
    """All requests weigh the same: mean of each request's own mean (the authors' package)."""


def mean_acceptance(requests: Sequence[Sequence[int]]) -> MeanAcceptance | None:
    """Both means.

    Args:
        requests: Acceptance lengths of each request's rounds; a request without rounds does not count.

    Returns:
        None where nothing was drafted.
    """
    drafted = [lengths for lengths in requests if lengths]
    if not drafted:
        return None
    committed, rounds = sum(map(sum, drafted)), sum(map(len, drafted))
    return MeanAcceptance(committed / rounds, sum(sum(r) / len(r) for r in drafted) / len(drafted))
