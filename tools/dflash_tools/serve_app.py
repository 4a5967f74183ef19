"""The server's routes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dflash_tools.serve_answers import Answer, AnswerResponse
from dflash_tools.serve_bundles import ServedBundle
from dflash_tools.serve_errors import ApiError
from dflash_tools.serve_fields import parse_body
from dflash_tools.serve_limits import Gate, Limits, error_response, read_body
from dflash_tools.serve_metrics import ServeMetrics
from dflash_tools.serve_pool import BundlePool
from dflash_tools.serve_replies import ChatShape, CompletionShape, Reply, Shape
from dflash_tools.serve_requests import Defaults, Order, read_chat, read_completion

Reader = Callable[[Mapping[str, Any], Defaults], Order]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")


@dataclasses.dataclass
class ServeApp:
    """Everything the routes share; `gate` is the ASGI application."""

    bundles: Sequence[ServedBundle]
    pool: BundlePool
    limits: Limits
    metrics: ServeMetrics
    defaults: Defaults

    def __post_init__(self) -> None:
        self._named = {facts.name: facts for facts in self.bundles}
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name}", self._model, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics_text, methods=["GET"]),
        ]
        handlers = {ApiError: _refused, HTTPException: _no_route, Exception: _fault}
        inner: ASGIApp = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        self.gate = Gate(inner, self.limits, self.metrics, PATHS)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await to_thread.run_sync(self.pool.close)

    async def _chat(self, request: Request) -> Any:
        return await self._answer(request, read_chat, ChatShape())

    async def _completions(self, request: Request) -> Any:
        return await self._answer(request, read_completion, CompletionShape())

    async def _answer(self, request: Request, read: Reader, shape: Shape) -> Any:
        order = read(parse_body(await read_body(request, self.limits)), self.defaults)
        facts = self._find(order.model)
        wants_logprobs = order.questions[0].top_logprobs is not None
        reply = Reply(
            shape, facts.name, facts.fingerprint, wants_logprobs, order.include_usage, order.answers_per_prompt
        )
        answer = Answer(self.pool, order, request.state.client, self.limits)
        return AnswerResponse(answer, order, reply, self.limits)

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(facts) for facts in self.bundles]})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(_model_card(self._find(request.path_params["name"])))

    async def _health(self, _: Request) -> Response:
        draining = self.gate.draining
        return JSONResponse({"status": "draining" if draining else "ok"}, 503 if draining else 200)

    async def _metrics_text(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _find(self, name: str) -> ServedBundle:
        if name not in self._named:
            known = ", ".join(self._named)
            raise ApiError(404, f"The model {name!r} does not exist here. This server has: {known}.", param="model",
                           code="model_not_found")  # fmt: skip
        return self._named[name]


def _model_card(facts: ServedBundle) -> dict[str, Any]:
    return {"id": facts.name, "object": "model", "created": facts.created_s, "owned_by": "dflash-export"}


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path} is not served here. Served are: {', '.join(PATHS)}."
    return error_response(ApiError(error.status_code, said, code="unknown_url"))


async def _fault(_: Request, error: Exception) -> Response:
    return error_response(ApiError(500, "The server failed at this request; its log says how.", code="fault"))
