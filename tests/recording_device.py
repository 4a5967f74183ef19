"""A device whose memory is NumPy's and whose engines are ONNX models run by ONNX Runtime on that memory.

It works late, as a GPU may: what is enqueued runs when the host waits, and then up to the mark only. A host that reads
too early, or writes what a copy has not read yet, gets wrong tokens. Memory lies between guards, and every access is
checked against what was allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from dflash_runtime.device import ALIGNMENT_BYTES, Buffer
from dflash_runtime.device_engine import GraphEngine, read_device_engine

Array = npt.NDArray[Any]
GUARD_BYTES, GUARD = 4096, 0xA5
TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}


class RecordingDevice:
    def __init__(self, compute_capability: str = "8.9", tensorrt_version: str = "1.7.1") -> None:
        self.compute_capability, self.tensorrt_version = compute_capability, tensorrt_version
        self.log: list[tuple[Any, ...]] = []
        self.closed = False
        self.host_bytes = 0
        self.memory: dict[int, tuple[Array, int]] = {}
        self._queue: list[tuple[str, Callable[[], None]]] = []
        self._recording: list[tuple[tuple[Any, ...], Callable[[], None]]] | None = None

    def open_engine(self, path: Path) -> RecordingEngine:
        record = read_device_engine(path.parent, "none")
        facts = next(engine for engine in record.engines if engine.file == path.name)
        return RecordingEngine(self, path, facts)

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

    def mark(self) -> None:
        assert self._recording is None
        self.enqueue(("mark",), lambda: None)

    def wait(self) -> None:
        assert self._recording is None
        self.log.append(("wait",))
        marks = [i for i, (name, _) in enumerate(self._queue) if name == "mark"]
        assert marks, "waits for a mark that was never made"
        ready, self._queue = self._queue[: marks[-1]], self._queue[marks[-1] + 1 :]
        for _, work in ready:
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
        self._queue.append((what[0], work))

    def finish(self) -> None:
        """Runs what is still enqueued."""
        queue, self._queue = self._queue, []
        for _, work in queue:
            work()

    def check_guards(self) -> None:
        for address, (whole, size) in self.memory.items():
            start = address - whole.ctypes.data
            assert (whole[:start] == GUARD).all() and (whole[start + size :] == GUARD).all()


class RecordingEngine:
    def __init__(self, device: RecordingDevice, path: Path, facts: GraphEngine) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(path.read_bytes(), options, ["CPUExecutionProvider"])
        self.device, self.facts, self.scratch_bytes = device, facts, 1000 + len(facts.kind)

    def open_context(self, profile: int, scratch: Buffer) -> RecordingContext:
        assert scratch.size_bytes >= self.scratch_bytes
        return RecordingContext(self, profile)


class RecordingContext:
    def __init__(self, engine: RecordingEngine, index: int) -> None:
        profile = engine.facts.profiles[index]
        letters = {"S": profile.rows, "b": profile.rows, "R": profile.logit_rows, "T": profile.capacity_rows, "B": 1}
        letters["b-1"] = profile.rows - 1
        self.engine, self.profile = engine, profile
        self.inputs, self.outputs = engine.session.get_inputs(), engine.session.get_outputs()
        self.shapes = {
            value.name: [d if isinstance(d, int) else letters[d] for d in value.shape]
            for value in (*self.inputs, *self.outputs)
        }
        self.types = {value.name: np.dtype(TYPES[value.type]) for value in (*self.inputs, *self.outputs)}
        self.sizes_bytes = {
            name: int(np.prod(shape)) * self.types[name].itemsize for name, shape in self.shapes.items()
        }
        self.binding: Any = None
        self.addresses: dict[str, int] = {}

    def bind(self, addresses: Mapping[str, int]) -> None:
        assert self.binding is None, "bound twice"
        assert set(addresses) == set(self.sizes_bytes)
        self.addresses, self.binding = dict(addresses), self.engine.session.io_binding()
        for values, bind in ((self.inputs, self.binding.bind_input), (self.outputs, self.binding.bind_output)):
            for name in (value.name for value in values):
                assert addresses[name] % ALIGNMENT_BYTES == 0, name
                self.engine.device.view(addresses[name], self.sizes_bytes[name])
                bind(name, "cpu", 0, self.types[name].type, self.shapes[name], addresses[name])

    def enqueue(self) -> None:
        work = self.engine.session.run_with_iobinding
        self.engine.device.enqueue(
            (self.engine.facts.kind, self.profile.rows, self.profile.capacity_rows), lambda: work(self.binding)
        )
