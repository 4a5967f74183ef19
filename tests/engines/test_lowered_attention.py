"""The lowered graph against the portable one in bare ONNX Runtime: every output, every valid cache row."""

from __future__ import annotations

import collections

import numpy as np
import onnx_ir as ir
import pytest
from bare_ort import Array, BareSession, deviation
from tiny_graphs import Layer, Sizes, drafter_context_model, drafter_model, target_model

from dflash_engines.ort_cpu import lower_model
from dflash_runtime.errors import EngineError

CAPACITY = 48
TOLERANCE = 2e-5

FULL, WINDOW = Layer(), Layer(window=6)
BOTH_WAYS, WINDOW_BOTH_WAYS = Layer(causal=False), Layer(causal=False, window=6)

TARGETS = {
    "causal": Sizes(),
    "windows": Sizes(layers=(WINDOW, FULL, Layer(window=1))),
    "qk-norm-bias": Sizes(head_norms=True, bias=True, kv_heads=1),
    "softcap": Sizes(softcap=2.0, layers=(FULL, WINDOW)),
    "no-groups": Sizes(kv_heads=4, head_dim=8, value_dim=8),
    "odd-head-size": Sizes(head_dim=6, value_dim=6, layers=(FULL, WINDOW)),
    "narrow-values": Sizes(value_dim=8),
    "two-scaled-tables": Sizes(rope_thetas=(10000.0, 50.0), rope_factor=1.25, layers=(FULL, WINDOW, FULL)),
    "table-of-another-width": Sizes(head_dim=24, value_dim=24, rope_thetas=(10000.0, 50.0)),
}
DRAFTERS = {
    "bidirectional": Sizes(layers=(BOTH_WAYS, BOTH_WAYS), head_norms=True),
    "windows": Sizes(layers=(WINDOW_BOTH_WAYS, WINDOW, BOTH_WAYS)),
    "causal": Sizes(layers=(FULL, FULL)),
}
# (rows committed before, rows of this call): prefill, blocks after rollbacks, single rows
CALLS = [(0, 16), (16, 4), (18, 1), (19, 4), (19, 16), (27, 1), (25, 4)]


def random_ids(rows: int, seed: int) -> Array:
    return np.random.default_rng(seed).integers(0, Sizes().vocab, (1, rows))


def inputs_of(model: ir.Model, position: int, rows: int) -> dict[str, Array]:
    offered = {
        "input_ids": random_ids(rows, seed=position * 100 + rows),
        "taps": np.random.default_rng(position).standard_normal((1, rows, 2 * Sizes().hidden)).astype(np.float32),
        "position": np.array([position]),
        "logit_rows": np.arange(rows),
    }
    return {name: array for name, array in offered.items() if name in {v.name for v in model.graph.inputs}}


def assert_same(found: dict[str, Array], expected: dict[str, Array], length: int) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        rows = slice(length) if name.startswith("present.") else slice(None)
        if array.dtype == np.int64:
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        else:
            one, two = (found[name][:, :, rows], array[:, :, rows])
            assert np.isfinite(one).all(), name
            assert deviation(one, two) < TOLERANCE, name


def compare(model: ir.Model, lowered: ir.Model, fill: float = 0.0) -> None:
    one, two = BareSession(model, CAPACITY), BareSession(lowered, CAPACITY, fill=fill)
    for position, rows in CALLS:
        inputs = inputs_of(model, position, rows)
        assert_same(two(**inputs), one(**inputs), position + rows)


def operators(model: ir.Model) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("fill", [0.0, 1e4, float("nan")])
@pytest.mark.parametrize("name", TARGETS)
def test_target_with_anything_past_the_valid_length(name: str, fill: float) -> None:
    model = target_model(TARGETS[name])
    compare(model, lower_model(model, "target"), fill)


@pytest.mark.parametrize("fill", [0.0, 1e4, float("nan")])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_with_anything_past_the_valid_length(name: str, fill: float) -> None:
    model = drafter_model(DRAFTERS[name])
    compare(model, lower_model(model, "drafter"), fill)


