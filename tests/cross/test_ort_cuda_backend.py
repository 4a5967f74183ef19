"""The `ort-cuda` backend's own work on a machine without a GPU: its graphs widened to fp32, its memory the host's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from recording_device import RecordingDevice
from tiny_models import drafter_config

from dflash_engines import ort_cpu, ort_cuda
from dflash_engines.draft_windows import drafter_rings
from dflash_engines.half_precision import to_fp32
from dflash_engines.ort_cuda import lower_model, write_graphs
from dflash_runtime import BackendError, EngineError
from dflash_runtime.backend import Backend, open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.decode import decode
from dflash_runtime.device import Buffer
from dflash_runtime.device_backend import DeviceBackend, open_engines
from dflash_runtime.device_engine import DeviceEngineRecord, EngineProfile
from dflash_runtime.device_weights import WeightPlaces, narrowed, upload_weights
from dflash_runtime.ort_engine import OrtEngines
from dflash_tools.gpu_check_device import read_taps
from dflash_tools.hollow_bundle import write_hollow_bundle
from dflash_tools.random_bundle_weights import fill_weights

TARGET = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
CHUNK = 16
PROMPTS = ([5], list(range(20, 37)), [int(n) for n in np.random.default_rng(3).integers(0, 512, 40)])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        root = tmp_path_factory.mktemp("pair") / "bundle"
        write_hollow_bundle(root, TARGET, drafter_config(num_target_layers=3, taps=(0, 1)), max_context_tokens=80)
        bundle = fill_weights(root, seed=1, likely_tokens=2)
        ort_cpu.lower_bundle(root)
        write_engines(bundle)
        yield bundle


def write_engines(bundle: Bundle) -> None:
    """The lowered graphs in fp32, which ONNX Runtime's attention on a CPU wants."""
    files = bundle.manifest.graph_files()
    drafter = ir.load(bundle.path / files["drafter"])
    rings = drafter_rings(bundle.manifest, drafter, call_rows=ort_cuda._CHUNK_TOKENS)
    wide = {kind: to_fp32(lower_model(ir.load(bundle.path / file), kind, "bf16", {} if kind == "target" else rings))
            for kind, file in files.items()}  # fmt: skip
    write_graphs(bundle, wide, {}, "fp32", rings)


def open_here(bundle: Bundle) -> DeviceBackend:
    return open_engines("ort-cuda", bundle, RecordingDevice(tensorrt_version=None), CHUNK)


def tokens(backend: Backend, prompt: list[int], block_size: int) -> tuple[list[int], list[list[int]]]:
    rounds = list(decode(backend, prompt, max_new_tokens=30, max_context_tokens=80, stop_token_ids=(),
                         block_size_of=lambda n: block_size))
    return [token for r in rounds for token in r.committed], [r.proposed for r in rounds]


def test_it_drafts_and_says_what_ort_cpu_does(bundle: Bundle) -> None:
    ours, other = open_here(bundle), open_backend("ort-cpu", bundle, 1, CHUNK)
    accepted = 0
    for prompt in PROMPTS:
        plain, _ = tokens(other, prompt, 1)
        for block_size in (1, 3, 4):  # 3: a block between two profiles
            found, proposed = tokens(ours, prompt, block_size)
            assert found == plain
            if block_size != 3:
                # The last block may be cut to what the context still holds, and is drafted larger here.
                assert proposed[:-1] == tokens(other, prompt, block_size)[1][:-1]
            accepted += sum(len(p) > 0 for p in proposed)
    assert accepted
    ours.close()


def test_windows_in_caches_of_constant_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_cuda, "_CHUNK_TOKENS", 8)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    write_hollow_bundle(tmp_path / "bundle", TARGET, drafter_config(num_target_layers=3, taps=(0, 1), **windows),
                        max_context_tokens=80)  # fmt: skip
    bundle = fill_weights(tmp_path / "bundle", seed=1, likely_tokens=2)
    ort_cpu.lower_bundle(bundle)
    write_engines(bundle)
    ours, other = open_here(bundle), open_backend("ort-cpu", bundle, 1, CHUNK)
    assert {group.memory.size_bytes for group in ours._caches["rings"].groups} == {2 * 2 * 34 * 32 * 4}
    for prompt in PROMPTS:
        found, expected = tokens(ours, prompt, 4), tokens(other, prompt, 4)
        assert (found[0], found[1][:-1]) == (expected[0], expected[1][:-1])
        assert ours._ring_rows.first > 0  # rows have moved
    ours.close()


