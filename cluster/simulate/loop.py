"""Virtual time: a queue of events, each a function to call at a moment."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Loop:
    """Runs events in order of time, and those of one moment in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0
        self._stopped = False

    def clock(self) -> float:
        """Seconds since the beginning."""
        return self.now

    def at(self, time: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function at a moment, which is now if it has passed."""
        self._planned += 1
        heapq.heappush(self._events, (max(time, self.now), self._planned, function, arguments))

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function that much later."""
        self.at(self.now + seconds, function, *arguments)

    def stop(self) -> None:
        """Let no more events happen."""
        self._stopped = True

    def run(self) -> None:
        """Run until `stop` or until nothing is planned."""
        while self._events and not self._stopped:
            self.now, _, function, arguments = heapq.heappop(self._events)
            function(*arguments)
