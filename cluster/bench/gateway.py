"""The gateway alone: what it adds to the first token, how many tokens a second it streams, whether it grows.

A real gateway runs in a process of its own: HTTP server, tokenizer, router, dispatcher and gossip. Its workers play
recorded tokens back; they reach it by a call instead of through Ray, which is all that is left out. The client is in
this process, on bare sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import mean, median

import psutil
from rich.console import Console
from rich.progress import Progress

from cluster.bench.recorded import MODEL, Server, serving
from cluster.bench.report import Check, Figures, Report
from cluster.bench.streams import Line, Streamed
from cluster.config import ClusterConfig
from cluster.models import resolve, served_name
from router.gateway.text import Text

ONE, MANY, MEMORY = "one stream", "many streams", "memory"
FIRST_MS, TOKENS_S = "median added to the first token ms", "tokens/s"
GROWN_MB, HELD_MB = "grown MB", "resident MB"
STEP_S = 0.025
"""Of a decode worker while first tokens beside other streams are timed: 100 streams get 4,000 tokens a second."""
ALONE_TOKENS, BESIDE_TOKENS, SHORT_TOKENS = 2, 40, 8
"""Tokens of an answer while first tokens are timed, alone and beside others, and while memory is watched."""
SAMPLES = 50
"""Of memory."""
WARM_UP = 10
"""Requests, at least, that are not measured: the first ones open connections and fill caches."""
PASSAGE = (
    "The river comes down from the hills in spring, brown and quick, and by the time that it reaches the mill it has "
    "carried off two fences and a gate. Nobody minds much. The miller opens the sluice, counts the sacks, and waits "
    "for the water to clear. In summer it is so low that children cross it on stones, and the wheel stands still."
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes: streams at a time, tokens of an answer while the rate is measured, requests of each measurement of first
    tokens, and requests while memory is watched (0: it is not)."""

    streams: int
    tokens: int
    firsts: int
    requests: int


def run(config: ClusterConfig, shape: Shape) -> Report:
    """Measure. Raises LoadError where an answer is not what was asked for."""
    model = resolve(config.model.name)
    recorded = tuple(Text(model).encode(PASSAGE))
    with Progress(console=Console(stderr=True), refresh_per_second=2) as progress:
        total = WARM_UP + max(WARM_UP, shape.streams) + 2 * shape.firsts + shape.streams + shape.requests
        task = progress.add_task("requests", total=total)
        with serving(model, recorded) as server:
            results = asyncio.run(_measure(server, shape, lambda: progress.advance(task)))
    return Report({**asdict(shape), "model": served_name(config.model.name)}, results, checks_of(results))


def checks_of(results: dict[str, Figures]) -> list[Check]:
    """What the gateway may take."""
    checks = [
        Check("streamed", results[MANY][TOKENS_S], "tokens/s", 4000, True),
        Check("added to the first token of one stream", results[ONE][FIRST_MS], "ms", 5, False),
        Check("added to the first token beside other streams", results[MANY][FIRST_MS], "ms", 25, False),
    ]
    if (memory := results.get(MEMORY)) is not None:
        bound = max(5.0, 0.02 * memory[HELD_MB])
        checks.append(Check("memory gained from the second to the last fifth", memory[GROWN_MB], "MB", bound, False))
    return checks


async def _measure(server: Server, shape: Shape, done: Callable[[], None]) -> dict[str, Figures]:
    load = _Load(server, done)
    await load.open(shape.streams)
    try:
        server.pace(STEP_S)
        one = await load.firsts(1, shape.firsts, ALONE_TOKENS)
        many = await load.firsts(shape.streams, shape.firsts, BESIDE_TOKENS)
        server.pace(0.0)
        rate = await load.rate(shape.tokens)
        results = {ONE: {FIRST_MS: one}, MANY: {FIRST_MS: many, TOKENS_S: rate}}
        if shape.requests:
            results[MEMORY] = await load.memory(shape.requests)
        return results
    finally:
        load.close()


class _Load:
    """Connections to a gateway, and what is measured over them. Every prompt is another one."""

    def __init__(self, server: Server, done: Callable[[], None]) -> None:
        self._server = server
        self._done = done
        self._lines: list[Line] = []
        self._numbers = itertools.count()
        self._draw = random.Random(0)

    async def open(self, streams: int) -> None:
        """Connect."""
        self._lines = [await Line.open(self._server.port) for _ in range(streams)]

    def close(self) -> None:
        """Close all connections."""
        for line in self._lines:
            line.close()

    async def firsts(self, streams: int, requests: int, tokens: int) -> float:
        """Milliseconds that the gateway adds to the first token, the median, while so many streams run. The recorded
        token is there at once, so that all of the time is the gateway's. Streams do not begin at the same time."""
        begin = [self._draw.random() * tokens * STEP_S if streams > 1 else 0.0 for _ in range(streams)]
        warm_up = max(WARM_UP, streams)
        streamed = await self._share(warm_up + requests, tokens, begin)
        return median(one.first_s for one in streamed[warm_up:]) * 1000

    async def rate(self, tokens: int) -> float:
        """Tokens a second while a stream runs on each connection, as fast as they are taken."""
        begun = time.perf_counter()
        streamed = await self._share(len(self._lines), tokens, [0.0] * len(self._lines))
        return sum(one.tokens for one in streamed) / (time.perf_counter() - begun)

    async def memory(self, requests: int) -> Figures:
        """What the gateway's process holds, in MB, and how much more in the last fifth of the requests than in the
        second one."""
        process, held = psutil.Process(self._server.pid), []
        for number in range(SAMPLES):
            some = requests * (number + 1) // SAMPLES - requests * number // SAMPLES
            await self._share(some, SHORT_TOKENS, [0.0] * len(self._lines))
            held.append(process.memory_info().rss / 1e6)
        fifth = SAMPLES // 5
        second, last = mean(held[fifth : 2 * fifth]), mean(held[-fifth:])
        return {HELD_MB: last, GROWN_MB: last - second}

    async def _share(self, requests: int, tokens: int, begin: list[float]) -> list[Streamed]:
        """So many requests over as many connections as `begin` has numbers, each of which waits so many seconds first;
        in the order in which they end."""
        left, streamed = itertools.count(), []

        async def work(line: Line, wait_s: float) -> None:
            await asyncio.sleep(wait_s)
            while next(left) < requests:
                text = f"Question {next(self._numbers)}. {PASSAGE} What does the miller do?"
                streamed.append(await line.chat(MODEL, text, tokens))
                self._done()

        await asyncio.gather(*(work(*pair) for pair in zip(self._lines, begin, strict=False)))
        return streamed
