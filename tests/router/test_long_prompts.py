"""A prompt of 100,000 tokens holds up nobody: reading, templating, tokenizing and hashing it leave the loop to others.

What counts is the processor time of each thing that the loop does, which does not depend on what else the machine
does. What is done in other threads must leave the interpreter to the loop: a task that wants to run every millisecond
does.
"""

import asyncio
import json
import time
from typing import Any

import pytest

from router.config import GatewayConfig
from router.gateway.text import Text
from tests.router.serving import MODEL, Client, Played, application, serving
from transfer.messages import Request

TOKENS = 100_000
MOST_S = 0.02
WORDS = " ".join(f"w{number % 997}" for number in range(TOKENS // 3))
"""At least three tokens a word."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 1},
    "/v1/completions": {"prompt": WORDS, "max_tokens": 1},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 1},
    "/tokenize": {"prompt": WORDS},
}


async def one_token(played: Played, request: Request) -> None:
    played.deliver(request, 0, (1000,), "length")


class Longest:
    """The processor time of the longest callback, and the longest time between two turns of a task."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.callback_s = 0.0
        self.turn_s = 0.0
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            begun = time.thread_time()
            run(handle)
            self.callback_s = max(self.callback_s, time.thread_time() - begun)

        monkeypatch.setattr(asyncio.Handle, "_run", timed)

    async def watch(self) -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            self.turn_s = max(self.turn_s, time.perf_counter() - begun)


@pytest.mark.parametrize("path", BODIES)
async def test_the_loop_goes_on(text: Text, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    config, played = GatewayConfig(), Played(one_token)
    async with serving(application(text, played, config), config) as (port, _):
        client = await Client.connect(port)
        body = json.dumps({"model": MODEL, **BODIES[path]}).encode()
        longest = Longest(monkeypatch)
        watch = asyncio.create_task(longest.watch())
        await asyncio.sleep(0.01)
        client.post(path, body)
        status, headers = await client.head()
        answer = await client.reader.readexactly(int(headers["content-length"]))
        watch.cancel()
    assert status == 200
    tokens = len(json.loads(answer)["tokens"]) if path == "/tokenize" else played.requests[0].prompt_tokens
    assert tokens > TOKENS
    assert longest.callback_s < MOST_S
    assert longest.turn_s < 0.3
