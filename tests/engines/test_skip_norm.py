"""A sum and the norm that reads it as one node with both results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from bare_ort import BareSession, deviation
from test_lowered_attention import operators
from tiny_graphs import GraphMaker, Sizes, target_model

from dflash_engines.ort_cpu import lower_model
from dflash_engines.passes.rms_norm import FuseRmsNormPass
from dflash_engines.passes.skip_norm import FuseSkipNormPass

H = 32


def arrays(*names: str, rows: int = 5) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {name: random.standard_normal((1, rows, H)).astype(np.float32) for name in names}


def sum_and_norm(other: list[int | str], weight: str = "stored") -> ir.Model:
    """norm(x + y) and, read before the norm, twice the sum; both are outputs, and so is the sum."""
    g = GraphMaker(Sizes())
    x, y = (g.input(name, shape, ir.DataType.FLOAT) for name, shape in (("x", [1, "S", H]), ("y", other)))
    total = g.op("Add", [x, y], [1, "S", H])
    double = g.op("Add", [total, total], [1, "S", H])
    normed = g.norm(total, "norm", H)
    product = normed.producer()
    assert product is not None
    if weight != "stored":
        one = g.constant(1.0, np.float32) if weight == "1 + w" else g.op("ReduceMean", [y], [], keepdims=0)
        shifted = ir.node("Add", [g.graph.initializers["norm"], one])
        shifted.outputs[0].type, shifted.outputs[0].shape = x.type, ir.Shape([H])
        g.graph.insert_before(product, shifted)
        product.replace_input_with(0, shifted.outputs[0])
        g.graph.sort()
    for value, name in ((double, "double"), (normed, "normed"), (total, "hidden_states.1")):
        g.output(value, name)
    return g.model()


def fused(model: ir.Model) -> ir.Model:
    copy = model.clone()
    FuseRmsNormPass()(copy)
    FuseSkipNormPass()(copy)
    return copy


def assert_same(one: ir.Model, two: ir.Model, inputs: dict[str, np.ndarray]) -> None:
    expected, found = BareSession(one, 0)(**inputs), BareSession(two, 0)(**inputs)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert deviation(found[name], array) < 1e-6, name


@pytest.mark.parametrize("weight", ["stored", "1 + w"])
def test_both_results_keep_their_names_and_values(weight: str) -> None:
    model = sum_and_norm([1, "S", H], weight)
    lowered = fused(model)
    assert operators(lowered)["SkipSimplifiedLayerNormalization"] == 1
    assert operators(lowered)["RMSNormalization"] == 0
    assert_same(model, lowered, arrays("x", "y"))


@pytest.mark.parametrize("other", [[H], [1, 1, H]], ids=["vector", "row"])
def test_a_broadcast_sum_stays(other: list[int | str]) -> None:
    model = sum_and_norm(other)
    lowered = fused(model)
    assert not operators(lowered)["SkipSimplifiedLayerNormalization"]
    inputs = arrays("x", "y")
    assert_same(model, lowered, {**inputs, "y": inputs["y"][0, 0].reshape([int(n) for n in other])})


def test_a_weight_that_depends_on_the_input_stays() -> None:
    model = sum_and_norm([1, "S", H], "computed")
    lowered = fused(model)
    assert not operators(lowered)["SkipSimplifiedLayerNormalization"]
    assert_same(model, lowered, arrays("x", "y"))


def test_norms_of_heads_stay() -> None:
    lowered = lower_model(target_model(Sizes(head_norms=True)), "target")
    sums = operators(lowered)["SkipSimplifiedLayerNormalization"]
    assert (sums, operators(lowered)["RMSNormalization"]) == (3, 2 * 2 + 2)


def test_a_second_norm_of_one_sum_reads_it() -> None:
    g = GraphMaker(Sizes())
    x, y = (g.input(name, [1, "S", H], ir.DataType.FLOAT) for name in "xy")
    total = g.op("Add", [x, y], [1, "S", H])
    for name in ("one", "two"):
        g.output(g.norm(total, name, H), f"{name}.normed")
    model = g.model()
    lowered = fused(model)
    assert operators(lowered)["SkipSimplifiedLayerNormalization"] == operators(lowered)["RMSNormalization"] == 1
    assert_same(model, lowered, arrays("x", "y"))
