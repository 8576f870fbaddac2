"""Admission: whether a new prompt can be expected to be answered soon enough, or is better refused at once.

By Little's law (J. D. C. Little, "A proof for the queuing formula L = λW", 1961) a prompt waits for as long as those
that wait when it comes need to get their turn, at the pace at which prompts do. Pace and number are those of the whole
cluster as one gateway sees it, so it does not matter what is scarce: computing, blocks, transfers, loads from tiers.

The pace is that of the last seconds, and of some prompts at least, in which many waited: when few do, it says how much
is asked, and not how much can be done. A cluster that does not get on is slower with every second.

Prompts of a priority below 0 do not count for the others, which go before them.

When more wait than the target allows, there is still a place for a tenant that has less than its share of them waiting:
workers serve tenants in turns, so the others' queue is not in front of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

HEADROOM = 2 / 3
"""The share of the target that may be expected: what is expected is a mean, and is measured."""
LOW = 0.5
"""What is left of it for priorities below 0, so that there is room for the others."""
FEW = 8
"""Fewer may always wait, and fewer answers are no pace."""
LEAST = 16
"""Answers that the pace is taken of, at least."""
SPAN_S = 5.0
"""Seconds that the pace is taken of, at least."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How long a new prompt would wait, and how long it may, in seconds."""

    expected_s: float
    allowed_s: float

    @property
    def again_s(self) -> float:
        """When there is room again, if no others come."""
        return self.expected_s - self.allowed_s


class Wait:
    """One prompt that waits; `over` is called with whether it was answered, or has left."""

    def __init__(self, over: Callable[[bool], None]) -> None:
        self._over = over
        self.open = True

    def answered(self) -> None:
        """It has had its turn."""
        self._end(answered=True)

    def left(self) -> None:
        """It does not wait any more, if it did."""
        self._end(answered=False)

    def _end(self, answered: bool) -> None:
        if self.open:
            self.open = False
            self._over(answered)


@dataclass(slots=True)
class _Line:
    """The prompts of one tenant that wait, and its share of the workers' time beside others'."""

    weight: float
    waiting: int = 0


class Admission:
    """The prompts of one gateway. Without a target, none is refused."""

    def __init__(self, target_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._target_s = target_s
        self._clock = clock
        self._looked_at = clock()
        self._lines: dict[str, _Line] = {}
        self._waiting = 0
        self._low = 0  # of those that wait
        self._crowded_s = 0.0
        """For how long many have waited, in all: a clock that stands still while few do."""
        self._answers: deque[float] = deque()
        """On this clock; the pace counts from the first one."""

    def check(self, tenant: str, weight: float, priority: int) -> Refusal | None:
        """None for a prompt that may come."""
        before = self._waiting if priority < 0 else self._waiting - self._low
        if self._target_s is None or before < FEW:
            return None
        allowed = self._target_s * HEADROOM * (LOW if priority < 0 else 1)
        expected = self._expected_s(before)
        if expected <= allowed:
            return None
        line = self._lines.get(tenant, _Line(weight))
        others = sum(one.weight for one in self._lines.values() if one is not line)
        room = before * allowed / expected
        if line.waiting + 1 <= room * weight / (weight + others):
            return None
        return Refusal(expected, allowed)

    def wait(self, tenant: str, weight: float, priority: int) -> Wait:
        """A prompt waits from now on."""
        self._tick()
        line = self._lines.setdefault(tenant, _Line(weight))
        line.weight = weight
        line.waiting += 1
        self._waiting += 1
        self._low += priority < 0
        return Wait(lambda answered: self._over(tenant, priority, answered))

    def _over(self, tenant: str, priority: int, answered: bool) -> None:
        self._tick()
        if answered and self._waiting >= FEW:
            self._answers.append(self._crowded_s)
            while len(self._answers) > LEAST + 1 and self._answers[1] <= self._crowded_s - SPAN_S:
                self._answers.popleft()
        line = self._lines[tenant]
        line.waiting -= 1
        if not line.waiting:
            del self._lines[tenant]
        self._waiting -= 1
        self._low -= priority < 0

    def _expected_s(self, before: int) -> float:
        """How long a prompt would wait that comes now, with so many before it. Until anybody has been answered: as long
        as others have waited so far."""
        self._tick()
        if not self._answers:
            return self._crowded_s
        return before * (self._crowded_s - self._answers[0]) / max(len(self._answers) - 1, FEW)

    def _tick(self) -> None:
        now = self._clock()
        if self._waiting >= FEW:
            self._crowded_s += now - self._looked_at
        self._looked_at = now
