"""The one module that calls CUDA and TensorRT, on stand-ins for both; the real ones where they are installed."""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeTensorRT, Status

from dflash_runtime import BackendError, Session
from dflash_runtime.device import Buffer
from dflash_runtime.device_engine import EngineProfile, GraphEngine
from dflash_runtime.device_graph import DeviceGraph
from dflash_runtime.errors import EngineError

MODULE = "dflash_runtime.cuda_device"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", fake)
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRT("tensorrt"))
    sys.modules.pop(MODULE, None)
    yield fake
    sys.modules.pop(MODULE, None)


@pytest.fixture
def device(cuda: FakeCuda) -> Any:
    loader = importlib.import_module("dflash_runtime.tensorrt_engine").TensorRTEngines("tensorrt")
    return importlib.import_module(MODULE).CudaDevice("tensorrt", loader)


def test_what_the_device_is(device: Any) -> None:
    assert device.compute_capability == "8.9"
    assert device.tensorrt_version == "10.3.0"  # a Jetson's module has no package


def test_memory_copies_and_marks(device: Any, cuda: FakeCuda) -> None:
    buffer = device.allocate(64)
    assert not cuda.memory[buffer.address].any()
    host = device.host_memory(32)
    assert not host.any()
    host[:] = np.arange(32)
    device.upload(buffer.address, host)
    device.copy_rows(buffer.address + 32, 8, buffer.address, 4, 3, 4)
    back = device.host_memory(64)
    device.download(back, buffer.address)
    device.mark()
    device.wait()
    assert back[32:].reshape(4, 8)[:, :3].tolist() == [[n, n + 1, n + 2] for n in (0, 4, 8, 12)]
    assert not back[32:].reshape(4, 8)[:, 3:].any()
    device.clear(buffer)
    assert not cuda.memory[buffer.address].any()
    assert ("cudaEventRecord", "event", 77) in cuda.calls and cuda.calls[-2] == ("cudaEventSynchronize", "event")
    device.close()
    assert cuda.memory == {}


def test_a_capture_is_launched_as_one(device: Any, cuda: FakeCuda) -> None:
    before = len(cuda.calls)
    launch = device.capture(device.mark)
    names = [call[0] for call in cuda.calls[before:]]
    assert names == ["cudaStreamBeginCapture", "cudaEventRecord", "cudaStreamEndCapture", "cudaGraphInstantiate",
                     "cudaGraphDestroy"]  # fmt: skip
    launch()
    assert cuda.calls[-1] == ("cudaGraphLaunch", "exec", 77)


def test_a_cycle_that_cannot_be_captured_says_what_to_do(device: Any, cuda: FakeCuda) -> None:
    cuda.fail = {"cudaStreamEndCapture": Status.cudaErrorMemoryAllocation}
    with pytest.raises(BackendError, match=r"cannot be recorded as a CUDA graph: .*cuda_graphs=False"):
        device.capture(lambda: None)


def test_engines_and_contexts(device: Any, tmp_path: Path) -> None:
    trt: Any = sys.modules["tensorrt"]
    (tmp_path / "target.engine").write_bytes(b"engine")
    engine = device.open_engine(tmp_path / "target.engine", [])
    scratch = device.allocate(engine.scratch_bytes)
    context = engine.open_context(1, scratch)
    assert trt.calls == [
        ("create", "by the user"), ("set_device_memory", *scratch), ("set_optimization_profile_async", 1, 77),
        ("set_input_shape", "ids", (1, 16)),
    ]  # fmt: skip
    assert context.sizes_bytes == {"ids": 128, "weight": 96, "taps": 256}
    assert engine.open_context(0, scratch).sizes_bytes["taps"] == 64
    context.bind({"ids": 256, "weight": 512})
    context.enqueue()
    assert trt.calls[-3:] == [("set_tensor_address", "ids", 256), ("set_tensor_address", "weight", 512),
                              ("execute_async_v3", 77)]  # fmt: skip
    for refused, call in (
        ("set_tensor_address", lambda: context.bind({"ids": 1})),
        ("execute_async_v3", context.enqueue),
        ("set_optimization_profile_async", lambda: engine.open_context(0, scratch)),
        ("set_input_shape", lambda: engine.open_context(0, scratch)),
        ("create", lambda: engine.open_context(0, scratch)),
    ):
        trt.refuses = {refused}
        with pytest.raises(EngineError, match=r"target\.engine"):
            call()
    (tmp_path / "target.engine").write_bytes(b"broken")
    with pytest.raises(EngineError, match=r"TensorRT 10.3.0 cannot load .*target\.engine"):
        device.open_engine(tmp_path / "target.engine", [])


