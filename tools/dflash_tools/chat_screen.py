"""Where `chat` reads lines and writes answers: a terminal, or pipes, which get the answers and nothing around them."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

import click

PROMPT = "> "


class ChatScreen:
    """Standard input and output. Notes go to standard error."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):  # not on Windows; where it is, input() gets editing and a history
                import readline  # noqa: F401

    def read(self) -> str | None:
        """The next line without its end; None behind the last one.

        Raises:
            KeyboardInterrupt: Ctrl-C for the second time; anywhere but on a terminal for the first.
        """
        if not self.interactive:
            line = sys.stdin.readline()
            return line.removesuffix("\n") if line else None
        try:
            return self._input()
        except KeyboardInterrupt:
            self.note("\nCtrl-C once more ends the chat, as /exit and Ctrl-D do.")
            return self._input()

    def write(self, text: str) -> None:
        """A piece of an answer, shown at once."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Something that is no answer."""
        click.echo(text, err=True)

    def interruption(self) -> Interruption:
        """To be entered around everything that is done about a message."""
        return Interruption(self.interactive)

    def _input(self) -> str | None:
        try:
            return input(PROMPT)
        except EOFError:
            self.note("")
            return None


class Interruption:
    """Inside of it Ctrl-C asks for the end and breaks nothing off, so that session and conversation stay whole.

    Args:
        active: Whether it does so at all.
    """

    def __init__(self, active: bool) -> None:
        self.asked, self._active = False, active
        self.may_break = False
        """Where it is set, a second Ctrl-C raises KeyboardInterrupt."""
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and self.may_break:
            raise KeyboardInterrupt
        self.asked = True
