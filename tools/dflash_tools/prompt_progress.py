"""How far a long prompt is read, on a terminal: a line that goes away before the answer begins."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from dflash_tools.progress import describe_share


class PromptProgress:
    """A `GenerationConfig.progress`. Writes to standard error, and nothing where that is no terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty()
        self._begun: tuple[int, float] | None = None
        self._written = False

    def __call__(self, done: int, total: int) -> None:
        """Shows how many of so many tokens are read."""
        if not self._shown:
            return
        now = time.monotonic()
        first_done, started_s = self._begun = self._begun or (done, now)
        if done < total:
            left = describe_share(done - first_done, total - first_done, now - started_s).partition(", ")[2]
            self._write(f"reading the prompt: {done:,} of {total:,} tokens{left and ', ' + left}")
        else:
            self.clear()

    def clear(self) -> None:
        """Takes the line away."""
        if self._written:
            self._write("")
        self._begun, self._written = None, False

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
        self._written = True
