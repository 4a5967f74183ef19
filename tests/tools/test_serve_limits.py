"""Who may ask, how much and for how long; and what happens to those who leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_calls import Running, serving, wait_until
from tiny_bundle import Sizes, write_bundle

from dflash_runtime import GenerationConfig, Session
from dflash_tools.serve_answers import Answer, AnswerResponse
from dflash_tools.serve_jobs import Event, Job, Piece, Question
from dflash_tools.serve_limits import Limits, allowed_hosts, is_loopback
from dflash_tools.serve_metrics import ServeMetrics
from dflash_tools.serve_replies import ChatShape, Reply
from dflash_tools.serve_requests import Order
from dflash_tools.serve_session import LoadedBundle, SessionOptions

MESSAGES: Any = [{"role": "user", "content": "hello"}]
SHORT: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "max_tokens": 4}
ENDLESS: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "logit_bias": {"257": -100}, "temperature": 0}
"""Thousands of tokens, each with its penalties: seconds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("served") / "pair", Sizes(likely_tokens=3, max_context=8192))


def test_a_client_that_leaves_a_stream_makes_room_at_once(folder: Path) -> None:
    with serving([folder]) as server:
        stream = server.client().chat.completions.create(stream=True, **ENDLESS)
        for _, chunk in zip(range(4), stream, strict=False):
            assert chunk.choices[0].finish_reason is None
        stream.close()
        wait_until(lambda: server.app.pool.running() == 0, limit_s=5)
        assert server.client().chat.completions.create(**SHORT).choices[0].finish_reason == "length"
        assert 'dflash_answers_total{ending="cancelled",model="pair"} 1.0' in server.get("/metrics").text


def test_a_client_that_leaves_without_a_stream_is_noticed_running_and_waiting(folder: Path) -> None:
    with serving([folder]) as server:
        impatient = server.client().with_options(timeout=0.5)
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(impatient.chat.completions.create, **ENDLESS) for _ in range(2)]
            wait_until(lambda: (server.app.pool.running(), server.app.pool.waiting()) == (1, 1))
            for future in asked:
                with pytest.raises(openai.APITimeoutError):
                    future.result()
        wait_until(lambda: (server.app.pool.running(), server.app.pool.waiting()) == (0, 0), limit_s=5)
        assert server.client().chat.completions.create(**SHORT).usage is not None
        wait_until(lambda: 'path="/v1/chat/completions",status="499"} 2.0' in server.get("/metrics").text)


def test_who_leaves_is_noticed_while_a_prompt_is_read_and_where_no_text_comes(folder: Path) -> None:
    silent = {258: 100.0}  # a special token, which has no text
    calls: list[tuple[str, int]] = []
    for prompt, leaves_at in (([5] * 40, ("prefill", 8)), ([5] * 8, ("verify", 11))):
        calls.clear()
        with Session.open(folder, threads=1, prefill_chunk_tokens=4) as session:
            loaded = LoadedBundle("pair", session, SessionOptions(threads=1, plain=True), ServeMetrics())
            config = GenerationConfig(max_new_tokens=500, logit_bias=silent, stop_token_ids=())
            job = Job("c", Question(prompt, config), lambda event: None)

            def watched(name: str, true: Any, job: Job = job, leaves_at: Any = leaves_at) -> Any:
                def call(ids: Any, position: int) -> Any:
                    calls.append((name, position))
                    job.cancelled |= (name, position) == leaves_at
                    return true(ids, position)

                return call

            for name in ("prefill", "verify"):
                setattr(session._backend, name, watched(name, getattr(session._backend, name)))
            loaded.run(job)
        assert calls[-1] == leaves_at


def test_nothing_more_is_sent_to_who_has_left() -> None:
    """However much of the answer is ready by then."""
    question = Question([1], GenerationConfig())

    class Ready(Answer):
        def __init__(self) -> None:
            self.cancelled = False

        async def events(self) -> AsyncIterator[tuple[int, Event]]:
            for _ in range(100):
                yield 0, Piece("a", [])

        def cancel(self) -> None:
            self.cancelled = True

    async def sent_to(leaver: bool) -> int:
        left, sent, answer = asyncio.Event(), list[Any](), Ready()

        async def send(message: Any) -> None:
            sent.append(message)
            if leaver and len(sent) == 5:
                left.set()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        order = Order("pair", [question], 1, True, False)
        response = AnswerResponse(answer, order, Reply(ChatShape(), "pair", "x", False, False), Limits())
        await response({"type": "http"}, receive, send)
        assert answer.cancelled
        return len(sent)

    assert asyncio.run(sent_to(leaver=False)) == 103  # with head, [DONE] and end
    assert asyncio.run(sent_to(leaver=True)) < 10


