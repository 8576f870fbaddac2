"""Ring: consistent hashing of prefix keys to workers (uhashring), so that few keys move when workers change."""

from __future__ import annotations

from collections.abc import Container, Iterable

from uhashring import HashRing

POINTS = 64
"""Of a worker on the ring: with more the ring is evener, but takes longer to change."""


class Ring:
    """Workers on a hash ring."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: frozenset[str] = frozenset()
        self._ring = HashRing(vnodes=POINTS)
        self.set(names)

    def set(self, names: Iterable[str]) -> None:
        """Make the ring consist of exactly these workers."""
        wanted = frozenset(names)
        if wanted != self._names:
            self._names, self._ring = wanted, HashRing(nodes=sorted(wanted), vnodes=POINTS)

    def order(self, key: bytes, count: int, allowed: Container[str]) -> list[str]:
        """Up to `count` of the allowed workers once each, the key's home first, then in ring order."""
        found: list[str] = []
        for one in self._ring.range(key.hex(), unique=True) if self._names and count else ():
            if one["nodename"] in allowed:
                found.append(one["nodename"])
                if len(found) == count:
                    break
        return found
