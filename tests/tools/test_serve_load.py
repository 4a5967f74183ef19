"""The tool that puts a server under load sees right answers, wrong ones and lost ones."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from openai_server import FakeServer
from openai_server import serving as serving_fake
from serve_calls import served_apart
from tiny_bundle import Sizes, write_bundle

from dflash_runtime.errors import DFlashError
from dflash_tools.serve_load import find_faults, main
from dflash_tools.serve_load_clients import Load, Question, ServerAddress

QUESTION = Question("fake-model", "hi", 8, 0, 0.0)


def test_clients_are_answered_evenly_and_nothing_is_lost_at_the_end(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "pair", Sizes(likely_tokens=3, max_context=192))
    with served_apart(tmp_path, folder) as (process, url):
        options = ["--clients", "4", "--seconds", "1", "--tokens", "12", "--bundle", str(folder)]
        done = CliRunner().invoke(main, [url, *options, "--terminate", str(process.pid)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert process.wait(timeout=20) == 0
    lines = done.stdout.splitlines()
    assert ", 0 wrong, 0 lost, " in lines[0]
    low, _, high = lines[1].split()[2:]
    assert 0 < int(low) <= int(high) <= 2 * int(low)
    assert lines[2].startswith("memory")


@pytest.mark.slow
def test_thirty_two_clients_for_two_minutes_and_then_sigterm(tmp_path: Path) -> None:
    """Every answer is right and whole, memory stays, nobody waits for others, and the end loses nothing."""
    folder = write_bundle(tmp_path / "pair", Sizes(likely_tokens=3, max_context=192))
    with served_apart(tmp_path, folder) as (process, url):
        options = ["--clients", "32", "--seconds", "120", "--bundle", str(folder), "--terminate", str(process.pid)]
        done = CliRunner().invoke(main, [url, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output  # 1 for anything wrong, lost, uneven or growing
        assert process.wait(timeout=60) == 0
    print(done.stdout)
    answered = re.match(r"answered    (\d+) requests of 32 clients in .* s, 0 wrong, 0 lost, ", done.stdout)
    assert answered is not None and int(answered[1]) > 32


def test_uneven_clients_and_growing_memory_are_faults() -> None:
    flat = [90_000_000, 100_000_000, 100_000_000, 101_000_000]
    assert find_faults([400, 401, 399], flat) == find_faults([0, 1, 2], flat) == []
    assert "400 answers and another 200" in find_faults([400, 200, 399], flat)[0]
    (told,) = find_faults([4, 4], [90_000_000, 100_000_000, 100_000_000, 125_000_000])
    assert "25.0 MB more memory" in told


def ask_once(load: Load) -> None:
    thread = threading.Thread(target=load.ask_on, args=(0,))
    thread.start()
    while not (load.wrong or load.lost or load.answered):
        thread.join(0.01)
    load.stop()
    thread.join()


def test_a_wrong_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    last = '{"choices": [{"delta": {"content": "hello"}, "finish_reason": "stop"}]}'
    monkeypatch.setattr(FakeServer, "events", lambda self: iter([last, "[DONE]"]))
    with serving_fake([], None) as fake:
        ask_once(load := Load(ServerAddress(fake.url, "none"), {QUESTION: "goodbye"}))
    assert load.wrong and not load.answered
    assert "'goodbye'" in load.wrong[0]


def test_a_stream_that_breaks_off_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeServer, "events", lambda self: iter(['{"choices": [{"delta": {"content": "he"}}]}']))
    with serving_fake([], None) as fake:
        ask_once(load := Load(ServerAddress(fake.url, "none"), {QUESTION: "hello"}))
    assert load.lost and not load.answered
    assert "without [DONE]" in load.lost[0]


def test_nobody_listening_is_told() -> None:
    with pytest.raises(DFlashError, match="does not answer as a server"):
        ServerAddress("http://127.0.0.1:9", "none").first_model()
