"""Quantised weights as TensorRT takes them: signed integers without zero points.

Measured with TensorRT-RTX 1.7.1 (three products with matrices of 4096 x 4096, scratch memory of an engine): int8 given
as inputs is read in place if it lies as [in, out] (8 MiB) and copied as [out, in] (56 MiB); int4 given as inputs, or
embedded with its scales given as inputs, is dequantised into scratch on every call (104 MiB); int4 embedded with its
scales is not (8 MiB). So int8 matrices become inputs, turned when they are loaded, and int4 ones stay in the engine.
FP8 is as int8: three matrices of 2048 x 2048 as inputs take 8 MiB as [in, out], 20 MiB as [out, in].
Zero points become a product of their own, see `zero_point_products`.
"""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, made_by
from dflash_engines.passes.graph_writing import add_integers, emit, remove_dead_nodes, replace
from dflash_engines.passes.quantized_weights import QuantizedMatrix, find_quantized
from dflash_engines.passes.zero_point_products import add_zero_point_products
from dflash_runtime.errors import EngineError

SIGNED_FILE = "signed_weights"
"""What the graph calls the file of embedded int4 weights; it lies beside the graph while an engine is built."""
_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class SignedPart:
    """One tensor of the file of embedded weights."""

    weight: str
    """In the bundle's index: values that become signed, or scales that become the engine's precision."""
    offset_bytes: int
    length_bytes: int
    dtype: str
    """I4, F16 or BF16."""


@dataclasses.dataclass(frozen=True)
class OffsetPart(SignedPart):
    """(middle - zero point) * scale in fp32; `weight` names the scales."""

    zero_points: str
    """In the bundle's index."""
    middle: int
    """8 or 128."""
    scale_dtype: str
    """F16 or BF16, the engine's precision: scales are rounded to it first, as they are for the values."""


