"""BlockPool: who owns which block. It hands out ids and knows nothing of what the blocks hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FREE, PRIVATE, CACHED, QUARANTINED = range(4)
_NAMES = ("free", "private", "cached", "quarantined")


class OwnershipError(RuntimeError):
    """A block was given back or passed on by someone who does not own it: a bug, never a load condition."""


class BlockPool:
    """`num_blocks` blocks, each with exactly one owner at any time: the free list, a sequence (private), the radix
    cache, or quarantine (a peer may still write to it)."""

    def __init__(self, num_blocks: int) -> None:
        self._owner = np.zeros(num_blocks, dtype=np.int8)
        self._counts = [num_blocks, 0, 0, 0]

    @property
    def total(self) -> int:
        """Number of blocks."""
        return len(self._owner)

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return self._counts[FREE]

    def counts(self) -> dict[str, int]:
        """Blocks by owner; the values add up to `total`."""
        return dict(zip(_NAMES, self._counts, strict=True))

    def fragmentation(self) -> float:
        """1 minus the share of the longest run in all free blocks: 0 when the free blocks are one run, or none are."""
        edges = np.diff((self._owner == FREE).astype(np.int8), prepend=0, append=0)
        lengths = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
        return 1.0 - float(lengths.max() / lengths.sum()) if len(lengths) else 0.0

    def owners(self) -> np.ndarray:
        """Owner code of every block, a copy."""
        return self._owner.copy()

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` free blocks, now private. Prefers the run that begins behind block `after`, then the smallest run
        that is long enough, then the longest runs. The caller has checked `free`."""
        if count > self.free:
            raise OwnershipError(f"{count} blocks asked for, {self.free} free")
        if count == 0:
            return []
        blocks = self._behind(after, count) if after is not None else []
        if len(blocks) < count:
            blocks = blocks + self._from_runs(count - len(blocks), taken=blocks)
        self._move(blocks, FREE, PRIVATE)
        return blocks

    def release(self, blocks: Sequence[int], owner: int = PRIVATE) -> None:
        """Blocks of `owner` become free."""
        self._move(blocks, owner, FREE)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Private blocks become the radix cache's."""
        self._move(blocks, PRIVATE, CACHED)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Private blocks that a peer may still write to: nobody's until released with owner QUARANTINED."""
        self._move(blocks, PRIVATE, QUARANTINED)

    def _behind(self, after: int, count: int) -> list[int]:
        stop = min(after + 1 + count, self.total)
        taken = self._owner[after + 1 : stop] != FREE
        length = int(taken.argmax()) if taken.any() else len(taken)
        return list(range(after + 1, after + 1 + length))

    def _from_runs(self, count: int, taken: list[int]) -> list[int]:
        available = self._owner == FREE
        available[taken] = False
        edges = np.diff(available.astype(np.int8), prepend=0, append=0)
        starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        lengths = stops - starts
        fitting = np.flatnonzero(lengths >= count)
        if len(fitting):
            best = fitting[lengths[fitting].argmin()]
            return list(range(int(starts[best]), int(starts[best]) + count))
        blocks: list[int] = []
        for run in np.argsort(-lengths, kind="stable"):
            blocks.extend(range(int(starts[run]), int(stops[run])))
            if len(blocks) >= count:
                break
        return blocks[:count]

    def _move(self, blocks: Sequence[int], source: int, target: int) -> None:
        ids = np.asarray(blocks, dtype=np.int64)
        if len(ids) == 0:
            return
        if (self._owner[ids] != source).any() or len(np.unique(ids)) != len(ids):
            raise OwnershipError(f"blocks {list(blocks)} are not all {_NAMES[source]}")
        self._owner[ids] = target
        self._counts[source] -= len(ids)
        self._counts[target] += len(ids)
