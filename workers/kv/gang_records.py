"""Records of a gang: host memory that its ranks share, in which each of them has its heads of every record.

So a record, and the file that it is written to, is the same whatever the number of ranks: what one parallelism has
stored, another one reads. The ranks are on one machine: rank 0 has the memory, and the others map it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from transfer.gang import Ranks
from transfer.layout import Shard
from transfer.pairs import holders
from workers.config import StartError, TierFormat
from workers.kv.memory import KVMemory
from workers.kv.records import RecordLayout, Records

_NICE = 19


class GangRecords(Records):
    """Rank 0's: what it saves and loads, the others do, too. `shards` are those of all ranks. Calls wait for all of
    them without a deadline, because a rank that is late may still write to its blocks: one that does not answer any
    more has to be the gang's end. Raises StartError."""

    def __init__(
        self, memory: KVMemory, records: RecordLayout, slots: int, ranks: Ranks, shards: Sequence[Shard]
    ) -> None:
        self._descriptor, rows = _shared(slots, records.record_bytes)
        super().__init__(memory, records, slots, rows)
        self._ranks = ranks
        self._others = range(1, len(shards))
        self._savers = {copies[0] for copies in holders(shards)}  # of equal copies one is enough
        place = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        _answers([ranks.call(rank, "keep", place, records.format, slots) for rank in self._others])

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """See `Records`."""
        asked = [self._ranks.call(rank, "save", blocks, slots) for rank in self._others if rank in self._savers]
        try:
            super().save(blocks, slots)
        finally:
            _answers(asked)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See `Records`."""
        asked = [self._ranks.call(rank, "load", slots, blocks) for rank in self._others]
        try:
            super().load(slots, blocks)
        finally:
            _answers(asked)


class RankRecords:
    """Another rank's: does what rank 0 asks for, in a thread for each of `METHODS`."""

    METHODS = frozenset({"keep", "save", "load"})

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._records: Records | None = None
        self._saver = ThreadPoolExecutor(1, "tier-saver", initializer=os.nice, initargs=(_NICE,))
        self._loader = ThreadPoolExecutor(1, "tier-reader")

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """The result of one of `METHODS`."""
        threads = self._saver if method == "save" else self._loader
        return threads.submit(getattr(self, f"_{method}"), *arguments)

    def close(self) -> None:
        """End the threads after what they are at."""
        for threads in (self._saver, self._loader):
            threads.shutdown(wait=False, cancel_futures=True)

    def _keep(self, place: str, format: TierFormat, slots: int) -> None:
        layout = RecordLayout(self._memory.layout.whole, format)
        self._records = Records(self._memory, layout, slots, _mapped(place, slots, layout.record_bytes))

    def _save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        assert self._records is not None
        self._records.save(blocks, slots)

    def _load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        assert self._records is not None
        self._records.load(slots, blocks)


def _shared(slots: int, record_bytes: int) -> tuple[int, np.ndarray]:
    """Memory that other processes can map, and the descriptor by which they do. It goes with the last of them."""
    if not hasattr(os, "memfd_create"):
        raise StartError("tiers.host: only Linux has the memory that the ranks of a worker would share")
    descriptor = os.memfd_create("headwater-records")
    size = slots * record_bytes
    try:
        os.ftruncate(descriptor, size)
        return descriptor, _rows(descriptor, slots, record_bytes)
    except OSError as error:
        os.close(descriptor)
        raise StartError(f"tiers.host: cannot have {size} bytes: {error.strerror}") from None


def _mapped(place: str, slots: int, record_bytes: int) -> np.ndarray:
    descriptor = os.open(place, os.O_RDWR)
    try:
        return _rows(descriptor, slots, record_bytes)
    finally:
        os.close(descriptor)


def _rows(descriptor: int, slots: int, record_bytes: int) -> np.ndarray:
    memory = mmap.mmap(descriptor, slots * record_bytes)
    return np.frombuffer(memory, dtype=np.uint8).reshape(slots, record_bytes)


def _answers(asked: list[Future[Any]]) -> None:
    """Wait for all of them, so that none is still at it when the first one's error is raised."""
    errors = [error for one in asked if (error := one.exception()) is not None]
    if errors:
        raise errors[0]
