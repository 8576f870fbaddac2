"""Eviction policies: which cached prefix is worth least.

A policy is told when a request uses a node and gives each node a worth; the smallest goes first. It sees nodes that
could go now: unpinned leaves. Protection by priority or time comes before any policy (see workers/kv/radix.py).
"""

from __future__ import annotations

from typing import Literal, Protocol

Name = Literal["lru", "lru-k", "lfu", "slru", "fifo"]
Worth = tuple[int, int]


class Entry(Protocol):
    """What a policy knows of a node. Times are counts of uses of the whole tree, so they are all different."""

    created: int
    last_use: int
    previous_use: int
    uses: int


class Policy:
    """Least recently used. The base of the others, which differ in `worth`."""

    def used(self, entry: Entry, now: int) -> Entry | None:
        """An entry was matched or inserted. Returns an entry that is worth less from now on, if there is one."""
        entry.previous_use, entry.last_use = entry.last_use, now
        entry.uses += 1
        return None

    def renewed(self, entry: Entry, now: int) -> None:
        """The use that began earlier ends now."""
        entry.last_use = now

    def removed(self, entry: Entry) -> None:
        """An entry is gone."""

    def worth(self, entry: Entry) -> Worth:
        """Smaller goes first."""
        return (0, entry.last_use)


class FIFO(Policy):
    """First in, first out."""

    def worth(self, entry: Entry) -> Worth:
        """By age."""
        return (0, entry.created)


class LFU(Policy):
    """Least frequently used; among equals the least recently used."""

    def worth(self, entry: Entry) -> Worth:
        """By number of uses."""
        return (entry.uses, entry.last_use)


class LRUK(Policy):
    """LRU-K (O'Neil et al., 1993) with K = 2: the oldest last-but-one use goes first, so that what was used only once
    never displaces what comes again and again."""

    def worth(self, entry: Entry) -> Worth:
        """By the last-but-one use; 0 where there was only one."""
        return (entry.previous_use, entry.last_use)


class SLRU(Policy):
    """Segmented LRU (Karedla et al., 1994): what was used again is protected, up to four fifths of the entries; the
    least recently used protected entry then is on probation again."""

    def __init__(self) -> None:
        self._protected: dict[Entry, None] = {}
        self._entries = 0

    def used(self, entry: Entry, now: int) -> Entry | None:
        """A second use protects."""
        super().used(entry, now)
        if entry.uses == 1:
            self._entries += 1
            return None
        self._protected.pop(entry, None)
        self._protected[entry] = None
        if len(self._protected) <= max(1, self._entries * 4 // 5):
            return None
        oldest = next(iter(self._protected))
        del self._protected[oldest]
        return oldest

    def renewed(self, entry: Entry, now: int) -> None:
        """Keeps the protected ones in order of use."""
        super().renewed(entry, now)
        if entry in self._protected:
            del self._protected[entry]
            self._protected[entry] = None

    def removed(self, entry: Entry) -> None:
        """Leaves its segment."""
        self._entries -= 1
        self._protected.pop(entry, None)

    def worth(self, entry: Entry) -> Worth:
        """Probation before protection, each least recently used first."""
        return (int(entry in self._protected), entry.last_use)


POLICIES: dict[str, type[Policy]] = {"lru": Policy, "lru-k": LRUK, "lfu": LFU, "slru": SLRU, "fifo": FIFO}
