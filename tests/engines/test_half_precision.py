"""Half-precision graphs in fp32, and with their own rounding."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from bare_ort import Array, BareSession, deviation
from test_lowered_attention import CAPACITY, DRAFTERS, assert_same, inputs_of
from tiny_graphs import GraphMaker, Layer, Sizes, drafter_model, target_model

from dflash_engines.half_precision import emulate_half, to_fp32
from dflash_engines.ort_cpu import lower_model

HALF: dict[str, np.dtype] = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
# One rounding is 2^-11 or 2^-8 of the value; a few layers of them stay within this.
ROUNDED = {"fp16": 1e-2, "bf16": 8e-2}


def sizes(precision: str) -> Sizes:
    return Sizes(precision=precision, layers=(Layer(), Layer(window=6)), head_norms=True, bias=True)


@pytest.mark.parametrize("precision", HALF)
def test_fp32_copy_and_lowered_graph_agree(precision: str) -> None:
    model = target_model(sizes(precision))
    one, two = BareSession(to_fp32(model), CAPACITY), BareSession(lower_model(model, "target"), CAPACITY)
    for position, rows in ((0, 9), (9, 4), (11, 1)):
        inputs = inputs_of(model, position, rows)
        assert_same(two(**inputs), one(**inputs), position + rows)


@pytest.mark.parametrize("precision", HALF)
def test_nothing_half_is_left_in_fp32(precision: str) -> None:
    lowered = lower_model(target_model(sizes(precision)), "target")
    values = [*lowered.graph.inputs, *lowered.graph.outputs, *lowered.graph.initializers.values()]
    values += [value for node in lowered.graph for value in node.outputs]
    assert not {v.dtype for v in values} & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    casts = [node for node in lowered.graph if node.op_type == "Cast"]
    assert not [node for node in casts if node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT]


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_emulation_rounds_every_result_and_stays_near_fp32(precision: str, kind: str) -> None:
    windows = Sizes(precision=precision, layers=DRAFTERS["windows"].layers)
    model = target_model(sizes(precision)) if kind == "target" else drafter_model(windows)
    exact, rounded = BareSession(to_fp32(model), CAPACITY), BareSession(emulate_half(model), CAPACITY)
    for position, rows in ((0, 9), (9, 4), (11, 1)):
        inputs = inputs_of(model, position, rows)
        expected, found = exact(**inputs), rounded(**inputs)
        assert found.keys() == expected.keys()
        for name, array in found.items():
            if array.dtype == np.float32:
                assert (array.astype(HALF[precision]).astype(np.float32) == array).all(), name
                assert deviation(array[:, :, : position + rows], expected[name][:, :, : position + rows]) < (
                    ROUNDED[precision]
                ), name


@pytest.mark.parametrize("precision", HALF)
def test_emulation_rounds_after_each_node(precision: str) -> None:
    g = GraphMaker(Sizes(precision=precision))
    a, b = (g.input(name, ["N"], g.dtype) for name in "ab")
    product = g.op("Mul", [a, b], ["N"])
    g.output(g.op("Sub", [product, a], ["N"]), "y")
    half = HALF[precision]
    x, y = np.random.default_rng(0).standard_normal((2, 5000)).astype(half)
    session = BareSession(emulate_half(g.model()), 0)
    found = session(a=x.astype(np.float32), b=y.astype(np.float32))["y"]

    def rounded(values: Array) -> Array:
        return values.astype(half).astype(np.float32)

    wide_x, wide_y = x.astype(np.float32), y.astype(np.float32)
    np.testing.assert_array_equal(found, rounded(rounded(wide_x * wide_y) - wide_x))


def test_an_fp32_graph_passes_unchanged() -> None:
    model = target_model()
    assert len(emulate_half(model).graph) == len(to_fp32(model).graph) == len(model.graph)


@pytest.mark.parametrize("precision", HALF)
def test_weights_in_files_are_bound_by_name_and_never_read_as_fp32(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target_model(sizes(precision))
    inline = BareSession(lower_model(model, "target"), CAPACITY)
    ir.save(model, tmp_path / "target.onnx", external_data="weights.bin", size_threshold_bytes=200)
    stored = ir.load(tmp_path / "target.onnx")
    lowered = lower_model(stored, "target")
    monkeypatch.chdir(tmp_path)
    weights = {
        name: value.const_value.numpy().astype(np.float32)
        for name, value in stored.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }
    assert weights
    inputs = inputs_of(model, 0, 9)
    assert_same(BareSession(lowered, CAPACITY, weights=weights)(**inputs), inline(**inputs), 9)
    with pytest.raises(Exception, match="size mismatch"):
        BareSession(lowered, CAPACITY)
