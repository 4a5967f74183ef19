"""Every kind of engine for every kind of GPU: built by TensorRT-RTX, which needs none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pairs import Pair
from shallow_engines import BF16, FP16, KINDS, options, take_the_form

from dflash_engines.tensorrt_engines import BuiltEngines, build_engines
from dflash_engines.tensorrt_plan import EnginePlan
from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import DeviceEngineRecord

pytest.importorskip("tensorrt_rtx")
pytestmark = pytest.mark.usefixtures("engines_are_kept")
CAPABILITIES = ("8.6", "8.9", "12.0")


def for_each_gpu(bundle: Bundle, mode: str) -> list[BuiltEngines]:
    """Engines for every kind of GPU; those for another are other engines, though made from the same graphs."""
    built = [build_engines(bundle, options(compute_capability=one, weights_mode=mode)) for one in CAPABILITIES]
    assert [each.record.compute_capability for each in built] == list(CAPABILITIES)
    for kind in KINDS:
        files = {each.record.files[f"{kind}.engine"].sha256 for each in built}
        assert len(files) == len(CAPABILITIES), f"one {kind} engine for two kinds of GPU"
    return built


@pytest.mark.parametrize("pair", (BF16, FP16), ids=lambda pair: str(pair.precision))
@pytest.mark.parametrize("mode", ["shared", "embedded"])
@pytest.mark.parametrize("form", ["fused", "primitive"])
def test_engines_for_each_gpu(
    form: str, mode: str, pair: Pair, bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target, context and drafter, layers with a window and without, causal and bidirectional."""
    take_the_form(form, monkeypatch)
    bundle = bundle_of(pair)
    graphs = bundle.manifest.drafter, bundle.manifest.target
    assert [{state.window_tokens for state in one.graph.state} for one in graphs if one] == [{None, 16}] * 2
    for built in for_each_gpu(bundle, mode):
        record, engines = built.record, built.record.engines
        assert [engine.kind for engine in engines] == KINDS
        assert (record.form, record.weights_mode, record.execution_precision) == (form, mode, pair.precision)
        for engine in engines:
            assert len(engine.scratch_bytes) == len(engine.profiles) and engine.build_peak_bytes > 50e6
            assert (built.folder / engine.file).stat().st_size == record.files[engine.file].size_bytes > 10_000
        half = {"fp16": "F16", "bf16": "BF16"}[record.execution_precision]
        stated = [(bool(engine.weights), {w.dtype for w in engine.weights} - {"F32"}) for engine in engines[:3]]
        assert stated == [(True, {half}) if mode == "shared" else (False, set())] * 3
        assert DeviceEngineRecord.read(built.folder, "") == record
    assert not list(bundle.path.rglob("*partial*"))


def test_an_engine_for_another_gpu_shows(
    bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: engines are kept without the kind of GPU they are for."""
    key = EnginePlan.key

    def blind(plan: EnginePlan, *rest: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "compute_capability", "8.9")
            return key(plan, *rest)

    monkeypatch.setattr(EnginePlan, "key", blind)
    with pytest.raises(AssertionError, match="one target engine for two kinds of GPU"):
        for_each_gpu(bundle_of(BF16), "shared")


def test_every_block_size_has_its_profile(bundle_of: Callable[[Pair], Bundle]) -> None:
    bundle = bundle_of(BF16)
    built = build_engines(bundle, options(block_sizes=(), prefill_chunk_tokens=32))
    target, context, drafter, acceptance, candidates = built.record.engines
    assert [p.rows for p in acceptance.profiles] == [1, 4, 8, 16] == [p.logit_rows for p in candidates.profiles]
    assert [p.rows for p in target.profiles] == [1, 4, 8, 16, 32] == [p.rows for p in context.profiles]
    assert [p.logit_rows for p in target.profiles] == [1, 4, 8, 16, 1]
    assert [p.rows for p in drafter.profiles] == [4, 8, 16]
    capacity = bundle.manifest.max_context_tokens + 32
    assert {p.capacity_rows for engine in built.record.engines[:3] for p in engine.profiles} == {capacity}
    assert all(len(engine.scratch_bytes) == len(engine.profiles) for engine in built.record.engines)
    stated = {w.weight for engine in built.record.engines for w in engine.weights}
    assert stated <= set(bundle.manifest.weights) and built.saved_bytes > 0
