"""Acceptance as a small integer graph, so that cycles of draft and verify can follow each other on the device.

It is `decode.accept` and the cut of `decode.decode` in operators of opset 20. Between two cycles the host then need
not look: the anchor and the position of the next one are outputs, and a cycle that starts after the end (its anchor
is a stop token, or there is no room) commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

OPSET, _IR_VERSION = 20, 10
NOTHING = -1
"""Fills `committed` past `count`; as a token it means that the logits were not finite."""


def acceptance_model() -> ir.Model:
    """The graph, all of it int64.

    Inputs:
        block [1, b]: anchor, then the proposals.
        posterior [1, b]: the target's token after each, -1 where its logits were not finite.
        position [1]: rows committed before this cycle.
        stop_ids [n]: ids that end the output, at least one; -2 stands for none.
        limit [1]: first number of committed rows that is not allowed, `end` of the decode loop.

    Outputs:
        committed [1, b]: tokens that now belong to the output, then -1.
        count [1]: how many.
        new_position [1]: rows committed now.
        anchor [1, 1]: the newest token.
        done [1]: 1 where the output has ended, or its newest token is -1.
    """
    graph = _AcceptanceGraph()
    block, posterior = graph.input("block", [1, "b"]), graph.input("posterior", [1, "b"])
    position, stop_ids, limit = (graph.input(n, [s]) for n, s in (("position", 1), ("stop_ids", "n"), ("limit", 1)))
    size = graph("Shape", posterior, start=1, end=2)
    places = graph("Range", graph.constant(0), graph("Squeeze", size), graph.constant(1))  # [b]

    shifted = graph("Slice", graph("Concat", block, graph.constant([[NOTHING]]), axis=1), graph.constant([1]),
                    graph("Add", size, graph.constant([1])), graph.constant([1]))  # fmt: skip
    inside = graph("Less", places, graph("Sub", size, graph.constant([1])))
    right = graph("And", graph("Equal", shifted, posterior), inside)  # the last place has no proposal
    accepted = graph.first(places, size, graph("Not", right))
    stop = graph.first(places, size, graph.is_in(posterior, stop_ids))
    room = graph("Max", graph("Sub", graph("Sub", limit, position), graph.constant([1])), graph.constant([0]))
    old_anchor = graph("Slice", block, graph.constant([0]), graph.constant([1]), graph.constant([1]))
    ended = graph("Squeeze", graph.is_in(old_anchor, stop_ids), graph.constant([0]))  # [1]
    tokens = graph("Add", graph("Min", accepted, stop), graph.constant([1]))
    count = graph("Where", ended, graph.constant([0]), graph("Min", tokens, room))

    new_position = graph("Add", position, count)
    anchor = graph("Gather", graph("Concat", old_anchor, posterior, axis=1), count, axis=1)
    full = graph("GreaterOrEqual", graph("Add", new_position, graph.constant([1])), limit)
    last = graph("Squeeze", anchor, graph.constant([0]))
    over = graph("Or", graph("Squeeze", graph.is_in(anchor, stop_ids), graph.constant([0])), full)
    over = graph("Or", over, graph("Less", last, graph.constant([0])))
    kept = graph("Less", places, count)
    graph.output("committed", graph("Where", kept, posterior, graph.constant(NOTHING)), [1, "b"])
    graph.output("count", count, [1])
    graph.output("new_position", new_position, [1])
    graph.output("anchor", anchor, [1, 1])
    graph.output("done", graph("Cast", over, to=ir.DataType.INT64), [1])
    return ir.Model(graph.graph, ir_version=_IR_VERSION)


class _AcceptanceGraph:
    """Collects the nodes: calling it adds one and gives its output."""

    def __init__(self) -> None:
        self.graph = ir.Graph([], [], nodes=[], name="acceptance", opset_imports={"": OPSET})

    def __call__(self, operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(operator, inputs, attributes)
        self.graph.append(node)
        return node.outputs[0]

    def input(self, name: str, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.INT64))
        self.graph.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, shape: Sequence[int | str]) -> None:
        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(ir.DataType.INT64)
        self.graph.outputs.append(value)

    def constant(self, values: Any) -> ir.Value:
        name = f"constant_{len(self.graph.initializers)}"
        tensor = ir.Tensor(np.array(values, np.int64), name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(ir.DataType.INT64), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def first(self, places: ir.Value, size: ir.Value, where: ir.Value) -> ir.Value:
        """[1]: the first place where `where` [1, b] is true, b if nowhere."""
        return self("ReduceMin", self("Where", where, places, size), self.constant([1]), keepdims=0)

    def is_in(self, tokens: ir.Value, ids: ir.Value) -> ir.Value:
        """BOOL [1, b]: whether each of `tokens` [1, b] is one of `ids` [n]."""
        same = self("Cast", self("Equal", self("Unsqueeze", tokens, self.constant([2])), ids), to=ir.DataType.INT64)
        return self("Greater", self("ReduceMax", same, self.constant([2]), keepdims=0), self.constant(0))
