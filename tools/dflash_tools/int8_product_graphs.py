"""How products with quantised weights treat what they are given, in graphs: rounded to int8, or not at all."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_writing import add_constant, add_integers, emit
from dflash_engines.passes.quantized_matmul import ACCURACY_LEVELS, block_size, quantized_weight_of


def keep_activations(model: ir.Model) -> None:
    """Makes a lowered graph's products compute in fp32; weights and everything else stay as they are."""
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", ACCURACY_LEVELS["fp32"])


def round_activations(model: ir.Model) -> None:
    """Makes a portable graph's products with quantised weights round what they are given, as int8 kernels do."""
    for node in list(model.graph):
        matrix = quantized_weight_of(node)
        block = None if matrix is None else block_size(matrix)
        if block is not None:
            node.replace_input_with(0, _rounded(node, block))


def _rounded(node: ir.Node, block: int) -> ir.Value:
    """127 steps either way of the largest magnitude of each block; a block of zeros stays."""
    graph, given = node.graph, node.inputs[0]
    assert graph is not None and given is not None
    shape = emit(node, "Shape", [given], dtype=ir.DataType.INT64)
    grouped = emit(node, "Reshape", [given, add_integers(graph, [-1, block])])
    largest = emit(node, "ReduceMax", [emit(node, "Abs", [grouped]), add_integers(graph, [-1])], {"keepdims": 1})
    count, one, zero = (add_constant(graph, f"int8.{n}", np.array(n, np.float32)) for n in (127, 1, 0))
    steps = emit(node, "Div", [largest, count])
    some = emit(node, "Greater", [steps, zero], dtype=ir.DataType.BOOL)
    divisor = emit(node, "Where", [some, steps, one], dtype=ir.DataType.FLOAT)
    whole = emit(node, "Round", [emit(node, "Div", [grouped, divisor])])
    return emit(node, "Reshape", [emit(node, "Mul", [whole, divisor]), shape])
