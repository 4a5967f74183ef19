"""What a value of a traced graph is, in words: a residual after a layer, a product with a weight, a tap."""

from __future__ import annotations

import re
from typing import NamedTuple

import onnx_ir as ir

MOVES = frozenset({
    "Cast", "Expand", "Flatten", "Gather", "GatherND", "Identity", "Neg", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
})  # fmt: skip
"""Their results are no larger than what they read."""
_RESIDUAL = re.compile(r"hidden_states\.(\d+)$")
_WEIGHT_LAYER = re.compile(r"\blayers?\.(\d+)\.|\bh\.(\d+)\.|\bblocks?\.(\d+)\.")


class Place(NamedTuple):
    """Where a value is."""

    what: str
    layer: int | None


def describe_values(graph: ir.Graph) -> dict[ir.Value, Place]:
    """Every value that nodes compute, in the order of the graph; the words name the layer where there is one.

    Args:
        graph: A portable graph; layer outputs of a target are named `hidden_states.{i}`.
    """
    places: dict[ir.Value, Place] = {}
    residual: tuple[object, ...] | None = None  # the shape of the stream
    layer: int | None = None
    for node in graph:
        weight = _weight(node)
        number = None if weight is None else _layer_of(weight)
        layer = layer if number is None else number
        for output in node.outputs:
            match = _RESIDUAL.match(output.name or "")
            shape = None if output.shape is None else tuple(map(str, output.shape))
            if match:
                residual, passed = shape, int(match[1])
                layer = passed
                what = f"residual after layer {passed - 1}" if passed else "embedding rows"
                places[output] = Place(what, passed - 1 if passed else None)
            elif output.name == "taps":
                places[output] = Place("taps", None)
            elif weight is not None and node.op_type in ("MatMul", "Gemm", "Gather"):
                words = "logits" if _are_logits(output) else f"product with {weight}"
                places[output] = Place(words if node.op_type != "Gather" else "embedding rows", number)
            elif node.op_type == "Add" and (bias := _bias(node)) is not None:
                places[output] = Place(f"product with {bias.removesuffix('.bias')} and its bias", layer)
            elif node.op_type == "Add" and shape is not None and len(shape) == 3 and shape == residual:
                places[output] = Place(f"residual in layer {layer}", layer)
            else:
                words = f"{node.op_type} in layer {layer}" if layer is not None else node.op_type
                places[output] = Place(words, layer)
    return {value: Place(_with_norm(value, place.what), place.layer) for value, place in places.items()}


def _weight(node: ir.Node) -> str | None:
    """The weight a node multiplies by or picks rows of, by its name without `.weight`."""
    for value in node.inputs:
        source = _before_turning(value)
        if source is not None and source.is_initializer() and len(source.shape or ()) >= 2 and "." in str(source.name):
            return str(source.name).removesuffix(".weight")
    return None


def _before_turning(value: ir.Value | None) -> ir.Value | None:
    """What is turned, widened or dequantised on its way to a product."""
    made = None if value is None else value.producer()
    if made is None or made.op_type not in ("Transpose", "Cast", "DequantizeLinear"):
        return value
    return _before_turning(made.inputs[0])


def _bias(node: ir.Node) -> str | None:
    names = (value.name for value in node.inputs if value is not None and value.is_initializer())
    return next((name for name in names if name is not None and name.endswith(".bias")), None)


def _layer_of(weight: str) -> int | None:
    match = _WEIGHT_LAYER.search(weight)
    return None if match is None else int(next(group for group in match.groups() if group is not None))


def _are_logits(value: ir.Value) -> bool:
    """Whether nothing but bias, scale, cap and widening stands between a product and the graph's logits."""
    while value.name not in ("logits", "draft_logits"):
        readers = [user for user in value.consumers() if user.op_type in ("Add", "Cast", "Div", "Mul", "Tanh")]
        if len(readers) != 1 or len(value.consumers()) != 1:
            return False
        value = readers[0].outputs[0]
    return True


def _with_norm(value: ir.Value, words: str) -> str:
    """A norm begins by widening what it reads."""
    if words.startswith(("residual", "embedding", "logits")):
        return words
    seen, waiting = set[ir.Value](), [value]
    while waiting:
        one = waiting.pop()
        seen.add(one)
        for user in one.consumers():
            made = user.outputs[0]
            if user.op_type == "Cast" and made.dtype == ir.DataType.FLOAT and any(
                reader.op_type in ("Pow", "ReduceMean") for reader in made.consumers()
            ):
                return f"{words}, a norm's input"
            if user.op_type in MOVES - {"Cast"} and made not in seen:
                waiting.append(made)
    return words
