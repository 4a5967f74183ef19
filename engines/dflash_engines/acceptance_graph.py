"""Acceptance as a small integer graph, so that cycles of draft and verify can follow each other on the device.

It is `decode.accept` and `decode.cut` in operators of opset 20. Between two cycles the host then need
not look: the anchor and the position of the next one are outputs, and a cycle that starts after the end (its anchor
is a stop token, or there is no room) commits nothing.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.graph_maker import GraphMaker

ACCEPTANCE = "acceptance"
"""The kind of this graph among a device's engines; it is no graph of a bundle."""
NOTHING = -1
"""Fills `committed` past `count`; as a token it means that the logits were not finite."""


def acceptance_model(stop_ids: int | None = None) -> ir.Model:
    """The graph; its inputs and outputs are int64. `stop_ids` fixes n.

    Inputs:
        block [1, b]: anchor, then the proposals.
        posterior [1, b]: the target's token after each, -1 where its logits were not finite.
        position [1]: rows committed before this cycle.
        rows [1]: how many of the b belong to the block; the others are padding.
        stop_ids [n]: ids that end the output, at least one; -2 stands for none.
        limit [1]: first number of committed rows that is not allowed, `end` of the decode loop.

    Outputs:
        committed [1, b]: tokens that now belong to the output, then -1.
        count [1]: how many.
        new_position [1]: rows committed now.
        anchor [1, 1]: the newest token; 0 where it is -1, as the next cycle looks up its embedding.
        done [1]: 1 where the output has ended, or its newest token is -1.
    """
    graph = _AcceptanceGraph(ACCEPTANCE)
    block, posterior = graph.input("block", [1, "b"]), graph.input("posterior", [1, "b"])
    position, rows, limit = (graph.input(name, [1]) for name in ("position", "rows", "limit"))
    stops = graph.input("stop_ids", [stop_ids or "n"])
    size = graph("Shape", posterior, start=1, end=2)
    places = graph("Range", graph.constant(0), graph("Squeeze", size), graph.constant(1))  # [b]

    one = graph.constant([1])
    shifted = graph("Slice", graph("Concat", block, graph.constant([[NOTHING]]), axis=1), one, graph("Add", size, one),
                    one)  # fmt: skip
    inside = graph("Less", places, graph("Sub", rows, one))
    right = graph("And", graph("Equal", shifted, posterior), inside)  # the last row has no proposal behind it
    accepted = graph.first(places, size, graph("Not", right))
    old_anchor = graph("Slice", block, graph.constant([0]), one, one)
    newest = graph("Concat", old_anchor, posterior, axis=1)  # [1, b+1]: the newest token by the number committed
    ends = graph.is_in(newest, stops)
    stop = graph.first(places, size, graph("Slice", ends, one, graph("Add", size, one), one))
    room = graph("Max", graph("Sub", graph("Sub", limit, position), one), graph.constant([0]))
    tokens = graph("Add", graph("Min", accepted, stop), one)
    ended = graph("Squeeze", graph("Slice", ends, graph.constant([0]), one, one), graph.constant([0]))
    count = graph("Where", ended, graph.constant([0]), graph("Min", tokens, room))

    new_position = graph("Add", position, count)
    last = graph("Gather", newest, count, axis=1)  # [1, 1]
    full = graph("GreaterOrEqual", graph("Add", new_position, one), limit)
    over = graph("Or", graph.is_in(last, stops), graph("Less", last, graph.constant(0)))
    over = graph("Or", graph("Squeeze", over, graph.constant([0])), full)
    kept = graph("Less", places, count)
    graph.output("committed", graph("Where", kept, posterior, graph.constant(NOTHING)), [1, "b"])
    graph.output("count", count, [1])
    graph.output("new_position", new_position, [1])
    graph.output("anchor", graph("Max", last, graph.constant(0)), [1, 1])
    graph.output("done", graph("Cast", over, to=ir.DataType.INT64), [1])
    return graph.model()


class _AcceptanceGraph(GraphMaker):
    """With the two questions that acceptance asks."""

    def first(self, places: ir.Value, size: ir.Value, where: ir.Value) -> ir.Value:
        """[1]: the first place where `where` [1, b] is true, b if nowhere."""
        left = self("Where", where, self("Sub", size, places), self.constant(0))
        return self("Sub", size, self.largest(left, axis=1))

    def is_in(self, tokens: ir.Value, ids: ir.Value) -> ir.Value:
        """BOOL [1, b]: whether each of `tokens` [1, b] is one of `ids` [n]."""
        same = self("Equal", self("Unsqueeze", tokens, self.constant([2])), ids)
        return self("Greater", self.largest(same, axis=2), self.constant(0))

    def largest(self, values: ir.Value, axis: int) -> ir.Value:
        """Reduced in fp32, which every backend has a kernel for; the numbers are small."""
        wide = self("Cast", values, to=ir.DataType.FLOAT)
        found = self("ReduceMax", wide, self.constant([axis]), keepdims=0)
        return self("Cast", found, to=ir.DataType.INT64)
