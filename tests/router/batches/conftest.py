"""Gateways over one directory, whose workers a test plays, and the official client for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from router.config import GatewayConfig
from router.gateway.accounts import Keyring
from router.gateway.batches import carry_out, runner
from router.gateway.text import Text
from tests.router.serving import MODEL, Played, application, serving
from tests.router.test_http import three
from transfer.messages import Request

OVER = ("completed", "failed", "expired", "cancelled")


class Gate:
    """Workers answer while it is open; `asked` counts requests, and `passed` those that were answered."""

    def __init__(self, left: int | None = None) -> None:
        self.left = left
        self.asked = 0
        self.passed = 0
        self.opened = asyncio.Event()

    async def play(self, played: Played, request: Request) -> None:
        """See `Played`."""
        self.asked += 1
        if self.left is not None and self.asked > self.left:
            await self.opened.wait()
        await three(played, request)
        self.passed += 1


class Gateway:
    """One of them."""

    def __init__(self, url: str, runs: runner.Runner, played: Played) -> None:
        self.url = url
        self.runner = runs
        self.played = played
        self._clients: dict[str, openai.AsyncOpenAI] = {}

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        """The official client."""
        if key not in self._clients:
            self._clients[key] = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        return self._clients[key]

    async def close(self) -> None:
        """Close the clients."""
        for one in self._clients.values():
            await one.close()


Start = Callable[..., Any]


@pytest.fixture
async def start(text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start a gateway over the test's directory."""
    monkeypatch.setattr(carry_out, "WATCH_S", 0.02)
    monkeypatch.setattr(runner, "LOOK_S", 0.1)
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def one(play: Any, keyring: Keyring | None, **settings: Any) -> AsyncIterator[Gateway]:
            config = GatewayConfig(batch_path=tmp_path / "batches", **settings)
            played = Played(play)
            app = application(text, played, config, keyring=keyring)
            runs: runner.Runner = app.state.runner
            runs.start(lambda: (1, 1))
            try:
                async with serving(app, config) as (port, _):
                    gateway = Gateway(f"http://127.0.0.1:{port}", runs, played)
                    yield gateway
                    await gateway.close()
            finally:
                await runs.stop()

        async def begin(play: Any = three, keyring: Keyring | None = None, **settings: Any) -> Gateway:
            return await stack.enter_async_context(one(play, keyring, **settings))

        yield begin


def line(custom_id: Any, url: str = "/v1/completions", **body: Any) -> str:
    """A line of a batch file."""
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 3} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


async def submit(client: openai.AsyncOpenAI, lines: list[str], **more: Any) -> Batch:
    """Upload lines, and make a batch of them."""
    file = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file.id} | more
    return await client.batches.create(**wanted)


async def until(client: openai.AsyncOpenAI, name: str, *statuses: str, within_s: float = 10) -> Batch:
    """Wait until a batch has one of these statuses, or is over."""
    deadline = asyncio.get_running_loop().time() + within_s
    while (batch := await client.batches.retrieve(name)).status not in (statuses or OVER):
        assert asyncio.get_running_loop().time() < deadline, batch
        await asyncio.sleep(0.02)
    return batch


async def rows(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    """Of a file that a batch has made."""
    if file is None:
        return []
    content = await client.files.content(file)
    return [json.loads(one) for one in content.text.splitlines()]


async def all_rows(client: openai.AsyncOpenAI, batch: Batch) -> list[dict[str, Any]]:
    """Of both files, whose counts are those of the batch."""
    good, bad = await rows(client, batch.output_file_id), await rows(client, batch.error_file_id)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.completed, counts.failed, counts.total) == (len(good), len(bad), len(good) + len(bad))
    assert all(row["error"] is None and row["response"]["status_code"] == 200 for row in good)
    assert all(row["error"] and (row["response"] is None or row["response"]["status_code"] != 200) for row in bad)
    return good + bad