def test_a_full_queue_says_when_to_come_back(folder: Path) -> None:
    with serving([folder], max_waiting=1) as server:
        streams = [server.client().chat.completions.create(stream=True, **ENDLESS)]
        waiting = threading.Thread(target=_left_alone, args=(server,))
        waiting.start()
        wait_until(lambda: server.app.pool.waiting() == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            server.client().chat.completions.create(**SHORT)
        assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        streams[0].close()
        waiting.join()


def _left_alone(server: Running) -> None:
    server.client().chat.completions.create(**SHORT)


def test_time_outs(folder: Path) -> None:
    with serving([folder], Limits(queue_timeout_s=0.4, request_timeout_s=1)) as server:
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(server.client().chat.completions.create, **ENDLESS)
            wait_until(lambda: server.app.pool.running() == 1)
            with pytest.raises(openai.InternalServerError) as queued:
                server.client().chat.completions.create(**SHORT)
            assert (queued.value.status_code, queued.value.code) == (503, "queue_timeout")
            with pytest.raises(openai.InternalServerError) as late:
                slow.result()
            assert (late.value.status_code, late.value.code) == (504, "request_timeout")
        with pytest.raises(openai.APIError, match="not complete after 1 s"):
            for _ in server.client().chat.completions.create(stream=True, **ENDLESS):
                pass
        wait_until(lambda: server.app.pool.running() == 0, limit_s=5)


def test_keys(folder: Path) -> None:
    with serving([folder], Limits(api_keys=["first", "sécond"])) as server:
        assert server.client("first").models.list().data[0].id == "pair"
        assert server.get("/v1/models", headers={"Authorization": "Bearer sécond".encode()}).status_code == 200
        for key in ("firstx", "firs", "other"):
            with pytest.raises(openai.AuthenticationError) as caught:
                server.client(key).chat.completions.create(**SHORT)
            assert caught.value.code == "invalid_api_key"
        assert server.get("/v1/models").headers["www-authenticate"] == "Bearer"
        assert server.get("/metrics").status_code == 401
        assert server.get("/health").status_code == 200
        assert server.get("/v1/models", headers={"Authorization": "Basic first"}).status_code == 401


def test_one_key_that_floods_does_not_hold_up_the_other(folder: Path) -> None:
    with serving([folder], Limits(api_keys=["flood", "small"]), slow_s=0.05) as server:
        done: list[str] = []

        def ask(key: str) -> None:
            server.client(key).chat.completions.create(**SHORT)
            done.append(key)

        with ThreadPoolExecutor(9) as pool:
            flood = [pool.submit(ask, "flood") for _ in range(8)]
            wait_until(lambda: server.app.pool.waiting() >= 5)
            pool.submit(ask, "small").result()
            assert sum(not future.done() for future in flood) >= 3
            for future in flood:
                future.result()
        assert sorted(done) == ["flood"] * 8 + ["small"]


def test_hosts_of_a_server_on_loopback(folder: Path) -> None:
    assert allowed_hosts("0.0.0.0", []) == []
    assert allowed_hosts("0.0.0.0", ["box"]) == ["box"]
    assert (is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("box")) == (
        True, True, False, False,
    )  # fmt: skip
    with serving([folder], Limits(allowed_hosts=allowed_hosts("127.0.0.1", ["box"]))) as server:
        known = [("box:80", 200), ("localhost", 200), ("[::1]:8000", 200)]
        for host, status in [*known, ("evil.example", 403), ("", 403)]:
            found = server.get("/health", headers={"Host": host})
            assert found.status_code == status, host
        assert found.json()["error"]["code"] == "host_not_allowed"
        assert "access-control-allow-origin" not in found.headers


def test_large_and_slow_bodies(folder: Path) -> None:
    with serving([folder], Limits(max_body_bytes=1000, body_timeout_s=0.3)) as server:
        with pytest.raises(openai.APIStatusError) as caught:
            server.client().completions.create(model="pair", prompt="x" * 2000)
        assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")
        kind = {"Content-Type": "application/json"}
        found = server.post("/v1/completions", content=iter([b"x" * 600, b"x" * 600]), headers=kind)
        assert found.json()["error"]["code"] == "body_too_large"
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
            link.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                         b"Content-Length: 50\r\n\r\n{")  # fmt: skip
            assert link.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_connection_without_a_request_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_tools.serve_process._HEADER_TIMEOUT_S", 0.3)
    with serving([folder]) as server:
        port = int(server.url.rpartition(":")[2])
        for head in (b"", b"GET /health HTTP/1.1\r\nHost: "):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
                link.sendall(head)
                assert link.recv(1000) == b""
        with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
            whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            for _ in range(2):
                link.sendall(whole)
                found = b""
                while b"ok" not in found:
                    found += link.recv(1000)
            link.sendall(b"GET /hea")
            assert link.recv(1000) == b""
        assert server.client().chat.completions.create(**{**ENDLESS, "max_tokens": 600}).usage is not None


def test_a_client_that_does_not_read_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_tools.serve_answers._READING_S", 0.2)
    monkeypatch.setattr("dflash_tools.serve_answers._STREAM_HEADERS", [(b"x-long", b"x" * 20_000_000)])
    with serving([folder], Limits(queue_timeout_s=0.4, request_timeout_s=0.4)) as server:
        port = int(server.url.rpartition(":")[2])
        body = json.dumps({**ENDLESS, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: server.app.gate.under_way == 1)
            wait_until(lambda: server.app.gate.under_way == 0, limit_s=5)
            wait_until(lambda: server.app.pool.running() == 0, limit_s=5)


def test_bundles_leave_within_the_budget(folder: Path, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other", Sizes(likely_tokens=3))
    with serving([folder, other]) as server:
        sizes = {facts.name: facts.memory_bytes for facts in server.app.bundles}
    with serving([folder, other], budget_bytes=max(sizes.values()) + 1) as server:
        for name in ("pair", "other", "pair"):
            server.client().chat.completions.create(**{**SHORT, "model": name})
            assert server.app.pool.loaded() == [name]
            assert server.metric("dflash_loaded_bytes") == sizes[name]
