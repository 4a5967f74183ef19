"""A small server that speaks like vLLM, SGLang or llama.cpp: streamed chat, usage at the end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake-model"


class FakeServer:
    """Answers every question with the same pieces; keeps what it was asked."""

    def __init__(self, pieces: list[str], completion_tokens: int | None) -> None:
        self.pieces = pieces
        self.completion_tokens = completion_tokens
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    def events(self) -> Iterator[str]:
        for piece in self.pieces:
            yield json.dumps({"choices": [{"index": 0, "delta": {"content": piece}}]})
        if self.completion_tokens is not None:
            yield json.dumps({"choices": [], "usage": {"completion_tokens": self.completion_tokens}})
        yield "[DONE]"


@contextmanager
def serving(pieces: list[str], completion_tokens: int | None) -> Iterator[FakeServer]:
    """Serves on a free port of this machine."""
    fake = FakeServer(pieces, completion_tokens)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say("application/json", json.dumps({"data": [{"id": MODEL}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.requests.append(body)
            if body.get("max_tokens", 0) > 4096:
                self.send_error(400)
                return
            self._say("text/event-stream", "".join(f"data: {event}\n\n" for event in fake.events()))

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _say(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
