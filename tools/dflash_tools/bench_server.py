"""A peer of `bench` behind an OpenAI-compatible URL: vLLM, SGLang, llama.cpp, or anything else that streams chat."""

from __future__ import annotations

import http.client
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from dflash_runtime.errors import DFlashError
from dflash_tools.bench_job import Answer, Job, Mode, Question

TIME_LIMIT_S = 600


class ServerEngine:
    """One model of a server; its own chat template, precision and hardware."""

    def __init__(self, job: Job) -> None:
        """Asks the server at `job.model` for its models.

        Raises:
            DFlashError: it does not answer, serves no model, or not the one asked for.
        """
        self._url = str(job.model).rstrip("/").removesuffix("/v1")
        self._template_args = job.template_args
        names = [str(row["id"]) for row in self._json("/v1/models").get("data", [])]
        if job.served_model is not None and job.served_model not in names:
            raise DFlashError(f"{self._url} serves {', '.join(names) or 'nothing'}, not {job.served_model}.")
        if not names:
            raise DFlashError(f"{self._url} serves no model.")
        self._model = job.served_model or names[0]
        self.precision = "as served"
        self.versions = {"model": self._model}

    def answer(self, mode: Mode, number: int, question: Question) -> Answer:
        """Runs one request; tokens are counted by the server, time by the pieces that arrive."""
        if question.messages is None:
            raise DFlashError("A server is asked with messages; raw prompts cannot be compared with it.")
        body: dict[str, Any] = {
            "model": self._model, "messages": question.messages, "max_tokens": question.max_new_tokens,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if self._template_args:
            body["chat_template_kwargs"] = self._template_args
        stamps: list[float] = []
        text, counted = "", None
        started_s, began = time.monotonic(), time.perf_counter()
        for event in self._events("/v1/chat/completions", body):
            piece = "".join(_words(choice) for choice in event.get("choices", []))
            if piece:
                stamps.append(time.perf_counter())
                text += piece
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
        if not stamps or counted is None:
            raise DFlashError(f"{self._url} sent {'no usage' if stamps else 'no text'} for question {number}.")
        if len(stamps) == 1 and int(counted) > 1:
            raise DFlashError(f"{self._url} sent {counted} tokens in one piece, so their times cannot be told.")
        return Answer(
            mode=mode,
            question=number,
            token_ids=[],
            time_to_first_token_ms=1000 * (stamps[0] - began),
            round_ms=[1000 * (b - a) for a, b in itertools.pairwise(stamps)],
            round_tokens=_shared_out(int(counted) - 1, len(stamps) - 1),
            started_s=started_s,
            ended_s=time.monotonic(),
            text=text,
        )

    def close(self) -> None:
        """Nothing is held."""

    def _json(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self._url + path, timeout=TIME_LIMIT_S) as reply:
                found: dict[str, Any] = json.load(reply)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise DFlashError(f"{self._url}{path} does not answer as an OpenAI-compatible server ({error}).") from error
        return found

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIME_LIMIT_S) as reply:
                for line in reply:
                    data = line.decode().strip()
                    if data.startswith("data:") and data != "data: [DONE]":
                        yield json.loads(data[5:])
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise DFlashError(f"{self._url}{path} refused ({error.code}): {said}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise DFlashError(f"{self._url}{path} broke off ({error}).") from error


def _words(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    # Some servers send what a model thinks apart from what it says; both are tokens it decoded.
    return str(delta.get("reasoning_content") or delta.get("reasoning") or "") + str(delta.get("content") or "")


def _shared_out(tokens: int, arrivals: int) -> list[int]:
    """A server does not say how many tokens each piece holds: as evenly as whole numbers allow."""
    if arrivals <= 0:
        return []
    return [tokens * (i + 1) // arrivals - tokens * i // arrivals for i in range(arrivals)]
