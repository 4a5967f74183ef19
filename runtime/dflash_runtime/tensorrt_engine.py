"""Engines of TensorRT or TensorRT-RTX, a context for each profile: the only module that calls either.

Kernels that TensorRT-RTX compiles when an engine is opened are kept for the next time.
"""

from __future__ import annotations

import hashlib
import importlib
import mmap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflash_runtime.bundle import cache_root, write_atomically
from dflash_runtime.device import Buffer
from dflash_runtime.device_engine import EngineProfile
from dflash_runtime.errors import EngineError

_DIGEST_BYTES = 32


class TensorRTEngines:
    """Opens engine files; ModuleNotFoundError where `backend`, tensorrt or tensorrt-rtx, is not installed."""

    captures = True

    def __init__(self, backend: str) -> None:
        self._trt: Any = importlib.import_module(backend.replace("-", "_"))
        self.version: str | None = str(self._trt.__version__)
        self._log = self._trt.Logger(self._trt.Logger.WARNING)
        self._runtime: Any = None
        self._kernels: KernelCache | None = None

    def open(self, path: Path, profiles: Sequence[EngineProfile], stream: int) -> TensorRTEngine:
        """See `Device.open_engine`; the profiles are in the file too."""
        self._runtime = self._runtime or self._trt.Runtime(self._log)  # wants a GPU
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            engine = self._runtime.deserialize_cuda_engine(mapped)
        if engine is None:
            raise EngineError(f"TensorRT {self.version} cannot load {path}; its own message is above.")
        return TensorRTEngine(self._trt, engine, stream, path, self._create_config(engine, path))

    def close(self) -> None:
        """Keeps what was compiled."""
        if self._kernels is not None:
            self._kernels.save()

    def _create_config(self, engine: Any, path: Path) -> Any:
        """How contexts are made: scratch memory is ours, and TensorRT-RTX takes compiled kernels from the cache."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(engine, "create_runtime_config") or not hasattr(self._trt, "IRuntimeCache"):
            return strategy  # TensorRT compiles when it builds
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        self._kernels = self._kernels or KernelCache(config.create_runtime_cache(), path.parent, self.version)
        config.set_runtime_cache(self._kernels.cache)
        return config


class TensorRTEngine:
    """A loaded engine."""

    def __init__(self, trt: Any, engine: Any, stream: int, path: Path, config: Any) -> None:
        self._trt, self._engine, self._stream, self._path, self._config = trt, engine, stream, path, config
        self.scratch_bytes = int(engine.device_memory_size_v2)

    def open_context(self, index: int, scratch: Buffer) -> TensorRTContext:
        """See `Engine.open_context`."""
        trt, engine = self._trt, self._engine
        context = engine.create_execution_context(self._config)
        if context is not None:
            context.set_device_memory(scratch.address, scratch.size_bytes)
        if context is None or not context.set_optimization_profile_async(index, self._stream):
            raise EngineError(f"TensorRT cannot prepare profile {index} of {self._path}; its own message is above.")
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        if narrow := [name for name in names if engine.get_tensor_dtype(name) == trt.DataType.INT32]:
            raise EngineError(f"{self._path} has {', '.join(narrow)} in INT32; ids here are INT64. Build it again.")
        moving = [name for name in names if -1 in tuple(engine.get_tensor_shape(name))]
        for name in (name for name in moving if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT):
            # A profile allows one shape: smallest, best and largest are the same.
            if not context.set_input_shape(name, tuple(engine.get_tensor_profile_shape(name, index)[1])):
                raise EngineError(f"TensorRT refuses the shape of {name} in profile {index} of {self._path}.")
        sizes = {name: int(np.prod(tuple(context.get_tensor_shape(name)))) * engine.get_tensor_dtype(name).itemsize
                 for name in names}  # fmt: skip
        return TensorRTContext(context, sizes, self._stream, f"profile {index} of {self._path}")


class TensorRTContext:
    """An execution context that keeps to one profile."""

    def __init__(self, context: Any, sizes_bytes: Mapping[str, int], stream: int, what: str) -> None:
        self.sizes_bytes = sizes_bytes
        self._context, self._stream, self._what = context, stream, what

    def bind(self, addresses: Mapping[str, int]) -> None:
        """See `Context.bind`."""
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise EngineError(f"TensorRT refuses the address {address:#x} for {name} in {self._what}.")

    def enqueue(self) -> None:
        """See `Context.enqueue`."""
        if not self._context.execute_async_v3(self._stream):
            raise EngineError(f"TensorRT cannot run {self._what}; its own message is above.")


class KernelCache:
    """One runtime cache for all engines of a folder, filled from a file and saved when the device closes.

    The file is the sha256 of the rest, and what TensorRT gave. A damaged file, or one that TensorRT takes for that of
    another GPU, driver or version, is ignored with a warning, and replaced.

    Args:
        cache: TensorRT's own object.
        engines: Folder of the engines; it names backend and GPU.
        version: TensorRT's.
    """

    def __init__(self, cache: Any, engines: Path, version: str | None) -> None:
        self.cache, self._loaded = cache, b""
        self.path = cache_root() / "compiled-kernels" / f"{engines.name}-{version}.cache"
        try:
            data = self.path.read_bytes()
        except OSError:
            return  # the first time here
        digest, blob = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        whole = hashlib.sha256(blob).digest() == digest
        if whole and cache.deserialize(blob):
            self._loaded = digest
        else:
            fault = "of another GPU, driver or TensorRT" if whole else "damaged"
            warnings.warn(f"{self.path} is {fault} and ignored; kernels are compiled anew.", stacklevel=2)

    def save(self) -> None:
        """Writes the file if there is something new; a folder that cannot be written costs compiling again."""
        blob = bytes(self.cache.serialize())
        digest = hashlib.sha256(blob).digest()
        if digest == self._loaded:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, digest + blob)
        except OSError as error:
            warnings.warn(f"Compiled kernels are not kept: {error}", stacklevel=2)
