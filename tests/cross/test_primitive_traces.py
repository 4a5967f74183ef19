"""The primitive form of graphs traced from real models: masks and positions as Transformers makes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from pairs import FULL, SLIDING, Pair, export_quickly
from primitive_session import Array, PrimitiveSession, filled_caches

from dflash_engines.primitive_form import lower_primitive
from dflash_engines.tensorrt_versions import PRIMITIVE_OPERATORS
from dflash_export.deviation import deviation

CAPACITY, TOLERANCE, W = 64, 2e-5, 8
KINDS = ("target", "drafter_context", "drafter")
# (rows committed before, rows of this call): edges of a window of 8, blocks after rollbacks, single rows
CALLS = ((0, W - 1), (W - 1, 1), (W, 1), (W + 1, 4), (W - 1, 4), (W, 16), (20, 1), (18, 4))

PAIRS = [
    Pair("primitive-qwen2", "qwen2", drafter={"taps": (0,), "layer_types": [SLIDING, FULL], "sliding_window": W}),
    Pair("primitive-mistral", "mistral", {"sliding_window": W, "head_dim": 16, "num_hidden_layers": 2},
         drafter={"taps": (0,), "layer_types": [SLIDING] * 2, "sliding_window": W, "is_causal": False}),
    Pair("primitive-gemma2", "gemma2", {"sliding_window": W, "head_dim": 32, "attn_logit_softcapping": 2.0,
         "num_hidden_layers": 2}, drafter={"taps": (0,), "num_key_value_heads": 1, "is_causal": True}),
]
SLOW_PAIRS = [
    Pair("primitive-llama", "llama", drafter={"taps": (0,), "num_key_value_heads": 4}),
    Pair("primitive-qwen3", "qwen3"),
]  # fmt: skip


@dataclasses.dataclass
class Portable:
    """A portable graph; `caches` is replaced by what each call returns."""

    session: ort.InferenceSession
    caches: dict[str, Array]

    def __call__(self, **inputs: Array) -> dict[str, Array]:
        names = [value.name for value in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, {**inputs, **self.caches}), strict=True))
        self.caches |= {name: outputs[name.replace("past_key_values.", "present.")] for name in self.caches}
        return outputs


def load(bundle: Path, kind: str) -> tuple[ir.Model, Portable]:
    model = ir.load(bundle / f"{kind}.onnx")
    ir.external_data.load_to_model(model)
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
    caches = {
        value.name: np.zeros([d if isinstance(d, int) else CAPACITY for d in value.shape], np.float32)
        for value in session.get_inputs() if value.name.startswith("past_key_values.")
    }  # fmt: skip
    return model, Portable(session, caches)


def assert_same(found: dict[str, Array], expected: dict[str, Array], length: int, *, caches: bool = True) -> None:
    for name, array in expected.items():
        if name.startswith("present.") and not caches:
            continue
        rows = slice(length) if name.startswith("present.") else slice(None)
        if array.dtype == np.int64:
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        elif array.size:
            assert deviation(found[name][:, :, rows], array[:, :, rows]) < TOLERANCE, name


@pytest.fixture(
    scope="module",
    params=[*PAIRS, *(pytest.param(pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS)],
    ids=lambda pair: pair.name,
)
def bundle(request: pytest.FixtureRequest, once: Any) -> Path:
    pair: Pair = request.param
    return Path(once(f"{pair.name}-exported", lambda folder: export_quickly(pair, folder))) / "bundle"


def test_target(bundle: Path) -> None:
    model, portable = load(bundle, "target")
    lowered = lower_primitive(model, "target")
    primitive = PrimitiveSession(lowered, filled_caches(lowered, CAPACITY, 1e4))
    for position, rows in CALLS:
        ids = np.random.default_rng(position + rows).integers(0, 500, (1, rows))
        inputs = {"input_ids": ids, "position": np.array([position]), "logit_rows": np.arange(rows)}
        assert_same(primitive(**inputs), portable(**inputs), position + rows)


def test_drafter_over_its_context(bundle: Path) -> None:
    context, append = load(bundle, "drafter_context")
    drafter, draft = load(bundle, "drafter")
    draft.caches = append.caches
    lowered = lower_primitive(context, "drafter_context")
    caches = filled_caches(lowered, CAPACITY, 1e4)
    primitive_append = PrimitiveSession(lowered, caches)
    primitive_draft = PrimitiveSession(lower_primitive(drafter, "drafter"), caches)
    width = context.graph.inputs[0].shape
    assert width is not None
    for position, rows in CALLS:
        taps = np.random.default_rng(position + rows).standard_normal((1, rows, int(width[2]))).astype(np.float32)
        inputs = {"taps": taps, "position": np.array([position])}
        assert_same(primitive_append(**inputs), append(**inputs), position + rows)
        for block in (2, 4, 16):
            ids = np.full((1, block), 511)
            ids[0, 0] = 31 * position % 500
            inputs = {"input_ids": ids, "position": np.array([position + rows])}
            assert_same(primitive_draft(**inputs), draft(**inputs), position + rows, caches=False)


def test_operators_are_those_of_tensorrt_10_3_and_weights_stay_outside(bundle: Path) -> None:
    for kind in KINDS:
        lowered = lower_primitive(ir.load(bundle / f"{kind}.onnx"), kind)  # type: ignore[arg-type]
        assert {node.op_type for node in lowered.graph} <= PRIMITIVE_OPERATORS
        big = [v for v in lowered.graph.initializers.values() if v.const_value is not None and v.const_value.size > 64]
        assert big and all(isinstance(value.const_value, ir.ExternalTensor) for value in big)
