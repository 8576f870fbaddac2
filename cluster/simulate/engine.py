"""The model of a worker: a queue served in order of arrival, before the real radix cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.simulate.trace import BLOCK_TOKENS, Request
from workers.kv.policies import Policy
from workers.kv.radix import Node, RadixCache

SALT = b""


@dataclass(frozen=True, slots=True)
class Loan:
    """A prefix that another worker holds: it can be copied instead of computed, `seconds` a block."""

    source: Engine
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker made of a request. `cached` counts the blocks that it held or copied; `added` and `removed` are
    the numbers of the blocks whose KV came and went; `node` ends the prompt in the cache."""

    start: float
    end: float
    cached: int
    missing_tokens: int
    added: tuple[int, ...]
    removed: tuple[int, ...]
    node: Node

    @property
    def service(self) -> float:
        """Seconds of the worker's time."""
        return self.end - self.start


class Engine:
    """A worker that computes `rate` prompt tokens a second, one request after another, and caches `capacity` blocks.

    The cache changes when a request arrives, not when it has been computed: whoever comes later waits behind it
    anyway. A request uses its blocks from the last to the first, so that leaves are the first to go."""

    def __init__(self, name: str, rate: float, capacity: int, clock: Callable[[], float]) -> None:
        self.name = name
        self.rate = rate
        self.radix = RadixCache(BLOCK_TOKENS, Policy(), clock)
        self.busy = 0.0
        self.running = 0
        self._free_at = 0.0
        self._clock = clock
        self._free = list(range(capacity))
        self._held = [0] * capacity

    @property
    def wait(self) -> float:
        """Seconds until all that has been accepted is computed."""
        return max(0.0, self._free_at - self._clock())

    @property
    def queued_tokens(self) -> int:
        """The same in prompt tokens."""
        return round(self.wait * self.rate)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had: free ones and such as eviction would free."""
        return len(self._free) + self.radix.evictable

    def cached(self, request: Request) -> int:
        """How many leading blocks of a prompt are here."""
        return self.radix.peek(SALT, request.prompt, False) // BLOCK_TOKENS

    def accept(self, request: Request, loan: Loan | None = None) -> Job:
        """Queue a request. Its blocks stay pinned until `release`."""
        own, added, removed, node = self._cache(request)
        cached, copying = own, 0.0
        if loan is not None:
            cached = max(own, min(loan.blocks, loan.source.cached(request)))
            copying = (cached - own) * loan.seconds
        missing = max(1, request.tokens - cached * BLOCK_TOKENS)
        start = max(self._free_at, self._clock())
        self._free_at = start + copying + missing / self.rate
        self.busy += self._free_at - start
        self.running += 1
        return Job(start, self._free_at, cached, missing, added, removed, node)

    def release(self, job: Job) -> None:
        """A request has left the worker."""
        self.running -= 1
        self.radix.unpin(job.node)

    def _cache(self, request: Request) -> tuple[int, tuple[int, ...], tuple[int, ...], Node]:
        """Use what is cached of a prompt and cache the rest, as far as there is room beside what is pinned."""
        prompt = request.prompt
        match = self.radix.match(SALT, prompt)
        known = len(match.blocks)
        self.radix.pin(match.node)
        self.radix.touch(match.node)
        wanted = len(request.blocks) - known
        evicted = self.radix.evict(max(0, wanted - len(self._free)))
        self._free += evicted
        removed = tuple(self._held[block] for block in evicted)
        fresh, self._free = self._free[:wanted], self._free[wanted:]
        added = request.blocks[known : known + len(fresh)]
        for block, number in zip(fresh, added, strict=True):
            self._held[block] = number
        whole = (known + len(fresh)) * BLOCK_TOKENS * 4
        node = self.radix.insert(SALT, prompt[:whole], match.blocks + fresh).node
        self.radix.pin(node)
        self.radix.unpin(match.node)
        return known, added, removed, node
