"""History: what a gateway did in each of the last seconds. Counted as it happens: nothing runs meanwhile."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

SECONDS = 300
COUNTS = ("requests", "answered", "failed", "prompts", "prompt_tokens", "cached_tokens", "output_tokens")
SAMPLES = 32
"""Times to first token that are kept of a second."""


@dataclass(slots=True)
class Second:
    """The second from the epoch's second `at` on: requests that came and that were answered to their end, prompts that
    were computed, their tokens and those of them that nobody computed, tokens generated, a sample of the times to the
    first one, and how many prompts which worker handed to which."""

    at: int
    requests: int = 0
    answered: int = 0
    failed: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    handed: dict[str, int] = field(default_factory=dict)

    def sample(self, first_s: float) -> None:
        """One more prompt's time to first token; of many, those that are kept are a fair sample."""
        if len(self.first_s) < SAMPLES:
            self.first_s.append(round(first_s, 4))
        elif (place := random.randrange(self.prompts)) < SAMPLES:
            self.first_s[place] = round(first_s, 4)

    def counts(self) -> dict[str, int]:
        """What can be added up."""
        return {name: getattr(self, name) for name in COUNTS}

    def shown(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"at": self.at, **self.counts(), "first_s": list(self.first_s), "handed": dict(self.handed)}


class History:
    """The last `SECONDS` seconds in which something happened. `clock` gives seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._seconds: deque[Second] = deque(maxlen=SECONDS)
        self._before = dict.fromkeys(COUNTS, 0)

    def now(self) -> Second:
        """The second that is now. A clock that is set back goes on with the latest one."""
        at = int(self._clock())
        if not self._seconds or self._seconds[-1].at < at:
            self._before = self.total()
            self._seconds.append(Second(at))
        return self._seconds[-1]

    def total(self) -> dict[str, int]:
        """Of all seconds since the gateway began."""
        now = self._seconds[-1].counts() if self._seconds else {}
        return {name: number + now.get(name, 0) for name, number in self._before.items()}

    def since(self, at: int) -> list[dict[str, Any]]:
        """The seconds from `at` on that are not too long ago, the one that is now among them, as JSON has them."""
        first = max(at, int(self._clock()) - SECONDS)
        return [one.shown() for one in self._seconds if one.at >= first]


def merged(parts: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The seconds of several gateways as if they were one's."""
    seconds: dict[int, dict[str, Any]] = {}
    for one in (one for part in parts for one in part):
        known = seconds.get(one["at"])
        if known is None:
            seconds[one["at"]] = one
            continue
        for name in (*COUNTS, "first_s"):
            known[name] = known[name] + one[name]
        handed = known["handed"]
        known["handed"] = handed | {pair: handed.get(pair, 0) + more for pair, more in one["handed"].items()}
    return [seconds[at] for at in sorted(seconds)]
