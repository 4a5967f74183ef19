"""Chooses which layers' outputs the target graph hands out: an edit of the graph, never a new trace."""

from __future__ import annotations

import onnx_ir as ir

from dflash_runtime.errors import PairError

_HIDDEN_PREFIX = "hidden_states."


def select_taps(model: ir.Model, layer_ids: list[int], hidden_size: int) -> None:
    """Makes output `taps` [1, S, K*H] the concatenation of the raw outputs of the given layers, in their order.

    Works on a freshly traced graph (every `hidden_states.{i}` is an output) and on a bundle's graph alike,
    because the values keep their names. Where one of them is kept in fp32, all taps are handed on in fp32.

    Args:
        model: A target graph; changed in place.
        layer_ids: 0-based decoder layers; layer i's output is the value `hidden_states.{i + 1}`.
        hidden_size: H.

    Raises:
        PairError: a layer id is not in the graph.
    """
    graph = model.graph
    values = {v.name: v for node in graph for v in node.outputs if v.name and v.name.startswith(_HIDDEN_PREFIX)}
    missing = [i for i in layer_ids if f"{_HIDDEN_PREFIX}{i + 1}" not in values]
    if missing:
        raise PairError(f"the target graph has no layers {missing}; it has {len(values) - 1}.")
    outputs = list(graph.outputs)
    at = next(k for k, v in enumerate(outputs) if v.name == "taps" or (v.name or "").startswith(_HIDDEN_PREFIX))
    kept = [v for v in outputs if v.name != "taps" and not (v.name or "").startswith(_HIDDEN_PREFIX)]
    old = next((v for v in outputs if v.name == "taps"), None)
    graph.outputs.clear()
    if old is not None:
        producer = old.producer()
        assert producer is not None
        widened = [value.producer() for value in producer.inputs if value is not None]
        graph.remove(producer, safe=True)
        for cast in dict.fromkeys(widened):
            if cast is not None and cast.op_type == "Cast" and not cast.outputs[0].uses():
                graph.remove(cast, safe=True)
    chosen = _of_one_type(graph, [values[f"{_HIDDEN_PREFIX}{i + 1}"] for i in layer_ids])
    node = ir.node("Concat", chosen, attributes={"axis": -1}, name="taps")
    taps = node.outputs[0]
    taps.name = "taps"
    taps.type = chosen[0].type
    taps.shape = ir.Shape([1, "S", len(layer_ids) * hidden_size])
    graph.append(node)
    graph.outputs.extend([*kept[:at], taps, *kept[at:]])


def _of_one_type(graph: ir.Graph, chosen: list[ir.Value]) -> list[ir.Value]:
    if len({value.dtype for value in chosen}) == 1:
        return chosen
    return [value if value.dtype == ir.DataType.FLOAT else _widened(graph, value) for value in chosen]


def _widened(graph: ir.Graph, value: ir.Value) -> ir.Value:
    cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    graph.append(cast)
    wide = cast.outputs[0]
    wide.shape, wide.type = value.shape, ir.TensorType(ir.DataType.FLOAT)
    return wide
