"""`chat` on a real terminal: a pseudo-terminal whose Ctrl-C reaches the process as a person's does."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_bundle import Sizes, write_bundle

TIMEOUT_S = 60.0
SLOW_ROUNDS = """
import time
import dflash_runtime.session as session
true = session.TextPieces._next_round
def slow(self):
    time.sleep(0.15)
    return true(self)
session.TextPieces._next_round = slow
"""


class Person:
    """Types, and reads what the screen shows."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(SLOW_ROUNDS, encoding="utf-8")
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.seen = ""
        child, self._screen = pty.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
            env = {**os.environ, "PYTHONPATH": path, "TERM": "dumb"}
            os.execve(sys.executable, [sys.executable, "-m", "dflash_tools.cli", *arguments], env)
        self._child = child

    def types(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def waits_for(self, text: str) -> str:
        """What came up to it."""
        assert self.sees(text, TIMEOUT_S), (text, self.seen)
        found, _, self.seen = self.seen.partition(text)
        return found

    def sees(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < deadline:
            if select.select([self._screen], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self._screen, 4096).decode(errors="replace")
                except OSError:  # Linux says so where the other end is closed
                    return False
        return text in self.seen

    def interrupts_at_the_prompt(self, text: str) -> None:
        """A Ctrl-C between readline's prompt and its waiting is seen by Python at the end of the line."""
        self.types("\x03")
        if not self.sees(text, 2):
            self.types("\n")

    def exit_code(self) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            done, status = os.waitpid(self._child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            if select.select([self._screen], [], [], 0.05)[0]:
                try:
                    os.read(self._screen, 4096)  # a full screen would hold the process up
                except OSError:  # Linux says so where the other end is closed
                    time.sleep(0.05)
        raise AssertionError("it does not end")


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    path = write_bundle(tmp_path / "talker", Sizes(likely_tokens=3, max_context=400))
    made = Person(["chat", str(path), "--max-new-tokens", "60", "--threads", "1", "--show-blocks"], tmp_path)
    yield made
    try:
        os.kill(made._child, signal.SIGKILL)
        os.waitpid(made._child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # it has ended, as it should
    os.close(made._screen)


def test_a_person_stops_an_answer_and_goes_on(person: Person) -> None:
    greeting = person.waits_for("> ")
    assert "toy-drafter on ort-cpu" in greeting and "accepted by the target" in greeting
    person.types("hello\n")
    person.waits_for("hello")  # the echo
    person.waits_for("b")  # the answer has begun
    person.types("\x03")
    person.waits_for("[stopped: what was said so far stays in the conversation]")
    person.waits_for("> ")
    person.types("/stats\n")
    assert "tokens, then stopped" in person.waits_for("Conversation: 2 messages")
    person.waits_for("> ")
    person.interrupts_at_the_prompt("Ctrl-C once more ends the chat")
    person.waits_for("Ctrl-C once more ends the chat")
    person.waits_for("> ")
    person.types("/reset\n")
    person.waits_for("A new conversation.")
    person.waits_for("> ")
    person.interrupts_at_the_prompt("Ctrl-C once more ends the chat")
    person.waits_for("Ctrl-C once more ends the chat")
    person.waits_for("> ")
    person.interrupts_at_the_prompt("there is no such text: it ends")
    assert person.exit_code() == 130


def test_the_end_of_input_ends_it(person: Person) -> None:
    person.waits_for("> ")
    person.types("\x04")
    assert person.exit_code() == 0
