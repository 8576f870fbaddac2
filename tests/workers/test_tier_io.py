"""The threads between the tiers, on real memory and real files."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from transfer.layout import KVLayout, LayerGeometry
from workers.kv.blockfile import Block, child_digest, root_digest
from workers.kv.disk import DiskStore
from workers.kv.memory import KVMemory
from workers.kv.records import RecordLayout, Records
from workers.kv.tier_io import EXTENT, Load, Part, Save, TierIO, Write

BLOCKS = 64
LAYOUT = KVLayout("model", "float32", 4, (LayerGeometry(2, 3, 5), LayerGeometry(1, 4, 4)), BLOCKS)
CPU = torch.device("cpu")


class Machine:
    """A pool with random bytes, host memory and a directory."""

    def __init__(self, path: Path) -> None:
        self.memory = KVMemory(LAYOUT, CPU)
        self.memory.flat.random_(0, 256)
        self.records = Records(self.memory, RecordLayout(LAYOUT, "exact"), BLOCKS)
        self.records.rows[:] = 0
        self.disk = DiskStore(path, "me", LAYOUT.fingerprint, 1 << 24, LAYOUT.block_bytes)
        self.io = TierIO(self.records, self.disk, lambda: None)
        self.over: list[object] = []

    def content(self, blocks: list[int]) -> list[int]:
        return [self.memory.checksum([block], (0, 2)) for block in blocks]

    def done(self, *jobs: Save | Write | Load) -> None:
        """Have jobs done, and wait for that."""
        for job in jobs:
            self.io.submit(job)
        self.wait(*jobs)

    def wait(self, *jobs: object) -> None:
        until(lambda: self.over.extend(self.io.take()) or all(any(one is job for one in self.over) for job in jobs))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.io.stop(5.0)
    assert not any(thread.is_alive() for thread in made.io._threads)


def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.002)


def chain(length: int) -> list[Block]:
    blocks: list[Block] = []
    digest = root_digest(LAYOUT.fingerprint, b"")
    for depth in range(length):
        tokens = np.arange(4 * depth, 4 * depth + 4, dtype="<i4").tobytes()
        blocks.append(Block(child_digest(digest, tokens), digest, depth, b"", tokens))
        digest = blocks[-1].digest
    return blocks


def stored(machine: Machine, count: int) -> tuple[list[Block], list[int]]:
    """Blocks on disk, and what they have to be."""
    blocks, sources = chain(count), list(range(count))
    wanted = machine.content(sources)
    machine.done(Save(sources, sources))  # first: another thread writes
    machine.done(write := Write(blocks, sources))
    assert write.owners == ["me"] * count
    return blocks, wanted


def test_blocks_go_down_and_come_back_wherever_they_are(machine: Machine) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        count = int(rng.integers(1, 30))
        blocks, slots, targets = (rng.permutation(BLOCKS)[:count].tolist() for _ in range(3))
        blocks.sort()  # with runs
        wanted = machine.content(blocks)
        save = Save(blocks, slots)
        machine.done(save)
        assert save.done == count
        load = Load([Part(slot, chain(1)[0]) for slot in slots], targets)
        machine.done(load)
        assert (load.done, load.read, load.failed) == (count, count, False)
        assert machine.content(targets) == wanted


def test_blocks_come_back_from_disk_through_their_slots(machine: Machine) -> None:
    blocks, wanted = stored(machine, 20)
    machine.records.rows[:] = 0
    machine.memory.flat.zero_()
    load = Load([Part(slot, block, "me") for slot, block in enumerate(blocks)], list(range(40, 60)))
    machine.done(load)
    assert (load.done, load.failed) == (20, False)
    assert machine.content(list(range(40, 60))) == wanted


def test_after_a_load_is_stopped_it_writes_nothing(machine: Machine) -> None:
    count = 3 * EXTENT
    blocks, _ = stored(machine, count)
    fetch, go = machine.io._fetch, threading.Event()

    def slow(job: Load, part: Part) -> bool:
        if part.block.depth == EXTENT + 3:
            go.wait(5)
        return fetch(job, part)

    machine.io._fetch = slow  # type: ignore[method-assign]
    load = Load([Part(slot, block, "me") for slot, block in enumerate(blocks)], list(range(count)))
    machine.io.submit(load)
    until(lambda: load.done == EXTENT)
    assert load.stop() == EXTENT
    machine.memory.flat.fill_(7)  # the blocks are somebody else's now
    go.set()
    machine.wait(load)
    assert bool((machine.memory.flat == 7).all())
    assert load.done == EXTENT
    assert not load.failed


def test_a_part_that_an_earlier_load_did_not_bring_is_not_there(machine: Machine) -> None:
    blocks, wanted = stored(machine, 4)
    (path,) = machine.disk.path.rglob(f"{blocks[2].digest.hex()}*")
    path.unlink()
    earlier = Load([Part(slot + 30, block, "me") for slot, block in enumerate(blocks)], [])
    later = Load([Part(slot + 30, block, after=(earlier, slot)) for slot, block in enumerate(blocks)], [50, 51, 52, 53])
    machine.done(earlier, later)
    assert (earlier.read, earlier.done, earlier.failed) == (2, 0, True)
    assert (later.read, later.done, later.failed) == (2, 2, False)
    assert machine.content([50, 51]) == wanted[:2]


def test_a_disk_that_fails_is_no_lost_file(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, _ = stored(machine, 2)

    def read(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(machine.disk, "read", read)
        load = Load([Part(slot, block, "me") for slot, block in enumerate(blocks)], [0, 1])
        machine.done(load)
    assert (load.read, load.failed, load.finished) == (0, False, True)
    again = Load([Part(slot, block, "me") for slot, block in enumerate(blocks)], [0, 1])
    machine.done(again)
    assert again.done == 2


def test_a_disk_that_stands_still_holds_up_neither_copies_nor_loads(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(machine.disk, "write", lambda *_: go.wait(5))
    stuck = Write(chain(1), [0])
    machine.io.submit(stuck)
    machine.done(Save([1, 2], [1, 2]), Load([Part(1, chain(1)[0])], [3]))
    assert not stuck.owners
    go.set()
    machine.wait(stuck)


def test_what_goes_wrong_ends_one_job_only(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(machine.records, "save", lambda *_: 1 / 0)
        patch.setattr(machine.records, "load", lambda *_: 1 / 0)
        machine.done(save := Save([0], [0]), load := Load([Part(0, chain(1)[0])], [1]))
    assert save.done == load.done == 0
    assert load.finished
    machine.done(save := Save([0], [0]))
    assert save.done == 1


def test_others_and_earlier_files_are_found_and_told_when_they_go(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.kv.tier_io.OTHERS_S", 0.05)
    blocks, _ = stored(machine, 3)
    other = DiskStore(machine.disk.path, "you", LAYOUT.fingerprint, 1 << 24, LAYOUT.block_bytes)
    theirs = chain(5)[3:]
    for block in theirs:
        assert other.write(block, bytes(LAYOUT.block_bytes))
    machine.io.stop(5.0)
    disk = DiskStore(machine.disk.path, "me", LAYOUT.fingerprint, 1 << 24, LAYOUT.block_bytes)
    machine.io = TierIO(machine.records, disk, lambda: None)
    found: dict[str, set[bytes]] = {"me": set(), "you": set()}
    gone: set[bytes] = set()
    complete: list[bool] = []

    def look() -> bool:
        while (one := machine.io.take_found()) is not None:
            found[one.owner] |= {block.digest for block, _ in one.blocks}
            gone.update(one.gone)
            if one.last:
                complete.append(len(found["you"]) == 2)
        return bool(complete)

    until(look)
    assert complete == [True]  # others' come first
    assert found == {"me": {one.digest for one in blocks}, "you": {one.digest for one in theirs}}
    other.remove(theirs[0].digest)
    until(lambda: look() and gone == {theirs[0].digest})
    other.close()
