"""The FastAPI application: routes, errors, and what happens when a client leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from router.gateway import metrics
from router.gateway.answers import Answer, ChatAnswer, CompletionAnswer
from router.gateway.choice import Piece
from router.gateway.errors import ApiError, failed, unavailable
from router.gateway.jobs import Job
from router.gateway.schemas.chat import ChatRequest
from router.gateway.schemas.common import parse
from router.gateway.schemas.completions import CompletionRequest
from router.gateway.service import Service

_log = logging.getLogger(__name__)
CLIENT_CLOSED = 499
"""Status, in metrics only, of a request whose client left (as nginx counts it)."""
PLAN_HEADER = "x-headwater-plan"
"""With it in a request, the response has one, too: the plans that were made for its prompts, as JSON."""
MAX_PLANS, MAX_PLAN_HEADER = 16, 4096
"""Prompts whose plans are shown, the latest of each; if that is longer than so many bytes, only the first prompt's last
plan is. Proxies and clients limit the size of headers."""
T = TypeVar("T")
Pieces = AsyncGenerator[Piece, None]


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def create_app(
    service: Service, ready: Callable[[], bool], render: Callable[[], bytes], max_body_bytes: int
) -> FastAPI:
    """The application over a service. `ready` says whether it can serve now, `render` gives the metrics' text."""
    app = FastAPI(title="Headwater", description="OpenAI-compatible gateway", docs_url="/docs", redoc_url=None)

    def check_ready() -> None:
        if not ready():
            raise unavailable("no worker of each role is ready")

    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    app.include_router(_operator_routes(check_ready, render))
    app.include_router(_openai_routes(service, check_ready, max_body_bytes))
    return app


def _operator_routes(check_ready: Callable[[], None], render: Callable[[], bytes]) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/ready")
    async def is_ready() -> dict[str, str]:
        check_ready()
        return {"status": "ready"}

    @routes.get("/metrics")
    async def metrics_text() -> Response:
        return Response(await asyncio.to_thread(render), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


def _openai_routes(service: Service, check_ready: Callable[[], None], max_body_bytes: int) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        check_ready()
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        check_ready()
        wanted = parse(ChatRequest, await _body(request, max_body_bytes))
        jobs = await service.chat(wanted)
        return await _respond(request, service, jobs, ChatAnswer(wanted, jobs, service.text), bool(wanted.stream))

    @routes.post("/completions")
    async def completions(request: Request) -> Response:
        check_ready()
        wanted = parse(CompletionRequest, await _body(request, max_body_bytes))
        jobs = await service.completion(wanted)
        return await _respond(request, service, jobs, CompletionAnswer(wanted, jobs, service.text), bool(wanted.stream))

    return routes


async def _on_api_error(request: Request, error: Any) -> Response:
    _count(request, "client_error" if error.status < 500 else "error")
    return error.response()


async def _on_http_error(request: Request, error: Any) -> Response:
    return ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}").response()


async def _on_client_gone(request: Request, _: Exception) -> Response:
    _count(request, "cancelled")
    return Response(status_code=CLIENT_CLOSED)


async def _on_bug(request: Request, error: Exception) -> Response:
    _log.error("%s failed", request.url.path, exc_info=error)
    _count(request, "error")
    return failed("internal error").response()


def _model(service: Service) -> dict[str, Any]:
    limits = service.limits
    return {
        "id": limits.model,
        "object": "model",
        "created": 0,
        "owned_by": "headwater",
        "max_model_len": limits.max_model_len,
    }


async def _body(request: Request, limit: int) -> bytes:
    """The request's body. Raises ApiError 413 before more than `limit` bytes are held."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


async def _respond(request: Request, service: Service, jobs: list[Job], answer: Answer, stream: bool) -> Response:
    pieces = service.pieces(jobs)
    if not stream:
        body = await _unless_gone(request, _closing(answer.whole(pieces), pieces))
        _count(request, "ok")
        return JSONResponse(body, headers=_plans(request, jobs))
    # Headers wait for the first token, so that an early failure still gets its proper status.
    try:
        first = await _unless_gone(request, anext(pieces))
    except BaseException:
        await pieces.aclose()
        raise
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **_plans(request, jobs)}
    events = _counted(request, answer.stream(_with(first, pieces)), pieces)
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _with(first: Piece, others: Pieces) -> Pieces:
    yield first
    async for piece in others:
        yield piece


def _plans(request: Request, jobs: list[Job]) -> dict[str, str]:
    if PLAN_HEADER not in request.headers:
        return {}
    for count in (MAX_PLANS, 1):
        text = json.dumps([[asdict(plan) for plan in job.prompt.plans[-count:]] for job in jobs[:count]])
        if len(text) <= MAX_PLAN_HEADER:
            break
    return {PLAN_HEADER: text}


async def _closing(work: Awaitable[T], pieces: Pieces) -> T:
    async with aclosing(pieces):
        return await work


async def _counted(
    request: Request, events: AsyncGenerator[bytes, None], pieces: Pieces
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; when the client leaves, what still runs for it is aborted."""
    outcome = "cancelled"
    try:
        async for data in events:
            outcome = "error" if data.startswith(b'data: {"error"') else outcome
            yield data
        outcome = "ok" if outcome == "cancelled" else outcome
    finally:
        _count(request, outcome)
        await pieces.aclose()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it and raise ClientGone as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _count(request: Request, outcome: str) -> None:
    """Count by route template, never by the client's path, so that labels stay bounded."""
    route = request.scope.get("route")
    metrics.requests.add(1, {"route": getattr(route, "path", "none"), "outcome": outcome})
