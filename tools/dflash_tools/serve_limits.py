"""Who may ask, how much, and for how long: checked before a request is looked at."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import ipaddress
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_tools.serve_errors import ApiError
from dflash_tools.serve_metrics import ServeMetrics

CLIENT_LEFT = 499
"""The status in the metrics where nobody was there to be answered."""
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What requests are held to."""

    max_body_bytes: int = 4_000_000
    body_timeout_s: float = 30
    queue_timeout_s: float = 120
    request_timeout_s: float = 600
    """From a request's turn to the end of its answer."""
    api_keys: Sequence[str] = ()
    """Empty: everybody may ask."""
    allowed_hosts: Sequence[str] = ()
    """Names that may stand in a Host header; empty: any."""


def allowed_hosts(host: str, given: Sequence[str]) -> list[str]:
    """Names to allow in Host headers of a server bound to `host`; empty for any.

    On the loopback address a web page could reach the server under a name of its own (DNS rebinding).
    """
    return [*_LOCAL_NAMES, *given] if is_loopback(host) else list(given)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """ASGI middleware: host, key, shutting down; it counts requests and knows how many are under way.

    It leaves the client's name for the queue in `scope["state"]["client"]`.
    """

    def __init__(self, app: ASGIApp, limits: Limits, metrics: ServeMetrics, paths: Sequence[str]) -> None:
        self._app, self._limits, self._metrics, self._paths = app, limits, metrics, paths
        self.draining = False
        self.under_way = 0
        """Requests that are being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through or answers it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.under_way += 1
        try:
            request = Request(scope)
            try:
                scope.setdefault("state", {})["client"] = self._admit(request)
            except ApiError as error:
                await error_response(error)(scope, receive, watched)
            else:
                await self._app(scope, receive, watched)
        finally:
            self.under_way -= 1
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.count_request(path, status)

    def _admit(self, request: Request) -> str:
        """The client's name; ApiError where the request may not come in."""
        host = _host_name(request.headers.get("host", ""))
        if self._limits.allowed_hosts and host not in self._limits.allowed_hosts:
            raise ApiError(403, f"This server is not called {host!r}. Start it with --allowed-host {host or 'NAME'}.",
                           code="host_not_allowed")  # fmt: skip
        peer = request.client.host if request.client is not None else "unknown"
        if request.url.path == "/health":
            return peer
        client = self._who(request.headers.get("authorization", ""), peer)
        if self.draining and request.method == "POST":
            raise ApiError(503, "The server is shutting down. Ask again when it is back.", code="shutting_down",
                           retry_after_s=10)  # fmt: skip
        return client

    def _who(self, authorization: str, peer: str) -> str:
        keys = self._limits.api_keys
        if not keys:
            return peer
        kind, _, given = authorization.partition(" ")
        given = given.strip() if kind.lower() == "bearer" else ""
        # Every key is compared, and in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in keys]
        if not any(matches):
            said = "The API key is not one of this server's" if given else "No API key was given"
            raise ApiError(401, f"{said}. Send it as: Authorization: Bearer KEY", code="invalid_api_key")
        return peer if len(keys) == 1 else f"key {matches.index(True)}"  # a key all share tells nobody apart


def _host_name(header: str) -> str:
    """A Host header without its port, in lower case; IPv6 without brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def error_response(error: ApiError) -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse(error.body(), error.status, error.headers())


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body.

    Raises:
        ApiError: it is not said to be JSON, too large, or does not come in time.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a web page may send other types to a foreign server without asking it
        raise ApiError(415, f"Content-Type is {kind!r} and must be application/json.", code="invalid_content_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        return await asyncio.wait_for(_read(request, limits), limits.body_timeout_s)
    except asyncio.TimeoutError:
        raise ApiError(408, f"The body did not come within {limits.body_timeout_s:g} s.", code="body_timeout") from None
    except ClientDisconnect as error:
        raise ApiError(CLIENT_LEFT, "The client left before its request was complete.") from error


async def _read(request: Request, limits: Limits) -> bytes:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > limits.max_body_bytes:
            raise _too_large(limits)
    return bytes(found)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"The body is larger than {limits.max_body_bytes} bytes. Send less, or start the server with "
                    "a larger --max-body.", code="body_too_large")  # fmt: skip
