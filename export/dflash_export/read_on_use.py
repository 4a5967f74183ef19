"""Weights that are read when an operation asks for them and forgotten after it: layers of any size in little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it
from torch.utils._pytree import tree_map_only

LARGE_ELEMENTS = 1 << 20
"""Smaller weights are read once and kept."""
PART_ELEMENTS = 1 << 24
"""A linear layer is computed in parts of so many weights."""

ReadRows = Callable[[slice], Tensor]


class ReadOnUse(Tensor):
    """Stands for a weight in a file; every operation that has it among its arguments gets the data anew."""

    @staticmethod
    def __new__(kind: type[ReadOnUse], shape: tuple[int, ...], dtype: torch.dtype, read: ReadRows) -> ReadOnUse:
        """Makes the stand-in.

        Args:
            kind: This class.
            shape: Of the weight.
            dtype: Of what `read` gives.
            read: Gives some rows; called whenever they are needed.
        """
        stand_in: ReadOnUse = Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)
        return stand_in

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, read: ReadRows) -> None:
        self.read = read

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes a linear layer in parts; everything else goes on to where it finds the data."""
        if func is F.linear and len(args) >= 2 and not kwargs and type(args[0]) is Tensor:
            return _linear(*args)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation on the data."""
        given = tree_map_only(ReadOnUse, lambda weight: weight.read(slice(None)), (args, kwargs or {}))
        return func(*given[0], **given[1])


def _linear(x: Tensor, weight: ReadOnUse, bias: Tensor | None = None) -> Tensor:
    rows, columns = weight.shape
    step = max(1, PART_ELEMENTS // columns)
    parts = []
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        parts.append(F.linear(x, weight.read(part), None if bias is None else bias[part]))
    return torch.cat(parts, dim=-1)
