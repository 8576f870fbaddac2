"""Requests over bare sockets: a client that measures many of them beside a cluster must not take its cores."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster.test_failures import MODEL
from tests.router.serving import Client


@dataclass(frozen=True)
class Reply:
    """What came of a request that was sent at `at`: after how many seconds its first token, or its refusal, came, and
    its end. A refusal says after how many seconds to come again."""

    at: float
    status: int
    first_s: float
    total_s: float
    retry_after: int = 0
    cached_tokens: int = 0


def wanted(prompt: list[int], output: int, model: str = MODEL) -> bytes:
    """The body of a streamed request."""
    body = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    return json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()


async def ask(port: int, body: bytes, key: str = "") -> Reply:
    """Send one request and read its answer to the end; anything but a whole answer or a 429 is an error."""
    at = time.perf_counter()
    client = await Client.connect(port)
    try:
        client.post("/v1/completions", body, authorization=f"Bearer {key}")
        status, headers = await client.head()
        if status != 200:
            assert status == 429, (status, await client.reader.readexactly(int(headers["content-length"])))
            late = time.perf_counter() - at
            return Reply(at, status, late, late, retry_after=int(headers["retry-after"]))
        first, events = 0.0, []
        async for chunk in client.chunks():
            if chunk.startswith(b"data: "):
                first = first or time.perf_counter() - at
                events.append(chunk)
        *_, usage, done = b"".join(events).decode().split("\n\n")[:-1]
        assert done == "data: [DONE]", done
        cached = json.loads(usage.removeprefix("data: "))["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Reply(at, status, first, time.perf_counter() - at, cached_tokens=cached)
    finally:
        client.leave()


async def closed_loop(port: int, body: Callable[[], bytes], clients: int, seconds: float, key: str = "") -> list[Reply]:
    """So many clients, each of which asks again as soon as it is answered. Refused ones wait as they are told."""
    replies: list[Reply] = []
    until = time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < until:
            replies.append(await ask(port, body(), key))
            await asyncio.sleep(replies[-1].retry_after)

    await asyncio.gather(*(one() for _ in range(clients)))
    return replies


async def open_loop(port: int, body: Callable[[], bytes], rate: float, seconds: float, key: str = "") -> list[Reply]:
    """So many requests a second, whatever becomes of them."""
    tasks = []
    begun = time.perf_counter()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(port, body(), key)))
    return await asyncio.gather(*tasks)
