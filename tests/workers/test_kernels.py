"""How kernels are compiled and run on threads."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workers.engine.kernels import compiled, threads
from workers.engine.kernels.threads import argument1, described, runner, share


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def add_one(data: Any) -> None:
    numbers = argument1(data, 0, np.int64)
    begin, end = share(len(numbers))
    for at in range(begin, end):
        numbers[at] += 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_threads_share_the_work(count: int) -> None:
    torch.set_num_threads(count)
    numbers = torch.arange(7)
    runner("add-one", add_one)(described(numbers))
    assert numbers.tolist() == list(range(1, 8))


def test_with_another_openmp_one_thread_does_everything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(Path, "read_text", lambda *_: "")
    threads._openmp.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert threads.threads() == 1
            numbers = torch.arange(7)
            runner("add-one", add_one)(described(numbers))
    finally:
        threads._openmp.cache_clear()
    assert numbers.tolist() == list(range(1, 8))
    assert [record.name for record in caplog.records] == [threads.__name__]


def test_fewer_threads_than_asked_for_leave_nothing_out() -> None:
    """As batch systems arrange it; OpenMP reads the limit when it is loaded."""
    code = """
import torch
from tests.workers.test_kernels import add_one
from workers.engine.kernels.threads import described, runner, threads
torch.set_num_threads(4)
numbers = torch.zeros(9, dtype=torch.int64)
runner("add-one", add_one)(described(numbers))
assert threads() == 4 and numbers.tolist() == [1] * 9
"""
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["file", "nowhere"])
def test_without_a_place_for_a_cache_kernels_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    if place == "file":
        monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "file"))
    else:
        monkeypatch.setattr(compiled, "cache_dir", Path("~nobody-of-this-name").expanduser)
    numbers = torch.zeros(3, dtype=torch.int64)
    runner("test", add_one)(described(numbers))
    assert numbers.tolist() == [1, 1, 1]
    assert compiled.compiled("test", add_one).cache_hits == 0
