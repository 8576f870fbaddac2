"""Actors that die, stand still or cannot start, on a real Ray."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster import keeper, lives
from cluster.keeper import Keeper
from transfer.messages import Pulse

SPACE = "test-keeper"


class Kept:
    """An actor that counts its lives in a file, cannot start in some of them, and stands still when told to."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._pulse = Pulse()
        self._takes_s = 0.0

    def start(self) -> None:
        with open(self._file, "a") as file:
            file.write("life\n")
        if Path(self._file + ".broken").exists():
            raise RuntimeError("no start today")

    def pulse(self) -> Pulse:
        time.sleep(self._takes_s)
        return self._pulse

    def take(self, seconds: float) -> None:
        self._takes_s = seconds

    def be(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def hang(self) -> None:
        time.sleep(3600)

    def pid(self) -> int:
        return os.getpid()


class Actors:
    """A cluster of such actors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.actors: dict[str, Any] = {}
        for name in self.names():
            self.create(name)
            ray.get(self.actors[name].start.remote())

    def names(self) -> list[str]:
        return ["one", "other"]

    def pulse(self, name: str) -> Any:
        return self.actors[name].pulse.remote()

    def heard(self, name: str, pulse: Pulse) -> None:
        pass

    def end(self, name: str) -> None:
        ray.kill(self.actors[name])

    def create(self, name: str) -> None:
        options = {"name": name, "namespace": SPACE, "num_cpus": 0}
        self.actors[name] = ray.remote(Kept).options(**options).remote(str(self._path / name))

    def begin(self, name: str) -> None:
        ray.get(self.actors[name].start.remote())

    def lives(self, name: str) -> int:
        return len((self._path / name).read_text().splitlines())


@pytest.fixture
def actors(local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actors]:
    for module, name, value in ((lives, "SILENT_S", 2.0), (lives, "PAUSE_S", 0.2), (keeper, "LOOK_S", 0.05)):
        monkeypatch.setattr(module, name, value)
    made = Actors(tmp_path)
    yield made
    for name in made.names():
        made.end(name)


@pytest.fixture
def said(actors: Actors) -> Iterator[list[str]]:
    lines: list[str] = []
    keeping = Keeper(actors, lines.append)
    keeping.start()
    yield lines
    keeping.stop()


def until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.05)


@pytest.mark.long
def test_who_dies_hangs_or_is_stuck_gets_another_life(actors: Actors, said: list[str]) -> None:
    other = ray.get(actors.actors["other"].pid.remote())
    os.kill(ray.get(actors.actors["one"].pid.remote()), 9)
    until(lambda: said[-1:] == ["one serves again"])
    assert actors.lives("one") == 2
    actors.actors["one"].hang.remote()
    until(lambda: said[-1:] == ["one serves again"] and len(said) == 4)
    assert "no answer" in said[2]
    ray.get(actors.actors["one"].be.remote(Pulse(7, busy=True, step_s=0.01)))
    until(lambda: said[-1:] == ["one serves again"] and len(said) == 6)
    assert "no step" in said[4]
    assert actors.lives("one") == 4
    assert ray.get(actors.actors["other"].pid.remote()) == other  # nobody else was touched
    assert actors.lives("other") == 1


def test_a_keeper_that_stood_still_ends_nobody(actors: Actors) -> None:
    ray.get([one.take.remote(0.5) for one in actors.actors.values()])  # so that answers are under way at any time
    lines: list[str] = []
    late = [0.0]
    keeping = Keeper(actors, lines.append, lambda: time.monotonic() + late[0])
    keeping.start()
    time.sleep(0.3)
    late[0] = 1000.0
    time.sleep(1.0)
    keeping.stop()
    assert lines == []
    assert actors.lives("one") == actors.lives("other") == 1


def test_who_cannot_start_is_tried_again_until_it_can(actors: Actors, said: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "one.broken"
    broken.touch()
    actors.end("one")
    until(lambda: actors.lives("one") >= 3)
    assert any("no start today" in line for line in said)
    broken.unlink()
    until(lambda: said[-1:] == ["one serves again"])
