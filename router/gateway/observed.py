"""Observed: what is measured of a client's request, once, whatever number of choices and attempts it takes."""

from __future__ import annotations

import time
from contextvars import ContextVar

from router.gateway import metrics

arrived: ContextVar[float] = ContextVar("arrived", default=0.0)
"""When the request came (monotonic), in every task that it starts; 0 elsewhere."""


class Observed:
    """A request that is being answered by so many `choices`."""

    def __init__(self, choices: int) -> None:
        self._arrived = arrived.get() or time.monotonic()
        self._open = choices
        self._begun = False

    def begun(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A choice has its first token; of its prompt so many were cached."""
        if not self._begun:
            self._begun = True
            metrics.first_token.record(time.monotonic() - self._arrived)
        metrics.prompt_tokens.add(prompt_tokens)
        metrics.cached_tokens.add(cached_tokens)

    def ended(self) -> None:
        """A choice has its last token."""
        self._open -= 1
        if not self._open:
            metrics.duration.record(time.monotonic() - self._arrived)
