"""Load through the gateway with the official client, and what came of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from openai import AsyncOpenAI


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


async def one(client: AsyncOpenAI, model: str, prompt: list[int], output: int) -> Timing:
    """Send one prompt of token ids and read its stream. Raises openai.OpenAIError."""
    start = time.perf_counter()
    first = 0.0
    usage = None
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=output,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in stream:
        if chunk.choices and not first:
            first = time.perf_counter() - start
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return Timing(
        first,
        time.perf_counter() - start,
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens or 0,
        usage.completion_tokens,
    )


async def many(
    url: str, model: str, prompts: list[list[int]], output: int, concurrency: int, done: Callable[[], None]
) -> Run:
    """Send all prompts, `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=1200) as client:

        async def limited(prompt: list[int]) -> Timing:
            async with gate:
                timing = await one(client, model, prompt, output)
            done()
            return timing

        start = time.perf_counter()
        timings = await asyncio.gather(*(limited(prompt) for prompt in prompts))
        return Run(list(timings), time.perf_counter() - start)
