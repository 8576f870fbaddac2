"""Records that the ranks of a gang share: what is stored at one parallelism is read at another."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from transfer.layout import KVLayout, LayerGeometry, Shard
from workers.kv.gang_records import GangRecords, RankRecords
from workers.kv.memory import KVMemory
from workers.kv.records import LARGEST, RecordLayout, Records

OF, BLOCKS, SLOTS = 4, 12, 8
WHOLE = KVLayout("model", "bfloat16", 4, (LayerGeometry(8, 8, 8), LayerGeometry(4, 6, 5)), BLOCKS, Shard(0, OF, OF))
SAVED, AT, LOADED = [3, 4, 9], [5, 6, 2], [0, 7, 11]


class Gang:
    """The pools of the ranks of a gang of `size`; each slice of a block has the same numbers wherever it is held."""

    def __init__(self, size: int, form: Any) -> None:
        self.shards = [Shard.of_rank(rank, size, OF) for rank in range(size)]
        self.pools = [self._pool(shard) for shard in self.shards]
        self.others = [RankRecords(pool) for pool in self.pools[1:]]
        layout = RecordLayout(self.pools[0].layout.whole, form)
        self.records: Records = (
            GangRecords(self.pools[0], layout, SLOTS, self, self.shards)
            if size > 1
            else Records(self.pools[0], layout, SLOTS)
        )

    @staticmethod
    def _pool(shard: Shard) -> KVMemory:
        layers = tuple(dataclasses.replace(one, kv_heads=one.kv_heads // OF * shard.count) for one in WHOLE.layers)
        made = KVMemory(dataclasses.replace(WHOLE, layers=layers, shard=shard), torch.device("cpu"))
        for number, piece in zip(shard.slices, made.slices, strict=True):
            for part in (*piece.keys, *piece.values):
                part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(number)))
        return made

    def call(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        return self.others[rank - 1].ask(method, *arguments)

    def slices(self, block: int) -> list[list[torch.Tensor]]:
        """What every rank has of a block, by slice."""
        return [
            [torch.cat([part[block * 4 : block * 4 + 4].flatten() for part in (*one.keys, *one.values)])]
            for pool in self.pools
            for one in pool.slices
        ]

    def close(self) -> None:
        for one in self.others:
            one.close()


@pytest.fixture
def gang() -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def opened(size: int, form: Any = "exact") -> Gang:
        made.append(Gang(size, form))
        return made[-1]

    yield opened
    for one in made:
        one.close()


@pytest.mark.parametrize("form", ["exact", *sorted(LARGEST)])
@pytest.mark.parametrize(("savers", "loaders"), [(1, 2), (2, 1), (2, 4), (4, 1), (8, 2), (2, 8)])
def test_what_one_parallelism_has_saved_another_one_loads(
    gang: Callable[..., Gang], savers: int, loaders: int, form: Any
) -> None:
    one, other = gang(savers, form), gang(loaders, form)
    one.records.save(SAVED, AT)
    alone = gang(1, form)
    alone.records.save(SAVED, AT)
    assert (one.records.rows[AT] == alone.records.rows[AT]).all()
    other.records.rows[:] = one.records.rows
    for pool in (*other.pools, *alone.pools):
        pool.flat.fill_(0xFF)
    other.records.load(AT, LOADED)
    alone.records.load(AT, LOADED)
    expected = dict(zip(range(OF), alone.slices(7), strict=True))
    held = [number for shard in other.shards for number in shard.slices]
    for number, found in zip(held, other.slices(7), strict=True):
        assert torch.equal(found[0], expected[number][0])
        assert not found[0].isnan().any()
    assert all(found[0].isnan().all() for found in other.slices(6))


def test_equal_copies_are_saved_once(gang: Callable[..., Gang]) -> None:
    """Two ranks that write the same place at a time could leave a mixture, if their copies are not equal to the bit."""
    one = gang(8)
    for rank in range(1, 8, 2):
        one.pools[rank].flat.fill_(0xFF)
    one.records.save(SAVED, AT)
    alone = gang(1)
    alone.records.save(SAVED, AT)
    assert (one.records.rows[AT] == alone.records.rows[AT]).all()


@pytest.mark.parametrize("method", ["save", "load"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_over_before_every_rank_is(gang: Callable[..., Gang], method: str, fails: bool) -> None:
    """Not even if rank 0 fails: what another one still reads or writes must not be given to somebody else."""
    one = gang(2)
    started, goes_on = threading.Event(), threading.Event()
    records = one.others[0]._records
    assert records is not None
    does = getattr(records, method)
    setattr(records, method, lambda *some: (started.set(), goes_on.wait(), does(*some)))
    if fails:
        one.records._parts = [None]  # type: ignore[list-item]
    arguments = (SAVED, AT) if method == "save" else (AT, LOADED)
    with ThreadPoolExecutor(1) as threads:
        over = threads.submit(getattr(one.records, method), *arguments)
        assert started.wait(5)
        time.sleep(0.05)
        assert not over.done()
        goes_on.set()
        assert isinstance(over.exception(5), AttributeError if fails else type(None))


def test_a_rank_that_fails_fails_the_whole(gang: Callable[..., Gang]) -> None:
    one = gang(2)
    records = one.others[0]._records
    assert records is not None

    def failing(*_: Any) -> None:
        raise RuntimeError("injected")

    records.save = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="injected"):
        one.records.save(SAVED, AT)


def test_other_processes_map_the_same_memory(gang: Callable[..., Gang]) -> None:
    records = gang(2).records
    assert isinstance(records, GangRecords)
    records.rows[:] = 0
    place = f"/proc/{os.getpid()}/fd/{records._descriptor}"
    code = f"import mmap, os; m = mmap.mmap(os.open({place!r}, os.O_RDWR), 0); m[5] = 77"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
    assert records.rows.ravel()[:7].tolist() == [0, 0, 0, 0, 0, 77, 0]
    assert np.count_nonzero(records.rows) == 1
