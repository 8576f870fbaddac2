"""Half an hour of mixed traffic with faults: what processes hold does not grow. `HEADWATER_SOAK_S` says how long."""

import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import ray

from cluster.control import Control
from tests.cluster.chaos import MODEL, Faults, Load, assert_at_rest, cases, process_of
from tests.cluster.conftest import CONTROLLED

SECONDS = float(os.environ.get("HEADWATER_SOAK_S", "1800"))
CLIENTS = 12
LEAVE_S = (0.02, 0.3)
LOOK_S = 15.0
"""Between two looks into the processes, which cost them some time."""
GROWTH = 0.05
"""What may be added from the first quarter to the end, by the line through all samples, as a share of what there is."""
LEAST = {"rss": 32e6, "fds": 8, "threads": 3, "objects": 32, "nixl": 8}
"""So much may be added in any case."""


def held(actor: Any) -> dict[str, int]:
    """Ray's objects that a process refers to, and what a worker has of NIXL: peers it knows, writes under way. Runs
    in it. (`gc.get_objects` would say more, but breaks tuples that other threads are making.)"""
    found = {"objects": len(ray._private.worker.global_worker.core_worker.get_all_reference_counts())}
    if (loop := getattr(actor, "_transfer_loop", None)) is not None:
        transfers = list(loop.sender._transfers.values()) + loop.sender._stuck
        found["nixl"] = len(loop.transport.own._remotes) + sum(len(one.in_flight) for one in transfers)
    return found


@dataclass
class Samples:
    """What each process held, at even intervals."""

    found: dict[tuple[str, str], list[float]]
    looked: float = 0.0

    def look(self, actors: dict[str, Any]) -> None:
        """What can only be seen from within."""
        if time.monotonic() < self.looked + LOOK_S:
            return
        self.looked = time.monotonic()
        calls = {name: actor.__ray_call__.remote(held) for name, actor in actors.items()}
        for name, call in calls.items():
            for kind, number in ray.get(call, timeout=60).items():
                self.found[name, kind].append(number)

    def take(self, processes: dict[str, psutil.Process]) -> None:
        for name, process in processes.items():
            self.found[name, "rss"].append(process.memory_info().rss)
            self.found[name, "fds"].append(process.num_fds())
            self.found[name, "threads"].append(process.num_threads())

    def growth(self, name: str, kind: str) -> tuple[float, float]:
        """By the line through the last three quarters: how much more at the end; and what there was at first."""
        values = np.array(self.found[name, kind][len(self.found[name, kind]) // 4 :])
        slope, _ = np.polyfit(np.linspace(0, 1, len(values)), values, 1)
        return float(slope), float(values[0])


def leave_early(url: str, draw: random.Random) -> None:
    """A client that does not wait for its answer."""
    body = {"model": MODEL, "prompt": [draw.randrange(500) for _ in range(200)], "max_tokens": 200}
    with suppress(httpx.TimeoutException):
        httpx.post(f"{url}/v1/completions", json=body, timeout=draw.uniform(*LEAVE_S))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_what_processes_hold_does_not_grow(control: Control, tiny: Path) -> None:
    faults, draw = Faults(control, CONTROLLED, 7), random.Random(7)
    report = faults.report()
    processes = {one.name: process_of(faults.actor(one.name)) for one in report.actors}
    processes["controller"] = process_of(control.actor)
    actors = {one.name: faults.actor(one.name) for one in report.actors}
    milder: list[Callable[[], str | None]] = [faults.stop_some, faults.part_gossip, faults.fail_writes]
    samples = Samples(defaultdict(list))
    with Load(lambda: report.urls, cases(tiny, 8, 120), CLIENTS) as load:
        until, struck = time.monotonic() + SECONDS, 0
        while time.monotonic() < until:
            leave_early(draw.choice(report.urls), draw)
            if draw.random() < 0.1:
                draw.choice(milder)()
                struck += 1
            samples.take(processes)
            samples.look(actors)
            time.sleep(0.5)
    assert set(load.ends) == {"right"}, load.ends
    assert_at_rest(faults)
    said = [f"{len(load.streams)} streams, {struck} faults in {SECONDS:.0f} s"]
    grown = []
    for name, kind in samples.found:
        more, there = samples.growth(name, kind)
        said.append(f"{name} {kind}: {there:.4g} {more:+.3g}")
        if more > max(LEAST[kind], GROWTH * there):
            grown.append(said[-1])
    sys.stdout.write("\n".join(said) + "\n")
    assert not grown
