"""`chat`: piped, on a terminal, and interrupted."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from cli_calls import Invoke
from click.testing import CliRunner
from tiny_bundle import Sizes, write_bundle

from dflash_runtime import GenerationConfig, NumericsError, Session
from dflash_runtime.backend import Round
from dflash_tools import chat_turns
from dflash_tools.chat_blocks import BlockPainter
from dflash_tools.chat_command import converse
from dflash_tools.chat_loop import Chat
from dflash_tools.chat_screen import ChatScreen
from dflash_tools.conversation import Message, read_conversation, write_conversation

THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}assistant: "
)


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """A pair with room for a conversation."""
    return write_bundle(tmp_path / "talker", Sizes(likely_tokens=3, max_context=400))


def turns(path: Path, said: list[str], *, system: str | None = None, **options: Any) -> list[str]:
    """What a session says to each, with nothing kept."""
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    config, answers = GenerationConfig(max_new_tokens=12, reuse_prefix=False, **options), []
    with Session.open(path, threads=1) as session:
        for text in said:
            messages.append({"role": "user", "content": text})
            answers.append(session.generate(messages, config).text)
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def chat(invoke: Invoke, path: Path, *lines: str, options: tuple[object, ...] = ()) -> Any:
    return invoke("chat", path, "--max-new-tokens", 12, "--threads", 1, *options, stdin="\n".join(lines))


def test_piped_lines_are_answered_and_nothing_else_is_printed(invoke: Invoke, talker: Path) -> None:
    done = chat(invoke, talker, "hello", "", "and now?", "third")
    assert done.exit_code == 0
    assert done.stdout == "".join(f"{answer}\n" for answer in turns(talker, ["hello", "and now?", "third"]))
    assert done.stderr == "[cut at --max-new-tokens 12]\n" * 3
    assert "\x1b" not in done.stdout + done.stderr and "> " not in done.stdout


def test_the_options_of_run(invoke: Invoke, talker: Path) -> None:
    said = ["hello", "again"]
    for options, config in (
        (("--plain",), {"plain": True}),
        (("--block-size", 8), {"block_size": 8}),
        (("--system", "Be brief."), {"system": "Be brief."}),
        (("--temperature", 0.8, "--seed", 3), {"temperature": 0.8, "seed": 3}),
    ):
        done = chat(invoke, talker, *said, options=options)
        assert done.stdout.split("\n")[:-1] == "\n".join(turns(talker, said, **config)).split("\n")
    refused = chat(invoke, talker, "hello", options=("--block-size", 9))
    assert refused.exit_code == 1 and refused.stderr.startswith("Error: block_size is 9")


def test_rows_are_kept_from_turn_to_turn(invoke: Invoke, talker: Path) -> None:
    done = chat(invoke, talker, "hello", "/stats", "again", "/stats")
    told = re.findall(r"(\d+) of (\d+) prompt tokens were there already", done.stderr)
    (first_kept, first), (kept, both) = [(int(a), int(b)) for a, b in told]
    assert first_kept == 0 and kept >= first > 0 and both > 2 * first
    assert "12 tokens (length)" in done.stderr and "tokens a round in" in done.stderr
    assert "Block sizes chosen by tokens per millisecond" in done.stderr  # as `run`, which chooses by default
    assert re.search(r"Conversation: 4 messages, \d+ of 400 tokens", done.stderr)
    assert "No answer yet." in chat(invoke, talker, "/stats").stderr


@pytest.mark.parametrize(("option", "args"), [
    ("--thinking", {"enable_thinking": True}), ("--no-thinking", {"enable_thinking": False})])  # fmt: skip
def test_the_thinking_switch(invoke: Invoke, tmp_path: Path, option: str, args: dict[str, bool]) -> None:
    path = write_bundle(tmp_path / "b", Sizes(likely_tokens=3, max_context=400), template=THINKING)
    answers = turns(path, ["hello", "again"], template_args=args)
    assert chat(invoke, path, "hello", "again", options=(option,)).stdout == "".join(f"{a}\n" for a in answers)
    assert answers != turns(path, ["hello", "again"], template_args={"enable_thinking": not args["enable_thinking"]})


def test_a_switch_the_template_does_not_have(invoke: Invoke, talker: Path) -> None:
    done = chat(invoke, talker, "hello", options=("--thinking",))
    assert done.exit_code == 1 and "no thinking mode" in done.stderr and done.stdout == ""


def test_a_new_conversation_keeps_the_system_prompt(invoke: Invoke, talker: Path) -> None:
    done = chat(invoke, talker, "hello", "/system Be brief.", "/reset", "hello", "/system", "/reset", "hello")
    (first,), (second,) = turns(talker, ["hello"]), turns(talker, ["hello"], system="Be brief.")
    assert done.stdout == f"{first}\n{second}\n{first}\n"
    assert first != second
    assert "It was: Be brief." in done.stderr


def test_saved_and_loaded(invoke: Invoke, talker: Path, tmp_path: Path) -> None:
    file = tmp_path / "a talk.json"
    first = chat(invoke, talker, "hello", f"/save {file}", "again", f"/save {file}", options=("--system", "Hä?"))
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert [message["role"] for message in saved] == ["system", "user", "assistant", "user", "assistant"]
    assert "\n".join(m["content"] for m in saved if m["role"] == "assistant") + "\n" == first.stdout
    assert "Hä?" in file.read_text(encoding="utf-8")
    third = turns(talker, ["hello", "again", "third"], system="Hä?")[2]
    assert chat(invoke, talker, f"/load {file}", "third", "/exit", "never").stdout == f"{third}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a talk.json", "talker"]


def test_what_cannot_be_saved_or_loaded_changes_nothing(invoke: Invoke, talker: Path, tmp_path: Path) -> None:
    notes, odd, strange = tmp_path / "notes.txt", tmp_path / "odd.json", tmp_path / "strange.json"
    notes.write_text("mine")
    odd.write_text('{"role": "user"}')
    strange.write_text('[{"role": "user", "content": "a"}, {"role": "user"}]')
    nowhere = tmp_path / "none" / "x.json"
    done = chat(invoke, talker, "hello", f"/save {notes}", f"/save {nowhere}", "/save", f"/load {notes}",
                f"/load {odd}", f"/load {strange}", "/load nothing.json", "/reset now", "/nope", "again")  # fmt: skip
    assert done.stdout == "".join(f"{answer}\n" for answer in turns(talker, ["hello", "again"]))
    assert done.exit_code == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    words = ["notes.txt exists and holds no conversation", "No such file", "/save needs a file", "cannot be read",
             "holds a dict", "Message 1", "(No such file or directory)", "'now'", "/nope is no command"]  # fmt: skip
    assert len(errors) == len(words)
    for line, word in zip(errors, words, strict=True):
        assert word in line
    assert notes.read_text() == "mine"


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "talk.json"
    write_conversation(file, [{"role": "user", "content": "a"}])

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(Exception, match=r"talk\.json cannot be written \(No space left on device\)"):
        write_conversation(file, [])
    assert read_conversation(file) == [{"role": "user", "content": "a"}]
    assert list(tmp_path.iterdir()) == [file]


def test_a_message_may_begin_with_a_slash(invoke: Invoke, talker: Path) -> None:
    assert chat(invoke, talker, "//etc").stdout == f"{turns(talker, ['/etc'])[0]}\n"


def test_a_template_without_system_prompts(invoke: Invoke, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b", Sizes(likely_tokens=3, max_context=400), template=NO_SYSTEM)
    done = chat(invoke, path, "/system Be brief.", "hello")
    assert "no system role" in done.stderr and done.exit_code == 1
    assert done.stdout == f"{turns(path, ['hello'])[0]}\n"
    assert chat(invoke, path, "hello", options=("--system", "x")).stdout == ""


def test_a_bundle_that_cannot_chat(invoke: Invoke, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b", template=None)
    done = chat(invoke, path, "hello")
    assert done.exit_code == 1 and "no chat template" in done.stderr and "dflash-export run" in done.stderr


def test_a_full_context_is_told_and_loses_nothing(invoke: Invoke, talker: Path) -> None:
    done = chat(invoke, talker, "hello", "x" * 400, "again", "/stats")
    assert done.stdout == "".join(f"{answer}\n" for answer in turns(talker, ["hello", "again"]))
    assert done.exit_code == 1
    assert re.search(r"the conversation has 5\d\d tokens, and the context holds 400\. /reset", done.stderr)
    assert "Conversation: 4 messages" in done.stderr
    near = chat(invoke, talker, "x" * 352, "/reset", "hello")
    assert "[cut: the context of 400 tokens is full." in near.stderr
    assert near.stdout.endswith(f"\n{turns(talker, ['hello'])[0]}\n") and near.exit_code == 0


class Terminal(ChatScreen):
    """A person who presses Ctrl-C when the given answers have so many pieces."""

    def __init__(self, lines: list[str], interrupts: dict[int, int] | None = None) -> None:
        super().__init__()
        self.interactive = True
        self.lines, self.interrupts = iter(lines), interrupts or {}
        self.answers: list[list[str]] = []
        self.notes: list[str] = []

    def read(self) -> str | None:
        self.answers.append([])
        return next(self.lines, None)

    def write(self, text: str) -> None:
        self.answers[-1].append(text)
        if self.interrupts.get(len(self.answers)) == len(self.answers[-1]):
            os.kill(os.getpid(), signal.SIGINT)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def opened(talker: Path) -> Iterator[Session]:
    with Session.open(talker, threads=1) as session:
        yield session


LONG = GenerationConfig(max_new_tokens=40)


def test_an_interrupted_answer_stays_and_the_session_goes_on(talker: Path, opened: Session) -> None:
    screen = Terminal(["hello", "again"], {1: 3})
    before = signal.getsignal(signal.SIGINT)
    talk = Chat(opened, LONG, screen)
    converse(talk)
    assert signal.getsignal(signal.SIGINT) == before
    first, second = ("".join(pieces).rstrip("\n") for pieces in screen.answers[:2])
    assert screen.notes[0] == "[stopped: what was said so far stays in the conversation]"
    assert [m["content"] for m in talk.messages] == ["hello", first, "again", second]
    with Session.open(talker, threads=1) as alone:
        whole = alone.generate("hello", LONG)
        assert whole.text.startswith(first) and 0 < len(first) < len(whole.text)
        assert second == alone.generate(talk.messages[:3], LONG).text
    # what was run before the stop need not be run again
    stopped = [token for message in talk.messages[:2] for token in message["content"]]
    assert talk.statistics.reused_tokens >= len(stopped)


def test_a_second_interrupt_breaks_off_at_once(
    talker: Path, opened: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice while the prompt is read: no piece comes that could be waited for."""
    backend: Any = opened._backend
    prefill, calls = backend.prefill, []

    def slow(ids: Any, position: int) -> int:
        calls.append(position)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return int(prefill(ids, position))

    monkeypatch.setattr(backend, "prefill", slow)
    screen = Terminal(["hello", "again", "third"])
    talk = Chat(opened, LONG, screen)
    converse(talk)
    assert "[stopped before the first word: the message was taken back]" in screen.notes
    assert [m["content"] for m in talk.messages if m["role"] == "user"] == ["hello", "third"]
    assert calls[0] == 0 and calls[1] > 0 and calls[2] == 0  # rows that may be half written are not kept
    with Session.open(talker, threads=1) as alone:
        assert talk.messages[3]["content"] == alone.generate(talk.messages[:3], LONG).text


