"""Bodies, streams and clients over real connections: nothing is held without a bound, nothing goes on for nobody."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar

import pytest

from router.config import GatewayConfig
from router.gateway.http import KEEP_ALIVE, body_as
from router.gateway.schemas.completions import CompletionRequest
from router.gateway.text import Text
from tests.router.serving import Client, Played, application, chat, completion, serving
from transfer.messages import Request

BIG = tuple(range(1000, 1500))
"""Tokens of one delivery that fills buffers."""
SMALL = 4096
"""Bytes that the sockets of some tests have room for, about."""


def run(work: Callable[[], Coroutine[Any, Any, None]], loop: str) -> None:
    """On the loop of the standard library, or on that which Ray gives its actors where it is installed."""
    runs = pytest.importorskip("uvloop").new_event_loop() if loop == "uvloop" else asyncio.new_event_loop()
    try:
        runs.run_until_complete(asyncio.wait_for(work(), 30))
    finally:
        runs.close()


async def nothing(played: Played, request: Request) -> None:
    await asyncio.sleep(60)


async def three(played: Played, request: Request) -> None:
    for start in range(3):
        played.deliver(request, start, (1000 + start,), "length" if start == 2 else None)
        await asyncio.sleep(0)


async def without_end(played: Played, request: Request) -> None:
    for start in range(0, 100_000, len(BIG)):
        played.deliver(request, start, BIG)
        await asyncio.sleep(0.001)


@pytest.fixture
async def client(text: Text) -> AsyncIterator[Client]:
    """Of a gateway with small bounds, whose worker answers three tokens."""
    config = GatewayConfig(max_body_bytes=2048, body_timeout_s=0.3)
    async with serving(application(text, Played(three), config), config) as (port, _):
        yield await Client.connect(port)


# Bodies


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(client: Client) -> None:
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2049\r\n\r\n")
    status, _, body = await client.answer()
    assert (status, body["error"]["message"]) == (413, "the body is larger than 2048 bytes")
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "body_too_large")


async def test_a_body_that_turns_out_too_large_is_refused_as_soon_as_it_is(client: Client) -> None:
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.writer.write(b"7d0\r\n" + b"x" * 2000 + b"\r\n" + b"7d0\r\n" + b"x" * 2000 + b"\r\n")  # and no end
    assert (await client.answer())[0] == 413


async def test_a_body_that_does_not_come_is_408_and_the_end_of_the_connection(client: Client) -> None:
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    status, headers, body = await asyncio.wait_for(client.answer(), 5)
    assert (status, headers["connection"]) == (408, "close")
    assert (body["error"]["type"], body["error"]["code"]) == ("timeout_error", "body_timeout")
    await client.closed()


async def test_a_head_that_does_not_come_is_the_end_of_the_connection(client: Client) -> None:
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
    await client.closed(within_s=1)


async def test_an_endless_head_is_refused(client: Client) -> None:
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: " + b"x" * 70_000)
    status, headers, body = await client.answer()
    assert (status, set(body["error"])) == (431, {"message", "type", "param", "code"})
    assert headers["x-request-id"]
    await client.closed()


async def test_what_is_not_http_is_an_error_object(client: Client) -> None:
    client.writer.write(b"hello\r\n\r\n")
    assert (await client.answer())[2]["error"]["type"] == "invalid_request_error"


async def test_a_connection_serves_one_request_after_another(client: Client) -> None:
    for _ in range(3):
        client.post("/v1/completions", completion(max_tokens=3))
        assert (await client.answer())[2]["usage"]["completion_tokens"] == 3


async def test_a_large_body_does_not_hold_the_loop(text: Text) -> None:
    """Of 100,000 tokens; the longest time that a task which wants to run every millisecond does not get to."""
    draw = random.Random(0)
    body = completion(prompt=[draw.randrange(49152) for _ in range(100_000)])
    assert len(body) > 500_000

    class Arrived:
        headers: ClassVar[dict[str, str]] = {}
        app = application(text, Played(nothing), GatewayConfig())

        async def stream(self) -> AsyncIterator[bytes]:
            yield body

    async def gaps_beside() -> list[float]:
        loop, gaps = asyncio.get_running_loop(), []

        async def probe() -> None:
            while True:
                before = loop.time()
                await asyncio.sleep(0.001)
                gaps.append(loop.time() - before)

        probing = asyncio.create_task(probe())
        await asyncio.sleep(0.002)
        gaps.clear()
        parsed = await body_as(CompletionRequest, Arrived())  # type: ignore[arg-type]
        runs = len(gaps)
        await asyncio.sleep(0.002)
        probing.cancel()
        assert len(parsed.prompt) == 100_000
        between.append(runs)
        return gaps

    between: list[int] = []
    least = 1.0
    for _ in range(30):  # whoever else is busy on this machine makes gaps, too
        least = min(least, max(await gaps_beside()))
    assert least < 0.02
    assert max(between) >= 2  # even where the whole of it would take no longer


# Streams


async def test_a_silent_stream_is_kept_alive_before_and_between_tokens(text: Text) -> None:
    async def slow(played: Played, request: Request) -> None:
        await asyncio.sleep(0.3)
        played.deliver(request, 0, (1000,))
        await asyncio.sleep(0.3)
        played.deliver(request, 1, (1001,), "length")

    config = GatewayConfig(keepalive_s=0.05)
    async with serving(application(text, Played(slow), config), config) as (port, _):
        client = await Client.connect(port)
        client.post("/v1/completions", completion(stream=True, return_token_ids=True))
        status, headers = await asyncio.wait_for(client.head(), 0.3)
        assert (status, headers["cache-control"], headers["x-accel-buffering"]) == (200, "no-cache", "no")
        assert headers["content-type"].startswith("text/event-stream")
        chunks = [chunk async for chunk in client.chunks()]
        client.leave()
    kinds = "".join("k" if chunk == KEEP_ALIVE else "t" if b"token_ids" in chunk else "d" for chunk in chunks)
    assert kinds.replace("k", "") == "ttd"
    before, between, after = kinds.split("t")
    assert (2 <= len(before) <= 10, 2 <= len(between) <= 10, after) == (True, True, "d")
    given = [json.loads(chunk.removeprefix(b"data: "))["choices"][0] for chunk in chunks if b"token_ids" in chunk]
    assert [(one["token_ids"], one["finish_reason"]) for one in given] == [([1000], None), ([1001], "length")]


async def test_a_stream_with_tokens_has_no_comments(text: Text) -> None:
    async def steady(played: Played, request: Request) -> None:
        for start in range(20):
            played.deliver(request, start, (1000,), "length" if start == 19 else None)
            await asyncio.sleep(0.02)

    config = GatewayConfig(keepalive_s=0.3)
    async with serving(application(text, Played(steady), config), config) as (port, _):
        client = await Client.connect(port)
        client.post("/v1/chat/completions", chat(stream=True))
        await client.head()
        chunks = [chunk async for chunk in client.chunks()]
        client.leave()
    assert KEEP_ALIVE not in chunks
    assert chunks[-1] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("late", [False, True])
async def test_a_failure_has_a_status_before_the_stream_has_begun_and_is_an_event_after(text: Text, late: bool) -> None:
    async def fail(played: Played, request: Request) -> None:
        await asyncio.sleep(0.3 if late else 0)
        played.dispatcher.shut_down()
        await asyncio.sleep(60)

    config = GatewayConfig(keepalive_s=0.1)
    played = Played(fail)
    async with serving(application(text, played, config), config) as (port, _):
        client = await Client.connect(port)
        client.post("/v1/completions", completion(stream=True))
        if late:
            assert (await client.head())[0] == 200
            chunks = [chunk async for chunk in client.chunks()]
            assert set(chunks[:-1]) == {KEEP_ALIVE}
            error = json.loads(chunks[-1].removeprefix(b"data: "))["error"]
        else:
            status, headers, body = await client.answer()
            assert (status, headers["retry-after"]) == (503, "2")
            error = body["error"]
        assert error == {
            "message": "the gateway is shutting down",
            "type": "server_error",
            "param": None,
            "code": "unavailable",
        }
        await played.all_aborted()
        client.leave()


async def test_a_bug_in_mid_stream_is_an_error_event(text: Text, caplog: pytest.LogCaptureFixture) -> None:
    async def odd(played: Played, request: Request) -> None:
        played.deliver(request, 0, (1000,))
        await asyncio.sleep(0.05)
        played.dispatcher._attempts[request.request_id].queue.put_nowait(ZeroDivisionError("a secret"))
        await asyncio.sleep(60)

    played = Played(odd)
    async with serving(application(text, played, GatewayConfig()), GatewayConfig()) as (port, _):
        client = await Client.connect(port)
        client.post("/v1/completions", completion(stream=True))
        assert (await client.head())[0] == 200
        *_, last = [chunk async for chunk in client.chunks()]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["message"], error["type"]) == ("internal error", "server_error")
        assert "a secret" in caplog.text
        await played.all_aborted()
        client.leave()


# Clients that leave or do not read


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_client_that_leaves_before_the_first_token_stops_the_work(text: Text, path: str, stream: bool) -> None:
    played = Played(nothing)
    config = GatewayConfig(keepalive_s=0.05)
    async with serving(application(text, played, config), config) as (port, _):
        for wait_s in (0.0, 0.1):  # during prefill, and when the stream has begun without a token
            client = await Client.connect(port)
            client.post(path, (chat if "chat" in path else completion)(stream=stream))
            while len(played.requests) == len(played.aborted):
                await asyncio.sleep(0.01)
            await asyncio.sleep(wait_s)
            client.leave()
            await played.all_aborted()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_the_middle_stops_the_work(text: Text, stream: bool) -> None:
    played = Played(without_end)
    async with serving(application(text, played, GatewayConfig()), GatewayConfig()) as (port, _):
        client = await Client.connect(port)
        client.post("/v1/completions", completion(stream=stream))
        if stream:
            await client.reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.1)
        client.leave()
        await played.all_aborted()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_does_not_read_is_gone(text: Text, loop: str) -> None:
    async def work() -> None:
        played = Played(without_end)
        config = GatewayConfig(write_timeout_s=0.2, keepalive_s=0.05)
        async with serving(application(text, played, config), config, SMALL) as (port, server):
            client = await Client.connect(port, SMALL, paused=True)
            client.post("/v1/completions", completion(stream=True, return_token_ids=True))
            most = 0
            while not played.requests or played.dispatcher.in_flight:
                held = [one.transport.get_write_buffer_size() for one in server.server_state.connections]
                most = max(most, *held, 0) if held else most
                await asyncio.sleep(0.01)
            await played.all_aborted()
            assert not server.server_state.connections
            assert 0 < most < 100_000
            client.leave()

    run(work, loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_reads_slowly_gets_everything(text: Text, loop: str) -> None:
    async def much(played: Played, request: Request) -> None:
        for start in range(0, 20_000, len(BIG)):
            played.deliver(request, start, BIG, "length" if start + len(BIG) == 20_000 else None)
            await asyncio.sleep(0)

    async def work() -> None:
        played = Played(much)
        config = GatewayConfig(write_timeout_s=0.4)
        async with serving(application(text, played, config), config, SMALL) as (port, _):
            client = await Client.connect(port, SMALL, paused=True)
            client.post("/v1/completions", completion(return_token_ids=True, max_tokens=20_000))
            loop, got, end = asyncio.get_running_loop(), 0, b""
            begun = loop.time()
            while not end.endswith(b"}}"):  # one write, which takes longer than a client may take nothing
                await asyncio.sleep(0.05 if got < 100_000 else 0)
                data = await loop.sock_recv(client.socket, 1 << 13)
                assert data, f"closed after {got} bytes"
                got, end = got + len(data), (end + data)[-2:]
            assert loop.time() - begun > 2 * config.write_timeout_s
            client.leave()

    run(work, loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_tokens_are_not_held_back_by_the_network(text: Text, loop: str) -> None:
    async def work() -> None:
        async with serving(application(text, Played(nothing), GatewayConfig()), GatewayConfig()) as (port, server):
            client = await Client.connect(port)
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            (connection,) = server.server_state.connections
            inner = connection.transport.get_extra_info("socket")
            assert inner.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.leave()

    run(work, loop)
