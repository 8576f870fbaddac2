"""Ring: consistent hashing of prefix keys to workers (uhashring), so that few keys move when workers change."""

from __future__ import annotations

from collections.abc import Iterable

from uhashring import HashRing


class Ring:
    """Workers on a hash ring."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: frozenset[str] = frozenset()
        self._ring = HashRing(hash_fn="ketama")
        self.set(names)

    def set(self, names: Iterable[str]) -> None:
        """Make the ring consist of exactly these workers."""
        wanted = frozenset(names)
        for name in self._names - wanted:
            self._ring.remove_node(name)
        for name in sorted(wanted - self._names):
            self._ring.add_node(name)
        self._names = wanted

    def order(self, key: bytes, count: int | None = None) -> list[str]:
        """Up to `count` workers (default: all) once each, the key's home first, then in ring order."""
        size = len(self._names) if count is None else min(count, len(self._names))
        return [one["nodename"] for one in self._ring.range(key.hex(), size=size, unique=True)] if size else []
