"""Headwater's own routers. Router, view, summaries and gossip are the real ones, over simulated workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from cluster.simulate.engine import SALT, Engine, Job
from cluster.simulate.run import Choice, World
from cluster.simulate.status import stand_in
from cluster.simulate.trace import BLOCK_TOKENS, Request
from router.config import RouterConfig
from router.route import NoWorkers, Router, Ticket
from router.view import BOTH, View
from transfer.gossip.replicas import Replicas
from transfer.gossip.summary import Load, Summary
from transfer.messages import Plan, Speeds, WorkerStatus
from transfer.prefix import PrefixChain, root_key
from workers.kv.journal import Journal

MODEL = "simulated"
ROOT = root_key(MODEL, tenant=SALT)
INCARNATION = 1
DEFAULTS = RouterConfig()
HEARTBEAT_S = 0.25
SOON_S = 1e-6
"""Handing over is not simulated; 0 would mean that nobody has measured it."""


@dataclass(slots=True)
class _Asked:
    """A request's keys, its latest plan, and what the router counts for it."""

    chain: PrefixChain
    plan: Plan
    ticket: Ticket


class RealRouters(ABC):
    """What both of Headwater's policies have in common: `count` routers over views of the simulated workers, where one
    that is silent for `silent_s` gets nothing. A subclass brings the views what they are to know, by `publish` and
    `announce`."""

    def __init__(self, world: World, config: RouterConfig, count: int, silent_s: float) -> None:
        settings = world.settings
        self._world = world
        self.engines = {engine.name: engine for engine in world.engines}
        self._numbers = {engine.name: number for number, engine in enumerate(world.engines)}
        self._arrived: dict[str, dict[str, int]] = {name: {} for name in self.engines}
        self.summaries = {name: Summary(name, INCARNATION, settings.capacity) for name in self.engines}
        self._journals = {name: Journal(MODEL) for name in self.engines}
        for name, engine in self.engines.items():
            engine.radix.watch(self._journals[name])
        self._asked: dict[int, _Asked] = {}
        self.replicas = [Replicas(settings.capacity) for _ in range(count)]
        self.views = [self._view(replicas, silent_s) for replicas in self.replicas]
        self.routers = [
            Router(view, config, f"r{number}", Random(world.random.random())) for number, view in enumerate(self.views)
        ]
        self._decodes = settings.decode

    def choose(self, router: int, request: Request, refused: frozenset[int], last: bool) -> Choice:
        """As the router plans, and a gateway dispatches. Where all have refused, or nobody else is able, one of those
        that refused has to take it."""
        ours, before = self.routers[router], self._asked.get(request.number)
        chain = before.chain if before else PrefixChain.of(ROOT, request.prompt, BLOCK_TOKENS)
        avoid = frozenset(self._world.engines[number].name for number in refused)
        try:
            plan = ours.plan(chain, request.tokens, self._decodes, avoid)
        except NoWorkers:
            plan, last = ours.plan(chain, request.tokens, self._decodes), True
        ticket = ours.dispatch(plan, chain, request.tokens)
        self._asked[request.number] = _Asked(chain, plan, ticket)
        self.announce(router, ticket)
        self._arrived[plan.prefill][ours.name] = ticket.notice.number
        worker, most = self._numbers[plan.prefill], ours.numbered(plan, ticket, last).most_queued
        if plan.fetch is None:
            return Choice(worker, most)
        return Choice(worker, most, self._numbers[plan.fetch.worker], plan.fetch.tokens // BLOCK_TOKENS)

    def busy(self, router: int, request: Request, worker: int) -> None:
        """The router learns how long the queue is, and no longer counts what it sent."""
        engine, ticket = self._world.engines[worker], self._asked[request.number].ticket
        notice = ticket.notice
        self.views[router].queue_is(engine.name, engine.queued_tokens, notice.router, notice.number)
        ticket.close()

    def placed(self, router: int, request: Request, worker: int, job: Job) -> None:
        """The worker's summary changes."""
        name = self._world.engines[worker].name
        self._journals[name].read(self.summaries[name])
        self.publish(name)

    def computed(self, router: int, request: Request, worker: int, job: Job) -> None:
        """The gateway gets the first token, and hears what was not where it was believed to be."""
        asked = self._asked[request.number]
        plan, cached = asked.plan, job.cached * BLOCK_TOKENS
        if cached < plan.cached:
            self.routers[router].lacks(plan.fetch.worker if plan.fetch else plan.prefill, asked.chain, cached)
        asked.ticket.computed()

    def ended(self, router: int, request: Request, worker: int, job: Job) -> None:
        """The gateway gets the end."""
        self._asked.pop(request.number).ticket.close()

    @abstractmethod
    def announce(self, router: int, ticket: Ticket) -> None:
        """Tell other routers of a dispatch."""

    @abstractmethod
    def publish(self, worker: str) -> None:
        """A worker's summary or load has changed."""

    def load(self, worker: str) -> Load:
        """What a worker says of itself."""
        engine = self.engines[worker]
        return Load(
            queued_tokens=engine.queued_tokens,
            running=engine.running,
            prompt_tokens_s=engine.rate,
            free_blocks=engine.free_blocks,
            accepted=tuple(self._arrived[worker].items()),
        )

    def _view(self, replicas: Replicas, silent_s: float) -> View:
        settings = self._world.settings
        view = View([(name, BOTH) for name in self.engines], self._world.loop.clock, replicas, silent_s)
        if settings.block_copy_s is not None:
            for name in self.engines:
                view.update(self._status(self.engines[name]))
        return view

    def _status(self, engine: Engine) -> WorkerStatus:
        settings = self._world.settings
        assert settings.block_copy_s is not None
        bytes_s = settings.kv_bytes_per_token * BLOCK_TOKENS / settings.block_copy_s
        return stand_in(engine.name, BOTH, Speeds(engine.rate, SOON_S, bytes_s), settings.kv_bytes_per_token)


class Exact(RealRouters):
    """One router that knows everything at once."""

    def __init__(self, world: World, config: RouterConfig = DEFAULTS) -> None:
        super().__init__(world, config, 1, 4 * HEARTBEAT_S)

    def start(self) -> None:
        """A router gives nothing to a worker that is silent."""
        for worker in self.engines:
            self.publish(worker)
        self._world.loop.after(HEARTBEAT_S, self.start)

    def choose(self, router: int, request: Request, refused: frozenset[int], last: bool) -> Choice:
        """The one router's choice; nobody refuses it."""
        return super().choose(0, request, refused, True)

    def placed(self, router: int, request: Request, worker: int, job: Job) -> None:
        """The one router knows."""
        super().placed(0, request, worker, job)

    def computed(self, router: int, request: Request, worker: int, job: Job) -> None:
        """The one router's gateway gets the first token."""
        super().computed(0, request, worker, job)

    def announce(self, router: int, ticket: Ticket) -> None:
        """There is no other router."""

    def publish(self, worker: str) -> None:
        """Nothing is in between."""
        self.replicas[0].apply(self.summaries[worker].update(self.load(worker)), self._world.loop.now)
