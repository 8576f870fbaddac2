"""Heat: how many prompt tokens a second arrive under a prefix, and which workers they went to.

Rates decay exponentially. Only the hottest keys are kept (as in the space-saving sketch of Metwally, Agrawal, El
Abbadi, 2005, but a new key begins with its own tokens, so that nothing looks hot that is not).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest


@dataclass(slots=True)
class _Entry:
    tokens: float
    at: float
    shares: dict[str, float] = field(default_factory=dict)


class Heat:
    """Decayed token counts of at most twice `size` prefix keys."""

    def __init__(self, size: int, half_life_s: float) -> None:
        self._size = size
        self._half_life_s = half_life_s
        self._entries: dict[bytes, _Entry] = {}

    def rate(self, key: bytes, now: float) -> float:
        """Prompt tokens a second under a key."""
        entry = self._entries.get(key)
        return entry.tokens * self._decay(entry, now) * math.log(2) / self._half_life_s if entry else 0.0

    def anchor(self, keys: Sequence[bytes], most: float, now: float) -> tuple[int, float]:
        """The shallowest of a prompt's keys that is not hotter than `most` tokens a second, or the deepest there is;
        and its rate."""
        rate = 0.0
        for index, key in enumerate(keys):
            rate = self.rate(key, now)
            if rate <= most:
                return index, rate
        return len(keys) - 1, rate

    def shares(self, key: bytes, now: float) -> dict[str, float]:
        """Decayed tokens under a key by worker."""
        entry = self._entries.get(key)
        if entry is None:
            return {}
        decay = self._decay(entry, now)
        return {worker: tokens * decay for worker, tokens in entry.shares.items()}

    def add(self, keys: Sequence[bytes], tokens: int, worker: str, now: float) -> None:
        """A prompt goes to a worker. `keys` are its own from the shallowest to its anchor: below that nothing is hot,
        and nothing is counted."""
        for key in keys:
            shares = self.shares(key, now)
            shares[worker] = shares.get(worker, 0.0) + tokens
            entry = self._entries.get(key, _Entry(0.0, now))
            self._entries[key] = _Entry(entry.tokens * self._decay(entry, now) + tokens, now, shares)
        if len(self._entries) > 2 * self._size:
            hottest = nlargest(
                self._size, self._entries.items(), key=lambda item: item[1].tokens * self._decay(item[1], now)
            )
            self._entries = dict(hottest)

    def _decay(self, entry: _Entry, now: float) -> float:
        return float(0.5 ** ((now - entry.at) / self._half_life_s))