def test_the_fp16_engine_as_it_is(bundle: Bundle, tmp_path: Path) -> None:
    copy = Bundle.open(shutil.copytree(bundle.path, tmp_path / "copy"))
    ort_cuda.lower_bundle(copy, "fp16")
    ours, wide = open_here(copy), open_here(bundle)
    for prompt in PROMPTS:
        assert tokens(ours, prompt, 4)[0] == tokens(ours, prompt, 1)[0]
    ids = PROMPTS[2]
    for position, rows in ((0, 4), (4, 4), (5, 1)):
        for backend in (ours, wide):
            backend.verify(ids[position : position + rows], position)
        one, two = read_taps(ours, rows), read_taps(wide, rows)
        assert 0 < np.abs(one - two).max() / np.abs(two).max() < 1e-2


def test_padded_rows_leave_nothing_behind(bundle: Bundle) -> None:
    ours = open_here(bundle)
    prompt = PROMPTS[2]
    expected = tokens(ours, prompt, 4)
    tokens(ours, PROMPTS[1], 3)
    assert tokens(ours, prompt, 4) == expected


def test_a_wrong_weight_is_seen(bundle: Bundle) -> None:
    spoiled = "model.layers.1.mlp.up_proj.weight"
    assert spoiled in bundle.manifest.weights

    def weights(device: Any, bundle: Bundle, wanted: Any) -> WeightPlaces:
        places = upload_weights(device, bundle, wanted)
        values = device.view(*places[spoiled, "F32"]).view(np.float32)
        values *= -1
        return places

    folder = bundle.path / "engines" / "ort-cuda"
    one = DeviceBackend("ort-cuda", bundle, RecordingDevice(tensorrt_version=None), folder,
                        DeviceEngineRecord.read(folder, ""), CHUNK, weights=weights)
    two = open_here(bundle)
    assert any(tokens(one, prompt, 1)[0] != tokens(two, prompt, 1)[0] for prompt in PROMPTS)


def test_without_the_provider_it_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BackendError, match=r"not CUDAExecutionProvider.*onnxruntime-gpu"):
        OrtEngines()
    with pytest.raises(BackendError, match=r"not CUDAExecutionProvider"):
        open_backend("ort-cuda", bundle, None, CHUNK)


def test_on_cuda_no_node_may_run_elsewhere(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    asked = {}

    def session(data: bytes, options: Any, providers: Any) -> Any:
        asked["fallback"] = options.get_session_config_entry("session.disable_cpu_ep_fallback")
        asked["providers"] = providers
        raise RuntimeError("a node has no kernel")

    monkeypatch.setattr("onnxruntime.InferenceSession", session)
    engine = OrtEngines().open(bundle.path / "target.onnx", [EngineProfile(4, 4, 96)], 77)
    with pytest.raises(EngineError, match="a node has no kernel"):
        engine.open_context(0, Buffer(0, 0))
    ((provider, options),) = asked["providers"]
    assert (asked["fallback"], provider) == ("1", "CUDAExecutionProvider")
    assert (options["use_tf32"], options["user_compute_stream"]) == ("0", "77")


def test_an_older_onnxruntime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.29.1")
    with pytest.raises(BackendError, match=r"1\.30 or newer, here is 1\.29\.1"):
        OrtEngines("CPUExecutionProvider", "cpu")


def test_a_session_on_another_provider_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    monkeypatch.setattr(ort.InferenceSession, "get_providers", lambda self: ["AzureExecutionProvider"])
    path, profiles = bundle.path / "engines" / "ort-cuda" / "target.onnx", [EngineProfile(4, 4, 96)]
    with pytest.raises(BackendError, match=r"got .*Azure"):
        OrtEngines("CPUExecutionProvider", "cpu").open(path, profiles, 0).open_context(0, Buffer(0, 0))


def test_more_rows_than_a_profile_has_are_refused(bundle: Bundle) -> None:
    with pytest.raises(EngineError, match="9 are asked for"):
        open_here(bundle).verify(list(range(9)), 0)


def test_weights_are_rounded_to_the_nearest() -> None:
    wide = np.array([1.0, 1 + 2**-9, 1 + 3 * 2**-9, -1 - 2**-8, np.inf], np.float32)
    as_bf16 = (narrowed(wide, "BF16", "w").astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(as_bf16, np.array([1.0, 1.0, 1 + 2**-7, -1.0, np.inf], np.float32))
    with pytest.raises(EngineError, match="65504"):
        narrowed(np.array([1e5], np.float32), "F16", "w")
