"""x * rsqrt(mean(x^2) + eps) * weight, six nodes in the traced graph, as one RMSNormalization node."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import HALF_TYPES, constant, dims, integer_attribute, made_by, scalar
from dflash_engines.passes.graph_writing import emit, remove_dead_nodes, replace


class FuseRmsNormPass(ir.passes.InPlacePass):
    """Fuses every root-mean-square norm over the last axis that ends in a product with a weight [D].

    A half-precision norm that widens to fp32 and rounds before the weight is fused too: the operator does the same.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        fused = 0
        for node in list(model.graph):
            match = _match(node)
            if match is None:
                continue
            x, weight, epsilon = match
            attributes = {"axis": -1, "epsilon": epsilon, "stash_type": int(ir.DataType.FLOAT)}
            replace(node.outputs[0], emit(node, "RMSNormalization", [x, weight], attributes))
            fused += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, fused > 0)


def _match(node: ir.Node) -> tuple[ir.Value, ir.Value, float] | None:
    """(x, weight, epsilon) if `node` is the product with the weight."""
    kind = node.outputs[0].dtype
    if node.op_type != "Mul" or (kind != ir.DataType.FLOAT and kind not in HALF_TYPES):
        return None
    for weight, normed in (tuple(node.inputs), tuple(reversed(node.inputs))):
        product = made_by(_before_rounding(normed) if kind in HALF_TYPES else normed, "Mul")
        weight_dims, x_dims = dims(weight), dims(normed)
        if product is None or weight is None or not weight_dims or not x_dims or weight_dims != x_dims[-1:]:
            continue
        for x, factor in (tuple(product.inputs), tuple(reversed(product.inputs))):
            epsilon = _epsilon_of_rsqrt(x, factor)
            source = x if kind == ir.DataType.FLOAT else _before_widening(x, kind)
            if source is not None and weight.dtype == kind and epsilon is not None:
                return source, weight, epsilon
    return None


def _before_rounding(value: ir.Value | None) -> ir.Value | None:
    cast = made_by(value, "Cast")
    source = None if cast is None else cast.inputs[0]
    return source if source is not None and source.dtype == ir.DataType.FLOAT else None


def _before_widening(value: ir.Value | None, kind: ir.DataType | None) -> ir.Value | None:
    cast = made_by(value, "Cast")
    source = None if cast is None else cast.inputs[0]
    return source if source is not None and source.dtype == kind else None


def _epsilon_of_rsqrt(x: ir.Value | None, factor: ir.Value | None) -> float | None:
    """Epsilon if `factor` is 1 / sqrt(mean(x^2) + epsilon) over the last axis."""
    reciprocal, power = made_by(factor, "Reciprocal"), made_by(factor, "Pow")
    if reciprocal is not None:
        root = made_by(reciprocal.inputs[0], "Sqrt")
        shifted = None if root is None else root.inputs[0]
    elif power is not None and scalar(power.inputs[1]) == -0.5:
        shifted = power.inputs[0]
    else:
        return None
    add = made_by(shifted, "Add")
    if add is None:
        return None
    for mean, epsilon in (tuple(add.inputs), tuple(reversed(add.inputs))):
        number = scalar(epsilon)
        if number is not None and _is_mean_of_square(mean, x):
            return number
    return None


def _is_mean_of_square(mean: ir.Value | None, x: ir.Value | None) -> bool:
    reduce = made_by(mean, "ReduceMean")
    if reduce is None or not integer_attribute(reduce, "keepdims", 1) or len(reduce.inputs) < 2:
        return False
    axes, rank = constant(reduce.inputs[1]), len(dims(x) or ())
    if axes is None or axes.size != 1 or int(axes.reshape(-1)[0]) not in (-1, rank - 1):
        return False
    power, product = made_by(reduce.inputs[0], "Pow"), made_by(reduce.inputs[0], "Mul")
    if power is not None:
        return power.inputs[0] is x and scalar(power.inputs[1]) == 2.0
    return product is not None and product.inputs[0] is x and product.inputs[1] is x
