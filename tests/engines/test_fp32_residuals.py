"""Residuals in fp32: sums beyond half precision stay right, and everything else is as it was."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from bare_ort import Array, BareSession, deviation
from test_lowered_attention import CAPACITY, inputs_of
from tiny_graphs import Layer, Sizes, drafter_model, target_model

from dflash_engines.half_precision import emulate_half, to_fp32
from dflash_engines.passes.fp32_residuals import Fp32ResidualsPass
from dflash_engines.passes.graph_writing import add_constant, emit
from dflash_runtime.errors import EngineError

HALF = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
CALLS = ((0, 9), (9, 4), (11, 1))
MODELS = {"target": target_model, "drafter": drafter_model}


def sizes(precision: str) -> Sizes:
    return Sizes(precision=precision, layers=(Layer(),) * 6, head_norms=True)


def with_large_sums(model: ir.Model, addend: float) -> ir.Model:
    """Every MLP adds `addend` to one channel: within fp16's range each, beyond it together."""
    sizes_ = model.graph.initializers["embed"].shape
    assert sizes_ is not None
    column = np.zeros(int(sizes_[1]), np.float16)
    column[3] = addend
    for node in list(model.graph):
        turned = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if turned is not None and str(turned.inputs[0].name).endswith(".down"):  # type: ignore[union-attr]
            (reader,) = node.outputs[0].consumers()
            sum_ = emit(reader, "Add", [node.outputs[0], add_constant(model.graph, "addend", column)])
            reader.replace_input_with(reader.inputs.index(node.outputs[0]), sum_)
    return model


def kept_in_fp32(model: ir.Model) -> ir.Model:
    copy = model.clone()
    Fp32ResidualsPass()(copy)
    return copy


def outputs(model: ir.Model, *, position: int, rows: int) -> dict[str, Array]:
    return BareSession(model, CAPACITY)(**inputs_of(model, position, rows))


@pytest.mark.parametrize("kind", MODELS)
def test_without_rounding_nothing_changes(kind: str) -> None:
    model = MODELS[kind](sizes("bf16"))
    one, two = BareSession(to_fp32(model), CAPACITY), BareSession(to_fp32(kept_in_fp32(model)), CAPACITY)
    for position, rows in CALLS:
        inputs = inputs_of(model, position, rows)
        expected, found = one(**inputs), two(**inputs)
        assert found.keys() == expected.keys()
        assert all((found[name] == expected[name]).all() for name in found)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("precision", HALF)
def test_sums_are_not_rounded(kind: str, precision: str) -> None:
    model = MODELS[kind](sizes(precision))
    table = model.graph.initializers["embed"]  # a stream much larger than what layers add, as in real models
    table.const_value = ir.Tensor(table.const_value.numpy() * table.dtype.numpy().type(32))  # type: ignore[union-attr]
    lowered = kept_in_fp32(model)
    halves = [
        node for node in lowered.graph
        if node.op_type == "Add" and list(node.outputs[0].shape or ()) == [1, "S", sizes(precision).hidden]
        and node.outputs[0].dtype != ir.DataType.FLOAT
    ]  # fmt: skip
    assert not halves
    name = "logits" if kind == "target" else "draft_logits"
    exact, plain, kept = (outputs(m, position=0, rows=9)[name] for m in (
        to_fp32(model), emulate_half(model), emulate_half(lowered)))  # fmt: skip
    assert np.square(kept - exact).mean() < np.square(plain - exact).mean()


@pytest.mark.parametrize("kind", MODELS)
def test_a_stream_beyond_fp16_stays_finite_and_right(kind: str) -> None:
    model = with_large_sums(MODELS[kind](sizes("fp16")), 4e4)
    name = "logits" if kind == "target" else "draft_logits"
    exact = outputs(to_fp32(model), position=0, rows=9)[name]
    plain = outputs(emulate_half(model), position=0, rows=9)[name]
    kept = outputs(emulate_half(kept_in_fp32(model)), position=0, rows=9)[name]
    assert not np.isfinite(plain).all(), "the planted sums do not pass fp16's range"
    assert deviation(kept, exact) < 1e-2


def test_a_graph_without_a_stream_is_refused() -> None:
    model = target_model(sizes("bf16"))
    for node in model.graph:
        if node.op_type == "Add" and list(node.outputs[0].shape or ()) == [1, "S", 32]:
            node.op_type = "Sub"
    with pytest.raises(EngineError, match="residuals"):
        kept_in_fp32(model)
