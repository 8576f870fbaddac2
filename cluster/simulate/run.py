"""One simulation: requests of a trace arrive at routers, which send them to workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import numpy as np

from cluster.simulate.engine import Engine, Job, Loan
from cluster.simulate.loop import Loop
from cluster.simulate.trace import Request
from router.config import RouterConfig

CANDIDATES = RouterConfig().candidates
"""Workers that a request is offered to; the last of them takes it."""
CUT_OFF_S = 30.0
"""How long routers that are cut off hear nothing."""
DECODE_STEP_S = 0.02
"""Time for a token of an answer."""
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Settings:
    """What is simulated. `rate` is in prompt tokens a second, `capacity` in blocks of 512 tokens a worker;
    `staleness_s` is how old news may be; `loss` is the share of gossip datagrams that are lost; `block_copy_s` is the
    time to copy a block from another worker, None where that is not possible; `decode` has answers keep their workers'
    blocks until they end. `slow` are factors on the rate by worker number; `cut_off` routers hear and tell nothing
    from `cut_from_s` until `cut_until_s`. The result is a function of all this and the trace."""

    workers: int = 16
    routers: int = 4
    capacity: int = 2000
    rate: float = 8000.0
    staleness_s: float = 0.25
    loss: float = 0.0
    block_copy_s: float | None = None
    kv_bytes_per_token: int = 0
    decode: bool = False
    seed: int = 0
    slow: dict[int, float] = field(default_factory=dict)
    cut_off: frozenset[int] = frozenset()
    cut_from_s: float = 0.0
    cut_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A router's choice: worker `worker`, which refuses if more than `most_queued` prompt tokens wait there (None: it
    takes what comes), and may copy the prompt's first `blocks` blocks from the worker `source`."""

    worker: int
    most_queued: int | None = None
    source: int | None = None
    blocks: int = 0


class Routers(Protocol):
    """All routers of one policy, by number, and how they learn what happens."""

    def start(self) -> None:
        """Time begins."""

    def choose(self, router: int, request: Request, refused: frozenset[int], last: bool) -> Choice:
        """A worker for a request that came to this router; those in `refused` have just answered busy, and the `last`
        one has to take it."""

    def busy(self, router: int, request: Request, worker: int) -> None:
        """A worker has refused, and says how long its queue is."""

    def placed(self, router: int, request: Request, worker: int, job: Job) -> None:
        """A worker has accepted."""

    def computed(self, router: int, request: Request, worker: int, job: Job) -> None:
        """A prompt is computed."""

    def ended(self, router: int, request: Request, worker: int, job: Job) -> None:
        """A request is over."""


@dataclass(frozen=True, slots=True)
class World:
    """What a policy is given: the workers, the time, chance, and what is simulated."""

    settings: Settings
    engines: list[Engine]
    loop: Loop
    random: Random


MakeRouters = Callable[[World], Routers]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each request, arrays in order of arrival: seconds until its prompt was computed, the worker and
    the router by number, blocks that did not have to be computed. And of each worker: seconds of its time."""

    arrivals: np.ndarray
    seconds: np.ndarray
    workers: np.ndarray
    routers: np.ndarray
    cached: np.ndarray
    blocks: np.ndarray
    refusals: int
    busy: np.ndarray

    def hit_rate(self, chosen: np.ndarray | slice = slice(None)) -> float:
        """The share of blocks, of all requests or of some, that did not have to be computed."""
        return float(self.cached[chosen].sum() / max(1, self.blocks[chosen].sum()))

    def figures(self) -> Figures:
        """Block hit rate; mean and quantiles of the seconds until a prompt is computed; the busiest worker's time as a
        multiple of the mean."""
        p50, p90, p99 = np.percentile(self.seconds, [50, 90, 99])
        figures = {"hit_rate": self.hit_rate(), "mean": self.seconds.mean(), "p50": p50, "p90": p90, "p99": p99}
        return {name: float(value) for name, value in figures.items()} | {
            "imbalance": float(self.busy.max() / self.busy.mean())
        }


def simulate(
    trace: Sequence[Request], settings: Settings, policy: MakeRouters, progress: Callable[[int], None] = lambda _: None
) -> Outcome:
    """Play a trace. `progress` is told now and then how many requests have arrived."""
    return _Simulation(trace, settings, policy, progress).run()


class _Simulation:
    def __init__(
        self, trace: Sequence[Request], settings: Settings, policy: MakeRouters, progress: Callable[[int], None]
    ) -> None:
        self._trace = trace
        self._settings = settings
        self._progress = progress
        self._loop = Loop()
        # The policy's chance is its own, so that every policy gets the same requests at the same routers.
        self._random = Random(f"requests {settings.seed}")
        self._engines = [
            Engine(f"w{number}", settings.rate * settings.slow.get(number, 1.0), settings.capacity, self._loop.clock)
            for number in range(settings.workers)
        ]
        self._routers = policy(World(settings, self._engines, self._loop, Random(f"policy {settings.seed}")))
        self._left = len(trace)
        self._chosen: list[tuple[int, int]] = []  # router, worker
        # Not the jobs themselves: they hold on to parts of the caches that are evicted since.
        self._ends: list[float] = []
        self._cached: list[int] = []
        self._refusals = 0

    def run(self) -> Outcome:
        self._routers.start()
        self._loop.at(self._trace[0].arrival, self._arrive, 0)
        self._loop.run()
        routers, workers = np.array(self._chosen).T
        arrivals = np.array([request.arrival for request in self._trace])
        return Outcome(
            arrivals=arrivals,
            seconds=np.array(self._ends) - arrivals,
            workers=workers,
            routers=routers,
            cached=np.array(self._cached),
            blocks=np.array([len(request.blocks) for request in self._trace]),
            refusals=self._refusals,
            busy=np.array([engine.busy for engine in self._engines]),
        )

    def _arrive(self, number: int) -> None:
        request = self._trace[number]
        if number + 1 < len(self._trace):
            self._loop.at(self._trace[number + 1].arrival, self._arrive, number + 1)
        router = self._random.randrange(self._settings.routers)
        choice = self._accepted(router, request)
        loan = None
        if choice.source is not None and self._settings.block_copy_s is not None:
            loan = Loan(self._engines[choice.source], choice.blocks, self._settings.block_copy_s)
        job = self._engines[choice.worker].accept(request, loan)
        self._chosen.append((router, choice.worker))
        self._ends.append(job.end)
        self._cached.append(job.cached)
        self._routers.placed(router, request, choice.worker, job)
        self._loop.at(job.end, self._computed, router, request, choice.worker, job)
        if number % 100 == 0:
            self._progress(number)

    def _accepted(self, router: int, request: Request) -> Choice:
        """The choice that a worker agrees to."""
        refused: frozenset[int] = frozenset()
        for left in reversed(range(CANDIDATES)):
            choice = self._routers.choose(router, request, refused, not left)
            most = choice.most_queued
            if most is None or self._engines[choice.worker].queued_tokens <= most:
                break
            self._refusals += 1
            self._routers.busy(router, request, choice.worker)
            refused |= {choice.worker}
        return choice

    def _computed(self, router: int, request: Request, worker: int, job: Job) -> None:
        self._routers.computed(router, request, worker, job)
        if self._settings.decode:
            self._loop.after(request.output * DECODE_STEP_S, self._ended, router, request, worker, job)
        else:
            self._ended(router, request, worker, job)

    def _ended(self, router: int, request: Request, worker: int, job: Job) -> None:
        self._engines[worker].release(job)
        self._routers.ended(router, request, worker, job)
        self._left -= 1
        if not self._left:
            self._loop.stop()
