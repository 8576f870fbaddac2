"""What every request passes on its way to a route and back. Plain ASGI: nothing is held back, no answer is buffered."""

from __future__ import annotations

import logging

from opentelemetry import trace
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.gateway import request_id
from router.gateway.errors import failed
from router.gateway.http import count

_log = logging.getLogger(__name__)
_HEADER = request_id.HEADER.encode()


class RequestIds:
    """Gives each request its id and puts it on the response, whatever that is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = request_id.chosen(next((value for key, value in scope["headers"] if key == _HEADER), None))
        before = request_id.current.set(name)
        trace.get_current_span().set_attribute(f"http.request.header.{request_id.HEADER}", [name])

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (_HEADER, name.encode()), (b"request-id", name.encode())]
            await send(message)

        await self._app(scope, receive, named)
        request_id.current.reset(before)  # not where it raises: the server logs that, and names the request


class Bugs:
    """Answers 500 where a route raises what it should not. Starlette's own place for that is outside of all others, so
    that its answer would have neither id nor CORS headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            _log.error("%s failed", scope["path"], exc_info=error)
            count(Request(scope), "error")
            await failed("internal error").response()(scope, receive, send)
