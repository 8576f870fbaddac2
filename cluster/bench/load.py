"""Load over plain HTTP on a server that speaks OpenAI's completions, and what came of each request.

A client library would spend more on each token than the cluster does, on the same cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from statistics import median

import httpx

from cluster.errors import UserError

LEAD_S = 1.0
"""How long the other load runs before what is measured beside it begins."""
Chat = list[list[int]]
"""The parts that a client adds, one a turn. Each turn's prompt is everything so far, answers included, and its part."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed request: seconds to the first token and in all, its token counts, and the answer's token ids
    (none from servers that do not send them)."""

    first_token_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    answer: tuple[int, ...] = ()


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
    try:
        return asyncio.run(_send(target, chats, output, concurrency, done))
    except httpx.HTTPError as error:
        raise LoadError(f"{target.url}: {type(error).__name__}: {error}") from error


def send_beside(
    target: Target,
    chats: list[Chat],
    output: int,
    pause_s: float,
    other: Target,
    another: Callable[[], list[int]],
    at_once: int,
) -> Run:
    """Hold `chats` one at a time, `pause_s` after each, while `other` is asked `another` prompt again and again,
    `at_once` at a time.

    Raises LoadError with the first request that fails, on either side.
    """

    async def both() -> Run:
        beside = asyncio.create_task(_keep_busy(other, another, output, at_once))
        await asyncio.sleep(LEAD_S)
        measured = asyncio.create_task(_send(target, chats, output, 1, lambda: None, pause_s))
        try:
            await asyncio.wait([beside, measured], return_when=asyncio.FIRST_COMPLETED)
            if beside.done():
                beside.result()
            return await measured
        finally:
            for task in (beside, measured):
                task.cancel()
            await asyncio.gather(beside, measured, return_exceptions=True)

    try:
        return asyncio.run(both())
    except httpx.HTTPError as error:
        raise LoadError(f"{target.url}: {type(error).__name__}: {error}") from error


async def _keep_busy(target: Target, another: Callable[[], list[int]], output: int, at_once: int) -> None:
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=target.url, timeout=1200, limits=limits) as client:

        async def ask() -> None:
            while True:
                await _one(client, target, another(), output)

        await asyncio.gather(*(ask() for _ in range(at_once)))


async def _send(
    target: Target, chats: list[Chat], output: int, concurrency: int, done: Callable[[], None], pause_s: float = 0.0
) -> Run:
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=target.url, timeout=1200, limits=limits) as client:

        async def hold(chat: Chat) -> list[Timing]:
            timings: list[Timing] = []
            prompt: list[int] = []
            async with gate:
                for part in chat:
                    prompt = prompt + part
                    timings.append(await _one(client, target, prompt, output))
                    prompt = prompt + list(timings[-1].answer)
                    done()
                    await asyncio.sleep(pause_s)
            return timings

        start = time.perf_counter()
        timings = await asyncio.gather(*(hold(chat) for chat in chats))
        return Run([one for chat in timings for one in chat], time.perf_counter() - start)


async def _one(client: httpx.AsyncClient, target: Target, prompt: list[int], output: int) -> Timing:
    start = time.perf_counter()
    first = 0.0
    wanted = {"model": target.model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    wanted |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    wanted |= {"user": target.user} if target.user else {}
    lines: list[str] = []
    async with client.stream("POST", "/v1/completions", json=wanted) as answer:
        async for line in _lines(answer):
            if not first:
                first = time.perf_counter() - start
            lines.append(line)
    total = time.perf_counter() - start
    if answer.status_code != 200 or not lines or lines[-1] != "data: [DONE]":
        raise LoadError(f"{answer.status_code}: {lines[-1][:300] if lines else 'an empty answer'}")
    try:
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    except ValueError as error:
        raise LoadError(f"an event is not JSON: {error}") from None
    usage = events[-1]["usage"]
    if usage["completion_tokens"] != output:
        raise LoadError(f"{usage['completion_tokens']} tokens came instead of {output}")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    tokens = tuple(token for event in events for one in event["choices"] for token in one.get("token_ids", ()))
    return Timing(first, total, usage["prompt_tokens"], cached, usage["completion_tokens"], tokens)


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """The lines of an event stream but empty ones and comments, which servers send to keep a connection open. httpx's
    own iterator would also end a line at the other separators that Unicode knows, which may stand in a text."""
    rest = b""
    async for data in answer.aiter_bytes():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.strip() and not line.startswith(b":"):
                yield line.decode().strip()
    if rest.strip():
        yield rest.decode().strip()
