"""The default tap rule, and taps chosen by editing a graph."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from dflash_export.tap_rule import default_target_layer_ids
from dflash_export.taps import select_taps
from dflash_runtime.errors import PairError

# Layers / taps -> ids, as the authors' `build_target_layer_ids` gives them; half cases round to even.
CHECKED = {
    (24, 5): [1, 6, 11, 16, 21],
    (28, 5): [1, 7, 13, 19, 25],
    (32, 5): [1, 8, 15, 22, 29],
    (36, 5): [1, 9, 17, 25, 33],
    (40, 5): [1, 10, 19, 28, 37],
    (48, 5): [1, 12, 23, 34, 45],
    (64, 5): [1, 16, 31, 46, 61],
    (52, 5): [1, 13, 25, 37, 49],
    (30, 6): [1, 6, 11, 17, 22, 27],
    (60, 6): [1, 12, 23, 35, 46, 57],
    (40, 8): [1, 6, 11, 16, 22, 27, 32, 37],
    (34, 5): [1, 8, 16, 24, 31],
    (30, 1): [15],
}


@pytest.mark.parametrize(("sizes", "expected"), CHECKED.items())
def test_the_default_rule(sizes: tuple[int, int], expected: list[int]) -> None:
    assert default_target_layer_ids(*sizes) == expected


@pytest.mark.parametrize("layers", range(1, 9))
def test_small_targets_get_valid_unique_taps(layers: int) -> None:
    ids = default_target_layer_ids(layers)
    assert ids == sorted(set(ids))
    assert min(ids) >= 0
    assert max(ids) < layers


def _graph(layers: int) -> ir.Model:
    x = ir.val("input", ir.DataType.FLOAT, ["S", 2])
    values, nodes = [], []
    for i in range(layers + 1):
        node = ir.node("Identity" if i == 0 else "Neg", [values[-1] if values else x])
        node.outputs[0].name = f"hidden_states.{i}"
        node.outputs[0].type = x.type
        nodes.append(node)
        values.append(node.outputs[0])
    logits = ir.node("Abs", [values[-1]])
    logits.outputs[0].name = "logits"
    graph = ir.Graph([x], [logits.outputs[0], *values], nodes=[*nodes, logits], opset_imports={"": 24})
    return ir.Model(graph, ir_version=10)


def _taps(model: ir.Model) -> list[str | None]:
    producer = next(v for v in model.graph.outputs if v.name == "taps").producer()
    assert producer is not None
    return [value.name for value in producer.inputs if value is not None]


def test_taps_keep_their_order_and_can_be_chosen_again() -> None:
    model = _graph(4)
    select_taps(model, [2, 0], 2)
    assert _taps(model) == ["hidden_states.3", "hidden_states.1"]
    assert [v.name for v in model.graph.outputs] == ["logits", "taps"]
    select_taps(model, [3], 2)  # the last layer's raw output
    assert _taps(model) == ["hidden_states.4"]
    assert [v.name for v in model.graph.outputs] == ["logits", "taps"]


def test_a_layer_the_target_does_not_have_is_named() -> None:
    with pytest.raises(PairError, match=r"no layers \[7\]; it has 4"):
        select_taps(_graph(4), [1, 7], 2)
