"""The waiting side of an answer: events of its jobs to one response, whole or streamed, until the client leaves."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from dflash_tools.serve_errors import ApiError
from dflash_tools.serve_jobs import Event, Failed, Finished, Job, Piece, Started, TokenText
from dflash_tools.serve_limits import Limits, error_response
from dflash_tools.serve_pool import BundlePool
from dflash_tools.serve_replies import Reply
from dflash_tools.serve_requests import Order

_READING_S = 30.0
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Answer:
    """The jobs of one request, on the event loop.

    Args:
        pool: Runs them.
        order: The request.
        client: Whose turn it takes.
        limits: Time-outs.

    Raises:
        ApiError: the queue is full, or the server is shutting down.
    """

    def __init__(self, pool: BundlePool, order: Order, client: str, limits: Limits) -> None:
        self._pool, self._limits, self._loop = pool, limits, asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._jobs = [Job(client, question, functools.partial(self._tell, i))
                      for i, question in enumerate(order.questions)]  # fmt: skip
        pool.submit(order.model, self._jobs)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Index of the choice and what happens to it, until all are complete.

        Raises:
            ApiError: one of them failed, or a time-out passed.
        """
        running, ahead = False, len(self._jobs)
        # A timer that is one more event: `asyncio.wait_for` of Python 3.11 loses a cancellation that meets a result.
        timer = self._fail_after(self._limits.queue_timeout_s, self._waited_too_long)
        try:
            while ahead:
                index, event = await self._events.get()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Started) and not running:
                    running = True
                    timer.cancel()
                    timer = self._fail_after(self._limits.request_timeout_s, self._took_too_long)
                ahead -= isinstance(event, Finished)
                yield index, event
        finally:
            timer.cancel()

    def cancel(self) -> None:
        """Frees places in the queue and ends what runs; what is complete stays so."""
        for job in self._jobs:
            self._pool.cancel(job)

    def _tell(self, index: int, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _fail_after(self, seconds: float, error: Callable[[], ApiError]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, lambda: self._events.put_nowait((0, Failed(error()))))

    def _waited_too_long(self) -> ApiError:
        said = f"The request waited {self._limits.queue_timeout_s:g} s without its turn coming. Ask again."
        return ApiError(503, said, code="queue_timeout", retry_after_s=10)

    def _took_too_long(self) -> ApiError:
        said = f"The answer was not complete after {self._limits.request_timeout_s:g} s. Ask for fewer tokens."
        return ApiError(504, said, code="request_timeout")


class AnswerResponse:
    """An ASGI response that ends its jobs when the client leaves."""

    def __init__(self, answer: Answer, order: Order, reply: Reply, limits: Limits) -> None:
        self._answer, self._order, self._reply = answer, order, reply
        # Both time-outs are over by then: whoever has not read the answer yet does not read.
        self._longest_s = limits.queue_timeout_s + limits.request_timeout_s + _READING_S
        self._prompt_tokens = 0
        self._texts = [""] * len(order.questions)
        self._tokens: list[list[TokenText]] = [[] for _ in order.questions]
        self._results: dict[int, Finished] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer, or the error that came instead."""
        work = asyncio.ensure_future(self._work(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, timeout=self._longest_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._answer.cancel()
            for task in (work, gone):
                if not task.done():
                    task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()  # a fault is raised here

    def _work(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        return self._stream(scope, receive, send) if self._order.stream else self._whole(scope, receive, send)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for index, event in self._answer.events():
                self._keep(index, event)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        results = [self._results[i].result for i in range(len(self._texts))]
        body = self._reply.whole(self._texts, self._tokens, results, self._prompt_tokens)
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Headers leave with the first event: until then an error has a status of its own."""
        opened = False
        try:
            async for index, event in self._answer.events():
                self._keep(index, event)
                if not opened:
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                    opened = True
                for chunk in self._chunks(index, event):
                    await _send_event(send, chunk)
        except ApiError as error:
            if not opened:
                await error_response(error)(scope, receive, send)
                return
            await _send_event(send, error.body())
        else:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _keep(self, index: int, event: Event) -> None:
        if isinstance(event, Started):
            first_of_prompt = index % self._order.answers_per_prompt == 0
            self._prompt_tokens += event.prompt_tokens if first_of_prompt else 0
        elif isinstance(event, Piece):
            self._texts[index] += event.text
            self._tokens[index] += event.tokens
        elif isinstance(event, Finished):
            self._results[index] = event
            self._tokens[index] += event.tokens

    def _chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        reply = self._reply
        if isinstance(event, Started):
            opening = reply.opening(index)
            return [] if opening is None else [opening]
        if isinstance(event, Piece):
            return [reply.piece(index, event.text, event.tokens)]
        assert isinstance(event, Finished)
        found = [reply.ending(index, event.result, event.tokens)]
        if len(self._results) == len(self._texts) and self._order.include_usage:
            results = [self._results[i].result for i in range(len(self._texts))]
            found.append(reply.usage(results, self._prompt_tokens))
        return found


async def _send_event(send: Send, data: Mapping[str, Any]) -> None:
    line = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {line}\n\n".encode(), "more_body": True})
    await asyncio.sleep(0)  # sending need not wait for anything, and the client's leaving is to be noticed all the same


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
