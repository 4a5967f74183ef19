"""FP8 weights for ONNX Runtime's CPU: dequantised once, when a session opens.

ONNX Runtime runs DequantizeLinear of FP8 on a CPU (1.32), again in every call; a cast and a product of constants it
computes when it opens the graph. There is no product that reads FP8, so a session holds these weights in fp32.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_writing import add_integers, emit, remove_dead_nodes, replace
from dflash_engines.passes.quantized_weights import find_quantized


class Float8WeightsPass(ir.passes.InPlacePass):
    """DequantizeLinear(FP8 weight, scales) -> Mul(Cast(weight), scales)."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        changed = 0
        for node in [node for node in model.graph if node.op_type == "DequantizeLinear"]:
            matrix = find_quantized(node.outputs[0])
            if matrix is None or not matrix.floating:
                continue
            kind = node.outputs[0].dtype
            assert kind is not None
            shape = [matrix.rows, matrix.columns]
            wide = emit(node, "Cast", [matrix.values], {"to": kind}, dtype=kind, shape=shape)
            column = emit(node, "Unsqueeze", [matrix.scales, add_integers(model.graph, [1])], shape=[matrix.rows, 1])
            scales = column if column.dtype == kind else emit(node, "Cast", [column], {"to": kind}, dtype=kind)
            replace(node.outputs[0], emit(node, "Mul", [wide, scales], dtype=kind, shape=shape))
            changed += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, changed > 0)
