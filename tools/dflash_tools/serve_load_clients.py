"""Clients of a server under load: each asks one question after another and compares the answers."""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from dflash_runtime.errors import DFlashError

_TIME_LIMIT_S = 900.0


class RefusedError(DFlashError):
    """The server did not take a request.

    Args:
        status: HTTP status.
        said: Its words.
    """

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"The server refused ({status}): {said}")
        self.status = status


@dataclasses.dataclass(frozen=True)
class Question:
    """One request."""

    model: str
    text: str
    max_tokens: int
    seed: int
    temperature: float

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a chat."""
        return [{"role": "user", "content": self.text}]


@dataclasses.dataclass(frozen=True)
class ServerAddress:
    """Where a server is; every request is a connection of its own."""

    url: str
    api_key: str

    def text(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """What a path answers.

        Raises:
            RefusedError: any status but 200; 0 where nobody listens.
            OSError: the connection broke.
            http.client.HTTPException: the answer was cut off.
        """
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.api_key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIME_LIMIT_S) as reply:
                return str(reply.read().decode())
        except urllib.error.HTTPError as error:
            raise RefusedError(error.code, error.read().decode(errors="replace")[:300]) from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):  # nobody listens any more
                raise RefusedError(0, str(error.reason)) from error
            raise

    def first_model(self) -> str:
        """The first model it names."""
        try:
            return str(json.loads(self.text("/v1/models"))["data"][0]["id"])
        except (OSError, ValueError, LookupError, RefusedError, http.client.HTTPException) as error:
            raise DFlashError(f"{self.url}/v1/models does not answer as a server of this kind ({error}).") from error

    def ask(self, question: Question, *, stream: bool) -> str:
        """The answer's text; errors are those of `text`, and DFlashError for an answer that is not complete."""
        body: dict[str, Any] = {
            "model": question.model, "messages": question.messages, "max_tokens": question.max_tokens,
            "seed": question.seed, "temperature": question.temperature, "stream": stream,
        }  # fmt: skip
        text = self.text("/v1/chat/completions", body)
        try:
            return _streamed_text(text) if stream else str(json.loads(text)["choices"][0]["message"]["content"])
        except (ValueError, LookupError) as error:
            raise DFlashError(f"This is no answer of a chat ({error!r}): {text[-200:]!r}") from error


def _streamed_text(events: str) -> str:
    lines = [line.removeprefix("data: ") for line in events.splitlines() if line]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError("the stream ended without [DONE]")
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    if choices[-1]["finish_reason"] is None:
        raise ValueError("the stream ended without a finish_reason")
    return "".join(choice["delta"].get("content") or "" for choice in choices)


class Load:
    """What all clients share.

    Args:
        server: Asked.
        expected: The right answer to every question.
    """

    def __init__(self, server: ServerAddress, expected: Mapping[Question, str]) -> None:
        self._server, self._expected = server, list(expected.items())
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.answered: dict[int, int] = {}
        """Client -> right answers."""
        self.wrong: list[str] = []
        self.lost: list[str] = []
        """Requests that were taken and not answered in full."""
        self.refused = 0

    def stop(self) -> None:
        """Every client ends with the answer it waits for."""
        self._stopped.set()

    def ask_on(self, client: int) -> None:
        """One client: asks until it is stopped, or the server takes no more."""
        turn = client
        while not self._stopped.is_set():
            question, right = self._expected[turn % len(self._expected)]
            try:
                said = self._server.ask(question, stream=turn // len(self._expected) % 2 == client % 2)
            except RefusedError as error:
                with self._lock:
                    self.refused += 1
                if error.status != 429:
                    self._stopped.set()  # it is shutting down
                time.sleep(0.1)
                continue
            except (OSError, http.client.HTTPException, DFlashError) as error:
                with self._lock:
                    self.lost.append(f"client {client}: {error!r}")
                time.sleep(0.1)
                continue
            turn += 1
            with self._lock:
                if said == right:
                    self.answered[client] = self.answered.get(client, 0) + 1
                else:
                    self.wrong.append(f"client {client}: {said!r} instead of {right!r}")
