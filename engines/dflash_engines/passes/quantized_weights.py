"""What a graph says of its quantised weights: DequantizeLinear on a stored matrix, read back for other forms of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_reading import constant, dims, integer_attribute, made_by

_BITS = {ir.DataType.UINT4: 4, ir.DataType.UINT8: 8, ir.DataType.FLOAT8E4M3FN: 8}


@dataclasses.dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [N, K] as (value - zero point) * scale."""

    node: ir.Node
    """The DequantizeLinear."""
    values: ir.Value
    """UINT4, UINT8 or FLOAT8E4M3FN [N, K], a weight in a file."""
    scales: ir.Value
    """[N, K / group_size], or [N]."""
    zero_points: ir.Value | None
    """None where they are the middle of the range throughout, 8 or 128, and for floats."""
    bits: int
    group_size: int | None
    """None for a scale a row."""
    rows: int
    columns: int

    @property
    def floating(self) -> bool:
        """The values are floats of eight bits."""
        return self.values.dtype == ir.DataType.FLOAT8E4M3FN


def find_quantized(value: ir.Value | None) -> QuantizedMatrix | None:
    """The quantised matrix that `value` is, dequantised; None if it is none."""
    node = made_by(value, "DequantizeLinear")
    if node is None or node.inputs[0] is None or node.inputs[1] is None:
        return None
    values, scales = node.inputs[0], node.inputs[1]
    shape = dims(values)
    bits = _BITS.get(values.dtype) if values.dtype is not None else None
    if bits is None or not values.is_initializer() or shape is None or len(shape) != 2:
        return None
    rows, columns = shape
    block = integer_attribute(node, "block_size", 0) or None
    if integer_attribute(node, "axis", 1) != (0 if block is None else 1):
        return None
    if not isinstance(rows, int) or not isinstance(columns, int):
        return None
    zero_points = node.inputs[2] if len(node.inputs) > 2 else None
    if zero_points is not None and is_middle(zero_points, bits):
        zero_points = None
    return QuantizedMatrix(node, values, scales, zero_points, bits, block, rows, columns)


def is_middle(value: ir.Value, bits: int) -> bool:
    """Whether zero points are 8 (of four bits) or 128 throughout, as an export writes a symmetric weight."""
    cast = made_by(value, "Cast")
    expand = made_by(value if cast is None else cast.inputs[0], "Expand")
    array = None if expand is None else constant(expand.inputs[0])
    return array is not None and bool(np.all(array.astype(np.int64) == 1 << (bits - 1)))


def as_bytes(matrix_part: ir.Value, shape: list[int], suffix: str) -> ir.Value:
    """The bytes of a stored tensor as UINT8 of another shape: the same place in the file under another name.

    Raises:
        ValueError: the tensor does not lie in a file.
    """
    name, tensor = f"{matrix_part.name}{suffix}", matrix_part.const_value
    graph = matrix_part.graph
    if not isinstance(tensor, ir.ExternalTensor) or graph is None:
        raise ValueError(f"{matrix_part.name} does not lie in a file")
    known = graph.initializers.get(name)
    if known is not None:
        return known
    span = ir.ExternalTensor(
        tensor.location, tensor.offset, tensor.length, ir.DataType.UINT8,
        shape=ir.Shape(shape), name=name, base_dir=tensor.base_dir,
    )  # fmt: skip
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.UINT8), const_value=span)
    graph.register_initializer(value)
    return value
