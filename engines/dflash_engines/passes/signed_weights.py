"""Quantised weights as TensorRT takes them: signed integers without zero points.

Measured with TensorRT-RTX 1.7.1 (scratch memory of an engine): int8 given as inputs is read in place if it lies as
[in, out] and copied as [out, in]. int4 given as inputs is dequantised into scratch on every call: two products of
3584 x 18944 take 267 MiB (fp16 and bf16; [in, out], [out, in] or batches of groups; scales for groups, columns or the
whole matrix; compute capability 8.6, 8.9 and 12.0), and as much with the values embedded and the scales given. int4
embedded with its scales takes 8 MiB. So int8 matrices become inputs, turned when they are loaded, and int4 ones stay
in the engine, all profiles sharing them; stored as [in, out] they cost the builder one copy and a third of the time
less than as [out, in]. Engines without weights that are refitted later need a GPU to be built.
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
    """One tensor of the file of embedded weights, turned: a matrix as [in, out], its scales as [groups, out]."""

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
            _turn(matrix)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, bool(found))

    def _embed(self, matrix: QuantizedMatrix) -> None:
        """Has values and scales lie in `SIGNED_FILE`."""
        assert matrix.group_size is not None
        count = matrix.rows * matrix.columns
        self._place(matrix.values, count // 2, "I4")
        self._place(matrix.scales, 2 * count // matrix.group_size, self._half)

    def _carry_zero_points(self, matrix: QuantizedMatrix, zero_points: str) -> None:
        offsets = add_zero_point_products(matrix)
        count = math.prod(int(d) for d in dims(offsets) or [])
        length, middle = 4 * count, 1 << (matrix.bits - 1)
        offset = self._point(offsets, length)
        self.parts.append(
            OffsetPart(str(matrix.scales.name), offset, length, "F32", zero_points, middle, self._half)
        )

    def _place(self, value: ir.Value, length: int, dtype: str) -> None:
        self.parts.append(SignedPart(str(value.name), self._point(value, length), length, dtype))

    def _point(self, value: ir.Value, length: int) -> int:
        """Points a value at the end of the file; returns where that is."""
        last = self.parts[-1] if self.parts else None
        offset = 0 if last is None else last.offset_bytes + last.length_bytes
        offset += -offset % _ALIGNMENT_BYTES
        tensor = value.const_value
        base_dir = tensor.base_dir if isinstance(tensor, ir.ExternalTensor) else ""
        assert value.dtype is not None and value.shape is not None
        value.const_value = ir.ExternalTensor(
            SIGNED_FILE, offset, length, value.dtype, shape=value.shape, name=str(value.name), base_dir=base_dir
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
    """The matrix as signed integers or FP8 [in, out], read so by products and, if INT8, by Gather."""
    values, scales, attributes = matrix.values, matrix.scales, {"axis": 1}
    signed = ir.DataType.INT4 if matrix.bits == 4 else ir.DataType.INT8
    _restate(values, [matrix.columns, matrix.rows], ir.DataType.FLOAT8E4M3FN if matrix.floating else signed)
    kind, given = matrix.node.outputs[0].dtype, scales.dtype
    assert kind is not None and given is not None
    if matrix.group_size is not None:
        _restate(scales, [matrix.columns // matrix.group_size, matrix.rows], given)
        attributes = {"axis": 0, "block_size": matrix.group_size}
    readers, size = list(matrix.node.outputs[0].consumers()), [matrix.columns, matrix.rows]
    turned = emit(matrix.node, "DequantizeLinear", [values, scales], attributes, dtype=given, shape=size)
    if given != kind:  # scales of FP8 are fp32 in any bundle
        turned = emit(matrix.node, "Cast", [turned], {"to": kind}, dtype=kind, shape=size)
    for node in readers:
        if node.op_type == "Gather" and matrix.bits == 8 and not matrix.floating:
            replace(node.outputs[0], _picked(node, values, scales, kind))
        elif node.op_type == "Transpose" and made_by(node.inputs[0], "DequantizeLinear") is matrix.node:
            ir.convenience.replace_all_uses_with(node.outputs[0], turned)
        elif node.op_type == "Cast" and all(user.op_type == "Transpose" for user in node.outputs[0].consumers()):
            wide = emit(node, "Cast", [turned], node.attributes, dtype=node.outputs[0].dtype, shape=size)
            for user in list(node.outputs[0].consumers()):
                ir.convenience.replace_all_uses_with(user.outputs[0], wide)
        else:
            raise EngineError(
                f"{values.name} is quantised and read by {node.op_type}, which has no form for TensorRT. Run this "
                "bundle with --backend ort-cpu."
            )


def _restate(value: ir.Value, sizes: list[int], dtype: ir.DataType) -> None:
    """Says of a weight in a file that it lies there turned."""
    old, shape = value.const_value, ir.Shape(sizes)
    assert isinstance(old, ir.ExternalTensor)
    value.shape, value.type = shape, ir.TensorType(dtype)
    value.const_value = ir.ExternalTensor(
        old.location, old.offset, old.length, dtype, shape=shape, name=str(value.name), base_dir=old.base_dir
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
