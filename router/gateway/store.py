"""Responses that clients may ask for again, in the memory of one gateway."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_AGE_S = 86_400.0
"""How long a response is remembered at most, in seconds."""
RECORD_BYTES = 512
"""What a stored response takes beside its texts, about."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response object and the list of all items that it answers, both as JSON."""

    response: bytes
    input: bytes
    stored_at: float

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return len(self.response) + len(self.input) + RECORD_BYTES


class ResponseStore:
    """Bounded by number, bytes and age (in seconds of `clock`): the oldest go first. Each response is stored with the
    whole conversation before it, so none depends on another, and the bytes counted are those that are held."""

    def __init__(self, max_count: int, max_bytes: int, max_age_s: float, clock: Callable[[], float]) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, name: str, response: bytes, items: bytes) -> None:
        """Store, or replace. What alone is larger than the bound is dropped at once, and nothing else for it."""
        self.drop(name)
        record = Stored(response, items, self._clock())
        if record.size > self._max_bytes:
            return
        self._stored[name] = record
        self.size += record.size
        self._drop_expired()
        while len(self._stored) > self._max_count or self.size > self._max_bytes:
            self._drop_oldest()

    def get(self, name: str) -> Stored | None:
        """None for what was never stored, or is no longer."""
        self._drop_expired()
        return self._stored.get(name)

    def drop(self, name: str) -> bool:
        """Whether it was there."""
        if (record := self._stored.pop(name, None)) is None:
            return False
        self.size -= record.size
        return True

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._stored and now - next(iter(self._stored.values())).stored_at > self._max_age_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, record = self._stored.popitem(last=False)
        self.size -= record.size
