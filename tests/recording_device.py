"""A device whose memory is NumPy's and whose engines are ONNX models run by ONNX Runtime on that memory.

It works late, as a GPU may: what is enqueued runs when the host waits, and then up to the mark only. A host that reads
too early, or writes what a copy has not read yet, gets wrong tokens. Memory lies between guards, and every access is
checked against what was allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_runtime.device import ALIGNMENT_BYTES, Buffer
from dflash_runtime.device_engine import EngineProfile
from dflash_runtime.ort_engine import OrtContext, OrtEngine, OrtEngines

Array = npt.NDArray[Any]
GUARD_BYTES, GUARD = 4096, 0xA5
CPU = OrtEngines("CPUExecutionProvider", "cpu")
SESSIONS: dict[Any, Any] = {}  # they have no state; opening one takes its time


class RecordingDevice:
    captures = True

    def __init__(self, compute_capability: str = "8.9", tensorrt_version: str | None = "1.7.1") -> None:
        self.compute_capability, self.tensorrt_version = compute_capability, tensorrt_version
        self.log: list[tuple[Any, ...]] = []
        self.closed = False
        self.host_bytes = 0
        self.memory: dict[int, tuple[Array, int]] = {}
        self.marked: set[int] = set()
        self._queue: list[tuple[tuple[Any, ...], Callable[[], None]]] = []
        self._recording: list[tuple[tuple[Any, ...], Callable[[], None]]] | None = None

    def open_engine(self, path: Path, profiles: Sequence[EngineProfile]) -> RecordingEngine:
        return RecordingEngine(self, path, profiles)

    def allocate(self, size_bytes: int) -> Buffer:
        assert size_bytes > 0 and not self.closed
        whole = np.full(size_bytes + 2 * GUARD_BYTES + ALIGNMENT_BYTES, GUARD, np.uint8)
        address = -(-(whole.ctypes.data + GUARD_BYTES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.memory[address] = whole, size_bytes
        self.view(address, size_bytes)[:] = 0
        self.log.append(("allocate", size_bytes))
        return Buffer(address, size_bytes)

    def host_memory(self, size_bytes: int) -> Array:
        self.host_bytes += size_bytes
        self.log.append(("host", size_bytes))
        return np.zeros(size_bytes, np.uint8)

    def view(self, address: int, size_bytes: int) -> Array:
        """Device memory, which must be inside of one allocation."""
        inside = any(a <= address and address + size_bytes <= a + size for a, (_, size) in self.memory.items())
        assert inside, f"{size_bytes} bytes at {address:#x} were not allocated"
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))

    def upload(self, address: int, host: Array) -> None:
        self.enqueue(("upload", host.nbytes), lambda: np.copyto(self.view(address, host.nbytes), host.view(np.uint8)))

    def download(self, host: Array, address: int) -> None:
        self.enqueue(("download", host.nbytes), lambda: np.copyto(host, self.view(address, host.nbytes)))

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, row_bytes: int, rows: int
                  ) -> None:
        assert rows == 1 or (row_bytes <= target_pitch and row_bytes <= source_pitch)

        def copy() -> None:
            for row in range(rows):
                start, end = source + row * source_pitch, target + row * target_pitch
                assert abs(start - end) >= row_bytes, "a copy onto itself"
                np.copyto(self.view(end, row_bytes), self.view(start, row_bytes))

        self.enqueue(("copy", row_bytes, rows), copy)

    def clear(self, buffer: Buffer) -> None:
        self.enqueue(("clear", buffer.size_bytes), lambda: self.view(*buffer).fill(0))

    def mark(self, place: int = 0) -> None:
        assert self._recording is None
        self.marked.add(place)
        self.enqueue(("mark", place), lambda: None)

    def wait(self, place: int = 0) -> None:
        assert self._recording is None
        assert place in self.marked, "waits for a mark that was never made"
        self.log.append(("wait", place))
        marks = [i for i, (what, _) in enumerate(self._queue) if what == ("mark", place)]
        ready = marks[-1] if marks else 0  # it was reached while the host waited for a later one
        for _, work in [self._queue.pop(0) for _ in range(ready)]:
            work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self._recording = []
        work()
        recorded, self._recording = self._recording, None

        def run() -> None:
            for _, step in recorded:
                step()

        return lambda: self.enqueue(("launch",), run)

    def close(self) -> None:
        self.closed = True

    def enqueue(self, what: tuple[Any, ...], work: Callable[[], None]) -> None:
        assert not self.closed
        if self._recording is not None:
            self._recording.append((what, work))
            return
        self.log.append(what)
        self._queue.append((what, work))

    def finish(self) -> None:
        """Runs what is still enqueued."""
        queue, self._queue = self._queue, []
        for _, work in queue:
            work()

    def check_guards(self) -> None:
        for address, (whole, size) in self.memory.items():
            start = address - whole.ctypes.data
            assert (whole[:start] == GUARD).all() and (whole[start + size :] == GUARD).all()


class RecordingEngine(OrtEngine):
    def __init__(self, device: RecordingDevice, path: Path, profiles: Sequence[EngineProfile]) -> None:
        super().__init__(CPU, path, profiles, 0)
        self.device, self.kind, self.profiles, self.scratch_bytes = device, path.stem, profiles, 1000 + len(path.stem)

    def open_context(self, index: int, scratch: Buffer) -> OrtContext:
        assert scratch.size_bytes >= self.scratch_bytes
        made = super().open_context(index, scratch)
        made.__class__ = RecordingContext
        assert isinstance(made, RecordingContext)
        made.engine, made.profile, made.addresses = self, self.profiles[index], {}
        return made

    def open_session(self, sizes: Mapping[str, int]) -> Any:
        key = hash(self._path.read_bytes()), *sizes.items()
        if key not in SESSIONS:
            SESSIONS[key] = super().open_session(sizes)
        return SESSIONS[key]


class RecordingContext(OrtContext):
    engine: RecordingEngine
    profile: EngineProfile
    addresses: dict[str, int]

    def bind(self, addresses: Mapping[str, int]) -> None:
        assert not self.addresses, "bound twice"
        assert set(addresses) == set(self.sizes_bytes)
        self.addresses = dict(addresses)
        for name, address in addresses.items():
            assert address % ALIGNMENT_BYTES == 0, name
            self.engine.device.view(address, self.sizes_bytes[name])
        super().bind(addresses)

    def enqueue(self) -> None:
        what = self.engine.kind, self.profile.rows, self.profile.capacity_rows
        self.engine.device.enqueue(what, super().enqueue)
