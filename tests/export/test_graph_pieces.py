"""What turns a weight runs where its product runs: turned weights of all layers never wait together."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from dflash_export import graph_pieces
from dflash_export.graph_pieces import cut_graph

LAYERS, WIDTH = 5, 8


def test_turned_weights_come_with_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_pieces, "PIECE_ELEMENTS", WIDTH * WIDTH)
    nodes, weights = [], {}
    for i in range(LAYERS):
        weights[f"w{i}"] = TensorProto(name=f"w{i}", dims=[WIDTH, WIDTH], data_type=TensorProto.FLOAT)
        nodes += [
            helper.make_node("Cast", [f"w{i}"], [f"wide{i}"], to=TensorProto.FLOAT),
            helper.make_node("Transpose", [f"wide{i}"], [f"turned{i}"], perm=[1, 0]),
            helper.make_node("MatMul", [f"x{i}", f"turned{i}"], [f"x{i + 1}"]),
        ]
    both = helper.make_node("MatMul", [f"x{LAYERS}", "turned0"], ["again"])  # a weight that is read twice
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x0", "again")]
    graph = helper.make_graph([*nodes, both], "g", values[:1], values[1:], list(weights.values()))
    pieces = cut_graph(onnx.GraphProto.FromString(graph.SerializeToString()), weights)
    where = {name: number for number, piece in enumerate(pieces) for node in piece.nodes for name in node.output}
    for i in range(LAYERS):
        assert where[f"wide{i}"] == where[f"turned{i}"] == where[f"x{i + 1}"]
    assert len({where[f"x{i + 1}"] for i in range(LAYERS)}) == LAYERS
    assert where["again"] >= where[f"x{LAYERS}"]
