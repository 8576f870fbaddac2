"""What one router of a baseline knows of the workers, as far as it has heard."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from cluster.simulate.engine import Job
from cluster.simulate.trace import Request


class Knowledge:
    """Counts by worker number, and who holds which block.

    `requests` are those that run or wait; `queued_tokens` those of their prompt tokens that nobody has computed;
    `blocks` those of their prompts; `free_at` is when a worker will have computed all that it was sent. `random` breaks
    ties: an idle cluster is all ties, and the first of a list would get everything."""

    def __init__(self, workers: int, rate: float, random: Random) -> None:
        self.workers = workers
        self.rate = rate
        self.random = random
        self.requests = [0] * workers
        self.queued_tokens = [0] * workers
        self.blocks = [0] * workers
        self.free_at = [0.0] * workers
        self._holders: dict[int, int] = {}  # block number to a bit for each worker

    def placed(self, worker: int, request: Request, job: Job, sent: float) -> None:
        """A request went to a worker at the time `sent`."""
        self.requests[worker] += 1
        self.queued_tokens[worker] += job.missing_tokens
        self.blocks[worker] += len(request.blocks)
        self.free_at[worker] = max(self.free_at[worker], sent) + job.service
        bit = 1 << worker
        holders = self._holders
        for block in job.added:
            holders[block] = holders.get(block, 0) | bit
        for block in job.removed:
            left = holders.get(block, 0) & ~bit
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)

    def computed(self, worker: int, job: Job) -> None:
        """A prompt is computed."""
        self.queued_tokens[worker] -= job.missing_tokens

    def ended(self, worker: int, request: Request) -> None:
        """A request is over."""
        self.requests[worker] -= 1
        self.blocks[worker] -= len(request.blocks)

    def depths(self, request: Request) -> list[int]:
        """How many leading blocks of a prompt each worker holds."""
        depths = [0] * self.workers
        holding = (1 << self.workers) - 1
        for depth, block in enumerate(request.blocks):
            still = holding & self._holders.get(block, 0)
            for worker in _bits(holding ^ still):
                depths[worker] = depth
            holding = still
            if not holding:
                return depths
        for worker in _bits(holding):
            depths[worker] = len(request.blocks)
        return depths

    def least(self, costs: Iterable[float]) -> int:
        """The worker of the least cost; one of those at random where there are several."""
        costs = list(costs)
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        return self.random.choice([worker for worker, cost in enumerate(costs) if cost == least])


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
