"""Soon: what workers will hold, or hold already, before their summaries say so."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Belief:
    there: bool
    until: float
    end: float


class Soon:
    """Prefix keys by worker, each believed until a time. What is wrong with a belief costs a detour."""

    def __init__(self) -> None:
        self._keys: dict[bytes, dict[str, _Belief]] = {}
        self._ends: list[tuple[float, bytes, str]] = []
        """A heap. Of a belief the entry of the time `end` counts, which goes back into it if the belief was renewed;
        others are of beliefs that were dropped."""

    def add(self, worker: str, keys: Iterable[bytes], there: bool, until: float) -> None:
        """A worker has these prefixes, or, unless they are `there`, is to compute them."""
        for key in keys:
            beliefs = self._keys.setdefault(key, {})
            before = beliefs.get(worker)
            if before is None:
                beliefs[worker] = _Belief(there, until, until)
                heapq.heappush(self._ends, (until, key, worker))
            else:
                before.there, before.until = there or before.there, max(until, before.until)

    def depths(self, keys: Sequence[bytes]) -> dict[str, tuple[int, int]]:
        """By worker, how many of a prompt's keys, from the first on, it will hold, and how many it holds by now."""
        found: dict[str, tuple[int, int]] = {}
        for count, key in enumerate(keys, 1):
            for worker, belief in self._keys.get(key, _NOTHING).items():
                there = found.get(worker, (0, 0))[1]
                found[worker] = count, count if belief.there else there
        return found

    def forget_soon(self, worker: str, keys: Iterable[bytes]) -> None:
        """What was sent to a worker has not been computed."""
        self._drop(worker, (key for key in keys if not self._is_there(worker, key)))

    def forget(self, worker: str, keys: Iterable[bytes]) -> None:
        """A worker turned out not to have these."""
        self._drop(worker, keys)

    def forget_worker(self, worker: str) -> None:
        """A worker has lost everything."""
        self._drop(worker, list(self._keys))

    def expire(self, now: float) -> None:
        """Stop believing what was to be believed until now."""
        while self._ends and self._ends[0][0] <= now:
            end, key, worker = heapq.heappop(self._ends)
            belief = self._keys.get(key, _NOTHING).get(worker)
            if belief is None or belief.end != end:
                continue
            if belief.until <= now:
                self._drop(worker, (key,))
            else:
                belief.end = belief.until
                heapq.heappush(self._ends, (belief.end, key, worker))

    def _is_there(self, worker: str, key: bytes) -> bool:
        belief = self._keys.get(key, _NOTHING).get(worker)
        return belief is not None and belief.there

    def _drop(self, worker: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            if (beliefs := self._keys.get(key)) is not None:
                beliefs.pop(worker, None)
                if not beliefs:
                    del self._keys[key]


_NOTHING: dict[str, _Belief] = {}
