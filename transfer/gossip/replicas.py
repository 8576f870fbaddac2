"""Replicas: a router's copies of all workers' summaries.

Each worker's log is applied in order, and only its newest incarnation counts. What a frame says of the load is whole,
so the newest wins even where updates before it are missing; the keys stay as they are until the gap is filled. A copy
whose digest is not the writer's is dropped: rather nothing is known of a worker than something false.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transfer.gossip.summary import (
    BUCKETS,
    Applied,
    Load,
    Repair,
    Update,
    bucket_digests,
    differing,
    digest,
    in_buckets,
)
from transfer.gossip.table import SummaryTable

__all__ = ["Applied", "Replicas"]

_WRAP = (1 << 64) - 1


@dataclass(slots=True)
class _Copy:
    """Of one worker. `seq` and `digest` are the writer's for the keys in the row, 0 where there are none yet; `newest`
    is the number that `load` came with. `partial`: the writer has more keys than a row holds."""

    row: int
    incarnation: int
    load: Load
    heard: float | None
    newest: int
    seq: int = 0
    digest: int = 0
    partial: bool = False


class Replicas:
    """At most `workers` summaries of at most `keys_per_worker` keys each. Not for several threads.

    Where a worker publishes more keys than that, the first of them are kept, which are closed under prefix; nothing is
    added then until so many have gone that a new snapshot is worth its price.
    """

    def __init__(self, keys_per_worker: int, workers: int = 4096) -> None:
        self.table = SummaryTable(keys_per_worker)
        self.workers: list[str] = []
        """Their names in the order of rows, which never changes; "" for a row that is free."""
        self._limit = workers
        self._copies: dict[str, _Copy] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, worker: str) -> bool:
        return worker in self._copies

    def apply(self, update: Update, heard: float | None) -> Applied:
        """Take an update over. It shows that the worker was alive at time `heard`, in seconds; None: it does not."""
        copy = self._hear(update, heard)
        if isinstance(copy, Applied):
            return copy
        if update.base == 0:
            self._drop(copy)
        elif update.base != copy.seq:
            return Applied.GAP
        removed = np.frombuffer(update.removed, "<u8")
        copy.digest = (copy.digest + self.table.remove(copy.row, removed)) & _WRAP
        if copy.partial and self.table.counts[copy.row] < self.table.keys_per_row // 2:
            self._drop(copy)
            return Applied.GAP
        if not copy.partial:
            self._add(copy, np.frombuffer(update.added, "<u8"), np.frombuffer(update.tiers, np.uint8))
        return self._check(copy, update.seq, update.digest)

    def mend(self, repair: Repair, heard: float | None) -> Applied:
        """Take over what differed from the digests that `buckets` gave; `heard` as for `apply`. GAP, and nothing has
        changed, where that does not lead to the writer's digest."""
        copy = self._hear(repair, heard)
        if isinstance(copy, Applied):
            return copy
        keys, tiers = self.table.items(copy.row)
        wrong = in_buckets(keys, repair.buckets)
        new_keys, new_tiers = np.frombuffer(repair.keys, "<u8"), np.frombuffer(repair.tiers, np.uint8)
        after = copy.digest - digest(keys[wrong], tiers[wrong]) + digest(new_keys, new_tiers)
        count = len(keys) - np.count_nonzero(wrong) + len(new_keys)
        if copy.partial or after & _WRAP != repair.digest or count > self.table.keys_per_row:
            return Applied.GAP
        copy.digest = (copy.digest + self.table.remove(copy.row, keys[wrong])) & _WRAP
        self._add(copy, new_keys, new_tiers)
        return self._check(copy, repair.seq, repair.digest)

    def load(self, worker: str) -> Load | None:
        """A worker's newest load."""
        copy = self._copies.get(worker)
        return copy.load if copy else None

    def heard(self, worker: str) -> float | None:
        """When something new showed that a worker was alive; None where nothing has."""
        copy = self._copies.get(worker)
        return copy.heard if copy else None

    def state(self, worker: str) -> tuple[int, int, int]:
        """Incarnation, sequence number and digest of what is here of a worker's keys; zeros where nothing is."""
        copy = self._copies.get(worker)
        return (copy.incarnation, copy.seq, copy.digest) if copy else (0, 0, 0)

    def row(self, worker: str) -> int | None:
        """The number of a worker's row, the same until it is forgotten."""
        copy = self._copies.get(worker)
        return copy.row if copy else None

    def depths(self, keys: np.ndarray) -> np.ndarray:
        """int32 `[rows]`: how many leading keys ('<u8', of a prompt's checkpoints) the worker of each row has."""
        return self.table.depths(keys)

    def device_depths(self, keys: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """int32 `[rows]`: of the leading keys that each worker has (its `depths`), how many it has on the device."""
        return self.table.device_depths(keys, depths)

    def tiers(self, worker: str, keys: np.ndarray, depth: int) -> tuple[int, int]:
        """Of the first `depth` keys of a prompt's checkpoints, all of which a worker has: how many, from the first on,
        it has on the device, and how many of the others in host memory."""
        copy = self._copies.get(worker)
        return self.table.tiers(copy.row, keys, depth) if copy else (0, 0)

    def tier(self, worker: str, key: int) -> int | None:
        """In which tier a worker has a prefix; None where it does not have it."""
        copy = self._copies.get(worker)
        return self.table.tier(copy.row, key) if copy else None

    def forget(self, worker: str) -> None:
        """A worker is gone; its row is free for another one. What still comes of its lives is for the caller to refuse,
        who knows which one is a member's."""
        if (copy := self._copies.pop(worker, None)) is None:
            return
        self.table.clear(copy.row)
        self.workers[copy.row] = ""
        self._free.append(copy.row)

    def buckets(self, worker: str) -> tuple[int, ...]:
        """Digests of the 64 buckets of what is here of a worker."""
        copy = self._copies.get(worker)
        return bucket_digests(*self.table.items(copy.row)) if copy else (0,) * BUCKETS

    def repair(self, worker: str, theirs: tuple[int, ...]) -> Repair | None:
        """What another router with these bucket digests needs to have what is here; None where that is not all."""
        if (copy := self._whole(worker)) is None:
            return None
        wrong, keys, tiers = differing(*self.table.items(copy.row), theirs)
        return Repair(worker, copy.incarnation, copy.seq, copy.load, copy.digest, wrong, keys, tiers)

    def snapshot(self, worker: str) -> Update | None:
        """Everything that is here of a worker, for another router of the same `keys_per_worker`; None where that is not
        all the worker has. Not in the order of ancestors."""
        if (copy := self._whole(worker)) is None:
            return None
        keys, tiers = self.table.items(copy.row)
        added = keys.astype("<u8").tobytes()
        return Update(worker, copy.incarnation, copy.seq, 0, copy.load, copy.digest, added, tiers.tobytes())

    def _whole(self, worker: str) -> _Copy | None:
        copy = self._copies.get(worker)
        return copy if copy and copy.seq and not copy.partial else None

    def _hear(self, news: Update | Repair, heard: float | None) -> _Copy | Applied:
        """The copy that news are for, with their load if it is newer; a new incarnation starts with nothing. OLD or
        FULL where there is no use for their keys."""
        copy = self._copies.get(news.worker)
        if copy is None:
            if len(self._copies) >= self._limit:
                return Applied.FULL
            copy = _Copy(self._place(news.worker), news.incarnation, news.load, heard, news.seq)
            self._copies[news.worker] = copy
        elif news.incarnation < copy.incarnation:
            return Applied.OLD
        elif news.incarnation > copy.incarnation:
            self._drop(copy)
            copy.incarnation, copy.newest = news.incarnation, 0
        if news.seq > copy.newest:
            copy.newest, copy.load = news.seq, news.load
            if heard is not None and (copy.heard is None or heard > copy.heard):
                copy.heard = heard
        return copy if news.seq > copy.seq else Applied.OLD

    def _place(self, worker: str) -> int:
        if self._free:
            row = self._free.pop()
            self.workers[row] = worker
            return row
        self.workers.append(worker)
        return self.table.new_row()

    def _add(self, copy: _Copy, keys: np.ndarray, tiers: np.ndarray) -> None:
        done, grown = self.table.add(copy.row, keys, tiers)
        copy.digest = (copy.digest + grown) & _WRAP
        copy.partial = done < len(keys)

    def _check(self, copy: _Copy, seq: int, expected: int) -> Applied:
        """Compare digests; that of a partial copy is the writer's by definition."""
        if copy.digest != expected and not copy.partial:
            self._drop(copy)
            return Applied.GAP
        copy.seq, copy.digest = seq, expected
        return Applied.APPLIED

    def _drop(self, copy: _Copy) -> None:
        self.table.clear(copy.row)
        copy.seq, copy.digest, copy.partial = 0, 0, False
