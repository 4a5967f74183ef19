"""A `Device` made of cuda-python and a TensorRT: the only module that calls either."""

from __future__ import annotations

import ctypes
import importlib
import mmap
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from dflash_runtime.device import Array, Buffer
from dflash_runtime.errors import BackendError, EngineError

cuda: Any = importlib.import_module("cuda.bindings.runtime")  # untyped; its absence is the caller's to explain

_MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_PACKAGES = {"tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"), "tensorrt-rtx": ("tensorrt-rtx",)}


class CudaDevice:
    """The first GPU, with one stream.

    Args:
        backend: `tensorrt` or `tensorrt-rtx`.

    Raises:
        BackendError: there is no GPU, or no driver for it.
        ModuleNotFoundError: the TensorRT is not installed.
    """

    def __init__(self, backend: str) -> None:
        self._trt: Any = importlib.import_module(_MODULES[backend])
        self._freed_by: list[Callable[[], object]] = []
        error, count = cuda.cudaGetDeviceCount()
        if error != cuda.cudaError_t.cudaSuccess or not count:
            raise BackendError(
                f"Backend {backend!r} needs an NVIDIA GPU and there is none: {_text(error) if error else 'no device'}. "
                "Use --backend ort-cpu, or run dflash-export doctor."
            )
        numbers = (getattr(cuda.cudaDeviceAttr, f"cudaDevAttrComputeCapability{part}") for part in ("Major", "Minor"))
        self.compute_capability = ".".join(str(_call("cudaDeviceGetAttribute", number, 0)) for number in numbers)
        self.tensorrt_version = _version(backend, self._trt)
        _call("cudaSetDevice", 0)
        self._stream = _call("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        self._event = _call("cudaEventCreateWithFlags", cuda.cudaEventDisableTiming)
        self._log = self._trt.Logger(self._trt.Logger.WARNING)
        self._runtime = self._trt.Runtime(self._log)

    def open_engine(self, path: Path) -> CudaEngine:
        """See `Device.open_engine`."""
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            engine = self._runtime.deserialize_cuda_engine(mapped)
        if engine is None:
            raise EngineError(f"TensorRT {self.tensorrt_version} cannot load {path}; its own message is above.")
        return CudaEngine(self._trt, engine, self._stream, path)

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
        kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        _call("cudaMemcpyAsync", address, host.ctypes.data, host.nbytes, kind, self._stream)

    def download(self, host: Array, address: int) -> None:
        """See `Device.download`."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        _call("cudaMemcpyAsync", host.ctypes.data, address, host.nbytes, kind, self._stream)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, row_bytes: int, rows: int
                  ) -> None:
        """See `Device.copy_rows`."""
        kind = cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        _call("cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, row_bytes, rows, kind, self._stream)

    def clear(self, buffer: Buffer) -> None:
        """See `Device.clear`."""
        _call("cudaMemsetAsync", buffer.address, 0, buffer.size_bytes, self._stream)

    def mark(self) -> None:
        """See `Device.mark`."""
        _call("cudaEventRecord", self._event, self._stream)

    def wait(self) -> None:
        """See `Device.wait`."""
        _call("cudaEventSynchronize", self._event)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Device.capture`."""
        _call("cudaStreamBeginCapture", self._stream, cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            work()
        finally:
            graph = _call("cudaStreamEndCapture", self._stream)
        launchable = _call("cudaGraphInstantiate", graph, 0)
        _call("cudaGraphDestroy", graph)
        self._freed_by.append(lambda: cuda.cudaGraphExecDestroy(launchable))
        return lambda: _call("cudaGraphLaunch", launchable, self._stream)

    def close(self) -> None:
        """See `Device.close`."""
        _call("cudaStreamSynchronize", self._stream)
        while self._freed_by:
            self._freed_by.pop()()
        _call("cudaEventDestroy", self._event)
        _call("cudaStreamDestroy", self._stream)


class CudaEngine:
    """A loaded TensorRT engine."""

    def __init__(self, trt: Any, engine: Any, stream: Any, path: Path) -> None:
        self._trt, self._engine, self._stream, self._path = trt, engine, stream, path
        self.scratch_bytes = int(engine.device_memory_size_v2)

    def open_context(self, profile: int, scratch: Buffer) -> CudaContext:
        """See `Engine.open_context`."""
        trt, engine = self._trt, self._engine
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is not None:
            context.set_device_memory(scratch.address, scratch.size_bytes)
        if context is None or not context.set_optimization_profile_async(profile, int(self._stream)):
            raise EngineError(f"TensorRT cannot prepare profile {profile} of {self._path}; its own message is above.")
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        moving = [name for name in names if -1 in tuple(engine.get_tensor_shape(name))]
        for name in (name for name in moving if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT):
            # A profile allows one shape: smallest, best and largest are the same.
            if not context.set_input_shape(name, tuple(engine.get_tensor_profile_shape(name, profile)[1])):
                raise EngineError(f"TensorRT refuses the shape of {name} in profile {profile} of {self._path}.")
        sizes = {
            name: int(np.prod(tuple(context.get_tensor_shape(name)))) * engine.get_tensor_dtype(name).itemsize
            for name in names
        }
        return CudaContext(context, sizes, self._stream, f"profile {profile} of {self._path}")


class CudaContext:
    """An execution context that keeps to one profile."""

    def __init__(self, context: Any, sizes_bytes: Mapping[str, int], stream: Any, what: str) -> None:
        self.sizes_bytes = sizes_bytes
        self._context, self._stream, self._what = context, int(stream), what

    def bind(self, addresses: Mapping[str, int]) -> None:
        """See `Context.bind`."""
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise EngineError(f"TensorRT refuses the address {address:#x} for {name} in {self._what}.")

    def enqueue(self) -> None:
        """See `Context.enqueue`."""
        if not self._context.execute_async_v3(self._stream):
            raise EngineError(f"TensorRT cannot run {self._what}; its own message is above.")


def _call(name: str, *args: Any) -> Any:
    """Calls a function of the CUDA runtime; returns what it gives besides its status."""
    error, *found = getattr(cuda, name)(*args)
    if error != cuda.cudaError_t.cudaSuccess:
        raise BackendError(f"CUDA's {name} failed: {_text(error)}. Close other programs on the GPU and try again.")
    return found[0] if len(found) == 1 else found


def _text(error: Any) -> str:
    return str(cuda.cudaGetErrorString(error)[1].decode())


def _version(backend: str, module: Any) -> str:
    """As the builder states it: of the package, or on a Jetson, whose TensorRT has none, of the module."""
    for package in _PACKAGES[backend]:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return str(module.__version__)
