"""Arrivals: which of each router's dispatches have arrived, so that routers know what the worker's load includes."""

from __future__ import annotations

from collections import OrderedDict

from transfer.messages import Dispatch

MOST = 32
"""Routers that are remembered, the latest ones: those of earlier lives send nothing any more."""


class Arrivals:
    """The highest number by router. Those before it have arrived, too, or will at about the same time."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str, int] = OrderedDict()

    @property
    def latest(self) -> tuple[tuple[str, int], ...]:
        """Routers' names and the numbers of their last dispatches."""
        return tuple(self._numbers.items())

    def arrived(self, dispatch: Dispatch) -> None:
        """A request has arrived, whether or not it is accepted."""
        if dispatch.router:
            self._numbers[dispatch.router] = max(dispatch.number, self._numbers.get(dispatch.router, 0))
            self._numbers.move_to_end(dispatch.router)
            while len(self._numbers) > MOST:
                self._numbers.popitem(last=False)
