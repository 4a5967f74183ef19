"""Graphs for ONNX Runtime's CUDA provider: what they are made of, and their numbers with every half widened to fp32."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from bare_ort import Array, BareSession, deviation
from small_bundle import write_small_bundle
from tiny_graphs import Layer, Sizes, drafter_context_model, drafter_model, target_model

from dflash_engines.acceptance_graph import ACCEPTANCE, acceptance_model
from dflash_engines.candidates_graph import CANDIDATES, candidates_model
from dflash_engines.half_precision import to_fp32
from dflash_engines.ort_cuda import CUDA_CONTRIB_OPERATORS, CUDA_OPERATORS, lower_bundle, lower_model
from dflash_engines.passes.graph_reading import HALF_TYPES
from dflash_runtime.device_engine import DeviceEngineRecord
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
    "odd-head-size": Sizes(head_dim=6, value_dim=6, layers=(FULL, WINDOW)),
}
DRAFTERS = {
    "bidirectional": Sizes(layers=(BOTH_WAYS, BOTH_WAYS), head_norms=True),
    "windows": Sizes(layers=(WINDOW_BOTH_WAYS, WINDOW, BOTH_WAYS)),
}
# (rows committed before, rows of this call): prefill, blocks after rollbacks, single rows, window edges
CALLS = [(0, 16), (16, 4), (18, 1), (19, 4), (19, 16), (27, 1), (25, 4)]


def half(sizes: Sizes, precision: str = "bf16") -> Sizes:
    return dataclasses.replace(sizes, precision=precision)


def inputs_of(model: ir.Model, position: int, rows: int) -> dict[str, Array]:
    random = np.random.default_rng(position * 100 + rows)
    offered = {
        "input_ids": random.integers(0, Sizes().vocab, (1, rows)),
        "taps": random.standard_normal((1, rows, 2 * Sizes().hidden)).astype(np.float32),
        "position": np.array([position]),
        "logit_rows": np.arange(rows),
    }
    return {name: array for name, array in offered.items() if name in {v.name for v in model.graph.inputs}}


def compare(model: ir.Model, lowered: ir.Model, fill: float = 0.0) -> None:
    one, two = BareSession(to_fp32(model), CAPACITY), BareSession(to_fp32(lowered), CAPACITY, fill=fill)
    for position, rows in CALLS:
        inputs = inputs_of(model, position, rows)
        expected, found = one(**inputs), two(**inputs)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            valid = slice(position + rows) if name.startswith("present.") else slice(None)
            if array.dtype == np.int64:
                np.testing.assert_array_equal(found[name], array, err_msg=name)
            else:
                assert deviation(found[name][:, :, valid], array[:, :, valid]) < TOLERANCE, name


def operators(model: ir.Model) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("fill", [0.0, 1e4])
@pytest.mark.parametrize("name", TARGETS)
def test_target_says_what_the_portable_graph_says(name: str, fill: float) -> None:
    model = target_model(half(TARGETS[name]))
    compare(model, lower_model(model, "target", "fp16"), fill)


@pytest.mark.parametrize("fill", [0.0, 1e4])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_says_what_the_portable_graph_says(name: str, fill: float) -> None:
    model = drafter_model(half(DRAFTERS[name], "fp16"))
    compare(model, lower_model(model, "drafter", "fp16"), fill)


def test_drafter_context_writes_the_same_rows() -> None:
    model = drafter_context_model(half(DRAFTERS["bidirectional"]))
    compare(model, lower_model(model, "drafter_context", "fp16"), fill=1e4)


@pytest.mark.parametrize("change", ["length", "places", "window"])
def test_the_comparison_sees_a_planted_fault(change: str) -> None:
    model = target_model(half(TARGETS["windows"])) if change != "places" else drafter_context_model(
        half(DRAFTERS["bidirectional"]))
    lowered = lower_model(model, "target" if change != "places" else "drafter_context", "fp16")
    if change == "length":
        lowered.graph.initializers["lowered.one"].const_value = ir.tensor(np.zeros(1, np.int32))
    elif change == "places":
        value = lowered.graph.initializers["lowered.head_numbers.2"]
        value.const_value = ir.tensor(np.zeros((1, 2, 1, 3), np.int64))
    else:
        kernel = next(node for node in lowered.graph if node.op_type == "GroupQueryAttention")
        kernel.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 7)
    with pytest.raises(AssertionError):
        compare(model, lowered)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_one_half_precision_is_left_and_norms_sum_in_fp32(precision: str) -> None:
    lowered = lower_model(target_model(half(TARGETS["qk-norm-bias"])), "target", precision)
    kinds = {value.dtype for node in lowered.graph for value in node.outputs if value.dtype in HALF_TYPES}
    assert kinds == {{"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}[precision]}
    counts = operators(lowered)
    assert counts["GroupQueryAttention"] == 2
    assert counts["RMSNormalization"] == 2 * 4 + 1
    assert counts["FusedMatMul"] == 2 * 7 + 1
    assert counts["TensorScatter"] == counts["Pow"] == counts["MatMul"] == 0
    norms = [node for node in lowered.graph if node.op_type == "RMSNormalization"]
    assert {node.attributes.get_int("stash_type", 0) for node in norms} == {int(ir.DataType.FLOAT)}


def test_bidirectional_layers_use_the_kernel_and_windowed_ones_a_mask() -> None:
    lowered = lower_model(drafter_model(half(DRAFTERS["windows"])), "drafter", "fp16")
    kernels = [node for node in lowered.graph if node.op_type == "GroupQueryAttention"]
    assert [node.attributes.get_int("causal", 1) for node in kernels] == [1, 0]
    (masked,) = [node for node in lowered.graph if node.op_type == "Attention"]
    assert masked.inputs[3] is not None and masked.inputs[3].dtype == ir.DataType.BOOL


@pytest.mark.parametrize("kind", ["target", "drafter_context", "drafter", ACCEPTANCE, CANDIDATES])
def test_with_fixed_sizes_nothing_is_computed_from_shapes(kind: str, tmp_path: Path) -> None:
    if kind == ACCEPTANCE:
        lowered = acceptance_model(stop_ids=8)
    elif kind == CANDIDATES:
        lowered = candidates_model(vocab_size=64)
    else:
        maker = {"target": target_model, "drafter_context": drafter_context_model, "drafter": drafter_model}[kind]
        sizes = half(TARGETS["windows"] if kind == "target" else DRAFTERS["windows"])
        lowered = to_fp32(lower_model(maker(sizes), kind, "fp16"))  # type: ignore[arg-type, operator]
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "folded.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    for name, size in {"S": 4, "R": 4, "b": 4, "T": CAPACITY}.items():
        options.add_free_dimension_override_by_name(name, size)
    ort.InferenceSession(ir.to_proto(lowered).SerializeToString(), options, providers=["CPUExecutionProvider"])
    # A Shape or Range node would run on the host in the middle of a CUDA graph.
    left = set(operators(ir.load(tmp_path / "folded.onnx")))
    assert not {"Shape", "Range", "Size"} & left and left <= CUDA_OPERATORS | CUDA_CONTRIB_OPERATORS


@pytest.mark.parametrize("kind", ["target", "drafter"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_types_agree_in_every_node(kind: str, precision: str) -> None:
    model = target_model(half(TARGETS["windows"])) if kind == "target" else drafter_model(half(DRAFTERS["windows"]))
    data = ir.to_proto(lower_model(model, kind, precision)).SerializeToString()  # type: ignore[arg-type]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # Types are checked before kernels are looked for, and a CPU has none for bf16.
        assert precision == "bf16" and "NOT_IMPLEMENTED" in str(error), error


def test_fp32_is_refused_with_the_way_out() -> None:
    with pytest.raises(EngineError, match="--precision bf16 or fp16"):
        lower_model(target_model(), "target", "fp16")
    with pytest.raises(EngineError, match="fp16 or bf16, not fp32"):
        lower_model(target_model(half(Sizes())), "target", "fp32")


def test_an_operator_without_a_cuda_kernel_is_named() -> None:
    model = target_model(half(Sizes()))
    logits = next(value for value in model.graph.outputs if value.name == "logits")
    node = ir.node("Det", [logits])
    node.outputs[0].name = "planted"
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    with pytest.raises(EngineError, match="Det"):
        lower_model(model, "target", "fp16")


def test_a_bundle_gets_graphs_whose_weights_are_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = write_small_bundle(tmp_path / "bundle", "bf16")
    record = lower_bundle(root, "fp16")
    assert DeviceEngineRecord.read(root / "engines" / "ort-cuda", "") == record
    assert record.execution_precision == "fp16"
    graph = ir.load(root / "engines" / "ort-cuda" / "target.onnx").graph
    names = [value.name for value in graph.inputs]
    assert {"embed", "embed#rows"} <= set(names)
    taken = {bound.input: bound for bound in record.engines[0].weights}
    others = {"input_ids", "position", "logit_rows"}
    assert taken.keys() == {n for n in names if n not in others and not n.startswith("past_key_values.")}
    assert (taken["embed#rows"].weight, taken["embed#rows"].dtype) == ("embed", "F16")
    assert not any(isinstance(value.const_value, ir.ExternalTensor) for value in graph.initializers.values())
    assert lower_bundle(root, "fp16") == record
    assert lower_bundle(root).execution_precision == "bf16"
