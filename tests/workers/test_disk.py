"""The store keeps its limit, and whatever happens to its files or its disk is a miss."""

import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.workers.blocks import LAYOUT, OTHER_LAYOUT, SIZE, chain, get, payload, store
from workers.config import StartError
from workers.kv import blockfile, disk_files, siblings
from workers.kv.disk import MAX_QUARANTINED, DiskStore
from workers.kv.disk_files import block_path


def du(path: Path) -> int:
    return int(subprocess.run(["du", "-s", "--block-size=1", path], capture_output=True, check=True).stdout.split()[0])


def files(path: Path) -> list[str]:
    """All files below, without the lock."""
    return sorted(entry.path for entry in disk_files.files(str(path)) if entry.name != "lock")


def fill(disk: DiskStore, blocks: list[blockfile.Block]) -> None:
    for block in blocks:
        assert disk.write(block, payload(block))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Writing beyond that fails in the middle of a file, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


# --- what is written is read --------------------------------------------------------------------------------------


def test_blocks_are_there_until_they_are_removed(tmp_path: Path) -> None:
    disk, blocks = store(tmp_path), chain(20)
    fill(disk, blocks)
    assert [get(disk, "w0", block) for block in blocks] == [payload(block) for block in blocks]
    assert {block.digest for block, _ in disk.own()} == {block.digest for block in blocks}
    disk.remove(blocks[3].digest)
    disk.remove(blocks[3].digest)  # twice does no harm
    assert get(disk, "w0", blocks[3]) is None
    assert blocks[3] not in {block for block, _ in disk.own()}
    assert (disk.stats.written_blocks, disk.stats.written_bytes) == (20, 20 * SIZE)
    assert (disk.stats.read_blocks, disk.stats.bad_files, disk.stats.write_errors) == (20, 0, 0)


def test_a_block_may_be_announced(tmp_path: Path) -> None:
    disk, blocks = store(tmp_path), chain(2)
    fill(disk, blocks[:1])
    for block in blocks:  # the second is not there
        disk.prefetch("w0", block)
    assert get(disk, "w0", blocks[0]) == payload(blocks[0])


def test_they_survive_a_restart_with_the_time_of_their_last_use(tmp_path: Path) -> None:
    first, blocks = store(tmp_path), chain(5)
    fill(first, blocks)
    for path in files(tmp_path):
        os.utime(path, (1e9, 1e9))
    assert get(first, "w0", blocks[2]) is not None
    assert first.write(blocks[4], payload(blocks[4]))  # it is there already, and counts as used
    assert first.stats.written_blocks == 5
    first.close()
    used = dict(store(tmp_path).own())
    assert set(used) == set(blocks)
    assert [at > 1e9 for at in map(used.__getitem__, blocks)] == [False, False, True, False, True]


def test_a_store_of_another_layout_has_none_of_them(tmp_path: Path) -> None:
    first, blocks = store(tmp_path), chain(3)
    fill(first, blocks)
    first.close()
    second = store(tmp_path, fingerprint=OTHER_LAYOUT)
    assert list(second.own()) == []
    assert [get(second, "w0", block) for block in blocks] == [None] * 3
    path = block_path(f"{tmp_path}/w0/{OTHER_LAYOUT}", blocks[0].digest)
    os.makedirs(os.path.dirname(path))
    os.rename(block_path(f"{tmp_path}/w0/{LAYOUT}", blocks[0].digest), path)
    assert get(second, "w0", blocks[0]) is None
    assert second.stats.bad_files == 1


