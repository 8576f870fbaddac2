"""How other routers choose, by their public descriptions, each as a rule over what one router knows.

The fields of a rule are its constants. policies.py has values to try for them, as many for each rule; the defaults are
the best of those on the first quarter of the Mooncake conversation trace, at the settings of docs/simulator.md.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from cluster.simulate.knowledge import Knowledge
from cluster.simulate.trace import BLOCK_TOKENS, Request

PLACES = 256
"""Places of a worker on the ring of consistent hashing."""


class Rule(Protocol):
    """Chooses a worker's number."""

    def choose(self, known: Knowledge, request: Request, now: float) -> int:
        """The worker for a request."""


@dataclass(slots=True)
class RoundRobin:
    """One worker after another."""

    _turn: count[int] = field(default_factory=count)

    def choose(self, known: Knowledge, request: Request, now: float) -> int:
        """The next worker."""
        return next(self._turn) % known.workers


@dataclass(slots=True)
class TwoChoices:
    """The one that is free sooner of two random workers (Mitzenmacher, 2001)."""

    def choose(self, known: Knowledge, request: Request, now: float) -> int:
        """The better of two."""
        drawn = known.random.sample(range(known.workers), min(2, known.workers))
        return min(drawn, key=lambda worker: max(0.0, known.free_at[worker] - now))


@dataclass(slots=True)
class BoundedLoad:
    """Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): the first `blocks` blocks of a
    prompt on a ring of 256 places a worker; on to the next worker while one has more than 1.25 times its share."""

    blocks: int = 2
    load: Literal["requests", "tokens"] = "tokens"
    bound: float = 1.25
    _places: list[tuple[int, int]] = field(default_factory=list)

    def choose(self, known: Knowledge, request: Request, now: float) -> int:
        """The first in ring order that has room."""
        if not self._places:
            places = range(known.workers * PLACES)
            self._places = sorted((_hash(place // PLACES, place), place // PLACES) for place in places)
        loads = known.requests if self.load == "requests" else known.queued_tokens
        own = 1 if self.load == "requests" else request.tokens
        most = self.bound * (sum(loads) + own) / known.workers
        start = bisect_left(self._places, (_hash(*request.blocks[: self.blocks]), 0))
        for place in range(len(self._places)):
            worker = self._places[(start + place) % len(self._places)][1]
            if loads[worker] <= most:
                return worker
        raise AssertionError("the least loaded has no more than the mean")


@dataclass(slots=True)
class CacheAware:
    """SGLang's cache-aware rule. Out of balance by `absolute` requests and by a factor of `relative`: the shortest
    queue. Else the longest match, if it is more than `threshold` of the prompt, else the least loaded."""

    threshold: float = 0.5
    absolute: int = 3
    relative: float = 1.5

    def choose(self, known: Knowledge, request: Request, now: float) -> int:
        """The longest match while the load is in balance."""
        loads = known.requests
        most, least = max(loads), min(loads)
        if most - least > self.absolute and most > self.relative * least:
            return known.least(loads)
        depths = known.depths(request)
        if max(depths, default=0) > self.threshold * len(request.blocks):
            return known.least(-depth for depth in depths)
        return known.least(loads)


@dataclass(slots=True)
class Overlap:
    """Dynamo's cost rule at temperature 0: `weight` times the prefill blocks that a worker would have, less those that
    it has cached, plus the blocks of what runs there."""

    weight: float = 16.0

    def choose(self, known: Knowledge, request: Request, now: float) -> int:
        """The least cost."""
        return known.least(
            self.weight * max((queued + request.tokens) / BLOCK_TOKENS - depth, 0.0) + blocks
            for queued, depth, blocks in zip(known.queued_tokens, known.depths(request), known.blocks, strict=True)
        )


@dataclass(slots=True)
class Product:
    """LMetric: missing prompt tokens times the batch. `tokens` says whether those of the requests that wait count, and
    `alone` what an empty batch counts for."""

    tokens: Literal["own", "queued"] = "queued"
    alone: float = 256.0

    def choose(self, known: Knowledge, request: Request, now: float) -> int:
        """The least product."""
        waiting = known.queued_tokens if self.tokens == "queued" else [0] * known.workers
        return known.least(
            (queued + max(1, request.tokens - depth * BLOCK_TOKENS)) * (batch + self.alone)
            for queued, depth, batch in zip(waiting, known.depths(request), known.requests, strict=True)
        )


def _hash(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little") for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
