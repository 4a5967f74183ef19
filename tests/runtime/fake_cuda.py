"""Stand-ins for `cuda.bindings.runtime` and a TensorRT module: NumPy memory, calls recorded, statuses at will.

They have the names and the order of arguments of cuda-python 12 and 13 and of TensorRT 10; where the real packages are
installed, a test compares.
"""

from __future__ import annotations

import ctypes
import enum
import types
from typing import Any

import numpy as np


class Status(enum.IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815
    cudaErrorInsufficientDriver = 35  # noqa: N815


class FakeCuda(types.ModuleType):
    """Copies run at once; `fail` names the functions that report an error instead."""

    cudaError_t = Status  # noqa: N815
    cudaStreamNonBlocking, cudaEventDisableTiming, cudaHostAllocDefault = 1, 2, 0  # noqa: N815
    cudaDeviceAttr = types.SimpleNamespace(  # noqa: N815
        cudaDevAttrComputeCapabilityMajor=75, cudaDevAttrComputeCapabilityMinor=76
    )
    cudaMemcpyKind = types.SimpleNamespace(  # noqa: N815
        cudaMemcpyDefault="either way"
    )
    cudaStreamCaptureMode = types.SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.calls: list[tuple[Any, ...]] = []
        self.fail: dict[str, Status] = {}
        self.memory: dict[int, Any] = {}
        self.gives: dict[str, tuple[Any, ...]] = {
            "cudaGetDeviceCount": (1,), "cudaStreamCreateWithFlags": (77,), "cudaEventCreateWithFlags": ("event",),
            "cudaMalloc": (0,), "cudaMemGetInfo": (3 << 20, 8 << 20),
            "cudaStreamEndCapture": ("graph",), "cudaGraphInstantiate": ("exec",),
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            if name in self.fail:
                return (self.fail[name], *(None for _ in self.gives.get(name, ())))
            work = getattr(self, f"_{name}", None)
            return (Status.cudaSuccess, *(work(*args) if work is not None else self.gives.get(name, ())))

        return call

    def _cudaGetErrorString(self, status: Status) -> tuple[bytes]:  # noqa: N802
        return (status.name.encode(),)

    def _cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int]:  # noqa: N802
        return ({75: 8, 76: 9}[attribute],)

    def _cudaMalloc(self, size: int) -> tuple[int]:  # noqa: N802
        array = np.full(size, 0xA5, np.uint8)
        self.memory[array.ctypes.data] = array
        return (array.ctypes.data,)

    def _cudaHostAlloc(self, size: int, flags: int) -> tuple[int]:  # noqa: N802
        return self._cudaMalloc(size)

    def _cudaFree(self, address: int) -> tuple[()]:  # noqa: N802
        del self.memory[address]
        return ()

    _cudaFreeHost = _cudaFree  # noqa: N815

    def _cudaMemcpyAsync(self, to: int, source: int, size: int, kind: str, stream: int) -> tuple[()]:  # noqa: N802
        ctypes.memmove(to, source, size)
        return ()

    def _cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[()]:  # noqa: N802
        ctypes.memset(address, value, size)
        return ()

    def _cudaMemcpy2DAsync(self, to: int, to_pitch: int, source: int, source_pitch: int,  # noqa: N802
                           width: int, height: int, kind: str, stream: int) -> tuple[()]:
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, source + row * source_pitch, width)
        return ()


class FakeTensorRT(types.ModuleType):
    """An engine with two profiles: `ids` of 4 and 16 INT64, `weight` of a fixed shape, `taps` in halves."""

    __version__ = "10.3.0"
    DataType = types.SimpleNamespace(INT32=types.SimpleNamespace(itemsize=4))
    TensorIOMode = types.SimpleNamespace(INPUT="in", OUTPUT="out")
    ExecutionContextAllocationStrategy = types.SimpleNamespace(USER_MANAGED="by the user")
    class Logger:
        WARNING = 2

        def __init__(self, severity: int) -> None: ...

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []
        self.refuses: set[str] = set()
        self.tensors = {"ids": ("in", (1, -1), 8), "weight": ("in", (6, 8), 2), "taps": ("out", (1, -1, 8), 2)}

    def Runtime(self, log: Any) -> Any:  # noqa: N802
        return types.SimpleNamespace(
            deserialize_cuda_engine=lambda data: None if bytes(data) == b"broken" else _Engine(self)
        )


class _Engine:
    device_memory_size_v2, num_io_tensors = 4096, 3

    def __init__(self, trt: FakeTensorRT) -> None:
        self.trt = trt

    def get_tensor_name(self, index: int) -> str:
        return list(self.trt.tensors)[index]

    def get_tensor_mode(self, name: str) -> str:
        return self.trt.tensors[name][0]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.trt.tensors[name][1]

    def get_tensor_dtype(self, name: str) -> Any:
        size = self.trt.tensors[name][2]
        return self.trt.DataType.INT32 if size == 4 else types.SimpleNamespace(itemsize=size)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        assert name == "ids"
        return [(1, (4, 16)[profile])] * 3

    def create_execution_context(self, strategy: str) -> Any:
        self.trt.calls.append(("create", strategy))
        return None if "create" in self.trt.refuses else _Context(self.trt)


class _Context:
    def __init__(self, trt: FakeTensorRT) -> None:
        self.trt, self.shape = trt, (1, -1)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> bool:
            self.trt.calls.append((name, *args))
            if name == "set_input_shape":
                self.shape = args[1]
            return name not in self.trt.refuses

        return call

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.shape[1] if dim == -1 else dim for dim in self.trt.tensors[name][1])
