"""HTTP between a request and its answer: bodies with bounds, answers whole or as events, clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from router.config import GatewayConfig
from router.gateway.answers import Answer
from router.gateway.choice import Piece
from router.gateway.errors import ApiError, failed, invalid
from router.gateway.schemas.common import parse

_log = logging.getLogger(__name__)
CLIENT_CLOSED = 499
"""Status, in metrics only, of a request whose client left (as nginx counts it)."""
THREAD_BYTES = 64 * 2**10
"""Larger bodies are parsed beside the event loop, so that tokens of others need not wait."""
OUTCOME = "headwater.outcome"
"""In the scope of a request: how it has ended, where its status does not say so."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients of server-sent events skip; what is between them and here sees that the stream lives."""
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Pieces = AsyncGenerator[Piece, None]


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def body_as(kind: type[M], request: Request) -> M:
    """The request's body, within the gateway's bounds, as `kind`. Raises ApiError 400, 408 or 413, and ClientGone."""
    config = _config(request)
    body = await read_body(request, config.max_body_bytes, config.body_timeout_s)
    if len(body) <= THREAD_BYTES:
        return parse(kind, body)
    return await asyncio.to_thread(parse, kind, body)


def check_query(request: Request, *known: str) -> None:
    """Raises ApiError 400 for a query parameter that is not known."""
    for name, value in request.query_params.items():
        if name not in known and (name, value) != ("stream", "false"):
            raise invalid(f"{name[:100]}: this query parameter is not supported", name[:100], "unsupported_parameter")


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The request's body. Raises ApiError 413 before more than `limit` bytes are held, 408 where it does not come
    within `timeout_s`, and ClientGone."""
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large(limit)
    collecting = asyncio.create_task(_collect(request, limit))
    try:
        # Not `wait_for`: before Python 3.12 it can swallow a cancellation.
        await asyncio.wait({collecting}, timeout=timeout_s)
        if collecting.done():
            return collecting.result()
        raise ApiError(408, f"the body did not come within {timeout_s:g} s", code="body_timeout")
    finally:
        await _end(collecting)


async def respond(
    request: Request,
    pieces: Pieces,
    answer: Answer,
    stream: bool,
    headers: Callable[[], Mapping[str, str]] = dict,
) -> Response:
    """The answer that `pieces` come to, whole or as events. `headers` is asked when the response begins.

    Raises ApiError for what fails before a response has begun, and ClientGone. Then, or when the response is over,
    `pieces` is closed: nobody works on for a client that has left. A stream begins with its first piece, so that an
    early failure still gets its status, or after `gateway.keepalive_s` without one."""
    if not stream:
        try:
            body = await unless_gone(request, answer.whole(pieces))
        finally:
            await pieces.aclose()
        return await asyncio.to_thread(JSONResponse, body, headers=headers())
    feed, keepalive_s = _Feed(pieces), _config(request).keepalive_s
    try:
        await unless_gone(request, asyncio.wait({feed.first}, timeout=keepalive_s))
        if feed.first.done():
            feed.first.result()
    except BaseException:
        await feed.close()
        raise
    return EventStream(request, feed, answer.stream(feed.pieces()), keepalive_s, headers())


class _Feed:
    """The pieces of a stream, of which the first is asked for at once. A stream that has begun can only end with an
    error event, so whatever goes wrong becomes an ApiError, and `failed` is set."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.first = asyncio.ensure_future(anext(pieces))
        self.failed = False

    async def pieces(self) -> Pieces:
        """All of them, from the first one on."""
        try:
            yield await self.first
            async for piece in self._pieces:
                yield piece
        except ApiError:
            self.failed = True
            raise
        except Exception as error:
            self.failed = True
            _log.error("a stream failed", exc_info=error)
            raise failed("internal error") from None

    async def close(self) -> None:
        """Abort what still runs."""
        await _end(self.first)
        await self._pieces.aclose()


class EventStream(StreamingResponse):
    """Server-sent events. While there are none, a comment goes out every `keepalive_s`; when the client leaves, what
    still runs for it is aborted."""

    def __init__(
        self,
        request: Request,
        feed: _Feed,
        events: AsyncGenerator[bytes, None],
        keepalive_s: float,
        headers: Mapping[str, str],
    ) -> None:
        always = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers={**always, **headers})
        self._request = request
        self._feed = feed
        self._events = events
        self._keepalive_s = keepalive_s
        self._sending = True
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        outcome = "cancelled"
        writing = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(_until_gone(receive))
        beside = asyncio.create_task(self._keep_alive(send))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                outcome = "error"
                writing.result()
                outcome = "error" if self._feed.failed else "ok"
        finally:
            await _end(writing, gone, beside)
            await self._events.aclose()
            await self._feed.close()
            self._request.scope[OUTCOME] = outcome

    async def _write(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._feed.first.done():
            self._sent_at = clock()
        self._sending = False
        async for data in self._events:
            self._sending = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending, self._sent_at = False, clock()
        self._sending = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Between events only: each of them is one message to the server, so a comment never falls into one."""
        clock = asyncio.get_running_loop().time
        while True:
            if not self._sending and clock() - self._sent_at >= self._keepalive_s:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._sent_at = clock()
            await asyncio.sleep(max(0.0, min(self._keepalive_s, self._sent_at + self._keepalive_s - clock())))


def _config(request: Request) -> GatewayConfig:
    config: GatewayConfig = request.app.state.config
    return config


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


async def _collect(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it and raise ClientGone as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(task, gone)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
