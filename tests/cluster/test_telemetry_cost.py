"""What telemetry costs: two clusters in turns. One traces every request and is scraped each second, the other one has
neither traces nor metrics."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from types import SimpleNamespace

import httpx
import psutil
import pytest
import ray

import cluster.launch
from cluster import telemetry
from cluster.bench.streams import Line
from cluster.config import TelemetryConfig
from cluster.launch import Cluster
from tests.cluster.conftest import Launch
from tests.cluster.otlp import Receiver, receiving
from transfer.telemetry import Telemetry, none

STREAMS, TOKENS, ROUNDS, FIRSTS = 4, 32, 16, 100
WORDS = ("river", "hill", "mill", "gate", "fence", "wheel", "water", "stone", "spring", "summer", "sack", "sluice")


def traced(environment: dict[str, str], name: str) -> Telemetry:
    """A gateway's, with these variables."""
    os.environ.update(environment)
    return telemetry.setup(name)


def traced_and_served(environment: dict[str, str], config: TelemetryConfig, name: str) -> Telemetry:
    """A worker's."""
    os.environ.update(environment)
    return telemetry.serve(config, name)


@dataclass
class Side:
    """One cluster under load."""

    cluster: Cluster
    processes: list[psutil.Process]
    rates: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, cluster: Cluster) -> Side:
        """With its workers' and its gateway's processes."""
        ids = [one.pid for one in cluster.statuses()] + ray.get([one.ping.remote() for one in cluster.gateways])
        return cls(cluster, [psutil.Process(one) for one in ids])

    @property
    def cpu_s(self) -> float:
        """What its processes have used."""
        return sum(sum(one.cpu_times()[:2]) for one in self.processes)

    async def round(self, texts: Callable[[], str]) -> None:
        """So many streams at a time."""
        lines = [await Line.open(self.cluster.ports[0]) for _ in range(STREAMS)]  # the server closes idle ones
        begun, used = perf_counter(), self.cpu_s
        chats = (one.chat(self.cluster.model_name, texts(), TOKENS) for one in lines)
        tokens = sum(one.tokens for one in await asyncio.gather(*chats))
        self.rates.append(tokens / (perf_counter() - begun))
        self.costs.append((self.cpu_s - used) / tokens)
        for one in lines:
            one.close()

    async def first(self, texts: Callable[[], str]) -> None:
        """One stream alone."""
        line = await Line.open(self.cluster.ports[0])
        self.firsts.append((await line.chat(self.cluster.model_name, texts(), 2)).first_s)
        line.close()


@contextmanager
def scraped(cluster: Cluster) -> Iterator[None]:
    """All processes, once a second."""
    over = Event()

    def scrape() -> None:
        with httpx.Client() as client:
            while not over.wait(1):
                for one in client.get(f"{cluster.url}/metrics/targets").json():
                    client.get(f"http://{one['targets'][0]}/metrics")

    thread = Thread(target=scrape, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


async def measured(on: Cluster, off: Cluster) -> tuple[Side, Side]:
    """The same in turns, with prompts that nobody has seen."""
    draw = random.Random(0)
    sides = [Side.of(on), Side.of(off)]

    def texts() -> str:
        return " ".join(draw.choices(WORDS, k=60))

    for one in sides:  # what is slow only once
        await one.round(texts)
        one.rates.clear()
        one.costs.clear()
    for number in range(ROUNDS):
        for one in sides if number % 2 else sides[::-1]:
            await one.round(texts)
    for number in range(FIRSTS):
        for one in sides if number % 2 else sides[::-1]:
            await one.first(texts)
    return sides[0], sides[1]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_telemetry_costs(launch: Launch, smollm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        on, off = both(launch, smollm, monkeypatch, receiver)
        with scraped(on):
            one, other = asyncio.run(measured(on, off))
    shares = [mine / theirs for mine, theirs in zip(one.rates, other.rates, strict=True)]
    dearer = [mine / theirs - 1 for mine, theirs in zip(one.costs, other.costs, strict=True)]
    added = [mine - theirs for mine, theirs in zip(one.firsts, other.firsts, strict=True)]
    print(f"tokens/s {median(one.rates):.1f} and {median(other.rates):.1f} without, share {median(shares):.3f}")  # noqa: T201
    print(f"CPU a token {median(one.costs):.5f} and {median(other.costs):.5f} s, {median(dearer):+.4f}")  # noqa: T201
    print(f"first token {median(one.firsts):.4f} and {median(other.firsts):.4f} s, added {median(added):.5f} s")  # noqa: T201
    assert len(receiver.spans) > 8 * FIRSTS
    # Other work of the machine moves rates by more than this: what a token takes of the processors says how many there
    # can be.
    assert median(dearer) <= 0.02
    assert median(added) <= 0.001


def both(launch: Launch, model: Path, monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> tuple[Cluster, Cluster]:
    """With all of it, and with none."""
    where = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.url}
    with monkeypatch.context() as patch:
        everything = SimpleNamespace(setup=partial(traced, where), serve=partial(traced_and_served, where))
        patch.setattr(cluster.launch, "telemetry", everything)
        on = launch(model, worker__max_model_len=2048)
    with monkeypatch.context() as patch:
        nothing = SimpleNamespace(setup=none, serve=lambda _, name: none(name))
        patch.setattr(cluster.launch, "telemetry", nothing)
        off = launch(model, worker__max_model_len=2048)
    return on, off
