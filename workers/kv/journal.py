"""Journal: what comes into the cache and goes, from the engine's thread to the one that publishes it.

The engine's thread must neither wait nor share a set that it changes. So it only appends to a deque, a list of keys at
a time, and the publishing thread takes from the other end; both are single steps of the interpreter and need no lock.
After each entry the set is closed under prefix, so the reader may stop anywhere.
"""

from __future__ import annotations

from collections import deque

from transfer.gossip.summary import Summary
from transfer.prefix import root_key


class Journal:
    """A `workers.kv.radix.Watcher`. `fingerprint` is the model's, as gateways have it."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._entries: deque[tuple[bool, list[int]]] = deque()

    def root(self, salt: bytes) -> bytes:
        """The key that a salt's chains begin with: a tenant's salt has keys of its own."""
        return root_key(self._fingerprint, tenant=salt)

    def came(self, keys: list[int]) -> None:
        """Prefixes are cached from now on."""
        self._entries.append((True, keys))

    def went(self, keys: list[int]) -> None:
        """Prefixes are not cached any more."""
        self._entries.append((False, keys))

    def read(self, summary: Summary) -> None:
        """Bring a summary up to date; what happens meanwhile is left for the next time. For one thread only, any but
        the engine's."""
        for _ in range(len(self._entries)):
            there, keys = self._entries.popleft()
            for key in keys:
                if there:
                    summary.add(key)
                else:
                    summary.remove(key)

    def stored(self, keys: list[int], tier: int) -> None: ...
    def dropped(self, keys: list[int], tier: int) -> None: ...
