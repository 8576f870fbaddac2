"""What telemetry costs: two clusters in turns. One traces every request and is scraped each second, the other one has
neither traces nor metrics."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from types import SimpleNamespace

import httpx
import pytest

import cluster.launch
from cluster import telemetry
from cluster.bench.streams import Line
from cluster.config import TelemetryConfig
from cluster.launch import Cluster
from tests.cluster.conftest import Launch
from tests.cluster.otlp import Receiver, receiving
from transfer.telemetry import Telemetry, none

STREAMS, TOKENS, ROUNDS, FIRSTS = 4, 48, 16, 80
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
    lines: list[Line]
    rates: list[float]
    firsts: list[float]

    async def round(self, texts: Callable[[], str]) -> None:
        """So many streams at a time."""
        begun = perf_counter()
        chats = (one.chat(self.cluster.model_name, texts(), TOKENS) for one in self.lines)
        tokens = sum(one.tokens for one in await asyncio.gather(*chats))
        self.rates.append(tokens / (perf_counter() - begun))

    async def first(self, texts: Callable[[], str]) -> None:
        """One stream alone."""
        self.firsts.append((await self.lines[0].chat(self.cluster.model_name, texts(), 2)).first_s)


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
    sides = []
    for one in (on, off):
        sides.append(Side(one, [await Line.open(one.ports[0]) for _ in range(STREAMS)], [], []))

    def texts() -> str:
        return " ".join(draw.choices(WORDS, k=60))

    for one in sides:  # what is slow only once
        await one.round(texts)
        one.rates.clear()
    for number in range(ROUNDS):
        for one in sides if number % 2 else sides[::-1]:
            await one.round(texts)
    for number in range(FIRSTS):
        for one in sides if number % 2 else sides[::-1]:
            await one.first(texts)
    return sides[0], sides[1]


@pytest.mark.long
def test_what_telemetry_costs(launch: Launch, smollm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        on, off = both(launch, smollm, monkeypatch, receiver)
        with scraped(on):
            one, other = asyncio.run(measured(on, off))
    shares = [mine / theirs for mine, theirs in zip(one.rates, other.rates, strict=True)]
    added = [mine - theirs for mine, theirs in zip(one.firsts, other.firsts, strict=True)]
    print(f"tokens/s {median(one.rates):.1f} and {median(other.rates):.1f} without, share {median(shares):.3f}")  # noqa: T201
    print(f"first token {median(one.firsts):.4f} and {median(other.firsts):.4f} s, added {median(added):.5f} s")  # noqa: T201
    assert len(receiver.spans) > 8 * FIRSTS
    assert median(shares) >= 0.98
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
