"""Lives: which actors of a cluster have to be started again, and when. A pure state machine; keeper.py runs it on Ray.

An actor is looked at again and again. It needs another life when its process has ended, when it does not answer for
`SILENT_S`, and, a worker, when its engine has work and makes no step for longer than steps take. A life that ends soon
is followed by the next one after a pause that doubles each time.
"""

from __future__ import annotations

from enum import Enum

from transfer.messages import Pulse

SILENT_S = 15.0
"""Without an answer for so long, a process counts as dead: nothing that it does takes its event loop as long."""
STUCK_S, STEPS, UNKNOWN_STUCK_S = 7.0, 4.0, 300.0
"""An engine is stuck after so many seconds, and so many times what a full step takes, without a step; after the last of
these while nobody knows how long a step takes."""
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
GOOD_S = 60.0
"""A life of this length is no failure: the next pause is the shortest again."""
START_S = 600.0


class State(Enum):
    """What is known of an actor."""

    UP = "up"
    DOWN = "down"
    STARTING = "starting"


class Life:
    """An actor that is to be kept alive. It is up at first."""

    def __init__(self, now: float) -> None:
        self.state = State.UP
        self.why = ""
        self.lives = 1
        self._since = self._heard = self._stepped = now
        self._pulse = Pulse()
        self._pause_s = PAUSE_S
        self._due = 0.0

    @classmethod
    def wanted(cls, now: float) -> Life:
        """One that is to begin at once."""
        made = cls(now)
        made.state, made.lives, made._due = State.DOWN, 0, now
        return made

    def heard(self, pulse: Pulse, now: float) -> None:
        """It has answered."""
        if not pulse.busy or not self._pulse.busy or pulse.steps != self._pulse.steps:
            self._stepped = now
        self._pulse, self._heard = pulse, now

    def not_watched(self, seconds: float) -> None:
        """Nobody has looked for so long: that is no silence."""
        self._heard += seconds
        self._stepped += seconds

    def ended(self, why: str, now: float) -> None:
        """Its process has ended, or its start has failed."""
        if self.state is State.DOWN:
            return
        if self.state is State.UP and now - self._since >= GOOD_S:
            self._pause_s = PAUSE_S
        self.state, self.why, self._due = State.DOWN, why, now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def starting(self, now: float) -> None:
        """The next life begins."""
        self.state, self._since = State.STARTING, now
        self.lives += 1

    def started(self, now: float) -> None:
        """It serves again."""
        self.state, self.why, self._pulse = State.UP, "", Pulse()
        self._since = self._heard = self._stepped = now

    def due(self, now: float) -> bool:
        """Whether the next life should begin now."""
        return self.state is State.DOWN and now >= self._due

    def hopeless(self, now: float) -> str | None:
        """Why an actor whose process lives had better be ended; None if it had not."""
        if self.state is State.STARTING:
            return f"not ready after {START_S:.0f} s" if now - self._since > START_S else None
        if self.state is not State.UP:
            return None
        if now - self._heard > SILENT_S:
            return f"no answer for {now - self._heard:.0f} s"
        patience = max(STUCK_S, STEPS * self._pulse.step_s) if self._pulse.step_s else UNKNOWN_STUCK_S
        if self._pulse.busy and now - self._stepped > patience:
            return f"no step of its engine for {now - self._stepped:.0f} s"
        return None
