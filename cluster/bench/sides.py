"""The sides of a comparison: clusters that run at the same time and do the same work in turns."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress

from cluster.bench.load import Run, Target, send, single
from cluster.bench.report import Report, medians
from cluster.bench.workload import Words, Work, Workload
from cluster.config import ClusterConfig, on_this_machine
from cluster.connection import STOP_S, connect, disconnect
from cluster.launch import Cluster
from cluster.models import resolve, served_name
from cluster.signals import interruptible, on_signals

REUSE, NO_REUSE = "reuse", "no reuse"


@dataclass(frozen=True, slots=True)
class Side:
    """A running cluster, and how many token ids its model knows."""

    target: Target
    vocabulary: int


def compare(config: ClusterConfig, workload: Workload, both: bool) -> Report:
    """Measure. With `both`, a second cluster without prefix cache does the same work, in turns with the first."""
    without = config.model_copy(update={"worker": config.worker.model_copy(update={"prefix_cache": False})})
    runs = _measure({REUSE: config, NO_REUSE: without} if both else {REUSE: config}, workload)
    results = {side: medians([workload.figures(run) for run in some]) for side, some in runs.items()}
    sizes = {**asdict(workload), "model": served_name(config.model.name)}  # type: ignore[call-overload]
    return Report(sizes, results, workload.checks(results))


@contextmanager
def running(configs: dict[str, ClusterConfig]) -> Iterator[dict[str, Cluster]]:
    """Clusters on free ports, in a Ray of their own. All of it ends with the block, within about `STOP_S`; signals
    interrupt the block, but not its end."""
    clusters: dict[str, Cluster] = {}
    models = {name: resolve(config.model.name) for name, config in configs.items()}
    try:
        connect(None)
        interruptible()  # Ray has installed its own
        for name, config in configs.items():
            free_port = config.gateway.model_copy(update={"port": 0})
            settings = on_this_machine(config.model_copy(update={"gateway": free_port}))
            clusters[name] = Cluster(settings, models[name], f"bench-{name.replace(' ', '-')}")
            clusters[name].start()
        yield clusters
    finally:
        on_signals(signal.SIG_IGN)
        until = time.monotonic() + STOP_S
        for cluster in clusters.values():
            cluster.stop(until)
        disconnect(until)
        interruptible()


@contextmanager
def started(configs: dict[str, ClusterConfig]) -> Iterator[dict[str, Side]]:
    """One running cluster a side, as `running` starts them."""
    with running(configs) as clusters:
        yield {
            name: Side(Target(one.url, served_name(one.config.model.name)), one.statuses()[0].vocab_size)
            for name, one in clusters.items()
        }


def do(target: Target, work: Work, done: Callable[[], None] = lambda: None) -> Run:
    """Let a server do the work of a round; `done` is called after each request."""
    for prompt in work.warm_up:
        send(target, single([prompt]), output=1, concurrency=1, done=done)
    return send(target, work.chats, work.output, work.concurrency, done)


def _measure(configs: dict[str, ClusterConfig], workload: Workload) -> dict[str, list[Run]]:
    """Each side's runs. Every second round the sides change places, so that a machine that becomes slower or faster
    meanwhile favours neither."""
    runs: dict[str, list[Run]] = {name: [] for name in configs}
    with Progress(console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("starting", total=None)
        with started(configs) as sides:
            for name, side in sides.items():
                progress.console.print(f"{name}: {side.target.url}/dashboard", highlight=False)
            vocabulary = next(iter(sides.values())).vocabulary
            works = [workload.work(Words(number, vocabulary)) for number in range(workload.rounds)]
            total = len(sides) * sum(work.requests for work in works)
            progress.update(task, description="requests", total=total)
            for number, work in enumerate(works):
                for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                    runs[name].append(do(sides[name].target, work, done=lambda: progress.advance(task)))
    return runs