def test_one_interrupt_ends_the_reading_of_a_long_prompt_and_keeps_what_was_read(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session.open(talker, threads=1, prefill_chunk_tokens=16) as session:
        backend: Any = session._backend
        prefill, calls = backend.prefill, []

        def slow(ids: Any, position: int) -> int:
            calls.append(position)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return int(prefill(ids, position))

        monkeypatch.setattr(backend, "prefill", slow)
        screen = Terminal([question := "x" * 200, question + "y"])
        talk = Chat(session, LONG, screen)
        converse(talk)
    assert calls[:3] == [0, 16, 32] and calls[3] == 48  # behind the piece that ran, and the next goes on from there
    assert screen.notes[0] == "[stopped before the first word: the message was taken back]"
    with Session.open(talker, threads=1) as alone:
        assert talk.messages[1]["content"] == alone.generate(question + "y", LONG).text


@pytest.mark.parametrize("place", ["line end", "note"])
def test_an_interrupt_too_many_ends_nothing(
    opened: Session, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The second one comes when the first has stopped the answer already."""
    screen = Terminal(["hello", "again"], {1: 3})
    write, note = screen.write, screen.note

    def writes(text: str) -> None:
        write(text)
        if text == "\n" and place == "line end":
            os.kill(os.getpid(), signal.SIGINT)

    def notes(text: str) -> None:
        note(text)
        if place == "note":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(screen, "write", writes)
    monkeypatch.setattr(screen, "note", notes)
    talk = Chat(opened, LONG, screen)
    converse(talk)
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2


def test_an_error_takes_the_message_back(talker: Path, opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = opened._backend
    verify, calls = backend.verify, []

    def broken(block: Any, position: int) -> Any:
        calls.append(position)
        if len(calls) == 3:
            raise NumericsError("The logits are NaN.")
        return verify(block, position)

    monkeypatch.setattr(backend, "verify", broken)
    screen = Terminal(["hello", "again"])
    talk = Chat(opened, LONG, screen)
    converse(talk)
    assert screen.notes[0] == "Error: The logits are NaN. The message was taken back; all before it is still there."
    assert [m["content"] for m in talk.messages][:1] == ["again"] and talk.failed
    with Session.open(talker, threads=1) as alone:
        assert talk.messages[1]["content"] == alone.generate("again", LONG).text


def test_blocks_in_colour(opened: Session) -> None:
    screen = Terminal(["hello", "again"])
    talk = Chat(opened, GenerationConfig(max_new_tokens=60, block_size=4), screen, show_blocks=True)
    screen.read()
    talk.say("hello")
    painted = "".join(screen.answers[0])
    result = opened.generate("hello", GenerationConfig(max_new_tokens=60, block_size=4))
    assert click.unstyle(painted) == result.text + "\n" and click.unstyle(painted) != painted
    accepted = sum(
        token == proposed
        for start, length, drafts in zip(_starts(result.acceptance_lengths), result.acceptance_lengths,
                                         result.proposed_ids, strict=True)
        for token, proposed in zip(result.token_ids[start : start + length], drafts, strict=False)
    )  # fmt: skip
    assert painted.count("\x1b[32m") + painted.count("\x1b[36m") == accepted > 0
    assert "tokens a round" in screen.notes[-1]


def _starts(lengths: list[int]) -> list[int]:
    return [1 + sum(lengths[:i]) for i in range(len(lengths))]


def test_what_is_painted() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    painter, (a, b, c, d) = BlockPainter(decode), b"abcd"
    rounds = [Round([a], []), Round([b, c, d], [b, c, a]), Round([a, b], [a, b, c]), Round([0xC3, 0xA4], [0xC3, a])]
    stop = Round([c, d], [c, d, a], "stop")

    def green(text: str) -> str:
        return click.style(text, fg="green")

    def cyan(text: str) -> str:
        return click.style(text, fg="cyan")

    assert painter.paint(rounds[:2]) == f"a{green('b')}{green('c')}d"
    assert painter.paint(rounds[2:]) == f"{cyan('a')}{cyan('b')}ä"  # the umlaut is complete with the target's token
    assert painter.paint([stop]) + painter.finish() == cyan("c")


def test_colours_are_for_terminals(invoke: Invoke, talker: Path) -> None:
    done = chat(invoke, talker, "hello", options=("--show-blocks",))
    assert done.stdout == f"{turns(talker, ['hello'])[0]}\n"
    assert "--show-blocks is for a terminal" in done.stderr


def test_the_first_interrupt_at_the_prompt_is_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[Callable[[], str]] = iter([_interrupt, lambda: "hello", _interrupt, _interrupt])
    screen = Terminal([])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers)())
    assert ChatScreen.read(screen) == "hello"
    assert "Ctrl-C once more" in screen.notes[0]
    with pytest.raises(KeyboardInterrupt):
        ChatScreen.read(screen)


def _interrupt() -> str:
    raise KeyboardInterrupt


def test_the_measurement_of_turns(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b", Sizes(likely_tokens=3, max_context=700))
    arguments = [str(path), "--turns", "5", "--max-new-tokens", "9", "--rounds", "2", "--threads", "1"]
    done = CliRunner().invoke(chat_turns.main, [*arguments, "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["same_turns"] == 5 == len(found["turns"])
    for before, turn in itertools.pairwise(found["turns"]):
        assert before["prompt_tokens"] <= turn["reused_tokens"] < turn["prompt_tokens"]
        assert turn["rows_run"] == turn["prompt_tokens"] - turn["reused_tokens"]
    assert found["turns"][0]["reused_tokens"] == 0
    assert found["turns"][4]["rows_run"] <= 1.3 * found["turns"][1]["rows_run"]  # what a turn costs does not grow
    assert found["last_to_second_cpu"] == found["turns"][4]["kept_cpu_ms"] / found["turns"][1]["kept_cpu_ms"] > 0
    assert found["last_to_second"] == found["turns"][4]["kept_ms"] / found["turns"][1]["kept_ms"] > 0
    table = CliRunner().invoke(chat_turns.main, arguments, catch_exceptions=False).stdout
    assert len(table.splitlines()) == 7 and "turn 5 against turn 2" in table
