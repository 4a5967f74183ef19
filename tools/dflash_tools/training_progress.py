"""What a training shows on a terminal: one line that rewrites itself, and a line that stays for every measurement."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from dflash_tools.acceptance import MeanAcceptance
from dflash_tools.progress import MIN_INTERVAL_S, ProgressLine, describe_share
from dflash_tools.sizes import bytes_text


class TrainingProgress:
    """Loss, predicted acceptance length and time left; silent unless the stream is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._line = ProgressLine(self._stream)
        self._started_s = self._last_write_s = 0.0
        self._first_step = self._num_steps = self._steps_per_epoch = 0
        self._acceptance = ""

    def stage(self, stage: str, done: int, total: int) -> None:
        """Shows that `done` of `total` units of a stage before the training are finished."""
        self._line(stage, done, total)

    def say_tap_size(self, size_bytes: int, num_texts: int) -> None:
        """Says what the cache of taps will take, before it is made."""
        self._keep(f"taps of {num_texts} texts: {bytes_text(size_bytes)} on disk")

    def start(self, step: int, num_steps: int, steps_per_epoch: int) -> None:
        """The training begins at `step`."""
        self._line.__exit__(None, None, None)
        self._started_s = time.monotonic()
        self._first_step, self._num_steps, self._steps_per_epoch = step, num_steps, steps_per_epoch

    def step(self, step: int, loss: float, measured: MeanAcceptance | None) -> None:
        """A step is done."""
        if not self._shown:
            return
        if measured is not None:
            self._acceptance = f"  acceptance length {measured.over_rounds:.2f}"
        now = time.monotonic()
        if measured is None and step < self._num_steps and now - self._last_write_s < MIN_INTERVAL_S:
            return
        self._last_write_s = now
        done, total = step - self._first_step, self._num_steps - self._first_step
        share = describe_share(done, total, now - self._started_s)
        epoch = (step - 1) // self._steps_per_epoch + 1
        text = f"step {step}/{self._num_steps}  epoch {epoch}  loss {loss:.3f}{self._acceptance} {share}"
        if measured is not None or step == self._num_steps:
            self._keep(text)
        else:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def _keep(self, text: str) -> None:
        if self._shown:
            self._stream.write(f"\r\x1b[K{text}\n")
            self._stream.flush()
