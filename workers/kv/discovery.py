"""Discovery: blocks that lie on disk already, found in no order, become part of the index when what is above them is.

Blocks whose beginnings are not known wait for them. Those of this worker may wait for ever, since somebody has to
delete them one day; of others' only so many.
"""

from __future__ import annotations

from collections import OrderedDict

from workers.kv.blockfile import Block
from workers.kv.tier_index import Entry, TierIndex

MAX_ORPHANS = 100_000
"""Others' blocks that wait."""


class Discovery:
    """What is found for the `index` of a worker."""

    def __init__(self, index: TierIndex) -> None:
        self._index = index
        self._mine: dict[bytes, dict[bytes, tuple[Block, float]]] = {}
        self._theirs: OrderedDict[bytes, dict[bytes, tuple[str, Block]]] = OrderedDict()
        self._waiting = 0
        self._earlier: list[tuple[float, Entry]] = []

    def found(self, owner: str, block: Block, used: float) -> list[Entry]:
        """A worker's directory has a block, last used at a time. Returns entries that are found on disk now, each after
        the one above it."""
        todo, attached = [(owner, block, used)], []
        for name, one, at in todo:
            entry = self._index.link(one)
            if entry is None:
                self._wait(name, one, at)
                continue
            if not entry.owner:
                self._index.discovered(entry, name)
                attached.append(entry)
                if name == self._index.owner:
                    self._earlier.append((at, entry))
            todo.extend(self._released(one.digest))
        return attached

    def complete(self) -> None:
        """All that earlier lives of this worker left has been found: what was used last goes last."""
        earlier = sorted(((used, entry) for used, entry in self._earlier if not entry.gone), key=lambda item: -item[0])
        self._index.in_order(entry for _, entry in earlier)
        self._earlier = []

    def useless(self, count: int) -> list[bytes]:
        """Up to so many of this worker's own files that nothing leads to, which are about to be deleted."""
        digests: list[bytes] = []
        while self._mine and len(digests) < count:
            parent, some = next(iter(self._mine.items()))
            digest, _ = some.popitem()
            digests.append(digest)
            if not some:
                del self._mine[parent]
        return digests

    def _wait(self, owner: str, block: Block, used: float) -> None:
        if owner == self._index.owner:
            self._mine.setdefault(block.parent, {})[block.digest] = block, used
            return
        some = self._theirs.setdefault(block.parent, {})
        self._waiting += block.digest not in some
        some[block.digest] = owner, block
        while self._waiting > MAX_ORPHANS:
            self._waiting -= len(self._theirs.popitem(last=False)[1])

    def _released(self, digest: bytes) -> list[tuple[str, Block, float]]:
        """What has waited for a block."""
        mine = [(self._index.owner, *one) for one in self._mine.pop(digest, {}).values()]
        theirs = self._theirs.pop(digest, {})
        self._waiting -= len(theirs)
        return mine + [(owner, block, 0.0) for owner, block in theirs.values()]
