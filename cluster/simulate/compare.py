"""Several policies over one trace, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.bench.report import Check, Figures, Report
from cluster.errors import UserError
from cluster.simulate.policies import HEADWATER, NAMES, ORACLE, PEERS, POLICIES, Constants, made
from cluster.simulate.run import Settings, simulate
from cluster.simulate.trace import Request
from cluster.simulate.tune import tune


def chosen(names: Sequence[str] | None) -> list[str]:
    """The policies asked for, all if none is. Raises UserError for one that there is not."""
    for name in names or ():
        if name not in NAMES:
            raise UserError(f"--policy {name}: must be one of {', '.join(NAMES)}")
    return list(dict.fromkeys(names or NAMES))


def compare(
    trace: Sequence[Request], settings: Settings, policies: Sequence[str], tuned: bool, about: dict[str, Any]
) -> Report:
    """Play the trace once for each policy; with `tuned`, with the constants that are best on its first quarter, and
    the oracle with Headwater's. `about` says what the report should tell of the trace."""
    results: dict[str, Figures] = {}
    constants: dict[str, Constants] = {}
    notes: list[str] = []
    with _progress() as progress:
        for name in (name for name in policies if tuned and POLICIES[name].grid):
            choices = len(POLICIES[name].choices)
            task = progress.add_task(f"{name}, constants", total=choices)
            constants[name], mean = tune(trace, settings, POLICIES[name], partial(progress.advance, task))
            values = ", ".join(f"{key} {value}" for key, value in constants[name].items())
            notes.append(f"{name}: {values}: best of {choices} on the first quarter (mean {mean:.3f} s)")
        constants[ORACLE] = constants.get(HEADWATER, {})
        for name in policies:
            task = progress.add_task(name, total=len(trace))
            outcome = simulate(trace, settings, made(name, constants.get(name, {})), partial(_reach, progress, task))
            progress.update(task, completed=len(trace))
            results[name] = outcome.figures()
    return Report(about | asdict(settings) | {"cut_off": sorted(settings.cut_off)}, results, checks(results), notes)


def checks(results: dict[str, Figures]) -> list[Check]:
    """Headwater beside exact knowledge, and, if all are there, beside the best of the other routers' rules."""
    ours, exact = results.get(HEADWATER), results.get(ORACLE)
    peers = [results[name] for name in PEERS if name in results]
    if ours is None:
        return []
    found: list[Check] = []
    if exact:
        found += [
            Check("mean time, times that of exact knowledge", ours["mean"] / exact["mean"], "x", 1.03, False),
            Check("hit rate, times that of exact knowledge", ours["hit_rate"] / exact["hit_rate"], "x", 0.97, True),
        ]
    if len(peers) == len(PEERS):
        best = min(one["mean"] for one in peers)
        found.append(Check("mean time, times that of the best peer", ours["mean"] / best, "x", 0.9, False))
    return found


def _reach(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
