"""The sum of residual and branch, and the norm that reads it, as one node with both results."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, integer_attribute, made_by
from dflash_engines.passes.graph_writing import MICROSOFT_DOMAIN, insert, remove_dead_nodes, replace

_DEFAULT_EPSILON = 1e-5


class FuseSkipNormPass(ir.passes.InPlacePass):
    """RMSNormalization(Add(x, y), weight) -> com.microsoft SkipSimplifiedLayerNormalization(x, y, weight)."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        fused = 0
        for norm in list(model.graph):
            add = _sum_before(norm)
            if add is not None:
                _fuse(add, norm)
                fused += 1
        model.graph.sort()  # a weight that is computed, as 1 + w, may have been made after the sum
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, fused > 0)


def _sum_before(norm: ir.Node) -> ir.Node | None:
    """The Add whose result [1, S, H] this node normalises, if nothing is broadcast."""
    if norm.op_type != "RMSNormalization" or norm.domain or integer_attribute(norm, "axis", -1) != -1:
        return None
    add, weight = made_by(norm.inputs[0], "Add"), norm.inputs[1]
    if add is None or not _is_constant(weight):
        return None
    shapes = [dims(value) for value in (*add.inputs, norm.outputs[0])]
    first = shapes[0]
    if first is None or len(first) != 3 or shapes != [first] * 3 or dims(weight) != first[-1:]:
        return None
    values = (*add.inputs, weight)
    return add if all(value is not None and value.dtype == ir.DataType.FLOAT for value in values) else None


def _is_constant(value: ir.Value | None) -> bool:
    """Whether this is stored, or made from what is stored alone."""
    if value is None or value.is_initializer():
        return value is not None
    node = value.producer()
    return node is not None and all(_is_constant(source) for source in node.inputs)


def _fuse(add: ir.Node, norm: ir.Node) -> None:
    epsilon = norm.attributes.get_float("epsilon", _DEFAULT_EPSILON)
    fused = ir.node(
        "SkipSimplifiedLayerNormalization", [*add.inputs, norm.inputs[1]], {"epsilon": epsilon},
        domain=MICROSOFT_DOMAIN, num_outputs=4,
    )
    insert(add, fused)  # where the sum was made, as others may read it before the norm does
    normed, *unused, total = fused.outputs
    for value in unused:
        value.name = ""  # the kernel skips results without a name
    replace(norm.outputs[0], normed)
    replace(add.outputs[0], total)
