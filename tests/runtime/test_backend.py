from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dflash_runtime
from dflash_runtime import BackendError, GenerationConfig, Session
from dflash_runtime.backend import AVAILABLE


@pytest.mark.parametrize("name", ["cuda", ""])
def test_backends_that_are_not_here(tiny: Path, name: str) -> None:
    with pytest.raises(BackendError, match="Available here: ort-cpu") as error:
        Session.open(tiny, name)
    assert repr(name) in str(error.value)


def test_options_that_cannot_be_used(tiny: Path) -> None:
    with pytest.raises(BackendError, match="threads is 0"):
        Session.open(tiny, threads=0)
    with pytest.raises(BackendError, match="prefill_chunk_tokens is 0"):
        Session.open(tiny, prefill_chunk_tokens=0)
    with pytest.raises(BackendError, match="cuda_graphs is True and backend 'ort-cpu' runs on the CPU"):
        Session.open(tiny, cuda_graphs=True)


def test_another_provider_than_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    monkeypatch.setattr(ort.InferenceSession, "get_providers", lambda self: ["AzureExecutionProvider"])
    with pytest.raises(BackendError, match=r"Asked .* CPUExecutionProvider, got .*Azure"):
        Session.open(tiny)


def test_bindings_are_made_once_per_size(session: Session) -> None:
    backend: Any = session._backend
    options = GenerationConfig(max_new_tokens=40, stop_token_ids=())
    session.generate([1, 2, 3], options)
    made = [dict(graph._bindings) for graph in (backend._target, backend._context, backend._drafter)]
    addresses = [rows.ctypes.data for rows in backend._target_state.values()]
    session.generate([4, 5, 6], options)
    assert [dict(graph._bindings) for graph in (backend._target, backend._context, backend._drafter)] == made
    assert [rows.ctypes.data for rows in backend._target_state.values()] == addresses


def test_caches_are_written_in_place(session: Session) -> None:
    backend: Any = session._backend
    backend.reset()
    backend.prefill([1, 2, 3], 0)
    backend.append_context(3, 0)
    for state in (backend._target_state, backend._drafter_state):
        for rows in state.values():
            assert rows[:, :, :3].all()
            assert not rows[:, :, 3:].any()


def test_one_buffer_serves_changing_sizes(session: Session) -> None:
    backend: Any = session._backend
    ids = [3, 9, 14, 80, 5, 61, 7, 2]
    whole = _taps_of(backend, [ids])
    for sizes in ([1] * 8, [4, 4], [1, 4, 3], [5, 1, 2]):
        at, pieces = 0, []
        for size in sizes:
            pieces.append(ids[at : at + size])
            at += size
        np.testing.assert_allclose(_taps_of(backend, pieces), whole, atol=1e-5)


def _taps_of(backend: Any, pieces: list[list[int]]) -> Any:
    backend.reset()
    rows, at = [], 0
    for piece in pieces:
        backend.verify(piece, at)
        rows.append(backend._taps[0, : len(piece)].copy())
        at += len(piece)
    return np.concatenate(rows)


_BLOCK = """
import sys
for name in ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "huggingface_hub", "ml_dtypes"):
    sys.modules[name] = None
"""


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BLOCK + code, *args], check=False, capture_output=True, text=True, timeout=120
    )


def test_works_without_torch(tiny: Path) -> None:
    code = """
from dflash_runtime import *
with Session.open(sys.argv[1], threads=1) as session:
    stream = session.stream("hi", GenerationConfig(max_new_tokens=20, block_size=8))
    text = "".join(stream)
    assert text == session.generate("hi", GenerationConfig(max_new_tokens=20, plain=True)).text
print(len(stream.result.token_ids), stream.result.finish_reason)
"""
    done = python(code, str(tiny))
    assert (done.stdout, done.stderr) == ("20 length\n", "")


def test_import_is_quick_and_leaves_onnxruntime_alone() -> None:
    code = """
import time
started = time.process_time()
import dflash_runtime
print(time.process_time() - started, "onnxruntime" in sys.modules)
"""
    seconds, onnxruntime = min(python(code).stdout.split() for _ in range(3))
    assert float(seconds) < 0.5
    assert onnxruntime == "False"


def test_onnxruntime_is_not_installed(tiny: Path) -> None:
    code = """
sys.modules["onnxruntime"] = None
from dflash_runtime import *
try:
    Session.open(sys.argv[1])
except BackendError as error:
    print(error)
"""
    assert "pip install dflash-export[ort]" in python(code, str(tiny)).stdout


def test_public_names() -> None:
    assert sorted(dflash_runtime.__all__) == dflash_runtime.__all__
    assert {"Session", "GenerationConfig", "GenerationResult"} <= set(dflash_runtime.__all__)
    assert all(hasattr(dflash_runtime, name) for name in dflash_runtime.__all__)
    assert AVAILABLE == ("ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx")
