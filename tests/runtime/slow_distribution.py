"""The distribution a token is drawn from, written down once more and slowly; and whether counts follow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_runtime import GenerationConfig

Scores = np.ndarray[Any, np.dtype[np.float64]]
FILTERS: list[dict[str, Any]] = [
    {}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.15}, {"top_k": 5, "top_p": 0.9},
    {"repetition_penalty": 1.4}, {"presence_penalty": 0.7, "frequency_penalty": 0.4}, {"logit_bias": {3: 2.0}},
    {"temperature": 1.4, "top_k": 5, "top_p": 0.85, "min_p": 0.05, "repetition_penalty": 1.2, "logit_bias": {0: -1.0}},
]  # fmt: skip
"""Each alone, and together; of a vocabulary of a few tokens."""
LIMIT = 8.0
"""Of `surprise`: beyond it by chance less than once in a hundred thousand times, for 2 to 6 degrees of freedom."""


def expected(options: dict[str, Any], prompt: Sequence[int], answer: Sequence[int], row: Any) -> Scores:
    """The distribution behind an answer so far, from the target's row of scores."""
    one = GenerationConfig(**{"temperature": 1.0, **options})
    scores = [float(x) + one.logit_bias.get(i, 0.0) for i, x in enumerate(row)]
    for i in range(len(scores)):
        if i in prompt or i in answer:
            scores[i] = scores[i] * one.repetition_penalty if scores[i] < 0 else scores[i] / one.repetition_penalty
        scores[i] -= one.presence_penalty * (i in answer) + one.frequency_penalty * list(answer).count(i)
    powers = {i: float(np.exp(x / one.temperature)) for i, x in enumerate(scores)}
    ranked = sorted(powers, key=lambda i: -powers[i])
    if one.top_k:
        ranked = ranked[: one.top_k]
    total = sum(powers[i] for i in ranked)
    ranked = [i for n, i in enumerate(ranked) if sum(powers[j] for j in ranked[:n]) < one.top_p * total]
    ranked = [i for i in ranked if powers[i] >= one.min_p * powers[ranked[0]]]
    total = sum(powers[i] for i in ranked)
    return np.array([powers[i] / total if i in ranked else 0.0 for i in range(len(scores))])


def surprise(counts: Scores, usual: Scores, covariance: Scores | None = None) -> float:
    """Chi-square as deviations of its own from what is usual; infinite for a token that cannot be.

    Args:
        counts: How often each token was drawn.
        usual: How often it should have been.
        covariance: Of the counts, where they were drawn from several distributions; None: all from one.
    """
    some = usual > 0
    if counts[~some].any():
        return float("inf")
    freedom = max(int(some.sum()) - 1, 1)
    if covariance is None:
        chi = ((counts[some] - usual[some]) ** 2 / usual[some]).sum()
    else:
        off = counts - usual
        chi = off @ np.linalg.pinv(covariance, rcond=1e-9, hermitian=True) @ off
    return float((chi - freedom) / np.sqrt(2 * freedom))
