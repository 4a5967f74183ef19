"""How far two tensors are apart, and a collector of the worst cases. NumPy alone, so a device can use it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_runtime.bundle import CheckRow

Array = npt.NDArray[Any]


def deviation(found: Array, expected: Array) -> float:
    """Largest difference relative to size: |a - b| / (|b| + rms of b's row). Infinite where `found` is not finite.

    Args:
        found: What was computed, [..., N].
        expected: The reference, same shape.
    """
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    if expected.size == 0:
        return 0.0
    wide = expected.astype(np.float64)
    rms = np.sqrt((wide**2).mean(axis=-1, keepdims=True))
    scale = np.maximum(np.abs(wide) + rms, np.finfo(np.float32).tiny)
    return float((np.abs(found.astype(np.float64) - wide) / scale).max())


def mean_deviation(found: Array, expected: Array) -> float:
    """Root of the mean square of the difference, relative to that of the reference.

    Args:
        found: What was computed.
        expected: The reference, same shape.
    """
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    wide = expected.astype(np.float64)
    scale = max(float(np.sqrt((wide**2).mean())), float(np.finfo(np.float32).tiny)) if wide.size else 1.0
    return float(np.sqrt(((found.astype(np.float64) - wide) ** 2).mean())) / scale if wide.size else 0.0


class Worst:
    """Collects the worst deviation by tensor."""

    def __init__(self) -> None:
        self.by_tensor: dict[str, float] = {}

    def add(self, tensor: str, value: float) -> None:
        """Keeps the larger one."""
        self.by_tensor[tensor] = max(self.by_tensor.get(tensor, 0.0), value)

    def rows(self, stage: str, tolerances: Mapping[str, float] | float, covered: str) -> list[CheckRow]:
        """One row a tensor."""
        rows = []
        for tensor, worst in self.by_tensor.items():
            tolerance = tolerances if isinstance(tolerances, float) else tolerances[tensor]
            # Two infinities are no agreement: a reference that overflows proves nothing.
            passed = bool(np.isfinite(worst)) and worst <= tolerance
            rows.append(CheckRow(stage, tensor, worst, tolerance, passed, covered))
        return rows
