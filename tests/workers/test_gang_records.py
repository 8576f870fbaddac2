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

BLOCKS, SLOTS = 12, 8
LAYERS = (LayerGeometry(8, 8, 8), LayerGeometry(4, 6, 5))
SAVED, AT, LOADED = [3, 4, 9], [5, 6, 2], [0, 7, 11]


class Gang:
    """The pools of the ranks of a gang of `size`, of a model whose heads are cut into `of` slices. Each head of a block
    has the same numbers wherever it is held."""

    def __init__(self, size: int, of: int = 4, form: Any = "exact") -> None:
        self.shards = [Shard.of_rank(rank, size, of) for rank in range(size)]
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
        layers = tuple(dataclasses.replace(one, kv_heads=one.kv_heads // shard.of * shard.count) for one in LAYERS)
        made = KVMemory(KVLayout("model", "bfloat16", 4, layers, BLOCKS, shard), torch.device("cpu"))
        for number, piece in zip(shard.slices, made.slices, strict=True):
            for part in (*piece.keys, *piece.values):
                for head in range(heads := part.shape[1]):
                    drawn = torch.Generator().manual_seed(number * heads + head)
                    part[:, head] = torch.randn(part[:, head].shape, generator=drawn)
        return made

    def call(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        return self.others[rank - 1].ask(method, *arguments)

    def heads(self, block: int) -> list[list[torch.Tensor]]:
        """What every rank has of a block: for each region, `[tokens, heads, size]`."""
        slots = slice(block * 4, block * 4 + 4)
        return [
            [
                torch.cat([part[slots] for part in parts], dim=1)
                for parts in zip(*([*one.keys, *one.values] for one in pool.slices), strict=True)
            ]
            for pool in self.pools
        ]

    def close(self) -> None:
        for one in self.others:
            one.close()


@pytest.fixture
def gang() -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def opened(*arguments: Any) -> Gang:
        made.append(Gang(*arguments))
        return made[-1]

    yield opened
    for one in made:
        one.close()


SHAPES = [((1, 1), (2, 2)), ((1, 1), (1, 4)), ((2, 4), (1, 4)), ((2, 2), (4, 4)), ((8, 4), (2, 2)), ((2, 4), (8, 4))]


@pytest.mark.parametrize("form", ["exact", *sorted(LARGEST)])
@pytest.mark.parametrize(("saver", "loader"), SHAPES)
def test_what_one_parallelism_has_saved_another_one_loads(
    gang: Callable[..., Gang], saver: tuple[int, int], loader: tuple[int, int], form: Any
) -> None:
    """Records and the names of files are the same, also if heads are cut in another way."""
    one, other, alone = gang(*saver, form), gang(*loader, form), gang(1, 1, form)
    one.records.save(SAVED, AT)
    alone.records.save(SAVED, AT)
    assert (one.records.rows[AT] == alone.records.rows[AT]).all()
    assert len({each.pools[0].layout.fingerprint for each in (one, other, alone)}) == 1
    other.records.rows[:] = one.records.rows
    for pool in (*other.pools, *alone.pools):
        pool.flat.fill_(0xFF)
    other.records.load(AT, LOADED)
    alone.records.load(AT, LOADED)
    (expected,) = alone.heads(7)
    for shard, found in zip(other.shards, other.heads(7), strict=True):
        for region, whole in zip(found, expected, strict=True):
            piece = whole.shape[1] // shard.of
            held = whole[:, shard.first * piece : (shard.first + shard.count) * piece]
            assert torch.equal(region, held)
            assert not region.isnan().any()
    assert all(region.isnan().all() for found in other.heads(6) for region in found)


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
        try:
            assert started.wait(5)
            time.sleep(0.05)
            assert not over.done()
        finally:
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
