"""`headwater bench tiers`: what lies below the device, measured in this process and without Ray."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from cluster.bench.report import Check, Figures, Report
from cluster.bench.tiers import demotion, guard, hits, overhead, rounds
from cluster.bench.tiers.parts import Part
from cluster.bench.tiers.shape import Bench, Outcome, Shape
from cluster.config import ClusterConfig
from cluster.errors import UserError
from cluster.models import check_architecture, resolve, served_name
from workers.config import StartError
from workers.engine.attention import ModelUnsupported
from workers.engine.model import Model

MEASURES: dict[Part, Callable[[Bench], Outcome]] = {
    Part.HITS: hits.measure,
    Part.GUARD: guard.measure,
    Part.DEMOTION: demotion.measure,
    Part.ROUNDS: rounds.measure,
    Part.OVERHEAD: overhead.measure,
}


def run(config: ClusterConfig, shape: Shape, parts: tuple[Part, ...] = tuple(Part)) -> Report:
    """Measure these parts. Raises UserError when model, device and sizes do not go together."""
    worker = config.worker
    threads = worker.threads or len(os.sched_getaffinity(0))
    path = resolve(config.model.name)
    check_architecture(path)
    torch.set_num_threads(threads)
    console = Console(stderr=True, highlight=False)
    results: dict[str, Figures] = {}
    checks: list[Check] = []
    try:
        model = Model(path, worker.dtype, worker.device)
        tiers = config.tiers.model_copy(update={"policy": "write-through"})
        gc.freeze()  # as workers do: a collection that walks through all that is loaded would be a long gap
        for part in MEASURES:
            if part in parts:
                console.print(part.value)
                with _directory(tiers.disk_path) as directory:
                    outcome = MEASURES[part](Bench(model, worker, tiers, directory, shape))
                for side, figures in outcome.results.items():
                    results.setdefault(side, {}).update(figures)
                checks += outcome.checks
    except (StartError, ModelUnsupported, ValueError) as error:
        raise UserError(str(error)) from error
    finally:
        gc.unfreeze()
    about = {"model": served_name(config.model.name), "device": str(model.device), "dtype": model.dtype}
    return Report({**asdict(shape), **about, "threads": threads}, results, checks)


@contextmanager
def _directory(parent: Path | None) -> Iterator[Path]:
    """An empty directory that goes with all that is in it. Raises UserError."""
    if parent is not None and not parent.is_dir():
        raise UserError(f"tiers.disk_path: {parent} is not a directory")
    with tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=parent) as path:
        yield Path(path)
