"""What every request passes on its way to a route and back. Plain ASGI: nothing is held back, no answer is buffered."""

from __future__ import annotations

import logging
import time

from opentelemetry import propagate, trace
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.gateway import metrics, observed, request_id
from router.gateway.errors import failed
from router.gateway.http import CLIENT_CLOSED, OUTCOME
from router.gateway.keys import is_looked_at
from transfer.tracing import enabled

_log = logging.getLogger(__name__)
_tracer = trace.get_tracer("headwater.gateway")
_HEADER = request_id.HEADER.encode()
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


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


class _Headers(Getter[list[tuple[bytes, bytes]]]):
    """Reads a request's headers as ASGI has them."""

    def get(self, carrier: list[tuple[bytes, bytes]], key: str) -> list[str] | None:
        """All values of one."""
        wanted = key.lower().encode()
        return [value.decode("latin-1") for name, value in carrier if name == wanted] or None

    def keys(self, carrier: list[tuple[bytes, bytes]]) -> list[str]:
        """Names of all."""
        return [name.decode("latin-1") for name, _ in carrier]


_HEADERS = _Headers()


class Traced:
    """Makes the span of each request, which goes on with the caller's trace where there is one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or is_looked_at(scope["path"]) or not enabled():
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        context = propagate.extract(scope["headers"], getter=_HEADERS)
        span = _tracer.start_span(method, context, SpanKind.SERVER, {"http.request.method": method})

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        # An exception's text may say more than a trace should.
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                await self._app(scope, receive, noted if span.is_recording() else send)
            finally:
                _describe(span, scope)


def _describe(span: Span, scope: Scope) -> None:
    if (route := getattr(scope.get("route"), "path", None)) is not None:
        span.set_attribute("http.route", route)
    if (outcome := scope.get(OUTCOME)) is not None:
        span.set_attribute("headwater.outcome", outcome)
        if outcome == "error":
            span.set_status(Status(StatusCode.ERROR))


class Counted:
    """Counts each request of clients once when it comes and once when it is over, whatever happens to it. By the
    route's template and never by the client's path, so that labels stay bounded."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or is_looked_at(scope["path"]):
            await self._app(scope, receive, send)
            return
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        metrics.started.add(1)
        before = observed.arrived.set(time.monotonic())
        try:
            await self._app(scope, receive, noted)
        finally:
            observed.arrived.reset(before)
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
