"""The router alone: how long a decision takes, and what a view of many workers costs.

Half of every worker's keys are of documents that others hold, too, down to different depths; the prompts are such
documents with ends of their own. What workers hold lies in all tiers, the deeper part of a document in the lower ones.
Workers are busy to different degrees. Heartbeats keep arriving between decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

from cluster.bench.report import Check, Figures, Report
from cluster.simulate.status import stand_in
from router.config import RouterConfig
from router.route import Router
from router.view import DECODE, PREFILL, View
from transfer.gossip.ladder import checkpoints
from transfer.gossip.replicas import Applied, Replicas
from transfer.gossip.summary import DEVICE, DISK, HOST, Load, Update, digest
from transfer.messages import Speeds, WorkerStatus, pack_tokens
from transfer.prefix import PrefixChain, root_key

BLOCK = 16
VOCABULARY = 50_000
DOCUMENTS = 200
SPEED = 8000.0
TIERS = (DEVICE, HOST, DISK)
SILENT_S = 3600.0
"""Filling many rows takes its time, and silence is not the subject."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes: workers of each view, keys a worker, tokens of a prompt, decisions."""

    workers: tuple[int, ...]
    keys: int
    prompt: int
    decisions: int


def run(shape: Shape) -> Report:
    """Measure every view."""
    results: dict[str, Figures] = {}
    with Progress(console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("decisions", total=len(shape.workers) * shape.decisions)
        for count in shape.workers:
            results[f"{count} workers"] = _measure(shape, count, lambda: progress.advance(task))
    return Report(asdict(shape), results, checks_of(results))


def checks_of(results: dict[str, Figures]) -> list[Check]:
    """What decisions may take, for the views that were measured."""
    checks = []
    if (hundred := results.get("100 workers")) is not None:
        checks.append(Check("decision, 100 workers, median", hundred["decision_p50_us"], "us", 300, False))
        checks.append(Check("decision, 100 workers, p99", hundred["decision_p99_us"], "us", 1000, False))
        checks.append(Check("keys of a prompt", hundred["keys_p50_us"], "us", 400, False))
    if (thousand := results.get("1000 workers")) is not None:
        checks.append(Check("decision, 1000 workers, median", thousand["decision_p50_us"], "us", 1500, False))
        checks.append(Check("view of 1000 workers", thousand["view_mbytes"], "MB", 250, False))
    return checks


def _measure(shape: Shape, count: int, done: Callable[[], None]) -> Figures:
    random, root = Random(count), root_key("model")
    documents = [random.choices(range(VOCABULARY), k=shape.prompt) for _ in range(DOCUMENTS)]
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    replicas = Replicas(shape.keys)
    names = [f"{PREFILL}-{number}" for number in range(count)]
    view = View([(name, PREFILL) for name in names] + [(f"{DECODE}-0", DECODE)], time.monotonic, replicas, SILENT_S)
    _fill(replicas, names, documents, shape, random)
    for name in names:
        view.update(_status(name, PREFILL))
    view.update(_status(f"{DECODE}-0", DECODE))
    grown = max(process.memory_info().rss - before, replicas.table.nbytes)
    router = Router(view, RouterConfig(), "router", random)
    keys, decisions = [], []
    for number in range(shape.decisions):
        replicas.apply(_heartbeat(replicas, random.choice(names), random), time.monotonic())
        view.update(_status(random.choice(names), PREFILL))
        cut = random.randrange(shape.prompt)
        tokens = random.choice(documents)[:cut] + random.choices(range(VOCABULARY), k=shape.prompt - cut)
        packed = pack_tokens(tokens)
        begun = time.perf_counter()
        chain = PrefixChain.of(root, packed, BLOCK)
        hashed = time.perf_counter()
        plan = router.plan(chain, shape.prompt, True)
        decided = time.perf_counter()
        router.dispatch(plan, chain, shape.prompt).close()
        if number >= shape.decisions // 10:  # the first ones compile and fill caches
            keys.append(hashed - begun)
            decisions.append(decided - hashed)
        done()
    quantiles = {"decision_p50_us": 50, "decision_p99_us": 99}
    figures = {name: float(np.percentile(decisions, share)) * 1e6 for name, share in quantiles.items()}
    return {**figures, "keys_p50_us": float(np.median(keys)) * 1e6, "view_mbytes": grown / 1e6}


def _fill(replicas: Replicas, names: list[str], documents: list[list[int]], shape: Shape, random: Random) -> None:
    """Give every worker as many keys as it may publish."""
    root, depths = root_key("model"), checkpoints(shape.prompt // BLOCK, BLOCK)
    chains = [PrefixChain.of(root, pack_tokens(document), BLOCK).numbers(depths) for document in documents]
    others = np.random.default_rng(random.randrange(2**32))
    for name in names:
        shared: list[np.ndarray] = []
        while sum(map(len, shared)) < shape.keys // 2 and len(shared) < DOCUMENTS // 2:
            shared.append(chains[random.randrange(DOCUMENTS)][: random.randint(1, len(depths))])
        in_tiers = [np.sort(np.array([random.choice(TIERS) for _ in one], np.uint8)) for one in shared]
        mine, first = np.unique(np.concatenate(shared), return_index=True)
        mine, first = mine[: shape.keys], first[: shape.keys]
        keys = np.concatenate([mine, others.integers(1, 2**63, shape.keys - len(mine), np.uint64)])
        tiers = np.full(len(keys), DEVICE, np.uint8)
        tiers[: len(mine)] = np.concatenate(in_tiers)[first]
        load = Load(random.randrange(int(SPEED)), 1, SPEED, 1000)
        update = Update(name, 1, 1, 0, load, digest(keys, tiers), keys.astype("<u8").tobytes(), tiers.tobytes())
        assert replicas.apply(update, time.monotonic()) is Applied.APPLIED


def _status(name: str, role: str) -> WorkerStatus:
    """What a worker answers: all have the same model, so that they could copy from one another."""
    return stand_in(name, role, Speeds(SPEED, 0.02, 1e10), token_bytes=131_072)


def _heartbeat(replicas: Replicas, name: str, random: Random) -> Update:
    incarnation, seq, total = replicas.state(name)
    return Update(name, incarnation, seq + 1, seq, Load(random.randrange(int(SPEED)), 1, SPEED, 1000), total)
