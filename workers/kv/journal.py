"""Journal: what comes into the cache and goes, in which tier, from the engine's thread to the one that publishes it.

The engine's thread must neither wait nor share a set that it changes. So it only appends to a deque, a list of keys at
a time, and the publishing thread takes from the other end; both are single steps of the interpreter and need no lock.
After each entry the set of what some tier has is closed under prefix, so the reader may stop anywhere. A summary says
of each prefix the best tier that has it; the reader remembers all of them.
"""

from __future__ import annotations

from collections import deque

from transfer.gossip.summary import DEVICE, DISK, HOST, Summary
from transfer.prefix import root_key


class Journal:
    """A `workers.kv.radix.Watcher`, of the device, and the same for the tiers below. `fingerprint` is the model's, as
    gateways have it.

    Whoever moves a prefix from one tier to another says that it is there before it says that it is not here any more:
    between the two its descendants would be without it.
    """

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._entries: deque[tuple[int, bool, list[int]]] = deque()
        """Each with a bit for every tier that it is about."""
        self._tiers: dict[int, int] = {}
        """The reader's: a bit for each tier that has a key."""

    def root(self, salt: bytes) -> bytes:
        """The key that a salt's chains begin with: a tenant's salt has keys of its own."""
        return root_key(self._fingerprint, tenant=salt)

    def came(self, keys: list[int]) -> None:
        """Prefixes are cached on the device from now on, ancestors first."""
        self._entries.append((1 << DEVICE, True, keys))

    def went(self, keys: list[int]) -> None:
        """Prefixes are not cached on the device any more, descendants first."""
        self._entries.append((1 << DEVICE, False, keys))

    def stored(self, keys: list[int], tier: int) -> None:
        """Prefixes are in a lower tier from now on, HOST or DISK, ancestors first."""
        self._entries.append((1 << tier, True, keys))

    def dropped(self, keys: list[int], tier: int) -> None:
        """Prefixes are not in a lower tier any more, descendants first."""
        self._entries.append((1 << tier, False, keys))

    def lost(self, keys: list[int]) -> None:
        """Prefixes are in neither of the lower tiers any more, descendants first. They go at once, whichever had them:
        tier by tier, some would stay without their ancestors."""
        self._entries.append((1 << HOST | 1 << DISK, False, keys))

    def read(self, summary: Summary) -> None:
        """Bring a summary up to date; what happens meanwhile is left for the next time. For one thread only, any but
        the engine's."""
        for _ in range(len(self._entries)):
            bits, there, keys = self._entries.popleft()
            for key in keys:
                before = self._tiers.get(key, 0)
                tiers = before | bits if there else before & ~bits
                if tiers:
                    self._tiers[key] = tiers
                    summary.add(key, (tiers & -tiers).bit_length() - 1)
                else:
                    self._tiers.pop(key, None)
                    summary.remove(key)