def test_drafter_context() -> None:
    model = drafter_context_model(DRAFTERS["bidirectional"])
    compare(model, lower_model(model, "drafter_context"), float("nan"))


def test_causal_layers_use_the_kernel_whose_cost_follows_the_length() -> None:
    counts = operators(lower_model(target_model(TARGETS["windows"]), "target"))
    assert counts["GroupQueryAttention"] == 3
    assert counts["Attention"] == counts["TensorScatter"] == 0


def test_other_layers_read_only_valid_rows() -> None:
    lowered = lower_model(drafter_model(DRAFTERS["windows"]), "drafter")
    counts = operators(lowered)
    assert (counts["GroupQueryAttention"], counts["Attention"], counts["TensorScatter"]) == (1, 2, 4)
    for node in lowered.graph:
        if node.op_type == "Attention":
            makers = [v.producer() for v in node.inputs[1:4] if v is not None]
            assert {maker.op_type for maker in makers if maker is not None} == {"Slice"}


def test_norms_rotations_and_linears_are_one_node_each() -> None:
    counts = operators(lower_model(target_model(TARGETS["qk-norm-bias"]), "target"))
    assert (counts["RMSNormalization"], counts["SkipSimplifiedLayerNormalization"]) == (2 * 2 + 2, 3)
    assert counts["RotaryEmbedding"] == 0
    assert counts["FusedMatMul"] == 2 * 7 + 1
    assert counts["MatMul"] == counts["Pow"] == counts["Neg"] == 0


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_buffers_are_updated_in_place_and_nothing_else_is_written(kind: str) -> None:
    model = target_model() if kind == "target" else drafter_model(DRAFTERS["windows"])
    session = BareSession(lower_model(model, kind), CAPACITY, fill=3.5, guard_rows=8)  # type: ignore[arg-type]
    before = {name: array.copy() for name, array in session.state.items()}
    outputs = session(**inputs_of(model, CAPACITY - 4, 4))
    for name, array in session.state.items():
        np.testing.assert_array_equal(array[:, :, :-4], before[name][:, :, :-4])
        assert (array[:, :, -4:] != before[name][:, :, -4:]).all()
        np.testing.assert_array_equal(outputs[name.replace("past_key_values", "present")], array)
    assert all((guard == 7.25).all() for guard in session.guards)


def test_in_place_update_allocates_no_second_buffer() -> None:
    lowered = lower_model(target_model(), "target")
    session = BareSession(lowered, CAPACITY)
    binding = session.session.io_binding()
    for name, array in inputs_of(lowered, 5, 4).items():
        binding.bind_cpu_input(name, array)
    for name, array in session.state.items():
        binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        binding.bind_output(name.replace("past_key_values", "present"), "cpu", 0, np.float32, array.shape,
                            array.ctypes.data)
    session.session.run_with_iobinding(binding)
    pointers = {value.data_ptr() for value in binding.get_outputs()}
    assert pointers == {array.ctypes.data for array in session.state.values()}


def test_the_portable_graph_is_left_alone() -> None:
    model = target_model(Sizes(precision="bf16"))
    before = ir.to_proto(model).SerializeToString()
    lower_model(model, "target")
    assert ir.to_proto(model).SerializeToString() == before


def test_weights_stay_as_they_are_stored() -> None:
    model = target_model()
    lowered = lower_model(model, "target")
    for name, value in model.graph.initializers.items():
        if name.startswith(("layers.", "embed")):
            kept = lowered.graph.initializers[name].const_value
            assert kept is not None and value.const_value is not None and kept.shape == value.const_value.shape


def test_attention_of_another_form_is_refused_by_layer() -> None:
    model = target_model()
    node = next(node for node in model.graph if node.op_type == "Attention")
    node.replace_input_with(6, None)
    with pytest.raises(EngineError, match="layer 0 does not read a preallocated cache"):
        lower_model(model, "target")


def test_other_precisions_are_refused() -> None:
    with pytest.raises(EngineError, match="computes in fp32, not bf16"):
        lower_model(target_model(), "target", "bf16")
