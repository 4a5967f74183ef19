"""A `Device` made of cuda-python: the only module that calls CUDA. What loads engines is given to it."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_runtime.bundle import Bundle
from dflash_runtime.device import Array, Buffer, Engine
from dflash_runtime.device_backend import DeviceBackend, open_engines
from dflash_runtime.device_engine import EngineProfile
from dflash_runtime.errors import BackendError

cuda: Any = importlib.import_module("cuda.bindings.runtime")  # untyped; its absence is the caller's to explain
_EITHER_WAY = cuda.cudaMemcpyKind.cudaMemcpyDefault  # the addresses say which


class EngineLoader(Protocol):
    """A library that runs engines on a stream."""

    version: str | None
    """That engines have to be made for; None where any will do."""
    captures: bool

    def open(self, path: Path, profiles: Sequence[EngineProfile], stream: int) -> Engine:
        """See `Device.open_engine`."""

    def close(self) -> None:
        """The engines are not used any more."""


class CudaDevice:
    """The first GPU, with one stream.

    Args:
        backend: Its name, for messages.
        loader: Runs the engines.

    Raises:
        BackendError: there is no GPU, or no driver for it.
    """

    def __init__(self, backend: str, loader: EngineLoader) -> None:
        self._loader, self.tensorrt_version, self.captures = loader, loader.version, loader.captures
        self._freed_by: list[Callable[[], object]] = []
        error, count = cuda.cudaGetDeviceCount()
        if error != cuda.cudaError_t.cudaSuccess or not count:
            raise BackendError(
                f"Backend {backend!r} needs an NVIDIA GPU and there is none: {_text(error) if error else 'no device'}. "
                "Use --backend ort-cpu, or run dflash-export doctor."
            )
        numbers = (getattr(cuda.cudaDeviceAttr, f"cudaDevAttrComputeCapability{part}") for part in ("Major", "Minor"))
        self.compute_capability = ".".join(str(_call("cudaDeviceGetAttribute", number, 0)) for number in numbers)
        _call("cudaSetDevice", 0)
        self._stream = _call("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        self._events = [_call("cudaEventCreateWithFlags", cuda.cudaEventDisableTiming) for _ in range(2)]

    def open_engine(self, path: Path, profiles: Sequence[EngineProfile]) -> Engine:
        """See `Device.open_engine`."""
        return self._loader.open(path, profiles, int(self._stream))

    def allocate(self, size_bytes: int) -> Buffer:
        """See `Device.allocate`."""
        error, address = cuda.cudaMalloc(size_bytes)
        if error != cuda.cudaError_t.cudaSuccess:
            free, total = _call("cudaMemGetInfo")
            raise BackendError(
                f"{size_bytes >> 20} MiB are wanted and {free >> 20} of {total >> 20} MiB on the GPU are free: "
                f"{_text(error)}. Close other programs, or build the bundle with a smaller --max-context."
            )
        self._freed_by.append(lambda: cuda.cudaFree(address))
        buffer = Buffer(int(address), size_bytes)
        self.clear(buffer)
        return buffer

    def host_memory(self, size_bytes: int) -> Array:
        """See `Device.host_memory`."""
        address = _call("cudaHostAlloc", size_bytes, cuda.cudaHostAllocDefault)
        self._freed_by.append(lambda: cuda.cudaFreeHost(address))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(int(address)))
        array[:] = 0
        return array

    def upload(self, address: int, host: Array) -> None:
        """See `Device.upload`."""
        _call("cudaMemcpyAsync", address, host.ctypes.data, host.nbytes, _EITHER_WAY, self._stream)

    def download(self, host: Array, address: int) -> None:
        """See `Device.download`."""
        _call("cudaMemcpyAsync", host.ctypes.data, address, host.nbytes, _EITHER_WAY, self._stream)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, row_bytes: int, rows: int
                  ) -> None:
        """See `Device.copy_rows`."""
        _call("cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, row_bytes, rows, _EITHER_WAY,
              self._stream)

    def clear(self, buffer: Buffer) -> None:
        """See `Device.clear`."""
        _call("cudaMemsetAsync", buffer.address, 0, buffer.size_bytes, self._stream)

    def mark(self, place: int = 0) -> None:
        """See `Device.mark`."""
        _call("cudaEventRecord", self._events[place], self._stream)

    def wait(self, place: int = 0) -> None:
        """See `Device.wait`."""
        _call("cudaEventSynchronize", self._events[place])

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Device.capture`."""
        _call("cudaStreamBeginCapture", self._stream, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            work()
        finally:
            error, graph = cuda.cudaStreamEndCapture(self._stream)
        if error != cuda.cudaError_t.cudaSuccess:
            raise BackendError(f"A cycle cannot be recorded as a CUDA graph: {_text(error)}. Open the session with "
                               "cuda_graphs=False.")
        launchable = _call("cudaGraphInstantiate", graph, 0)
        _call("cudaGraphDestroy", graph)
        self._freed_by.append(lambda: cuda.cudaGraphExecDestroy(launchable))
        return lambda: _call("cudaGraphLaunch", launchable, self._stream)

    def close(self) -> None:
        """See `Device.close`."""
        _call("cudaStreamSynchronize", self._stream)
        self._loader.close()
        while self._freed_by:
            self._freed_by.pop()()
        for event in self._events:
            _call("cudaEventDestroy", event)
        _call("cudaStreamDestroy", self._stream)


def _call(name: str, *args: Any) -> Any:
    """Calls a function of the CUDA runtime; returns what it gives besides its status."""
    error, *found = getattr(cuda, name)(*args)
    if error != cuda.cudaError_t.cudaSuccess:
        raise BackendError(f"CUDA's {name} failed: {_text(error)}. Close other programs on the GPU and try again.")
    return found[0] if len(found) == 1 else found


def _text(error: Any) -> str:
    return str(cuda.cudaGetErrorString(error)[1].decode())


def open_on_gpu(name: str, bundle: Bundle, prefill_chunk_tokens: int, **options: Any) -> DeviceBackend:
    """Opens `ort-cuda`, `tensorrt` or `tensorrt-rtx`; options are those of `open_engines`."""
    if name == "ort-cuda":
        from dflash_runtime.ort_engine import OrtEngines

        device = CudaDevice(name, OrtEngines())
    else:
        from dflash_runtime.tensorrt_engine import TensorRTEngines

        device = CudaDevice(name, TensorRTEngines(name))
    try:
        return open_engines(name, bundle, device, prefill_chunk_tokens, **options)
    except BaseException:
        device.close()
        raise
