"""Ring: consistent hashing of prefix keys to workers (uhashring), so that few keys move when workers change."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from uhashring import HashRing

POINTS = 64
"""Of a worker on the ring: with more the ring is evener, but takes longer to make."""
SPACE = 2**128
"""Keys are hashed with MD5."""


class Ring:
    """Workers on a hash ring."""

    def __init__(self, names: Iterable[str]) -> None:
        self._ring = HashRing(nodes=sorted(names), vnodes=POINTS)

    def order(self, key: bytes, count: int, allowed: Collection[str]) -> list[str]:
        """Up to `count` of the allowed workers once each, the key's home first, then in ring order."""
        found: list[str] = []
        for one in self._ring.range(key.hex(), unique=True) if allowed else ():
            if one["nodename"] in allowed:
                found.append(one["nodename"])
                if len(found) == count:
                    break
        return found

    def arcs(self) -> list[tuple[float, str]]:
        """Where around the ring, from 0 to 1, an arc ends, and whose keys are on it; in order."""
        return [(point / SPACE, name) for point, name in self._ring.get_points()]
