"""Load over plain HTTP on a server that speaks OpenAI's completions, and what came of each request.

A client library would spend more on each token than the cluster does, on the same cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import httpx

from cluster.errors import UserError

LEAD_S = 1.0
"""How long the other load runs before what is measured beside it begins."""
Chat = list[list[int]]
"""The parts that a client adds, one a turn. Each turn's prompt is everything so far, answers included, and its part."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed request: seconds to the first token and in all, its token counts, the answer's token ids (none from
    servers that do not send them), and when each of its events came, on the clock of `time.perf_counter`."""

    first_token_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    answer: tuple[int, ...] = ()
    at: tuple[float, ...] = ()

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event and the next."""
        return [later - earlier for earlier, later in pairwise(self.at)]


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one run, chat by chat in their order, and its duration in seconds."""

    timings: list[Timing]
    seconds: float

    def figures(self) -> dict[str, float]:
        """Throughput in output tokens a second, median time to first token in seconds, cached share of the prompts,
        duration."""
        return {
            "output tokens/s": sum(one.output_tokens for one in self.timings) / self.seconds,
            "median first token s": median(one.first_token_s for one in self.timings),
            "cached share": sum(one.cached_tokens for one in self.timings)
            / sum(one.prompt_tokens for one in self.timings),
            "total s": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class Target:
    """A server, the name of its model, and as whom to ask."""

    url: str
    model: str
    user: str = ""


class LoadError(UserError):
    """A request did not end as it should; the message has what came instead."""


def single(prompts: list[list[int]]) -> list[Chat]:
    """Prompts as chats of one turn."""
    return [[prompt] for prompt in prompts]


def send(
    target: Target, chats: list[Chat], output: int, concurrency: int, done: Callable[[], None] = lambda: None
) -> Run:
    """Hold all chats, `concurrency` at a time, with answers of `output` tokens; `done` is called after each request.

    Raises LoadError with the first request that fails.
    """
    return asyncio.run(_send(target, chats, output, concurrency, done))


def send_paused(target: Target, prompts: list[list[int]], output: int, pause_s: float) -> list[Timing]:
    """Send prompts one at a time, each `pause_s` after the answer before it.

    Raises LoadError with the first request that fails.
    """
    return asyncio.run(paused(target, prompts, output, pause_s))


def send_beside(
    target: Target,
    prompts: list[list[int]],
    output: int,
    pause_s: float,
    other: Target,
    another: Callable[[], list[int]],
    at_once: int,
) -> list[Timing]:
    """`send_paused`, while `other` is asked `another` prompt again and again, `at_once` at a time.

    Raises LoadError with the first request that fails, on either side.
    """

    async def both() -> list[Timing]:
        beside = asyncio.create_task(_keep_busy(other, another, output, at_once))
        await asyncio.sleep(LEAD_S)
        measured = asyncio.create_task(paused(target, prompts, output, pause_s))
        try:
            await asyncio.wait([beside, measured], return_when=asyncio.FIRST_COMPLETED)
            if beside.done():
                beside.result()
            return await measured
        finally:
            for task in (beside, measured):
                task.cancel()
            await asyncio.gather(beside, measured, return_exceptions=True)

    return asyncio.run(both())


def send_into(
    target: Target, streams: list[list[int]], output: int, lead_s: float, prompt: list[int]
) -> tuple[list[Timing], Timing, float]:
    """Send prompts that are answered at the same time, and `lead_s` later one prompt more, for one token. All of them,
    the last one apart, and when that was sent.

    Raises LoadError with the first request that fails.
    """

    async def run() -> tuple[list[Timing], Timing, float]:
        async with _client(target, len(streams) + 1) as client:
            running = [asyncio.create_task(_one(client, target, one, output)) for one in streams]
            try:
                await asyncio.sleep(lead_s)
                sent = time.perf_counter()
                last = await _one(client, target, prompt, 1)
                return list(await asyncio.gather(*running)), last, sent
            finally:
                for task in running:
                    task.cancel()

    return asyncio.run(run())


async def paused(target: Target, prompts: list[list[int]], output: int, pause_s: float) -> list[Timing]:
    """`send_paused` in a running event loop."""
    timings: list[Timing] = []
    async with _client(target, 1) as client:
        for prompt in prompts:
            if timings:
                await asyncio.sleep(pause_s)
            timings.append(await _one(client, target, prompt, output))
    return timings


async def _keep_busy(target: Target, another: Callable[[], list[int]], output: int, at_once: int) -> None:
    async with _client(target, at_once) as client:

        async def ask() -> None:
            while True:
                await _one(client, target, another(), output)

        await asyncio.gather(*(ask() for _ in range(at_once)))


async def _send(target: Target, chats: list[Chat], output: int, concurrency: int, done: Callable[[], None]) -> Run:
    gate = asyncio.Semaphore(concurrency)
    async with _client(target, concurrency) as client:

        async def hold(chat: Chat) -> list[Timing]:
            timings: list[Timing] = []
            prompt: list[int] = []
            async with gate:
                for part in chat:
                    prompt = prompt + part
                    timings.append(await _one(client, target, prompt, output))
                    prompt = prompt + list(timings[-1].answer)
                    done()
            return timings

        start = time.perf_counter()
        timings = await asyncio.gather(*(hold(chat) for chat in chats))
        return Run([one for chat in timings for one in chat], time.perf_counter() - start)


def _client(target: Target, connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections)
    return httpx.AsyncClient(base_url=target.url, timeout=1200, limits=limits)


async def _one(client: httpx.AsyncClient, target: Target, prompt: list[int], output: int) -> Timing:
    """Send one request. Raises LoadError, which names the target."""
    start = time.perf_counter()
    lines: list[str] = []
    at: list[float] = []
    try:
        async with client.stream("POST", "/v1/completions", json=_wanted(target, prompt, output)) as answer:
            async for line in _lines(answer):
                lines.append(line)
                at.append(time.perf_counter())
    except httpx.HTTPError as error:
        raise LoadError(f"{target.url}: {type(error).__name__}: {error}") from error
    total = time.perf_counter() - start
    if answer.status_code != 200 or not lines or lines[-1] != "data: [DONE]":
        last = lines[-1][:300] if lines else "an empty answer"
        raise LoadError(f"{target.url}: {answer.status_code}: {last}")
    try:
        timing = _timing(start, total, at, [json.loads(line.removeprefix("data: ")) for line in lines[:-1]])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"not the events of a completion ({type(error).__name__}: {error})"
        raise LoadError(f"{target.url}: {problem}: {' '.join(lines[-2:])[:300]}") from None
    if timing.output_tokens != output:
        raise LoadError(f"{target.url}: {timing.output_tokens} tokens came instead of {output}")
    return timing


def _wanted(target: Target, prompt: list[int], output: int) -> dict[str, Any]:
    wanted = {"model": target.model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    wanted |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return wanted | ({"user": target.user} if target.user else {})


def _timing(start: float, total: float, at: list[float], events: list[Any]) -> Timing:
    """What the events of an answer say, usage in the last one. Other things raise what indexing them raises."""
    usage = events[-1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens = tuple(token for event in events for one in event["choices"] for token in one.get("token_ids", ()))
    counts = int(usage["prompt_tokens"]), int(cached), int(usage["completion_tokens"])
    times = tuple(when for when, event in zip(at, events, strict=False) if event["choices"])
    return Timing(at[0] - start, total, *counts, tokens, times)


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """The lines of an event stream but empty ones and comments, which servers send to keep a connection open. httpx's
    own iterator would also end a line at the other separators that Unicode knows, which may stand in a text."""
    rest = b""
    async for data in answer.aiter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.strip() and not line.startswith(b":"):
                yield line.decode(errors="replace").strip()
    if rest.strip():
        yield rest.decode(errors="replace").strip()
