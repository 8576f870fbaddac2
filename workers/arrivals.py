"""Arrivals: which of each router's dispatches have arrived, so that routers know what the worker's load includes."""

from __future__ import annotations

from transfer.messages import Dispatch

MOST = 32
"""Routers that are reported, the latest ones: an entry is to fit a datagram."""
KEEP_S = 10.0
"""How long an arrival is reported: often enough for every router to hear of it."""


class Arrivals:
    """The highest number by router. Those before it have arrived, too, or will at about the same time."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}

    def latest(self, now: float) -> tuple[tuple[str, int], ...]:
        """Routers that have sent something lately, and the numbers of their last dispatches."""
        self._last = {router: last for router, last in self._last.items() if now - last[1] < KEEP_S}
        latest = sorted(self._last.items(), key=lambda item: -item[1][1])[:MOST]
        return tuple((router, number) for router, (number, _) in latest)

    def arrived(self, dispatch: Dispatch, now: float) -> None:
        """A request has arrived, whether or not it is accepted."""
        if dispatch.router:
            number, _ = self._last.get(dispatch.router, (0, 0.0))
            self._last[dispatch.router] = max(dispatch.number, number), now
