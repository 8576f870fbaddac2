"""Held: which prefixes a worker is believed to hold, by what this router has sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Held:
    """Keys of whole-block prefixes, no more than `limit`, the least recently used go first. A chain is touched from its
    end, so that a prefix never goes before what extends it. It is a belief: what is wrong with it costs a detour."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._keys: OrderedDict[bytes, bool] = OrderedDict()  # whether it is there, and not only soon

    def add(self, keys: Sequence[bytes], there: bool) -> None:
        """The worker has this chain, or soon will."""
        for key in reversed(keys):
            self._keys[key] = there or self._keys.get(key, False)
            self._keys.move_to_end(key)
        while len(self._keys) > self.limit:
            self._keys.popitem(last=False)

    def match(self, keys: Sequence[bytes], there: bool = False) -> int:
        """How many of a chain's keys the worker is believed to hold, from the first on; with `there`, only those that
        it has by now. Not by halves: after `cut`, what extended the lost keys is still listed."""
        for count, key in enumerate(keys):
            found = self._keys.get(key)
            if found is None or found < there:
                return count
        return len(keys)

    def cut(self, keys: Sequence[bytes], count: int) -> None:
        """The worker turned out to hold only the first `count` of a chain."""
        for key in keys[count:]:
            self._keys.pop(key, None)

    def forget_soon(self, keys: Sequence[bytes]) -> None:
        """What was sent to the worker has not been computed."""
        for key in keys:
            if self._keys.get(key) is False:
                del self._keys[key]

    def clear(self) -> None:
        """The worker has lost everything."""
        self._keys.clear()
