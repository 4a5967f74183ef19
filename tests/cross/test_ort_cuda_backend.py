"""The `ort-cuda` backend's own work on a machine without a GPU: its graphs widened to fp32, its memory the host's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import drafter_config

from dflash_engines import ort_cpu, ort_cuda
from dflash_engines.engine_writing import write_engine
from dflash_engines.half_precision import to_fp32
from dflash_engines.ort_cuda import BACKEND, lower_model
from dflash_runtime import BackendError, EngineError
from dflash_runtime.backend import Backend, open_backend
from dflash_runtime.bundle import Bundle
from dflash_runtime.decode import decode
from dflash_runtime.ort_cuda import DeviceWeights, OrtCudaBackend
from dflash_runtime.ort_fixed_graph import CUDA, Place, Placed
from dflash_runtime.weights import narrowed
from dflash_tools.hollow_bundle import write_hollow_bundle
from dflash_tools.random_bundle_weights import fill_weights

HOST = Place("CPUExecutionProvider", "cpu", {})
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
        files = {"target": "target.onnx", "drafter_context": "drafter_context.onnx", "drafter": "drafter.onnx"}
        wide = {file: to_fp32(lower_model(ir.load(root / file), kind, "bf16")) for kind, file in files.items()}  # type: ignore[arg-type]
        write_engine(bundle, BACKEND, wide, {}, execution_precision="fp32")
        yield bundle


def tokens(backend: Backend, prompt: list[int], block_size: int) -> tuple[list[int], list[list[int]]]:
    rounds = list(decode(backend, prompt, max_new_tokens=30, max_context_tokens=80, stop_token_ids=(),
                         block_size_of=lambda n: block_size))
    return [token for r in rounds for token in r.committed], [r.proposed for r in rounds]


def test_it_drafts_and_says_what_ort_cpu_does(bundle: Bundle) -> None:
    ours, other = OrtCudaBackend(bundle, CHUNK, place=HOST), open_backend("ort-cpu", bundle, 1, CHUNK)
    accepted = 0
    for prompt in PROMPTS:
        plain, _ = tokens(other, prompt, 1)
        for block_size in (1, 3, 4):  # 3: a block between two sessions' sizes
            found, proposed = tokens(ours, prompt, block_size)
            assert found == plain
            if block_size != 3:
                # The last block may be cut to what the context still holds, and is drafted larger here.
                assert proposed[:-1] == tokens(other, prompt, block_size)[1][:-1]
            accepted += sum(len(p) > 0 for p in proposed)
    assert accepted
    ours.close()


def test_the_fp16_engine_as_it_is(bundle: Bundle, tmp_path: Path) -> None:
    copy = Bundle.open(shutil.copytree(bundle.path, tmp_path / "copy"))
    ort_cuda.lower_bundle(copy, "fp16")
    ours, wide = OrtCudaBackend(copy, CHUNK, place=HOST), OrtCudaBackend(bundle, CHUNK, place=HOST)
    for prompt in PROMPTS:
        assert tokens(ours, prompt, 4)[0] == tokens(ours, prompt, 1)[0]
    ids = PROMPTS[2]
    for position, rows in ((0, 16), (16, 4), (17, 1)):
        for backend in (ours, wide):
            backend.verify(ids[position : position + rows], position)
        one, two = ours.read_taps(rows), wide.read_taps(rows)
        assert 0 < np.abs(one - two).max() / np.abs(two).max() < 1e-2


def test_padded_rows_leave_nothing_behind(bundle: Bundle) -> None:
    ours = OrtCudaBackend(bundle, CHUNK, place=HOST)
    prompt = PROMPTS[2]
    expected = tokens(ours, prompt, 4)
    tokens(ours, PROMPTS[1], 3)
    assert tokens(ours, prompt, 4) == expected


def test_a_wrong_weight_is_seen(bundle: Bundle) -> None:
    stored = DeviceWeights(bundle, HOST)
    spoiled = {"model.layers.1.mlp.up_proj.weight"}
    assert spoiled <= set(bundle.manifest.weights)

    def weights(name: str, dtype: str) -> Placed:
        return HOST.put(-stored(name, dtype).numpy()) if name in spoiled else stored(name, dtype)

    one, two = OrtCudaBackend(bundle, CHUNK, place=HOST, weights=weights), OrtCudaBackend(bundle, CHUNK, place=HOST)
    assert any(tokens(one, prompt, 1)[0] != tokens(two, prompt, 1)[0] for prompt in PROMPTS)


def test_without_the_provider_it_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BackendError, match=r"not CUDAExecutionProvider.*onnxruntime-gpu"):
        OrtCudaBackend(bundle, CHUNK)
    with pytest.raises(BackendError, match=r"not CUDAExecutionProvider"):
        open_backend("ort-cuda", bundle, None, CHUNK)
    assert CUDA.options["use_tf32"] == "0"


def test_an_older_onnxruntime_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.__version__", "1.29.1")
    with pytest.raises(BackendError, match=r"1\.30 or newer, here is 1\.29\.1"):
        OrtCudaBackend(bundle, CHUNK, place=HOST)


def test_a_session_on_another_provider_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    monkeypatch.setattr(ort.InferenceSession, "get_providers", lambda self: ["AzureExecutionProvider"])
    with pytest.raises(BackendError, match=r"got .*Azure"):
        OrtCudaBackend(bundle, CHUNK, place=HOST)


def test_more_rows_than_a_session_has_are_refused(bundle: Bundle) -> None:
    ours = OrtCudaBackend(bundle, CHUNK, place=HOST)
    with pytest.raises(BackendError, match="17 rows"):
        ours.verify(list(range(17)), 0)


def test_weights_are_rounded_to_the_nearest() -> None:
    wide = np.array([1.0, 1 + 2**-9, 1 + 3 * 2**-9, -1 - 2**-8, np.inf], np.float32)
    as_bf16 = (narrowed(wide, "BF16", "w").astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(as_bf16, np.array([1.0, 1.0, 1 + 2**-7, -1.0, np.inf], np.float32))
    with pytest.raises(EngineError, match="65504"):
        narrowed(np.array([1e5], np.float32), "F16", "w")
