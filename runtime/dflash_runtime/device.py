"""What a GPU has to do for the device backends. Everything above is plain Python that never calls CUDA itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from dflash_runtime.device_engine import EngineProfile

Array = npt.NDArray[Any]
ALIGNMENT_BYTES = 256
"""TensorRT wants the addresses of tensors at multiples of it."""


class Buffer(NamedTuple):
    """A piece of device memory."""

    address: int
    size_bytes: int


class Context(Protocol):
    """One engine at one of its profiles."""

    sizes_bytes: Mapping[str, int]
    """Size of every I/O tensor at the shapes of the profile."""

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Says where each I/O tensor lies, for good."""

    def enqueue(self) -> None:
        """Runs once, behind what was enqueued before."""


class Engine(Protocol):
    """A built graph, loaded."""

    scratch_bytes: int
    """Most device memory one call needs."""

    def open_context(self, index: int, scratch: Buffer) -> Context:
        """Prepares the profile of this index; contexts may share `scratch`, as calls run one after another."""


class Device(Protocol):
    """One GPU with one stream: what is enqueued runs in order, and the host goes on at once."""

    compute_capability: str
    """`8.9`"""
    tensorrt_version: str | None
    """None where engines are graphs that ONNX Runtime opens: they fit any GPU and any version."""
    captures: bool
    """Whether engines are known to run inside of `capture`."""

    def open_engine(self, path: Path, profiles: Sequence[EngineProfile]) -> Engine:
        """Loads an engine file. Raises EngineError where it is refused."""

    def allocate(self, size_bytes: int) -> Buffer:
        """Zeroed device memory, aligned. Raises BackendError where there is too little."""

    def host_memory(self, size_bytes: int) -> Array:
        """UINT8 host memory that copies read and write while the host goes on; 0 at first."""

    def upload(self, address: int, host: Array) -> None:
        """Enqueues a copy from `host_memory`."""

    def download(self, host: Array, address: int) -> None:
        """Enqueues a copy to `host_memory`."""

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, row_bytes: int, rows: int
                  ) -> None:
        """Enqueues a copy on the device of `rows` pieces of `row_bytes`, each a pitch after the one before."""

    def clear(self, buffer: Buffer) -> None:
        """Enqueues filling with zeros."""

    def mark(self, place: int = 0) -> None:
        """Enqueues one of two marks for the next `wait`."""

    def wait(self, place: int = 0) -> None:
        """Returns once the last of these marks is reached."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` enqueues, without running it; the result enqueues all of it at once."""

    def close(self) -> None:
        """Frees everything."""


def aligned(size_bytes: int) -> int:
    """The next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
