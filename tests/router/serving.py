"""A real gateway's HTTP side in the test's own event loop: application, service, dispatcher and router over workers
that a test plays."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI

from router.config import GatewayConfig, RouterConfig
from router.gateway.accounts import Keyring
from router.gateway.app import create_app
from router.gateway.dispatch import Dispatcher
from router.gateway.jobs import Limits
from router.gateway.parsers import tool_parser
from router.gateway.server import ServerConfig
from router.gateway.service import Service
from router.gateway.text import Text
from router.gateway.trial import Trials
from router.route import Router
from router.view import View
from transfer.messages import Delta, Outcome, Request

MODEL = "model"
Play = Callable[["Played", Request], Awaitable[None]]


class Played:
    """A directory of one worker, which does for each request what `play` does; `aborted` are the ids of those that were
    called off."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._playing: dict[str, asyncio.Task[None]] = {}
        self.dispatcher: Dispatcher | None = None
        self.requests: list[Request] = []
        self.aborted: set[str] = set()

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        """See `Directory`."""
        if method == "abort":
            self.aborted.add(args[0])
            if args[0] in self._playing:
                self._playing[args[0]].cancel()
            return None
        request = args[0]
        self.requests.append(request)
        task = self._playing[request.request_id] = asyncio.ensure_future(self._play(self, request))
        try:
            await task
        except asyncio.CancelledError:
            return Outcome("aborted")
        return Outcome("done")

    def deliver(self, request: Request, start: int, tokens: tuple[int, ...], finish: str | None = None) -> None:
        """Bring tokens."""
        assert self.dispatcher is not None
        self.dispatcher.deliver([Delta(request.request_id, start, tokens, 0, finish)])

    async def all_aborted(self, within_s: float = 2.0) -> None:
        """Wait until nothing runs any more; fails after `within_s`."""
        until = asyncio.get_running_loop().time() + within_s
        while not {one.request_id for one in self.requests} <= self.aborted or self.dispatcher.in_flight:
            assert asyncio.get_running_loop().time() < until, "still at work"
            await asyncio.sleep(0.01)


def application(
    text: Text,
    directory: Played,
    config: GatewayConfig,
    context: int = 1_000_000,
    tier_format: str = "exact",
    keyring: Keyring | None = None,
) -> FastAPI:
    """The application over a worker that is played; prompt and answer may have `context` tokens. Without a keyring
    nobody needs a key."""
    view = View([("both-0", "both")])
    directory.dispatcher = Dispatcher("g", Router(view, RouterConfig()), directory, RouterConfig(), config)
    limits = Limits(MODEL, context, 16, 49152, "model", 0, 0.0, config.request_timeout_s, tier_format)
    trials = Trials(text, limits.vocab_size)
    service = Service(text, directory.dispatcher, limits, trials, tool_parser("auto", None), None)
    return create_app(service, lambda: True, lambda: b"", config, keyring or Keyring())


@asynccontextmanager
async def serving(
    app: Any, config: GatewayConfig, send_buffer: int | None = None
) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    """Serve an application as the gateway does; its port, and the server. Sockets have this much room for what is not
    read."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = uvicorn.Server(ServerConfig(app, config))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield listener.getsockname()[1], server
    finally:
        for one in list(server.server_state.connections):
            one.transport.abort()
        while server.server_state.tasks:
            await asyncio.sleep(0.005)
        task.cancel()  # an orderly end would take the server's next tick
        await asyncio.gather(task, return_exceptions=True)
        for one in server.servers:
            one.close()


class Client:
    """A connection that sends bytes, and reads what comes when it is told to."""

    def __init__(self, inner: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.socket = inner
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None, paused: bool = False) -> "Client":
        """Connect, with this much room in the socket for what is not read. A paused client reads nothing by itself."""
        one = socket.socket()
        if receive_buffer is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        one.setblocking(False)
        await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
        # The loop's own connection may close its socket; this one is for reading by hand.
        reader, writer = await asyncio.open_connection(sock=one.dup(), limit=1 << 16)
        if paused:
            writer.transport.pause_reading()
        return cls(one, reader, writer)

    def post(self, path: str, body: bytes, **headers: str) -> None:
        """Send a request."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """The status and the headers of the response."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, value in pairs}

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """A whole response with a JSON body."""
        status, headers = await self.head()
        return status, headers, json.loads(await self.reader.readexactly(int(headers["content-length"])))

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body of a stream, as it was sent, to its end."""
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)

    async def closed(self, within_s: float = 2.0) -> None:
        """Read until the server has closed the connection; fails after `within_s`."""
        with suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), within_s)

    def leave(self) -> None:
        """Close the connection."""
        self.socket.close()
        self.writer.transport.abort()


def chat(**more: Any) -> bytes:
    """A chat request's body."""
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **more}).encode()


def completion(**more: Any) -> bytes:
    """A completion request's body."""
    return json.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 100_000, **more}).encode()