class SignedWeightsPass(ir.passes.InPlacePass):
    """DequantizeLinear of UINT4 and UINT8 -> of INT4 and INT8; FP8 turned as INT8 is.

    After the call `parts` lists what `SIGNED_FILE` must hold.
    """

    def __init__(self, half: ir.DataType) -> None:
        super().__init__()
        self._half = "F16" if half == ir.DataType.FLOAT16 else "BF16"
        self.parts: list[SignedPart] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class.

        Raises:
            EngineError: a table of int4, of FP8 or with zero points that rows are picked from, or int8 in groups.
        """
        found = [find_quantized(node.outputs[0]) for node in list(model.graph) if node.op_type == "DequantizeLinear"]
        for matrix in found:
            if matrix is None:
                continue
            _refuse(matrix)
            if matrix.zero_points is not None:
                self._carry_zero_points(matrix, str(matrix.zero_points.name))
            if matrix.bits == 4:
                self._embed(matrix)
            else:
                _turn(matrix)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, bool(found))

    def _embed(self, matrix: QuantizedMatrix) -> None:
        matrix.values.type = ir.TensorType(ir.DataType.INT4)
        self._place(matrix.values, ir.DataType.INT4, matrix.rows * matrix.columns // 2, "I4")
        assert matrix.scales.dtype is not None and matrix.group_size is not None
        count = matrix.rows * matrix.columns // matrix.group_size
        self._place(matrix.scales, matrix.scales.dtype, 2 * count, self._half)
        matrix.node.replace_input_with(2, None)

    def _carry_zero_points(self, matrix: QuantizedMatrix, zero_points: str) -> None:
        offsets = add_zero_point_products(matrix)
        count = math.prod(int(d) for d in dims(offsets) or [])
        length, middle = 4 * count, 1 << (matrix.bits - 1)
        offset = self._point(offsets, ir.DataType.FLOAT, length)
        self.parts.append(
            OffsetPart(str(matrix.scales.name), offset, length, "F32", zero_points, middle, self._half)
        )

    def _place(self, value: ir.Value, kind: ir.DataType, length: int, dtype: str) -> None:
        self.parts.append(SignedPart(str(value.name), self._point(value, kind, length), length, dtype))

    def _point(self, value: ir.Value, kind: ir.DataType, length: int) -> int:
        """Points a value at the end of the file; returns where that is."""
        last = self.parts[-1] if self.parts else None
        offset = 0 if last is None else last.offset_bytes + last.length_bytes
        offset += -offset % _ALIGNMENT_BYTES
        tensor = value.const_value
        base_dir = tensor.base_dir if isinstance(tensor, ir.ExternalTensor) else ""
        assert value.shape is not None and value.name is not None
        shape = ir.Shape([int(d) for d in dims(value) or []])
        value.const_value = ir.ExternalTensor(
            SIGNED_FILE, offset, length, kind, shape=shape, name=value.name, base_dir=base_dir
        )
        return offset


def _refuse(matrix: QuantizedMatrix) -> None:
    if matrix.bits == 8 and matrix.group_size is not None:
        raise EngineError(
            f"{matrix.values.name} is int8 with a scale for each {matrix.group_size} inputs; engines take int8 with "
            "one for each output channel. Run this bundle with --backend ort-cpu."
        )
    picked = [node for node in matrix.node.outputs[0].consumers() if node.op_type == "Gather"]
    if matrix.bits == 4 and picked:
        raise EngineError(
            f"{matrix.values.name} is an int4 table that rows are picked from, and TensorRT would dequantise it whole "
            "on every call. Build the bundle with --quantize-head keep or int8."
        )


def _turn(matrix: QuantizedMatrix) -> None:
    """The matrix as INT8 or FP8 [in, out], read so by products and, if INT8, by Gather."""
    values, shape = matrix.values, ir.Shape([matrix.columns, matrix.rows])
    signed = ir.DataType.FLOAT8E4M3FN if matrix.floating else ir.DataType.INT8
    tensor = values.const_value
    assert isinstance(tensor, ir.ExternalTensor) and values.name is not None
    values.shape, values.type = shape, ir.TensorType(signed)
    values.const_value = ir.ExternalTensor(
        tensor.location, tensor.offset, tensor.length, signed,
        shape=shape, name=values.name, base_dir=tensor.base_dir,
    )  # fmt: skip
    readers = list(matrix.node.outputs[0].consumers())
    kind = matrix.node.outputs[0].dtype
    assert kind is not None
    size = [matrix.columns, matrix.rows]
    inputs, given = [values, matrix.scales], matrix.scales.dtype
    turned = emit(matrix.node, "DequantizeLinear", inputs, {"axis": 1}, dtype=given, shape=size)
    if given != kind:  # scales of FP8 are fp32 in any bundle
        turned = emit(matrix.node, "Cast", [turned], {"to": kind}, dtype=kind, shape=size)
    for node in readers:
        if node.op_type == "Gather" and not matrix.floating:
            replace(node.outputs[0], _picked(node, values, matrix.scales, kind))
        elif node.op_type == "Transpose" and made_by(node.inputs[0], "DequantizeLinear") is matrix.node:
            ir.convenience.replace_all_uses_with(node.outputs[0], turned)
        else:
            raise EngineError(
                f"{values.name} has 8 bits and is read by {node.op_type}, which has no form for TensorRT. Run this "
                "bundle with --backend ort-cpu."
            )


def _picked(node: ir.Node, values: ir.Value, scales: ir.Value, kind: ir.DataType) -> ir.Value:
    """Rows [1, S, H] of a table that lies as [H, V]."""
    columns = emit(node, "Gather", [values, node.inputs[1]], {"axis": 1}, dtype=ir.DataType.INT8)
    rows = emit(node, "Transpose", [columns], {"perm": [1, 2, 0]}, dtype=ir.DataType.INT8)
    wide = emit(node, "Cast", [rows], {"to": kind}, dtype=kind)
    picked = emit(node, "Gather", [scales, node.inputs[1]], {"axis": 0}, dtype=kind)
    graph = node.graph
    assert graph is not None
    return emit(node, "Mul", [wide, emit(node, "Unsqueeze", [picked, add_integers(graph, [-1])])], dtype=kind)
