"""Products with a weight as products of two matrices.

Measured with TensorRT-RTX 1.7.1: `[1, S, in] x Transpose(weight [out, in])`, with the weight an input of the engine,
writes a transposed copy of the weight into scratch memory on every call; `[S, in] x Transpose(weight)` reads it in
place. `tests/cross/test_engine_sizes.py` builds both.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, made_by
from dflash_engines.passes.graph_writing import add_integers, emit, remove_dead_nodes, replace


class FlatMatMulPass(ir.passes.InPlacePass):
    """MatMul(x [1, S, in], weight) -> Unsqueeze(MatMul(Squeeze(x), weight)), the squeezed x shared."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        flat: dict[ir.Value, ir.Value] = {}
        changed = 0
        for node in list(model.graph):
            x = node.inputs[0] if node.op_type == "MatMul" else None
            if x is None or not _is_one_matrix(x) or not _is_weight(node.inputs[1]):
                continue
            first = add_integers(model.graph, [0])
            if x not in flat:
                flat[x] = emit(node, "Squeeze", [x, first])
            product = emit(node, "MatMul", [flat[x], node.inputs[1]])
            replace(node.outputs[0], emit(node, "Unsqueeze", [product, first]))
            changed += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, changed > 0)


def _is_one_matrix(value: ir.Value) -> bool:
    shape = dims(value)
    return shape is not None and len(shape) == 3 and shape[0] == 1


def _is_weight(value: ir.Value | None) -> bool:
    transpose = made_by(value, "Transpose")
    source = value if transpose is None else transpose.inputs[0]
    for op_type in ("Cast", "DequantizeLinear"):
        if source is not None and (node := made_by(source, op_type)) is not None:
            source = node.inputs[0]
    return source is not None and source.is_initializer() and len(dims(source) or ()) == 2
