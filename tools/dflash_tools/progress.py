"""Progress of long work on a terminal: one line that rewrites itself, silence everywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

MIN_INTERVAL_S = 0.1
MIN_ESTIMATE_S = 2.0
"""No estimate of the time left before a stage has run this long: it would jump about."""


class ProgressLine:
    """A callable `(stage, done, total)` that shows the stage, its share done and the time left.

    Every finished stage stays on the screen with its duration. Writes nothing unless the stream is a terminal.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._stage: str | None = None
        self._stage_started_s = 0.0
        self._last_write_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` units of `stage` are finished."""
        if not self._shown:
            return
        now = time.monotonic()
        if stage != self._stage:
            self._finish_stage(now)
            self._stage, self._stage_started_s = stage, now
        elif done < total and now - self._last_write_s < MIN_INTERVAL_S:
            return
        self._last_write_s = now
        self._write(f"{stage}{describe_share(done, total, now - self._stage_started_s)}")

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._finish_stage(time.monotonic())

    def _finish_stage(self, now: float) -> None:
        if self._stage is not None:
            self._write(f"{self._stage}: {now - self._stage_started_s:.1f} s")
            self._stream.write("\n")
            self._stream.flush()
            self._stage = None

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


def describe_share(done: int, total: int, elapsed_s: float) -> str:
    """` 40 %, 12 s left`, or less where less is known."""
    if total <= 1 or done <= 0:
        return " ..."
    share = f" {100 * done // total} %"
    if elapsed_s < MIN_ESTIMATE_S or done >= total:
        return share
    return f"{share}, {elapsed_s * (total - done) / done:.0f} s left"
