"""What every request passes on its way to a route and back. Plain ASGI: nothing is held back, no answer is buffered."""

from __future__ import annotations

import logging

from opentelemetry import trace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.gateway import metrics, request_id
from router.gateway.errors import failed
from router.gateway.http import CLIENT_CLOSED, OUTCOME
from router.gateway.keys import DASHBOARD_DATA, is_open

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


class Counted:
    """Counts each request of clients once when it comes and once when it is over, whatever happens to it. By the
    route's template and never by the client's path, so that labels stay bounded."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        path = scope["path"]
        if scope["type"] != "http" or is_open(path) or path.startswith(DASHBOARD_DATA):
            await self._app(scope, receive, send)
            return
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        metrics.started.add(1)
        try:
            await self._app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            metrics.requests.add(1, {"route": route, "outcome": scope.get(OUTCOME) or _outcome(status)})


def _outcome(status: int) -> str:
    if status == CLIENT_CLOSED:
        return "cancelled"
    return "ok" if status < 400 else "client_error" if status < 500 else "error"


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
            await failed("internal error").response()(scope, receive, send)
