"""Routers that follow a rule, each over what it knows: of its own requests at once, of all others late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.simulate.baselines import Rule
from cluster.simulate.engine import Job
from cluster.simulate.knowledge import Knowledge
from cluster.simulate.run import Choice, World
from cluster.simulate.trace import Request


class Informed:
    """A baseline's routers."""

    def __init__(self, world: World, rule: Rule) -> None:
        settings = world.settings
        self._loop = world.loop
        self._staleness_s = settings.staleness_s
        # With nothing late they all know the same.
        count = settings.routers if settings.staleness_s else 1
        self._known = [Knowledge(settings.workers, settings.rate, world.random) for _ in range(count)]
        self._rule = rule

    def start(self) -> None:
        """Nothing happens by itself."""

    def choose(self, router: int, request: Request, refused: frozenset[int], last: bool) -> Choice:
        """As the rule says; workers take what comes."""
        return Choice(self._rule.choose(self._known_to(router), request, self._loop.now))

    def busy(self, router: int, request: Request, worker: int) -> None:
        """Does not happen."""

    def placed(self, router: int, request: Request, worker: int, job: Job) -> None:
        """A request runs."""
        self._tell(router, Knowledge.placed, worker, request, job, self._loop.now)

    def computed(self, router: int, request: Request, worker: int, job: Job) -> None:
        """A prompt is computed."""
        self._tell(router, Knowledge.computed, worker, job)

    def ended(self, router: int, request: Request, worker: int, job: Job) -> None:
        """A request is over."""
        self._tell(router, Knowledge.ended, worker, request)

    def _known_to(self, router: int) -> Knowledge:
        return self._known[router % len(self._known)]

    def _tell(self, router: int, what: Callable[..., None], *arguments: Any) -> None:
        """Its own router knows at once, the others later."""
        mine = self._known_to(router)
        what(mine, *arguments)
        if len(self._known) > 1:
            self._loop.after(self._staleness_s, self._tell_others, mine, what, arguments)

    def _tell_others(self, but: Knowledge, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        for known in self._known:
            if known is not but:
                what(known, *arguments)
