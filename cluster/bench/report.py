"""What every benchmark prints: one object of `config`, `machine`, `results` and `checks`, or a table of the same."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Figures = dict[str, float]
"""What was measured on one side, by name; a name says its unit."""
FILE_WIDTH = 120
"""Columns of a table that goes to a file or a pipe, which have no width of their own."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that a benchmark is there to show. `at_least` says which way `bound` goes."""

    name: str
    value: float
    unit: str
    bound: float
    at_least: bool

    @property
    def ok(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def bound_text(self) -> str:
        """The bound for people, such as ">= 4.1"."""
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark; `results` maps a side's name to its figures, `notes` say what was left out."""

    config: dict[str, Any]
    results: dict[str, Figures]
    checks: list[Check]
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was checked and every check holds."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """The table: each figure's name and its value on every side, "-" where a side has none."""
        names = dict.fromkeys(name for figures in self.results.values() for name in figures)
        sides = self.results.values()
        return [(name, [f"{side[name]:.4g}" if name in side else "-" for side in sides]) for name in names]

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints; `notes` only where there are any."""
        checks = [
            {"name": one.name, "value": one.value, "unit": one.unit, "bound": one.bound_text, "ok": one.ok}
            for one in self.checks
        ]
        whole = {"config": self.config, "machine": machine(), "results": self.results, "checks": checks}
        return {**whole, "notes": self.notes} if self.notes else whole

    def show(self, as_json: bool) -> None:
        """Print the report on standard output."""
        console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
        if as_json:
            console.out(json.dumps(self.as_dict(), indent=2), highlight=False)
            return
        figures = Table(title=" ".join(f"{key}={value}" for key, value in self.config.items()))
        figures.add_column("")
        for side in self.results:
            figures.add_column(side, justify="right")
        for name, values in self.rows:
            figures.add_row(name, *values)
        console.print(figures)
        for check in self.checks:
            mark = "[green]ok[/]" if check.ok else "[red]missed[/]"
            console.print(f"{check.name}: {check.value:.4g} {check.unit} (bound {check.bound_text}) {mark}")
        for note in self.notes:
            console.print(note, markup=False, highlight=False)


def medians(rounds: list[Figures]) -> Figures:
    """The median of each figure over rounds that all have the same ones."""
    return {name: median(one[name] for one in rounds) for name in rounds[0]}


def ratio(
    name: str, results: dict[str, Figures], figure: str, sides: tuple[str, str], bound: float, at_least: bool
) -> list[Check]:
    """The check of one side's figure as a multiple of the other's; none where one of them was not measured."""
    mine, other = (results.get(side, {}).get(figure) for side in sides)
    if mine is None or not other:
        return []
    return [Check(name, mine / other, "x", bound, at_least)]


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
