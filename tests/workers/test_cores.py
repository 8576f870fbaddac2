"""Which share of the cores a worker is given, asked from several real processes."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from workers.cores import Cores

CORES = len(os.sched_getaffinity(0))


def _other(path: Path, affinity: set[int] | None, line: Connection) -> None:
    cores = Cores(path)
    if affinity is not None:
        os.sched_setaffinity(0, affinity)
    while (told := line.recv()) != "end":
        line.send(cores.enter() if told == "enter" else cores.leave())


@contextmanager
def other(path: Path, affinity: set[int] | None = None) -> Iterator[Connection]:
    """A second worker, which does as it is told over the line."""
    line, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_other, args=(path, affinity, its), daemon=True)
    process.start()
    its.close()
    try:
        yield line
        if process.is_alive():
            line.send("end")
            process.join(10)
    finally:
        process.kill()
        process.join()


def tell(line: Connection, what: str) -> int | None:
    line.send(what)
    assert line.poll(20), "no answer"
    answer: int | None = line.recv()
    return answer


def test_workers_share_while_both_compute(tmp_path: Path) -> None:
    mine = Cores(tmp_path / "busy")
    assert mine.enter() == CORES
    with other(tmp_path / "busy") as line:
        assert tell(line, "enter") == max(1, CORES // 2)
        assert mine.enter() == max(1, CORES // 2)
        mine.leave()
        assert tell(line, "enter") == CORES
        assert mine.enter() == max(1, CORES // 2)
        tell(line, "leave")
        assert mine.enter() == CORES
    mine.close()


def test_every_worker_counts_whoever_locked_first(tmp_path: Path) -> None:
    """The system names any of several locks, not the first one in the file."""
    mine = Cores(tmp_path / "busy")
    with other(tmp_path / "busy") as one, other(tmp_path / "busy") as two, other(tmp_path / "busy") as three:
        for line in (three, one, two):
            tell(line, "enter")
        assert mine._others(os.sched_getaffinity(0), 0, 1 << 31) == 3
        tell(one, "leave")
        assert mine._others(os.sched_getaffinity(0), 0, 1 << 31) == 2
    mine.close()


def test_a_worker_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    mine = Cores(tmp_path / "busy")
    with other(tmp_path / "busy") as line:
        tell(line, "enter")
        assert mine.enter() == max(1, CORES // 2)
        (child,) = multiprocessing.active_children()
        child.kill()
        child.join()
        assert mine.enter() == CORES
    mine.close()


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_workers_on_different_cores_do_not_count(tmp_path: Path) -> None:
    all_cores = os.sched_getaffinity(0)
    first, second = sorted(all_cores)[:2]
    mine = Cores(tmp_path / "busy")
    try:
        os.sched_setaffinity(0, {first})
        with other(tmp_path / "busy", {second}) as line:
            assert tell(line, "enter") == 1
            os.sched_setaffinity(0, {first})
            assert mine._others({first}, 0, 1 << 31) == 0
            assert mine._others({first, second}, 0, 1 << 31) == 1
    finally:
        os.sched_setaffinity(0, all_cores)
        mine.close()


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "busy").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        Cores(tmp_path / "busy")
    assert not (tmp_path / "elsewhere").exists()
