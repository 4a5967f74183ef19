"""Electrical power while something runs, where the board reports it: `tegrastats` on a Jetson, nvidia-smi on a card."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

INTERVAL_MS = 100
_TOTAL_RAILS = ("VDD_IN", "VIN")
"""What the module draws in all: Orin NX and Nano, Thor. AGX Orin has no such rail, and its rails are added up."""


def parse_tegrastats(line: str) -> float | None:
    """Watts of the module in a line of tegrastats; None in a line without rails."""
    rails = {name: int(now) for name, now in re.findall(r"\b(V\w+) (\d+)mW/\d+mW", line)}
    for name in _TOTAL_RAILS:
        if name in rails:
            return rails[name] / 1000
    return sum(rails.values()) / 1000 if rails else None


def parse_nvidia_smi(line: str) -> float | None:
    """Watts of the card; None where it does not say."""
    return float(line) if re.fullmatch(r"\d+(\.\d+)?", line.strip()) else None


class PowerMeter:
    """Reads power in the background; a context manager. Without a source it measures nothing."""

    def __init__(self, *, uses_gpu: bool, command: Sequence[str] | None = None) -> None:
        """Looks for a source.

        Args:
            uses_gpu: nvidia-smi is asked only where the GPU does the work.
            command: Command to read instead, in the format of tegrastats; for tests.
        """
        self.source: str | None = None
        """What the watts are of, in words."""
        self.samples: list[tuple[float, float]] = []
        """Time on the clock `time.monotonic`, watts."""
        self._command: list[str] = []
        self._parse: Callable[[str], float | None] = parse_tegrastats
        if command is not None or shutil.which("tegrastats"):
            self.source = "the whole module (tegrastats)"
            self._command = list(command or ["tegrastats", "--interval", str(INTERVAL_MS)])
        elif uses_gpu and shutil.which("nvidia-smi"):
            self.source = "the graphics card (nvidia-smi)"
            query = ["--id=0", "--query-gpu=power.draw", "--format=csv,noheader,nounits", f"-lms={INTERVAL_MS}"]
            self._command, self._parse = ["nvidia-smi", *query], parse_nvidia_smi
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> PowerMeter:
        if self._command:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._reader is not None:
            self._process.terminate()
            self._process.wait()
            self._reader.join()

    def energy_joules(self, started_s: float, ended_s: float) -> float | None:
        """Energy between two moments of `time.monotonic`; None where the samples do not reach over them."""
        return energy_joules(self.samples, started_s, ended_s)

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            watts = self._parse(line)
            if watts is not None:
                self.samples.append((time.monotonic(), watts))


def energy_joules(samples: Sequence[tuple[float, float]], started_s: float, ended_s: float) -> float | None:
    """Integral of power over time, straight lines between samples.

    Args:
        samples: (seconds, watts), ascending.
        started_s: Begin, on the samples' clock.
        ended_s: End.

    Returns:
        Joules, or None where a sample is missing before the begin or after the end.
    """
    if not samples or samples[0][0] > started_s or samples[-1][0] < ended_s:
        return None
    total = 0.0
    for (t0, p0), (t1, p1) in itertools.pairwise(samples):
        low, high = max(t0, started_s), min(t1, ended_s)
        if high > low:
            slope = (p1 - p0) / (t1 - t0)
            total += (high - low) * (p0 + slope * ((low + high) / 2 - t0))
    return total
