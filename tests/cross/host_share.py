"""What Python itself takes of a cycle of the device backend, on a device whose work this CPU does.

Time in the device's own functions, which run the graphs here, is the cycle; the rest is the host's. It is the
decoding thread's processor time, so that other work on the machine does not count. By hand:

    PYTHONPATH=tests:tests/cross python tests/cross/host_share.py [BLOCK [BUNDLE]]

with a bundle in fp32, or the tiny pair.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pairs import MAIN, export_quickly
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice

from dflash_runtime.backend import Round
from dflash_runtime.bundle import Bundle
from dflash_runtime.decode import decode
from dflash_runtime.device_backend import DeviceBackend, open_engines

THE_DEVICES = ("upload", "download", "copy_rows", "clear", "mark", "wait", "enqueue", "capture")
CHUNK, NEW_TOKENS = 32, 120


class TimedDevice(RecordingDevice):
    """Knows how long it was at work, and whether it is."""

    def __init__(self) -> None:
        super().__init__()
        self.spent_s, self.depth = 0.0, 0
        for name in THE_DEVICES:
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def call(*args: Any) -> Any:
            self.depth += 1
            started = time.thread_time()
            try:
                return work(*args)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.spent_s += time.thread_time() - started

        return call


class Share(NamedTuple):
    """Seconds per cycle."""

    host_s: float
    cycle_s: float

    @property
    def percent(self) -> float:
        return 100 * self.host_s / self.cycle_s


def open_timed(bundle: Bundle, form: str, block_sizes: list[int]) -> tuple[DeviceBackend, TimedDevice]:
    """A backend with engines of these block sizes."""
    write_recorded_engines(bundle, form, block_sizes, CHUNK)
    device = TimedDevice()
    return open_engines(BACKENDS[form], bundle, device, 128), device


def cycles_of(backend: DeviceBackend, block_size: int, new_tokens: int = NEW_TOKENS) -> Iterator[Round]:
    """The cycles of a request; the prompt has been read."""
    rounds = decode(backend, [5, 6, 7], max_new_tokens=new_tokens, stop_token_ids=(), max_context_tokens=160,
                    block_size_of=lambda n: block_size)  # fmt: skip
    next(rounds)
    return rounds


def measure_share(backend: DeviceBackend, device: TimedDevice, block_size: int, new_tokens: int = NEW_TOKENS) -> Share:
    """Measures the second of two requests: the first prepares and captures."""
    for _ in cycles_of(backend, block_size, 3 * block_size):
        pass
    rounds = cycles_of(backend, block_size, new_tokens)
    device.spent_s, started = 0.0, time.thread_time()
    count = sum(1 for _ in rounds)
    whole = time.thread_time() - started
    return Share((whole - device.spent_s) / count, device.spent_s / count)


def main() -> None:
    block_size = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "bundle"
        if len(sys.argv) > 2:
            root.mkdir()
            for path in Path(sys.argv[2]).resolve().iterdir():
                if path.name != "engines":
                    (root / path.name).symlink_to(path)
        else:
            export_quickly(MAIN, Path(folder))
        bundle = Bundle.open(root)
        for form in BACKENDS:
            backend, device = open_timed(bundle, form, bundle.manifest.block_sizes)
            share = measure_share(backend, device, block_size)
            print(f"{form}, block {block_size}: host {1e6 * share.host_s:.0f} us, cycle {1e6 * share.cycle_s:.0f} us, "
                  f"{share.percent:.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
