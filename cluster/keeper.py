"""Keeper: starts the actors of a cluster again that have died or stand still. A thread beside whoever started it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cluster.connection import LaunchError
from cluster.lives import Life, State
from transfer.messages import Pulse

_log = logging.getLogger(__name__)
LOOK_S = 0.5
"""How often all actors are looked at."""
AWAY_S = 3.0
"""Between two looks, after which what was not heard meanwhile says nothing about the actors."""
WAIT_POLL_S = 0.05
RELEASE_S = 30.0
"""How long Ray may take to give the name of an actor that has ended free."""


class Kept(Protocol):
    """The cluster whose actors are kept."""

    def names(self) -> list[str]:
        """Of all actors that there should be."""

    def pulse(self, name: str) -> Any:
        """A call of an actor that comes to a `Pulse`."""

    def heard(self, name: str, pulse: Pulse) -> None:
        """An actor has answered."""

    def end(self, name: str) -> None:
        """End an actor's process."""

    def create(self, name: str) -> None:
        """Create an actor's next life, under the same name. Raises ValueError while the name is not free."""

    def begin(self, name: str) -> None:
        """Make a new actor serve, however long that takes. Raises RayError."""


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

    def start(self, lost: Sequence[str] = ()) -> None:
        """Begin; all actors serve by now, but for those that are `lost`."""
        self._looked_at = self._clock()
        now = self._clock()
        self._lives = {name: Life.wanted(now) if name in lost else Life(now) for name in self._cluster.names()}
        self._thread.start()

    def add(self, name: str) -> None:
        """Start an actor, and look after it from now on."""
        self._lives[name] = Life.wanted(self._clock())

    def forget(self, name: str) -> None:
        """Look after an actor no more."""
        self._lives.pop(name, None)
        self._asked.pop(name, None)

    def wait(self, name: str, seconds: float) -> None:
        """Until an actor serves. Raises LaunchError if it cannot start, or takes longer."""
        life, until = self._lives[name], self._clock() + seconds
        while life.state is not State.UP:
            if life.state is State.DOWN and life.why:
                raise LaunchError(f"{name}: {life.why}")
            if self._clock() > until:
                raise LaunchError(f"{name}: not ready after {seconds:.0f} s")
            time.sleep(WAIT_POLL_S)

    def up(self, name: str) -> bool:
        """Whether an actor serves, as far as is known."""
        life = self._lives.get(name)
        return life is not None and life.state is State.UP

    def lives(self) -> dict[str, tuple[State, int, str]]:
        """What is known of each actor: its state, its lives so far, and why it is not up."""
        return {name: (life.state, life.lives, life.why) for name, life in list(self._lives.items())}

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
            for life in list(self._lives.values()):
                life.not_watched(now - before)
        for name, life in list(self._lives.items()):
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
                self._asked.pop(name, None)
                pulse: Pulse = ray.get(call)
                life.heard(pulse, self._clock())
                self._cluster.heard(name, pulse)
                if not pulse.serves:
                    self._cluster.end(name)
                    self._ended(name, life, "it does not serve any more")
        except ActorUnavailableError as error:  # the network failed; it may still be at work
            self._asked.pop(name, None)
            _log.warning("%s: %s", name, error)
        except RayActorError as error:
            self._asked.pop(name, None)
            self._ended(name, life, type(error).__name__)
        except RayError as error:
            self._asked.pop(name, None)
            _log.warning("%s: %s", name, error)

    def _ended(self, name: str, life: Life, why: str) -> None:
        if self._lives.get(name) is not life:  # nobody wants it any more
            return
        self._asked.pop(name, None)
        life.ended(why, self._clock())
        self._said(f"{name} has ended ({why}); it is started again")

    def _begin(self, name: str, life: Life) -> None:
        """Start an actor's next life; in a thread, since that takes long."""
        number = life.lives
        try:
            self._cluster.end(name)  # Ray keeps the name of an actor that has died by itself
            self._create(name)
            if self._lives.get(name) is not life:  # nobody wants it any more
                self._cluster.end(name)
                return
            self._cluster.begin(name)
        except Exception as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if life.lives == number and not self._stopping.is_set():
                self._ended(name, life, f"cannot start: {' '.join(str(cause).split())[:200]}")
            return
        if life.lives == number and self._lives.get(name) is life:
            life.started(self._clock())
            if number > 1:
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
