"""Questions the passes ask about values: who makes them, are they constant, what shape have they."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

HALF_TYPES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_LARGEST_CONSTANT = 4096


def made_by(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that makes `value`, if it is of this operator; None otherwise."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == domain else None


def constant(value: ir.Value | None) -> npt.NDArray[np.generic] | None:
    """The array behind a small constant; None if `value` is computed, a weight, or large."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.size > _LARGEST_CONSTANT:
        return None
    return tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """The number behind a constant of one element."""
    array = constant(value)
    return float(array.astype(np.float64).reshape(-1)[0]) if array is not None and array.size == 1 else None


def integers(value: ir.Value | None) -> list[int] | None:
    """The numbers behind a constant list of integers."""
    array = constant(value)
    return None if array is None or array.dtype.kind not in "iu" else [int(n) for n in array.reshape(-1)]


def dims(value: ir.Value | None) -> list[int | str] | None:
    """The shape, symbolic dimensions as their names; None if it is not known."""
    if value is None or value.shape is None:
        return None
    return [dim if isinstance(dim, int) else str(dim) for dim in value.shape]


def integer_attribute(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute, or what the operator means by its absence."""
    return node.attributes.get_int(name, default)


def swaps_heads_and_rows(node: ir.Node | None) -> bool:
    """Whether this is the transposition [B, S, heads, D] <-> [B, heads, S, D]."""
    if node is None or node.op_type != "Transpose":
        return False
    return list(node.attributes.get_ints("perm", ())) == [0, 2, 1, 3]
