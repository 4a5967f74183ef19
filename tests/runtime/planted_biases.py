"""The known ways to bend the distribution of drafted text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash_runtime.sampling import TokenChooser


class SoftmaxForArgmax(TokenChooser):
    """The likeliest token is proposed, and judged as if it had been drawn."""

    def propose(self, backend: Any, likeliest: list[int], position: int) -> list[int]:
        super().propose(backend, likeliest, position)
        return likeliest


class WrongRow(TokenChooser):
    """The bonus token comes from the row before its own."""

    def choose(self, logits: Any, proposed: Sequence[int], position: int) -> list[int]:
        return super().choose([*logits[:-1], logits[len(logits) - 2]], proposed, position)  # type: ignore[arg-type]


class OneSided(TokenChooser):
    """The drafter's filter is left out when a proposal is judged; it was drawn with it."""

    def propose(self, backend: Any, likeliest: list[int], position: int) -> list[int]:
        chosen = super().propose(backend, likeliest, position)
        everything = self._sampling
        self._sampling = dataclasses.replace(everything, top_k=0, top_p=1.0)
        rows = backend.outputs("drafter", len(self._drafted))["draft_logits"]
        for place, row in zip(self._drafted, rows, strict=True):
            kept = self._kept(row)
            assert kept is not None
            self._drafted[place] = kept
        self._sampling = everything
        return chosen


def not_renormalised(p: Any, q: Any) -> Any:
    """What is missing to 1 falls to the last token, as it does where a number is compared with the running sum."""
    left = np.maximum(p - q, 0)
    left[-1] += 1 - left.sum()
    return np.log(np.maximum(left, 1e-300))