# --- the limit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [500, 70_000])
def test_du_stays_below_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Through ten times the limit, with files of earlier runs, of this layout and others, in the directory; in the
    middle of a write, too."""
    limit = 256 << 10 if size < 1000 else 3 << 20
    earlier = store(tmp_path, fingerprint=OTHER_LAYOUT, block_bytes=size, limit=limit // 2)
    kept: deque[bytes] = deque()
    for number in range(100):
        block = chain(1, number, fingerprint=OTHER_LAYOUT)[0]
        earlier.write(block, payload(block, size))
    earlier.close()
    assert store_and_check(tmp_path, size, limit, limit, kept, monkeypatch, first=0) > 0
    written = store_and_check(tmp_path, size, limit, 10 * limit, kept, monkeypatch, first=10**6)
    assert written * du_of_one(size) > 9 * limit
    assert not [path for path in files(tmp_path) if OTHER_LAYOUT in path]


def du_of_one(size: int) -> int:
    return -(-size // 4096) * 4096


def store_and_check(
    path: Path, size: int, limit: int, amount: int, kept: deque[bytes], monkeypatch: pytest.MonkeyPatch, first: int
) -> int:
    """Write so much, removing the oldest as a caller would; how many blocks."""
    disk, rename, worst = store(path, block_bytes=size, limit=limit), os.replace, [0]
    count = max(1, amount // du_of_one(size))

    def measure(*paths: str) -> None:
        if random.random() < 0.03:
            worst.append(du(path / "w0"))
        rename(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", measure)
        for number in range(count):
            block = chain(1, first + number)[0]
            while disk.usage - disk.strays + disk.cost > limit:
                disk.remove(kept.popleft())
            assert disk.write(block, payload(block, size))
            kept.append(block.digest)
            if not number % 50 or number > count - 3:
                worst.append(du(path / "w0"))
                assert worst[-1] <= disk.usage <= worst[-1] + 4096 * len(files(path))
    assert max(worst) <= limit
    assert max(worst) > 0.7 * limit or amount == limit
    assert {block.digest for block, _ in disk.own()} >= set(list(kept)[-5:])
    disk.close()
    return count


def test_directories_that_grow_count(tmp_path: Path) -> None:
    """So many blocks in one directory that it needs more than one block of the file system."""
    disk = store(tmp_path, block_bytes=500)
    shared = [block for block in (chain(1, number)[0] for number in range(40_000)) if block.digest[0] == 7]
    for block in shared[:120]:
        assert disk.write(block, payload(block, 500))
    assert disk.usage == du(tmp_path / "w0")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    disk, blocks = store(tmp_path, limit=300_000), chain(50)
    written = [block for block in blocks if disk.write(block, payload(block))]
    assert 5 <= len(written) < 50
    assert disk.writable()
    assert du(tmp_path / "w0") <= 300_000
    disk.remove(written[0].digest)
    assert disk.write(blocks[-1], payload(blocks[-1]))


def test_files_of_earlier_runs_count_and_go_first(tmp_path: Path) -> None:
    earlier = store(tmp_path, fingerprint=OTHER_LAYOUT)
    old = chain(10, fingerprint=OTHER_LAYOUT)
    fill(earlier, old)
    for age, block in enumerate(old):
        os.utime(block_path(f"{tmp_path}/w0/{OTHER_LAYOUT}", block.digest), (1e9 + age, 1e9 + age))
    earlier.close()
    (tmp_path / "w0" / "rubbish").write_bytes(bytes(50_000))
    disk = store(tmp_path, limit=du(tmp_path / "w0") + 100_000)
    assert disk.usage >= du(tmp_path / "w0") > 300_000
    assert disk.strays > 250_000
    fill(disk, chain(4))
    left = {path for path in files(tmp_path) if OTHER_LAYOUT in path}
    assert 0 < len(left) < 10
    assert left == {block_path(f"{tmp_path}/w0/{OTHER_LAYOUT}", block.digest) for block in old[-len(left) :]}
    fill(disk, chain(12))
    assert disk.strays == 0
    assert len(files(tmp_path)) == 12
    assert (tmp_path / "w0" / "lock").exists()


def test_a_block_in_the_wrong_place_is_a_stray(tmp_path: Path) -> None:
    disk, block = store(tmp_path), chain(1)[0]
    fill(disk, [block])
    disk.close()
    os.rename(os.path.dirname(block_path(f"{tmp_path}/w0/{LAYOUT}", block.digest)), tmp_path / "w0" / LAYOUT / "00")
    disk = store(tmp_path)
    assert disk.strays >= SIZE
    assert list(disk.own()) == []


def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    """Without the blocks that were used least lately."""
    earlier, blocks = store(tmp_path), chain(30)
    fill(earlier, blocks)
    for age, block in enumerate(blocks):
        os.utime(block_path(f"{tmp_path}/w0/{LAYOUT}", block.digest), (1e9 - age, 1e9 - age))
    earlier.close()
    disk = store(tmp_path, limit=400_000)
    assert du(tmp_path / "w0") <= disk.usage <= 400_000
    kept = {block for block, _ in disk.own()}
    assert kept == set(blocks[: len(kept)])
    assert len(kept) > 5
    assert not all(disk.write(block, payload(block)) for block in chain(5, first=1))
    assert kept <= {block for block, _ in disk.own()}  # from then on nothing goes by itself
    assert (tmp_path / "w0" / "lock").exists()


def test_files_that_somebody_else_deleted_are_noticed(tmp_path: Path) -> None:
    clock = Clock()
    disk, blocks = store(tmp_path, limit=300_000, clock=clock), chain(50)
    while disk.write(blocks[0], payload(blocks[0])):
        blocks.pop(0)
    for path in files(tmp_path):
        os.unlink(path)
    assert not disk.write(blocks[0], payload(blocks[0]))
    clock.now += 61
    assert disk.write(blocks[0], payload(blocks[0]))


# --- bad files ----------------------------------------------------------------------------------------------------


def test_bad_files_are_misses_and_put_aside(tmp_path: Path) -> None:
    """A truncated one, a flipped byte, two swapped ones, a foreign one, one in the wrong place."""
    disk, blocks = store(tmp_path), chain(8)
    fill(disk, blocks)
    paths = [block_path(f"{tmp_path}/w0/{LAYOUT}", block.digest) for block in blocks]
    os.truncate(paths[0], SIZE // 2)
    content = bytearray(Path(paths[1]).read_bytes())
    content[-100] ^= 4
    Path(paths[1]).write_bytes(content)
    os.rename(paths[2], tmp_path / "spare")
    os.rename(paths[3], paths[2])
    os.rename(tmp_path / "spare", paths[3])
    Path(paths[4]).write_text("not a block")
    os.makedirs(f"{tmp_path}/w0/{LAYOUT}/zz")
    os.rename(paths[5], f"{tmp_path}/w0/{LAYOUT}/zz/{os.path.basename(paths[5])}")
    found = [get(disk, "w0", block) for block in blocks]
    assert found[:6] == [None] * 6
    assert found[6:] == [payload(block) for block in blocks[6:]]
    assert disk.stats.bad_files == 5
    assert sorted(os.listdir(tmp_path / "w0" / "quarantine")) == sorted(map(os.path.basename, paths[:5]))
    assert {block for block, _ in disk.own()} == set(blocks[6:])
    fill(disk, blocks[:6])
    assert [get(disk, "w0", block) for block in blocks] == [payload(block) for block in blocks]


def test_the_scan_puts_bad_headers_aside(tmp_path: Path) -> None:
    disk, blocks = store(tmp_path), chain(3)
    fill(disk, blocks)
    Path(block_path(f"{tmp_path}/w0/{LAYOUT}", blocks[1].digest)).write_bytes(bytes(40))
    assert {block for block, _ in disk.own()} == {blocks[0], blocks[2]}
    assert len(os.listdir(tmp_path / "w0" / "quarantine")) == 1


def test_a_bad_file_does_not_keep_the_good_one_out(tmp_path: Path) -> None:
    """When it is written again before anybody has read it."""
    disk, block = store(tmp_path), chain(1)[0]
    fill(disk, [block])
    Path(block_path(f"{tmp_path}/w0/{LAYOUT}", block.digest)).write_bytes(bytes(40))
    fill(disk, [block])
    assert get(disk, "w0", block) == payload(block)
    assert du(tmp_path / "w0") <= disk.usage


def test_the_quarantine_is_small_and_within_the_limit(tmp_path: Path) -> None:
    disk, blocks = store(tmp_path, limit=2 << 20), chain(40)
    fill(disk, blocks)
    for block in blocks:
        path = Path(block_path(f"{tmp_path}/w0/{LAYOUT}", block.digest))
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        assert get(disk, "w0", block) is None
    assert len(os.listdir(tmp_path / "w0" / "quarantine")) == MAX_QUARANTINED
    assert du(tmp_path / "w0") <= disk.usage <= 2 << 20
    assert disk.usage <= du(tmp_path / "w0") + 4096 * MAX_QUARANTINED


def test_a_file_that_another_worker_has_stays_whatever_it_is(tmp_path: Path) -> None:
    disk, other, block = store(tmp_path), store(tmp_path, "w1"), chain(1)[0]
    fill(other, [block])
    path = Path(block_path(f"{tmp_path}/w1/{LAYOUT}", block.digest))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert get(disk, "w1", block) is None
    assert disk.stats.bad_files == 1
    assert path.exists()


# --- disks that fail ----------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_nothing_and_is_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    clock, blocks = Clock(), chain(4)
    disk = store(tmp_path, clock=clock)
    fill(disk, blocks[:1])
    waits = []
    with no_file_longer_than(SIZE // 2):
        for _ in range(9):
            assert not disk.write(blocks[1], payload(blocks[1]))
            assert len(files(tmp_path)) == 1
            begun = clock.now
            while not disk.writable():
                assert not disk.write(blocks[2], payload(blocks[2]))
                clock.now += 1
            waits.append(clock.now - begun)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (disk.stats.write_errors, disk.stats.read_only) == (9, True)
    assert get(disk, "w0", blocks[0]) == payload(blocks[0])
    assert get(disk, "w0", blocks[1]) is None
    assert {block for block, _ in disk.own()} == {blocks[0]}
    fill(disk, blocks)
    assert disk.stats.read_only is False
    assert [record.getMessage().split("w0 ")[1][:20] for record in caplog.records] == [
        "cannot be written to",
        "can be written to ag",
    ]
    assert du(tmp_path / "w0") <= disk.usage <= du(tmp_path / "w0") + 4 * 4096
    again = chain(1, first=1)[0]
    with no_file_longer_than(SIZE // 2):
        assert not disk.write(again, payload(again))
    clock.now += 1
    assert disk.writable()


def test_what_cannot_be_deleted_at_once_goes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, blocks = Clock(), chain(2)
    disk = store(tmp_path, clock=clock)
    with monkeypatch.context() as patch, no_file_longer_than(SIZE // 2):
        patch.setattr(os, "unlink", lambda path: os.stat("/nowhere"))
        assert not disk.write(blocks[0], payload(blocks[0]))
    assert [path[-4:] for path in files(tmp_path)] == [".tmp"]
    clock.now += 1
    fill(disk, blocks[1:])
    assert [path[-3:] for path in files(tmp_path)] == [".kv"]
    assert du(tmp_path / "w0") <= disk.usage


def test_a_full_disk(small_disk: Path) -> None:
    """Once, and then for as long as it is full, whatever the limit says."""
    clock, blocks = Clock(), chain(40)
    disk = store(small_disk, clock=clock)
    written = [block for block in blocks if disk.write(block, payload(block))]
    assert 5 < len(written) < 20
    assert disk.stats.write_errors == 1
    for _ in range(4):
        clock.now += 100
        assert not disk.write(blocks[-1], payload(blocks[-1]))
    assert disk.stats.write_errors == 5
    assert [get(disk, "w0", block) for block in written] == [payload(block) for block in written]
    assert not [path for path in files(small_disk) if not path.endswith(".kv")]
    disk.remove(written[0].digest)
    clock.now += 100
    fill(disk, [blocks[-1]])
    assert disk.stats.read_only is False


def test_a_disk_that_becomes_read_only(small_disk: Path) -> None:
    clock, blocks = Clock(), chain(4)
    disk = store(small_disk, clock=clock)
    fill(disk, blocks[:2])
    disk.close()  # a file that is open for writing would not let it
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    disk._lock = os.open(os.devnull, os.O_RDONLY)
    assert not disk.write(blocks[2], payload(blocks[2]))
    disk.remove(blocks[0].digest)
    assert disk.stats.read_only
    assert [get(disk, "w0", block) for block in blocks[:2]] == [payload(block) for block in blocks[:2]]
    disk.close()
    with pytest.raises(StartError, match=r"tiers\.disk_path: cannot write to .*/w0: Read-only file system"):
        store(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert {block for block, _ in store(small_disk).own()} == set(blocks[:2])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StartError, match=r"tiers\.disk_path: cannot write to"):
        store(tmp_path)


def test_settings_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"tiers\.disk_path: .*/file is not a directory"):
        store(tmp_path / "file")
    with pytest.raises(StartError, match=r"tiers\.disk: 20000 bytes are less than one block takes there, \d+ bytes"):
        store(tmp_path, limit=20_000)
    least = store(tmp_path, "w1").cost + 4096
    fill(store(tmp_path, "w2", limit=least), chain(1))
    disk = store(tmp_path)  # the attempt with too little has not kept the lock
    monkeypatch.setattr("workers.kv.disk.LOCK_WAIT_S", 0.1)
    with pytest.raises(StartError, match=r"tiers\.disk_path: .*/w0 is in use by another process"):
        store(tmp_path)
    disk.close()
    store(tmp_path).close()


# --- several workers ----------------------------------------------------------------------------------------------


def test_others_are_reported_once(tmp_path: Path) -> None:
    clock = Clock()
    disk, first, second = (store(tmp_path, name, clock=clock) for name in ("w0", "w1", "w2"))
    blocks = chain(6)
    fill(disk, blocks[:1])
    fill(first, blocks[1:3])
    fill(second, blocks[3:4])
    (tmp_path / "not a worker").mkdir()
    assert set(disk.others()) == {("w1", blocks[1]), ("w1", blocks[2]), ("w2", blocks[3])}
    assert list(disk.others()) == []
    fill(second, blocks[4:6])
    assert set(disk.others()) == {("w2", blocks[4]), ("w2", blocks[5])}
    assert get(disk, "w2", blocks[5]) == payload(blocks[5])
    assert [disk.owner(block.digest) for block in (blocks[0], blocks[2], blocks[5])] == [None, "w1", "w2"]
    second.remove(blocks[5].digest)
    assert disk.owner(blocks[5].digest) is None
    assert get(disk, "w2", blocks[5]) is None
    assert list(disk.others()) == []
    second.write(blocks[5], payload(blocks[5]))
    assert list(disk.others()) == [("w2", blocks[5])]


def test_a_worker_that_comes_later_is_seen(tmp_path: Path) -> None:
    clock = Clock()
    disk, block = store(tmp_path, clock=clock), chain(1)[0]
    assert disk.owner(block.digest) is None
    fill(store(tmp_path, "w1"), [block])
    clock.now += siblings.FRESH_S
    assert disk.owner(block.digest) == "w1"


def test_directories_that_do_not_change_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, other, blocks = store(tmp_path), store(tmp_path, "w1"), chain(30)
    fill(other, blocks)
    assert len(list(disk.others())) == 30
    assert list(disk.others()) == []
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail(f"{path} is listed"))
    assert list(disk.others()) == []


def test_a_file_that_comes_in_the_same_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    disk, other = store(tmp_path), store(tmp_path, "w1")
    shared = [block for block in (chain(1, number)[0] for number in range(3000)) if block.digest[0] == 7]
    fill(other, shared[:1])
    shard = f"{tmp_path}/w1/{LAYOUT}/07"
    at = os.stat(shard).st_mtime_ns
    assert len(list(disk.others())) == 1
    fill(other, shared[1:2])
    os.utime(shard, ns=(at, at))
    assert list(disk.others()) == [("w1", shared[1])]


def start(path: Path, worker: str, operations: int, seed: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.workers.blocks", path, worker, str(operations), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("operations", [2000, pytest.param(50_000, marks=pytest.mark.long)])
def test_two_processes_read_nothing_torn(tmp_path: Path, operations: int) -> None:
    """Each writes and removes its own blocks and reads both's."""
    both = [start(tmp_path, f"w{number}", operations, number) for number in range(2)]
    hits = [int(one.communicate(timeout=250)[0]) for one in both]
    assert [one.returncode for one in both] == [0, 0]
    assert min(hits) > operations // 10


