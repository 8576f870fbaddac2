"""Keeper: starts the actors of a cluster again that have died or stand still. A thread beside whoever started it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from cluster.lives import Life, State

_log = logging.getLogger(__name__)
LOOK_S = 0.5
"""How often all actors are looked at."""
AWAY_S = 3.0
"""Between two looks, after which what was not heard meanwhile says nothing about the actors."""
RELEASE_S = 30.0
"""How long Ray may take to give the name of an actor that has ended free."""


class Kept(Protocol):
    """The cluster whose actors are kept."""

    def names(self) -> list[str]:
        """Of all actors that there should be."""

    def pulse(self, name: str) -> Any:
        """A call of an actor that comes to a `Pulse`."""

    def end(self, name: str) -> None:
        """End an actor's process."""

    def create(self, name: str) -> None:
        """Create an actor's next life, under the same name. Raises ValueError while the name is not free."""

    def begin(self, name: str) -> list[Callable[[], Any]]:
        """The calls that make a new actor serve, one after the other."""


class Keeper:
    """Looks after the actors of `cluster` from `start` to `stop`. `said` is told what a person should know."""

    def __init__(self, cluster: Kept, said: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._said = said
        self._clock = clock
        self._lives: dict[str, Life] = {}
        self._asked: dict[str, Any] = {}
        self._looked_at = clock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def start(self) -> None:
        """Begin; all actors serve by now."""
        self._looked_at = self._clock()
        self._lives = {name: Life(self._clock()) for name in self._cluster.names()}
        self._thread.start()

    def stop(self) -> None:
        """Start nothing any more."""
        self._stopping.set()
        self._thread.join(LOOK_S + 1)

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                self._look()
            except Exception:
                _log.exception("cannot look after the actors")

    def _look(self) -> None:
        now, before, self._looked_at = self._clock(), self._looked_at, self._clock()
        if now - before > AWAY_S:  # this process was stopped, or had no turn
            for life in self._lives.values():
                life.not_watched(now - before)
        for name, life in self._lives.items():
            if life.state is State.UP:
                self._ask(name, life)
            if (why := life.hopeless(self._clock())) is not None:
                self._cluster.end(name)
                self._ended(name, life, why)
            if life.due(self._clock()) and not self._stopping.is_set():
                life.starting(self._clock())
                threading.Thread(target=self._begin, args=(name, life), name=f"begin-{name}", daemon=True).start()

    def _ask(self, name: str, life: Life) -> None:
        call = self._asked.get(name)
        if call is None:
            call = self._asked[name] = self._cluster.pulse(name)
        try:
            if ray.wait([call], timeout=0)[0]:
                del self._asked[name]
                life.heard(ray.get(call), self._clock())
        except RayActorError as error:
            self._asked.pop(name, None)
            self._ended(name, life, type(error).__name__)
        except RayError as error:
            self._asked.pop(name, None)
            _log.warning("%s: %s", name, error)

    def _ended(self, name: str, life: Life, why: str) -> None:
        self._asked.pop(name, None)
        life.ended(why, self._clock())
        self._said(f"{name} has ended ({why}); it is started again")

    def _begin(self, name: str, life: Life) -> None:
        """Start an actor's next life; in a thread, since that takes long."""
        number = life.lives
        try:
            self._cluster.end(name)  # Ray keeps the name of an actor that has died by itself
            self._create(name)
            for call in self._cluster.begin(name):
                ray.get(call())
        except Exception as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if life.lives == number and not self._stopping.is_set():
                self._ended(name, life, f"cannot start: {' '.join(str(cause).split())[:200]}")
            return
        if life.lives == number:
            life.started(self._clock())
            self._said(f"{name} serves again")

    def _create(self, name: str) -> None:
        until = self._clock() + RELEASE_S
        while not self._stopping.is_set():
            try:
                self._cluster.create(name)
                return
            except ValueError:
                if self._clock() > until:
                    raise
                time.sleep(0.05)
