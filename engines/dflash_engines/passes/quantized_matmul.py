"""Products with a quantised weight as ONNX Runtime's MatMulNBits, which reads the values as the bundle holds them.

With activations in int8 and at most 32 inputs in a block (64 with 8 bits), a row of a product is the same whatever the
number of rows beside it, bit for bit (measured with ONNX Runtime 1.32 on x86, for 1 to 64 rows). Of wider blocks the
last of an odd number of rows is summed in another order; so are all rows where activations stay in fp32.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_reading import made_by
from dflash_engines.passes.graph_writing import (
    MICROSOFT_DOMAIN,
    add_constant,
    add_integers,
    emit,
    remove_dead_nodes,
    replace,
)
from dflash_engines.passes.quantized_weights import QuantizedMatrix, as_bytes, find_quantized

ActivationPrecision = Literal["int8", "fp32"]
ACCURACY_LEVELS: dict[ActivationPrecision, int] = {"int8": 4, "fp32": 1}
"""MatMulNBits' attribute: what the activations of a product are rounded to, in groups as large as the weight's."""
_BLOCKS = (32, 16)
"""Inputs in a block where the weight has one scale a row: activations are rounded block by block, so small ones are
nearer."""


class QuantizedMatMulPass(ir.passes.InPlacePass):
    """MatMul(x, Transpose(DequantizeLinear(weight))) -> com.microsoft MatMulNBits(x, weight)."""

    def __init__(self, activations: ActivationPrecision = "int8") -> None:
        super().__init__()
        self._accuracy_level = ACCURACY_LEVELS[activations]

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        changed = 0
        for node in list(model.graph):
            matrix = quantized_weight_of(node)
            block = None if matrix is None else block_size(matrix)
            if matrix is not None and block is not None:
                self._rewrite(node, matrix, block)
                changed += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, changed > 0)

    def _rewrite(self, node: ir.Node, matrix: QuantizedMatrix, block: int) -> None:
        blocks = matrix.columns // block
        values = as_bytes(matrix.values, [matrix.rows, blocks, block * matrix.bits // 8], ".blocks")
        inputs = [node.inputs[0], values, _scales(node, matrix, blocks)]
        if matrix.zero_points is not None:
            inputs.append(_zero_points(node, matrix, blocks))
        attributes = {
            "K": matrix.columns,
            "N": matrix.rows,
            "bits": matrix.bits,
            "block_size": block,
            "accuracy_level": self._accuracy_level,
        }
        replace(node.outputs[0], emit(node, "MatMulNBits", inputs, attributes, domain=MICROSOFT_DOMAIN))


def quantized_weight_of(node: ir.Node) -> QuantizedMatrix | None:
    """The quantised matrix that a MatMul multiplies by; None for other nodes."""
    transpose = made_by(node.inputs[1], "Transpose") if node.op_type == "MatMul" else None
    matrix = None if transpose is None else find_quantized(transpose.inputs[0])
    return None if matrix is None or matrix.floating else matrix


def block_size(matrix: QuantizedMatrix) -> int | None:
    """Inputs in one block of the kernel: a group, or a power of two that divides a row with one scale."""
    return activation_block(matrix.group_size, matrix.columns)


def activation_block(group_size: int | None, columns: int) -> int | None:
    """How many activations are rounded by one scale, beside a weight of such groups; None where no kernel fits."""
    if group_size is not None:
        return group_size
    return next((size for size in _BLOCKS if columns % size == 0), None)


def _scales(node: ir.Node, matrix: QuantizedMatrix, blocks: int) -> ir.Value:
    """[N, blocks]; a row's one scale is repeated for its blocks when the session opens."""
    if matrix.group_size is not None:
        return matrix.scales
    return _repeated(node, matrix.scales, matrix.rows, blocks)


def _repeated(node: ir.Node, column: ir.Value, rows: int, blocks: int) -> ir.Value:
    graph = node.graph
    assert graph is not None
    upright = emit(node, "Unsqueeze", [column, add_integers(graph, [1])], shape=[rows, 1])
    return emit(node, "Expand", [upright, add_integers(graph, [rows, blocks])], shape=[rows, blocks])


def _zero_points(node: ir.Node, matrix: QuantizedMatrix, blocks: int) -> ir.Value:
    """Bytes of whole rows: where a row of int4 has an odd number of groups, they are packed anew, inside the graph."""
    assert matrix.zero_points is not None
    if matrix.bits == 8:
        one_each = matrix.group_size is None
        return _repeated(node, matrix.zero_points, matrix.rows, blocks) if one_each else matrix.zero_points
    assert matrix.group_size is not None
    groups = matrix.columns // matrix.group_size
    if groups % 2 == 0:
        return as_bytes(matrix.zero_points, [matrix.rows, groups // 2], ".bytes")
    tensor, graph = matrix.zero_points.const_value, matrix.node.graph
    assert tensor is not None and graph is not None
    padded = np.pad(tensor.numpy().astype(np.uint8), ((0, 0), (0, 1)))
    return add_constant(graph, f"{matrix.zero_points.name}.rows", padded[:, 0::2] | (padded[:, 1::2] << 4))
