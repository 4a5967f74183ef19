"""Measures what Python itself takes of a cycle of the device backend, by hand:

    PYTHONPATH=tests:tests/cross python tests/cross/host_share.py [BLOCK [BUNDLE]]

A bundle in fp32, or the tiny pair, runs on the recording device: time in the device's own functions, which run the
graphs on this CPU, is the cycle; the rest is the host's. Processor time, so that other work here does not count.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pairs import MAIN, export_quickly
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice

from dflash_runtime.bundle import Bundle
from dflash_runtime.decode import decode
from dflash_runtime.device_backend import open_engines

TIMED = ("upload", "download", "copy_rows", "clear", "mark", "wait", "enqueue", "capture")


class TimedDevice(RecordingDevice):
    def __init__(self) -> None:
        super().__init__()
        self.spent_s, self._depth = 0.0, 0
        for name in TIMED:
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def call(*args: Any) -> Any:
            self._depth += 1
            started = time.process_time()
            try:
                return work(*args)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.spent_s += time.process_time() - started

        return call


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
            write_recorded_engines(bundle, form, bundle.manifest.block_sizes, 32)
            device = TimedDevice()
            backend = open_engines(BACKENDS[form], bundle, device, 128)
            for _ in range(2):  # the first request prepares and captures
                rounds = decode(backend, [5, 6, 7], max_new_tokens=120, stop_token_ids=(), max_context_tokens=160,
                                block_size_of=lambda n: block_size)  # fmt: skip
                next(rounds)
                device.spent_s, started = 0.0, time.process_time()
                count = sum(1 for _ in rounds)
                whole = time.process_time() - started
            host_us, cycle_us = (1e6 * s / count for s in (whole - device.spent_s, device.spent_s))
            print(f"{form}, block {block_size}: host {host_us:.0f} us, cycle {cycle_us:.0f} us, "
                  f"{100 * host_us / cycle_us:.1f} %")  # fmt: skip


if __name__ == "__main__":
    main()