def test_tensors_are_bound_by_name_whatever_their_order(device: Any, tmp_path: Path) -> None:
    """TensorRT lists them as it likes; ids of INT64 are 8 bytes each since version 10."""
    trt: Any = sys.modules["tensorrt"]
    trt.tensors = dict(reversed(trt.tensors.items()))
    (tmp_path / "target.engine").write_bytes(b"engine")
    engine = device.open_engine(tmp_path / "target.engine", [])
    context = engine.open_context(1, device.allocate(engine.scratch_bytes))
    assert context.sizes_bytes == {"taps": 256, "weight": 96, "ids": 16 * 8}
    context.bind({"ids": 256, "taps": 768, "weight": 512})
    assert {call[1:] for call in trt.calls if call[0] == "set_tensor_address"} == {
        ("ids", 256), ("taps", 768), ("weight", 512)
    }  # fmt: skip


def test_what_an_engine_wants_must_be_there_and_large_enough(device: Any, tmp_path: Path) -> None:
    """Ids of 32 bit where the engine has INT64, or a tensor of another name."""
    (tmp_path / "target.engine").write_bytes(b"engine")
    profile = EngineProfile(16, 0, 0)
    facts = GraphEngine("target", "target.engine", "key", [EngineProfile(4, 0, 0), profile], [], [0, 0], 0)
    opened = device.open_engine(tmp_path / "target.engine", [])
    graph = DeviceGraph(facts, opened, device.allocate(opened.scratch_bytes), "Run: X")
    buffers = {"ids": Buffer(256, 16 * 8), "weight": Buffer(512, 96), "taps": Buffer(768, 256)}
    graph.bind(profile, buffers)
    ids = buffers.pop("ids")
    for wrong in ({"ids": Buffer(256, 16 * 4)}, {"input_ids": ids}):
        with pytest.raises(EngineError, match=r"target engine wants 128 bytes for ids .*gives (64|0)\. Run: X"):
            graph.bind(profile, {**buffers, **wrong})


def test_an_engine_with_ids_of_32_bit_is_refused(device: Any, tmp_path: Path) -> None:
    """They would be read as every other half of those of 64."""
    (tmp_path / "target.engine").write_bytes(b"engine")
    sys.modules["tensorrt"].tensors["ids"] = ("in", (1, -1), 4)
    opened = device.open_engine(tmp_path / "target.engine", [])
    with pytest.raises(EngineError, match=r"target\.engine has ids in INT32; ids here are INT64"):
        opened.open_context(0, device.allocate(opened.scratch_bytes))


def test_what_fails_is_named(device: Any, cuda: FakeCuda) -> None:
    cuda.fail = {"cudaMalloc": Status.cudaErrorMemoryAllocation, "cudaEventRecord": Status.cudaErrorMemoryAllocation}
    with pytest.raises(BackendError, match=r"5 MiB are wanted and 3 of 8 MiB .* cudaErrorMemoryAllocation"):
        device.allocate(5 << 20)
    with pytest.raises(BackendError, match="cudaEventRecord failed: cudaErrorMemoryAllocation"):
        device.mark()


def test_no_gpu_is_said_and_nothing_else_is_tried(tiny: Path, cuda: FakeCuda) -> None:
    cuda.fail = {"cudaGetDeviceCount": Status.cudaErrorInsufficientDriver}
    with pytest.raises(BackendError, match=r"'tensorrt' needs an NVIDIA GPU .*InsufficientDriver.*ort-cpu"):
        Session.open(tiny, "tensorrt")
    cuda.fail, cuda.gives["cudaGetDeviceCount"] = {}, (0,)
    with pytest.raises(BackendError, match="no device"):
        Session.open(tiny, "tensorrt")


def test_no_engines_are_said_and_the_device_is_freed(tiny: Path, cuda: FakeCuda) -> None:
    with pytest.raises(EngineError, match=r"no engine in .*tensorrt-sm89.*engines .* --backend tensorrt"):
        Session.open(tiny, "tensorrt")
    assert cuda.calls[-1] == ("cudaStreamDestroy", 77)


