"""`headwater bench shared-prefix`: many requests behind one long prefix, with and without prefix reuse."""

from __future__ import annotations

import asyncio
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import ray
from rich.console import Console
from rich.progress import Progress

from cluster.bench.load import Run, many
from cluster.bench.report import Check, Report
from cluster.config import ClusterConfig
from cluster.launch import Cluster, connect, disconnect
from cluster.models import resolve, served_name

MIN_SPEEDUP = 4.1
MAX_FIRST_TOKEN_SHARE = 0.12
MIN_CACHED_SHARE = 0.90
"""What has been published for this kind of cache: 4.1 times the throughput, first token -88 %, 92 % cached."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The work: `requests` prompts of `prefix` shared + `query` own tokens, `output` tokens each, `rounds` times."""

    prefix: int
    query: int
    output: int
    requests: int
    concurrency: int
    rounds: int


def prompts(shape: Shape, seed: int, vocabulary: int) -> tuple[list[int], list[list[int]]]:
    """A prompt that brings the prefix into the cache, and the prompts to measure; the same for every side."""
    draw = random.Random(seed)

    def words(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    prefix = words(shape.prefix)
    return prefix + words(shape.query), [prefix + words(shape.query) for _ in range(shape.requests)]


def run(config: ClusterConfig, shape: Shape, compare: bool) -> Report:
    """Measure. With `compare`, a second cluster without prefix cache does the same work, in turns with the first."""
    model, name = resolve(config.model.name), served_name(config.model.name)
    sides = {"reuse": config}
    if compare:
        sides["no reuse"] = _without_cache(config)
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    connect(None)
    clusters = {side: _cluster(one, model, side) for side, one in sides.items()}
    try:
        with Progress(console=Console(stderr=True)) as progress:
            for cluster in clusters.values():
                cluster.start()
            vocabulary = clusters["reuse"].statuses()[0].vocab_size
            task = progress.add_task("requests", total=len(sides) * shape.rounds * (shape.requests + 1))
            for round_number in range(shape.rounds):
                first, rest = prompts(shape, seed=round_number, vocabulary=vocabulary)
                for side, cluster in clusters.items():

                    def send(some: list[list[int]], output: int, url: str = cluster.url) -> Run:
                        done = lambda: progress.advance(task)  # noqa: E731
                        return asyncio.run(many(url, name, some, output, shape.concurrency, done))

                    send([first], 1)
                    runs[side].append(send(rest, shape.output))
    finally:
        for cluster in clusters.values():
            cluster.stop()
        disconnect()
    results = {side: _median(some) for side, some in runs.items()}
    return Report({**asdict(shape), "model": name}, results, _checks(results))


def _without_cache(config: ClusterConfig) -> ClusterConfig:
    return config.model_copy(update={"worker": config.worker.model_copy(update={"prefix_cache": False})})


def _cluster(config: ClusterConfig, model: Path, side: str) -> Cluster:
    free_port = config.gateway.model_copy(update={"port": 0})
    name = f"bench-{side.replace(' ', '-')}"
    assert ray.is_initialized()
    return Cluster(config.model_copy(update={"gateway": free_port}), model, name)


def _median(runs: list[Run]) -> dict[str, float]:
    figures = [one.figures() for one in runs]
    return {name: median(one[name] for one in figures) for name in figures[0]}


def _checks(results: dict[str, dict[str, float]]) -> list[Check]:
    reuse = results["reuse"]
    checks = [Check("cached share of prompt tokens", reuse["cached share"], "", MIN_CACHED_SHARE, at_least=True)]
    if "no reuse" in results:
        without = results["no reuse"]
        speedup = reuse["output tokens/s"] / without["output tokens/s"]
        share = reuse["median first token s"] / without["median first token s"]
        checks.append(Check("throughput against no reuse", speedup, "x", MIN_SPEEDUP, at_least=True))
        checks.append(Check("median first token against no reuse", share, "", MAX_FIRST_TOKEN_SHARE, at_least=False))
    return checks