def test_what_a_killed_worker_leaves_is_whole(tmp_path: Path) -> None:
    chance = random.Random(1)
    for seed in range(3):
        worker = start(tmp_path, "w0", 10**9, seed)
        until = time.monotonic() + 30
        while len(files(tmp_path)) < 5 * (seed + 1) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        disk = store(tmp_path, limit=4 << 20)
        blocks = [block for block, _ in disk.own()]
        assert len(blocks) >= 3
        assert [get(disk, "w0", block) for block in blocks] == [payload(block) for block in blocks]
        assert not [path for path in files(tmp_path) if not path.endswith(".kv")]
        assert du(tmp_path / "w0") <= disk.usage
        assert disk.stats.bad_files == 0
        disk.close()


def test_an_unfinished_file_is_neither_seen_nor_kept(tmp_path: Path) -> None:
    disk, blocks = store(tmp_path), chain(2)
    fill(disk, blocks[:1])
    disk.close()
    path = Path(block_path(f"{tmp_path}/w0/{LAYOUT}", blocks[1].digest))
    path.parent.mkdir()
    path.with_suffix(".tmp").write_bytes(bytes(5000))
    reader = store(tmp_path, "w1")
    assert len(list(reader.others())) == 1
    assert len(list(store(tmp_path).own())) == 1
    assert not path.parent.exists()