@pytest.mark.parametrize(("name", "missing"), [("tensorrt", "cuda"), ("tensorrt-rtx", "tensorrt_rtx")])
def test_missing_packages_are_named(
    tiny: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str, missing: str
) -> None:
    for module in [loaded for loaded in sys.modules if loaded.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(BackendError, match=rf"'{name}' needs {missing}.*pip install dflash-export\[{name}\]"):
        Session.open(tiny, name)


def test_threads_are_not_for_a_gpu(tiny: Path) -> None:
    with pytest.raises(BackendError, match="threads is 2"):
        Session.open(tiny, "tensorrt-rtx", threads=2)


class _Cache:
    """TensorRT-RTX's runtime cache: it takes what it gave itself."""

    def __init__(self) -> None:
        self.held = b""

    def deserialize(self, blob: bytes) -> bool:
        if not blob.startswith(b"this GPU"):
            return False
        self.held = bytes(blob)
        return True

    def serialize(self) -> bytes:
        return self.held


def _open_with_cache(device: Any, trt: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> _Cache:
    cache = _Cache()
    config = types.SimpleNamespace(
        create_runtime_cache=lambda: cache, set_runtime_cache=lambda given: trt.calls.append(("cache", given)),
        set_execution_context_allocation_strategy=lambda given: trt.calls.append(("strategy", given)),
    )  # fmt: skip
    monkeypatch.setattr(trt, "IRuntimeCache", _Cache, raising=False)
    monkeypatch.setattr(fake_cuda._Engine, "create_runtime_config", lambda engine: config, raising=False)
    engine = device.open_engine(path, [])
    engine.open_context(0, device.allocate(64))
    assert trt.calls[:3] == [("strategy", "by the user"), ("cache", cache), ("create", config)]
    return cache


@pytest.mark.parametrize("damage", [None, "cut", "foreign"])
def test_compiled_kernels_are_kept_for_the_next_time(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trt: Any = sys.modules["tensorrt"]
    (tmp_path / "target.engine").write_bytes(b"engine")
    cache = _open_with_cache(device, trt, tmp_path / "target.engine", monkeypatch)
    cache.held = b"another GPU" if damage == "foreign" else b"this GPU, compiled"
    device.close()
    (kept,) = (tmp_path / "cache").rglob("*.cache")
    if damage == "cut":
        kept.write_bytes(kept.read_bytes()[:-3])
    trt.calls.clear()
    loader = importlib.import_module("dflash_runtime.tensorrt_engine").TensorRTEngines("tensorrt")
    again = importlib.import_module(MODULE).CudaDevice("tensorrt", loader)
    if damage is None:
        found = _open_with_cache(again, trt, tmp_path / "target.engine", monkeypatch)
        assert found.held == b"this GPU, compiled"
    else:
        with pytest.warns(UserWarning, match="damaged" if damage == "cut" else "another GPU"):
            found = _open_with_cache(again, trt, tmp_path / "target.engine", monkeypatch)
        assert found.held == b""
        found.held = b"this GPU, compiled again"
    again.close()
    assert kept.read_bytes()[32:] == found.held
    assert not list(kept.parent.glob("*partial*"))


def test_the_real_cuda_python_has_these_functions() -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    text = Path(importlib.util.find_spec(MODULE).origin).read_text(encoding="utf-8")  # type: ignore[union-attr, arg-type]
    names = set(re.findall(r'_call\("(\w+)"', text)) | set(re.findall(r"cuda\.(cuda\w+)", text))
    assert len(names) > 20
    assert [name for name in names if not hasattr(real, name)] == []
    members = set(re.findall(r"cuda\.(cuda\w+)\.(cuda\w+)", text))
    assert {("cudaMemcpyKind", "cudaMemcpyDefault"), ("cudaError_t", "cudaSuccess")} <= members
    assert [member for owner, member in members if not hasattr(getattr(real, owner), member)] == []
    assert all(hasattr(real.cudaDeviceAttr, name) for name in vars(FakeCuda.cudaDeviceAttr))
    status, count = real.cudaGetDeviceCount()
    assert status == real.cudaError_t.cudaSuccess or not count


def test_the_real_tensorrt_rtx_has_these_methods() -> None:
    real = pytest.importorskip("tensorrt_rtx")
    for owner, names in (
        (real.ICudaEngine, "create_execution_context device_memory_size_v2 get_tensor_name get_tensor_mode "
                           "get_tensor_shape get_tensor_dtype get_tensor_profile_shape num_io_tensors "
                           "create_runtime_config"),
        (real.IRuntimeConfig, "create_runtime_cache set_runtime_cache set_execution_context_allocation_strategy"),
        (real.IRuntimeCache, "serialize deserialize"),
        (real.IExecutionContext, "set_device_memory set_optimization_profile_async set_input_shape get_tensor_shape "
                                 "set_tensor_address execute_async_v3"),
        (real.Runtime, "deserialize_cuda_engine"),
        (real.ExecutionContextAllocationStrategy, "USER_MANAGED"), (real.TensorIOMode, "INPUT"),
    ):  # fmt: skip
        assert [name for name in names.split() if not hasattr(owner, name)] == []
    assert real.DataType.INT32 != real.DataType.INT64
    assert [real.DataType.BF16.itemsize, real.DataType.INT64.itemsize] == [2, 8]
