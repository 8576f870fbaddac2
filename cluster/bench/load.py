"""Load through the gateway over plain HTTP, and what came of each request.

A client library would spend more on each token than the cluster does, on the same cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import httpx

from cluster.errors import UserError


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed request: seconds to the first token and in all, and its token counts."""

    first_token_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one run and its duration in seconds."""

    timings: list[Timing]
    seconds: float

    def figures(self) -> dict[str, float]:
        """Throughput in output tokens a second, median time to first token in seconds, cached share of the prompts."""
        return {
            "output tokens/s": sum(one.output_tokens for one in self.timings) / self.seconds,
            "median first token s": median(one.first_token_s for one in self.timings),
            "cached share": sum(one.cached_tokens for one in self.timings)
            / sum(one.prompt_tokens for one in self.timings),
        }


class LoadError(UserError):
    """A request did not end as it should; the message has what came instead."""


async def one(client: httpx.AsyncClient, model: str, prompt: list[int], output: int) -> Timing:
    """Send one prompt of token ids and read its stream. Raises LoadError, or httpx.HTTPError."""
    start = time.perf_counter()
    first = 0.0
    wanted = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    wanted |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    events: list[str] = []
    async with client.stream("POST", "/v1/completions", json=wanted) as answer:
        async for line in answer.aiter_lines():
            if line and not first:
                first = time.perf_counter() - start
            events = [*events[-1:], line] if line else events
    if answer.status_code != 200 or events[-1] != "data: [DONE]":
        raise LoadError(f"{answer.status_code}: {events[-1][:300]}")
    usage = json.loads(events[0].removeprefix("data: "))["usage"]
    if usage["completion_tokens"] != output:
        raise LoadError(f"{usage['completion_tokens']} tokens came instead of {output}")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Timing(first, time.perf_counter() - start, usage["prompt_tokens"], cached, usage["completion_tokens"])


async def many(
    url: str, model: str, prompts: list[list[int]], output: int, concurrency: int, done: Callable[[], None]
) -> Run:
    """Send all prompts, `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=1200, limits=limits) as client:

        async def limited(prompt: list[int]) -> Timing:
            async with gate:
                timing = await one(client, model, prompt, output)
            done()
            return timing

        start = time.perf_counter()
        timings = await asyncio.gather(*(limited(prompt) for prompt in prompts))
        return Run(list(timings), time.perf_counter() - start)
