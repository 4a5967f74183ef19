"""`dflash-export serve` as a process: its words, its end, its refusals."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from cli_calls import Invoke
from serve_calls import served_apart, serving, wait_until
from tiny_bundle import Sizes, write_bundle

from dflash_runtime import GenerationConfig, Session
from dflash_tools.serve_process import DrainingServer, listen

MESSAGES: Any = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "max_tokens": 600, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("served") / "pair", Sizes(likely_tokens=3, max_context=1024))


def test_sigterm_answers_what_runs_and_what_waits_and_refuses_the_rest(folder: Path, tmp_path: Path) -> None:
    with Session.open(folder, threads=1) as session:
        expected = [session.generate(MESSAGES, GenerationConfig(max_new_tokens=600, seed=i, temperature=1)).text
                    for i in range(6)]  # fmt: skip
    with served_apart(tmp_path, folder) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(i: int) -> str:
            found = client.chat.completions.create(**{**LONG, "temperature": 1, "seed": i}, stream=i % 2 == 0)
            if i % 2:
                return found.choices[0].message.content or ""
            return "".join(chunk.choices[0].delta.content or "" for chunk in found)

        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(ask, i) for i in range(6)]
            wait_until(lambda: "dflash_queue_length 5.0" in httpx2.get(f"{url}/metrics").text)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx2.get(f"{url}/health").status_code == 503)
            with pytest.raises(openai.InternalServerError) as refused:
                client.chat.completions.create(**LONG)
            assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
            assert [answer.result() for answer in answers] == expected
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None
        told = process.stderr.read().splitlines()  # nothing where all were answered before it looked
        assert len(told) <= 1 and all(line.startswith("Ending when ") for line in told)


def test_who_ends_the_server_is_told_once_what_it_waits_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving([folder]) as running:
        for under_way, words in ((0, ""), (1, "(1 request)"), (6, "(6 requests)")):
            server = DrainingServer(running.app, 60)
            monkeypatch.setattr(running.app.gate, "under_way", under_way)
            server.handle_exit(signal.SIGTERM, None)
            assert server._drain_until_s is not None
            for _ in range(3):
                server._tell_of_drain()
            told = capsys.readouterr().err
            assert words in told and told.count("after 60 s at the latest") == len(told.splitlines()) == bool(words)
        running.app.gate.under_way, running.app.gate.draining = 0, False


def test_what_outlasts_the_drain_fails_and_is_told(folder: Path) -> None:
    endless = {**LONG, "max_tokens": 900, "logit_bias": {"257": -100}, "n": 4}
    with serving([folder], drain_timeout_s=0.3) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client().chat.completions.create, **endless)
        wait_until(lambda: server.app.pool.waiting() > 0)
        stopping = threading.Thread(target=lambda: (time.sleep(0.1), server.drain()))
        stopping.start()
        with pytest.raises(openai.InternalServerError) as caught:
            answer.result()
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        stopping.join()


def test_bundles_have_names(folder: Path, tmp_path: Path) -> None:
    options = ("--preload", "--max-new-tokens", 5, "--temperature", 0)
    with served_apart(tmp_path, f"small={folder}", folder, *options) as (_, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["small", "pair"]
        assert "dflash_loaded_bundles 2.0" in httpx2.get(f"{url}/metrics").text
        found = [client.chat.completions.create(model=name, messages=MESSAGES) for name in ("small", "pair")]
        assert found[0].choices[0].message.content == found[1].choices[0].message.content
        assert found[0].usage is not None
        assert found[0].usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError, match="at most 5 tokens"):
            client.chat.completions.create(**LONG)


def test_what_cannot_be_served_is_one_line(invoke: Invoke, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n\n")
    taken = listen("127.0.0.1", 0)
    taken.listen()
    for arguments, words in [
        ([tmp_path], "bundle.json"), ([folder, f"pair={folder}"], "Both"),
        ([folder, "--backend", "tensorrt"], "engines"),
        ([folder, "--memory-budget", "1kB"], "--memory-budget is 1.0 kB"), ([folder, "--host", "300.1.1.1"], "listen"),
        ([folder, "--port", taken.getsockname()[1]], ": Address already in use. Give another"),
        ([folder, "--api-key-file", tmp_path / "keys"], "no API key"), ([folder, "--block-size", 9], "from 1 to 8"),
        ([folder, "--block-size", 4, "--plain"], "contradict"),
    ]:  # fmt: skip
        done = invoke("serve", *arguments)
        assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert words in done.stderr
    taken.close()
