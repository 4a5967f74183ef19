"""The primitive form against the portable graph in plain ONNX Runtime: every output, every valid cache row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from bare_ort import Array, BareSession, deviation
from primitive_cases import (
    BOTH_WAYS,
    CALLS,
    CAPACITY,
    DRAFTERS,
    FULL,
    TARGETS,
    WINDOW,
    WINDOW_EDGES,
    assert_same,
    compare_drafter,
    compare_target,
    inputs_of,
)
from primitive_session import PrimitiveSession, filled_caches
from tiny_graphs import Sizes, drafter_context_model, drafter_model, target_model

from dflash_engines.half_precision import emulate_half
from dflash_engines.passes.new_rows import NewRows, read_new_rows
from dflash_engines.primitive_form import lower_primitive
from dflash_engines.tensorrt_versions import PRIMITIVE_OPERATORS
from dflash_runtime.errors import EngineError


@pytest.mark.parametrize("fill", [0.0, 1e4])
@pytest.mark.parametrize("name", TARGETS)
def test_target_equals_the_portable_graph(name: str, fill: float) -> None:
    model = target_model(TARGETS[name])
    compare_target(model, lower_primitive(model, "target"), fill)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "no-groups"])
def test_target_at_the_edges_of_a_window(name: str) -> None:
    model = target_model(TARGETS[name])
    compare_target(model, lower_primitive(model, "target"), 1e4, calls=WINDOW_EDGES)


@pytest.mark.parametrize("calls", [CALLS, WINDOW_EDGES], ids=["calls", "window-edges"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_and_its_context_equal_the_portable_graphs(name: str, calls: tuple[tuple[int, int], ...]) -> None:
    model = drafter_model(DRAFTERS[name])
    compare_drafter(model, lower_primitive(model, "drafter"), DRAFTERS[name], 1e4, calls)


@pytest.mark.parametrize("capacity", [35, 64, 200])
def test_every_bucket_of_the_capacity_gives_the_same(capacity: int) -> None:
    model = target_model(TARGETS["gemma2"])
    compare_target(model, lower_primitive(model, "target"), 1e4, capacity)


def test_a_bucket_of_exactly_the_valid_length_is_enough() -> None:
    model = target_model(TARGETS["gemma2"])
    lowered = lower_primitive(model, "target")
    portable, primitive = BareSession(model, CAPACITY), PrimitiveSession(lowered, filled_caches(lowered, CAPACITY))
    for position, rows in ((0, 16), (16, 4), (18, 9)):
        inputs = inputs_of(model, position, rows)
        assert_same(primitive(read_rows=max(1, position), **inputs), portable(**inputs), position + rows)


def test_unwritten_keys_may_be_nan_and_unwritten_values_must_be_finite() -> None:
    model = target_model()
    lowered = lower_primitive(model, "target")
    caches = filled_caches(lowered, CAPACITY)
    for name, array in caches.items():
        array.fill(np.nan if name.endswith(".key") else 3e38)
    inputs = inputs_of(model, 0, 8)
    assert_same(PrimitiveSession(lowered, caches)(**inputs), BareSession(model, CAPACITY)(**inputs), 8)
    caches["past_key_values.0.value"][:, :, 40] = np.nan
    assert not np.isfinite(PrimitiveSession(lowered, caches)(**inputs)["logits"]).any()


# One rounding is 2^-11 or 2^-8 of the value; a few layers of them stay within this.
@pytest.mark.parametrize(("precision", "rounded"), [("fp16", 1e-2), ("bf16", 8e-2)])
@pytest.mark.parametrize("softmax_precision", ["fp32", "graph"])
def test_half_precision_with_its_own_rounding(precision: str, rounded: float, softmax_precision: str) -> None:
    sizes = dataclasses.replace(TARGETS["gemma2"], precision=precision, head_dim=32, value_dim=32)
    model = target_model(sizes)
    lowered = lower_primitive(model, "target", softmax_precision)  # type: ignore[arg-type]
    kinds = {node.inputs[0].dtype for node in lowered.graph if node.op_type == "Softmax" and node.inputs[0] is not None}
    assert kinds == {ir.DataType.FLOAT if softmax_precision == "fp32" else model.graph.inputs[3].dtype}
    caches = filled_caches(lowered, CAPACITY, 1e4)
    portable, primitive = BareSession(emulate_half(model), CAPACITY), PrimitiveSession(emulate_half(lowered), caches)
    for position, rows in CALLS:
        inputs = inputs_of(model, position, rows)
        found, expected = primitive(**inputs), portable(**inputs)
        for name in ("logits", "taps", "present.1.value"):
            length = slice(position + rows) if name.startswith("present.") else slice(None)
            assert deviation(found[name][:, :, length], expected[name][:, :, length]) < rounded, name


def test_fp16_scores_stay_in_range_where_the_bare_product_does_not() -> None:
    model = target_model(Sizes(precision="fp16", bias=True))
    for name, value in model.graph.initializers.items():
        if name.endswith((".k.bias", ".q.bias")):
            assert value.const_value is not None
            value.const_value = ir.Tensor(value.const_value.numpy() + np.float16(90), name=name)
    lowered = lower_primitive(model, "target")
    session = PrimitiveSession(emulate_half(lowered), filled_caches(lowered, CAPACITY))
    assert 16 * 90.0**2 > float(np.finfo(np.float16).max) > 16 * 90.0**2 / 4
    assert np.isfinite(session(**inputs_of(model, 0, 8))["logits"]).all()


def test_new_rows_of_all_layers_are_one_output() -> None:
    model = target_model(TARGETS["qwen3"])
    lowered = lower_primitive(model, "target")
    assert [v.name for v in lowered.graph.inputs] == [v.name for v in model.graph.inputs]
    assert [v.name for v in lowered.graph.outputs] == ["taps", "token_ids", "logits", "new_rows.0"]
    caches = tuple(f"past_key_values.{i}.{part}" for i in range(2) for part in ("key", "value"))
    assert read_new_rows(lowered) == [NewRows("new_rows.0", caches, 2, 16)]
    assert lowered.graph.outputs[-1].shape == ir.Shape([4, 2, "S", 16])


def test_caches_of_two_shapes_are_two_outputs() -> None:
    lowered = lower_primitive(target_model(TARGETS["odd-sizes"]), "target")
    keys, values = (tuple(f"past_key_values.{i}.{part}" for i in range(2)) for part in ("key", "value"))
    assert read_new_rows(lowered) == [NewRows("new_rows.0", keys, 2, 6), NewRows("new_rows.1", values, 2, 10)]


def test_a_drafter_keeps_its_rows_and_its_context_reads_no_cache() -> None:
    sizes = DRAFTERS["windows"]
    drafter = lower_primitive(drafter_model(sizes), "drafter")
    context = lower_primitive(drafter_context_model(sizes), "drafter_context")
    assert [v.name for v in drafter.graph.outputs] == ["draft_logits", "draft_ids"]
    assert [v.name for v in context.graph.inputs] == ["taps", "position"]
    assert [v.name for v in context.graph.outputs] == ["new_rows.0"]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_graph_is_valid_opset_20_of_known_operators(precision: str) -> None:
    sizes = Sizes(precision=precision, layers=(FULL, WINDOW), softcap=2.0, head_norms=True)
    target = lower_primitive(target_model(sizes), "target")
    drafter = lower_primitive(drafter_model(dataclasses.replace(sizes, layers=(BOTH_WAYS,))), "drafter")
    for model in (target, drafter):
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
        assert (model.opset_imports, model.ir_version) == ({"": 20}, 9)
        assert {node.op_type for node in model.graph} <= PRIMITIVE_OPERATORS


def test_masks_are_made_once_for_all_layers() -> None:
    lowered = lower_primitive(target_model(Sizes(layers=(FULL,) * 4)), "target")
    (mask,) = {node.inputs[0] for node in lowered.graph if node.op_type == "Where"}
    assert mask is not None and len(mask.uses()) == 4


def test_the_portable_graph_is_left_alone() -> None:
    model = target_model(Sizes(precision="bf16"))
    before = ir.to_proto(model).SerializeToString()
    lower_primitive(model, "target")
    assert ir.to_proto(model).SerializeToString() == before


def attention_of(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "Attention")


def give_mask(model: ir.Model, mask: Array) -> None:
    value = ir.Value(name="mask", shape=ir.Shape(mask.shape), const_value=ir.Tensor(mask, name="mask"))
    value.type = ir.TensorType(ir.DataType.from_numpy(mask.dtype))
    model.graph.register_initializer(value)
    attention_of(model).replace_input_with(3, value)


def read_by_something_else(model: ir.Model) -> None:
    present = attention_of(model).inputs[1]
    assert present is not None
    model.graph.append(ir.node("Softmax", [present]))


def expand_to_capacity(model: ir.Model) -> None:
    past = model.graph.inputs[3]
    size = ir.node("Shape", [past], {"start": 2, "end": 3})
    model.graph.append(size)
    model.graph.append(ir.node("Expand", [model.graph.inputs[1], size.outputs[0]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (read_by_something_else, r"Softmax reads the cache present\.0\.key after its write"),
        (lambda m: give_mask(m, np.zeros((1, 1, 1, 56), np.float32)), "layer 0 has a mask of type FLOAT"),
        (lambda m: give_mask(m, np.ones((1, 4, 1, 56), bool)), r"layer 0 has a mask of type BOOL and shape \[1, 4"),
        (lambda m: give_mask(m, np.ones((1, 1, 1, 56), bool)), "layer 0 has a mask .* not computed from key numbers"),
        (expand_to_capacity, "capacity of a cache in Expand"),
        (lambda m: attention_of(m).replace_input_with(6, m.graph.inputs[1]), "layer 0 does not read `position` . S"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(change: Callable[[ir.Model], None], message: str) -> None:
    model = target_model()
    change(model)
    with pytest.raises(EngineError, match=message):
        lower_primitive(model, "target")


def test_an_operator_the_backend_lacks_is_refused() -> None:
    model = target_model()
    node = ir.node("BitwiseNot", [model.graph.inputs[0]])
    model.graph.append(node)
    node.outputs[0].name = "extra"
    model.graph.outputs.append(node.outputs[0])
    with pytest.raises(EngineError, match="BitwiseNot"):
        lower_primitive(model, "target")
