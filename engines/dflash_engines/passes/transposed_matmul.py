"""MatMul with a transposed weight as one node that reads the weight as it is stored, [out, in].

Left alone, ONNX Runtime folds the transposition into a second copy of the weight when a session opens; for a tied
embedding both copies would stay in memory.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import HALF_TYPES, dims, made_by
from dflash_engines.passes.graph_writing import MICROSOFT_DOMAIN, emit, remove_dead_nodes, replace

_KINDS = HALF_TYPES | {ir.DataType.FLOAT}


class FuseTransposedMatMulPass(ir.passes.InPlacePass):
    """MatMul(x, Transpose(weight)) -> com.microsoft FusedMatMul(x, weight, transB=1); a weight may be an input."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        fused = 0
        for node in list(model.graph):
            weight = _weight_behind_transpose(node)
            if weight is None:
                continue
            attributes = {"alpha": 1.0, "transA": 0, "transB": 1}
            output = emit(node, "FusedMatMul", [node.inputs[0], weight], attributes, domain=MICROSOFT_DOMAIN)
            replace(node.outputs[0], output)
            fused += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, fused > 0)

    def ensures(self, model: ir.Model) -> None:
        """No weight is transposed by a node of its own."""
        left = [
            node.inputs[0].name
            for node in model.graph
            if node.op_type == "Transpose"
            and node.inputs[0] is not None
            and node.inputs[0].is_initializer()
            and any(user.op_type == "MatMul" for user in node.outputs[0].consumers())
        ]
        if left:
            raise ir.passes.PostconditionError(f"weights transposed by a node of their own: {left[:5]}")


def _weight_behind_transpose(node: ir.Node) -> ir.Value | None:
    if node.op_type != "MatMul":
        return None
    transpose = made_by(node.inputs[1], "Transpose")
    weight = None if transpose is None else transpose.inputs[0]
    stored = weight is not None and (weight.is_initializer() or weight.is_graph_input())
    if weight is None or not stored or weight.dtype not in _KINDS:
        return None
    return weight if len(dims(weight) or ()) == 2 else None
