"""The server as a process: its socket, its signals, its end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from types import FrameType

import click
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_runtime.errors import DFlashError
from dflash_tools.serve_app import ServeApp
from dflash_tools.sizes import counted

_HEADER_TIMEOUT_S = 30.0
_KEEP_ALIVE_S = 30
_LAST_BYTES_S = 5
"""For what is sent already to reach the clients."""


class TimedProtocol(H11Protocol):
    """HTTP whose connections are closed when a request's head does not come in time."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection must send a request."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Bytes came: either a head is complete with them, or it is still awaited."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEADER_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class DrainingServer(uvicorn.Server):
    """A server that ends when asked to: new requests are refused, those under way are answered first.

    Args:
        app: What is served.
        drain_timeout_s: Longest wait for answers; then they fail.
        ready: Called once requests are taken.
    """

    def __init__(self, app: ServeApp, drain_timeout_s: float, ready: Callable[[], None] | None = None) -> None:
        # Addresses in headers are what a client claims; turns are taken by who is connected.
        super().__init__(uvicorn.Config(
            app.gate, http=TimedProtocol, ws="none", lifespan="on", loop="asyncio", access_log=False,
            log_level="warning", proxy_headers=False, server_header=False, timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_BYTES_S,
        ))  # fmt: skip
        self._app, self._drain_timeout_s, self._ready = app, drain_timeout_s, ready
        self._drain_until_s: float | None = None
        self._told_of_drain = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens; signals are caught from before."""
        await super().startup(sockets)
        if self._ready is not None:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first one drains, the second one ends at once."""
        if self._drain_until_s is None:
            self.drain()
        else:
            self._drain_until_s = time.monotonic()

    def drain(self) -> None:
        """Refuses new requests from now on, and ends when those under way are answered."""
        self._app.gate.draining = True
        self._drain_until_s = time.monotonic() + self._drain_timeout_s

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second: looks whether the end has come."""
        if self._drain_until_s is not None:
            self._tell_of_drain()
            if time.monotonic() >= self._drain_until_s and (count := self._app.pool.abandon()):
                click.echo(f"{count} answers were not complete in time and have failed.", err=True)
            if self._app.gate.under_way == 0 or time.monotonic() >= self._drain_until_s:
                self.should_exit = True
        return await super().on_tick(counter)

    def _tell_of_drain(self) -> None:
        if not self._told_of_drain and (count := self._app.gate.under_way):
            click.echo(f"Ending when what is under way is answered ({counted(count, 'request')}), after "
                       f"{self._drain_timeout_s:g} s at the latest; Ctrl-C or SIGTERM now ends at once.", err=True)
        self._told_of_drain = True


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address; port 0 takes a free one.

    Raises:
        DFlashError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except OSError as error:
        said = f"Cannot listen on {host}:{port}: {error.strerror}. Give another --host or --port."
        raise DFlashError(said) from error
    found.set_inheritable(False)
    return found
