"""Pending: dispatches to one worker that are not in what it has reported yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Dispatch:
    tokens: int
    until: float


class Pending:
    """Dispatches by the router that made them and by that router's number for them, which grows. `tokens` are the
    prompt tokens that they add to the worker's queue."""

    def __init__(self) -> None:
        self.tokens = 0
        self.count = 0
        self._open: dict[str, dict[int, _Dispatch]] = {}
        self._arrived: dict[str, int] = {}

    def add(self, router: str, number: int, tokens: int, until: float) -> None:
        """A dispatch is on its way, and forgotten at the time `until` at the latest. One that the worker has reported
        already, or that is told of twice, is not counted."""
        some = self._open.setdefault(router, {})
        if number > self._arrived.get(router, 0) and number not in some:
            some[number] = _Dispatch(tokens, until)
            self.tokens, self.count = self.tokens + tokens, self.count + 1

    def drop(self, router: str, number: int) -> None:
        """A dispatch is over, or never was."""
        if (one := self._open.get(router, {}).pop(number, None)) is not None:
            self.tokens, self.count = self.tokens - one.tokens, self.count - 1

    def arrived(self, router: str, number: int) -> None:
        """The worker has reported all of a router's dispatches up to this one."""
        self._arrived[router] = max(number, self._arrived.get(router, 0))
        for earlier in [one for one in self._open.get(router, ()) if one <= number]:
            self.drop(router, earlier)

    def expire(self, now: float) -> None:
        """Forget what was to be forgotten by now."""
        for router, some in self._open.items():
            for number in [number for number, one in some.items() if one.until <= now]:
                self.drop(router, number)

    def clear(self) -> None:
        """The worker has lost everything."""
        self.tokens = self.count = 0
        self._open.clear()
        self._arrived.clear()
