"""Engines at real sizes, from graphs whose weights do not exist."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from tiny_models import write_target

from dflash_engines import tensorrt_network
from dflash_engines.builder_memory import builder_peak_bytes
from dflash_engines.passes import weight_inputs
from dflash_engines.passes.signed_weights import SignedWeightsPass
from dflash_engines.tensorrt_engines import build_engines
from dflash_engines.tensorrt_plan import EngineOptions
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.quantization import quantize_options
from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import EngineError
from dflash_tools.engine_memory import DRAFTER_7B, QWEN2_7B
from dflash_tools.hollow_bundle import write_hollow_bundle

pytest.importorskip("tensorrt_rtx")
OPTIONS = EngineOptions("tensorrt-rtx", "8.9", (16,), use_cache=False)


@pytest.fixture(scope="module", params=["untied", "tied"])
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two layers of Qwen2-7B's width and vocabulary, and a drafter of one."""
    tied = request.param == "tied"
    root = tmp_path_factory.mktemp("wide") / "a bundle"
    drafter: dict[str, Any] = {**DRAFTER_7B, "num_hidden_layers": 1, "num_target_layers": 2}
    drafter["dflash_config"] = {"mask_token_id": 151665, "target_layer_ids": [0]}
    write_hollow_bundle(root, {**QWEN2_7B, "num_hidden_layers": 2, "tie_word_embeddings": tied}, drafter, 896)
    assert sum(path.stat().st_blocks for path in root.rglob("*.safetensors")) == 0
    return Bundle.open(root, check_files=False)


@pytest.mark.slow
def test_no_weight_is_in_the_engines_or_in_scratch_memory(wide: Bundle) -> None:
    built = build_engines(wide, OPTIONS)
    assert built.weight_bytes > 2.5e9 and built.engine_bytes < 60e6
    assert max(max(engine.scratch_bytes) for engine in built.record.engines) < 100 << 20


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["FlatMatMulPass", "_by_reading"])
def test_a_network_that_copies_weights_is_refused(wide: Bundle, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of three axes, and one weight read in two ways: TensorRT writes the weight out again in every call."""

    class Nothing(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            return ir.passes.PassResult(model, False)

    if fault == "FlatMatMulPass":
        monkeypatch.setattr(tensorrt_network, fault, Nothing)
    else:
        if wide.manifest.target.head_weight != wide.manifest.target.embedding_weight:
            pytest.skip("no weight of an untied model is read in two ways")
        monkeypatch.setattr(tensorrt_network.WeightInputsPass, fault, lambda self, graph, value: [value])
    with pytest.raises(EngineError, match="it copies weights on every call"):
        build_engines(wide, OPTIONS)
    assert not Path(wide.path / "engines").exists() or not list((wide.path / "engines").glob("*partial*"))


@pytest.fixture(scope="module")
def wide_int4(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One layer of Qwen2-7B's width, random weights in int4."""
    root = tmp_path_factory.mktemp("wide int4")
    layer = {**QWEN2_7B, "num_hidden_layers": 1, "vocab_size": 512}
    layer = {name: value for name, value in layer.items() if name not in ("architectures", "model_type")}
    write_target(root / "target", "qwen2", dtype=torch.bfloat16, **layer)
    options = BuildOptions(str(root / "target"), None, precision="bf16", max_context_tokens=896)
    options = dataclasses.replace(options, quantize=quantize_options("int4", "int4", "keep", 128))
    (root / "bundle").mkdir()
    export_bundle(plan_build(options), root / "bundle", lambda stage, done, total: None)
    return Bundle.open(root / "bundle", check_files=False)


@pytest.mark.slow
def test_int4_lies_in_the_engines_once_and_not_in_scratch_memory(wide_int4: Bundle) -> None:
    built = build_engines(wide_int4, OPTIONS)
    parts = [wide_int4.manifest.weights[n] for n, q in wide_int4.manifest.quantized.items() for n in (n, q.scales)]
    assert built.held_bytes == sum(entry.length_bytes for entry in parts) > 115e6
    assert 0 < built.engine_bytes - built.held_bytes < 8e6
    assert max(max(engine.scratch_bytes) for engine in built.record.engines) < 80 << 20
    (target,) = [engine for engine in built.record.engines if engine.kind == "target"]
    told = builder_peak_bytes(1, len(target.profiles), int4_weight_bytes=built.held_bytes)
    assert target.build_peak_bytes < 1.1 * told + built.held_bytes  # the mapped file too


@pytest.mark.slow
def test_int4_given_to_an_engine_is_refused(wide_int4: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX writes it out, dequantised, in every call."""
    monkeypatch.setattr(SignedWeightsPass, "_embed", lambda self, matrix: None)
    monkeypatch.setitem(weight_inputs._SAFETENSORS_NAMES, ir.DataType.INT4, "I4")
    with pytest.raises(EngineError, match="it copies weights on every call"):
        build_engines(wide_int4, dataclasses.replace(OPTIONS, prefill_chunk_tokens=16))
