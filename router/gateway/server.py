"""The HTTP server: uvicorn over httptools, with bounds on connections that uvicorn does not have."""

from __future__ import annotations

import asyncio
import json
import socket
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.config import GatewayConfig
from router.gateway import request_id
from router.gateway.errors import ApiError

MAX_HEAD_BYTES = 64 * 2**10
"""Of a request's first line and headers."""
CLOSING_S = 1
"""How long open connections are given when the server ends."""


class ServerConfig(uvicorn.Config):
    """How the gateway serves its application."""

    def __init__(self, app: ASGIApp, gateway: GatewayConfig) -> None:
        super().__init__(
            app,
            http=Connection,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSING_S,
            ssl_certfile=gateway.tls_certificate,
            ssl_keyfile=gateway.tls_key,
        )
        self.gateway = gateway


class Connection(HttpToolsProtocol):
    """One client's connection. It ends when a request's head does not come in time, or when the client does not take
    what is written: then the application sees it leave. Nothing is buffered beyond what the socket takes, so an answer
    waits in its queue and not in memory of the connection."""

    config: ServerConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._stalled: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        # A plain transport pauses when it holds more than this, an encrypted one when it holds as much.
        transport.set_write_buffer_limits(high=int(transport.get_extra_info("sslcontext") is not None), low=0)
        # asyncio does so only for sockets that were made with the protocol's number, which listeners' are not.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        if self._head is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(ApiError(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """Its head is there."""
        if self._head is not None:
            self._head.cancel()
            self._head = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The socket takes no more for now."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """It has taken everything."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP."""
        self._refuse(ApiError(400, msg))

    def _await_head(self) -> None:
        self._head_bytes = 0
        if self._head is not None:
            self._head.cancel()
        self._head = self.loop.call_later(self.config.gateway.body_timeout_s, self.transport.abort)

    def _watch(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.config.gateway.write_timeout_s, self._check)

    def _check(self) -> None:
        """A slow client is served as long as it takes anything."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch()
        else:
            self.transport.abort()

    def _cancel_timers(self) -> None:
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()
        self._head = self._stalled = None

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, which has nothing that it could answer to."""
        body = json.dumps(error.body()).encode()
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            f"{request_id.HEADER}: {request_id.chosen(None)}",
            "Connection: close",
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()
