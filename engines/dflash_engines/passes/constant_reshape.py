"""Reshape to a shape computed from the number of rows, as Reshape to a constant."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import constant, dims
from dflash_engines.passes.graph_writing import add_integers, remove_dead_nodes


class ConstantReshapePass(ir.passes.InPlacePass):
    """Replaces a computed shape with at most one symbolic dimension by a constant with -1 in its place."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        changed = 0
        for node in model.graph:
            shape = _constant_shape(node)
            if shape is not None:
                node.replace_input_with(1, add_integers(model.graph, shape))
                node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
                changed += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, changed > 0)


def _constant_shape(node: ir.Node) -> list[int] | None:
    if node.op_type != "Reshape" or constant(node.inputs[1]) is not None:
        return None
    shape = dims(node.outputs[0])
    # A zero stays out: Reshape would read it as "copy this dimension".
    if shape is None or sum(isinstance(dim, str) for dim in shape) > 1 or 0 in shape:
        return None
    return [-1 if isinstance(dim, str) else dim for dim in shape]
