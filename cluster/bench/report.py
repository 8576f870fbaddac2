"""What every benchmark prints: one object of `config`, `machine`, `results` and `checks`, or a table of the same."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


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


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark; `results` maps a side's name to its figures."""

    config: dict[str, Any]
    results: dict[str, dict[str, float]]
    checks: list[Check]

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        checks = [{**asdict(check), "ok": check.ok} for check in self.checks]
        for check in checks:
            check["bound"] = f"{'>=' if check.pop('at_least') else '<='} {check['bound']:g}"
        return {"config": self.config, "machine": machine(), "results": self.results, "checks": checks}

    def show(self, as_json: bool) -> None:
        """Print the report on standard output."""
        console = Console()
        if as_json:
            console.out(json.dumps(self.as_dict(), indent=2), highlight=False)
            return
        figures = Table(title=" ".join(f"{key}={value}" for key, value in self.config.items()))
        figures.add_column("")
        for side in self.results:
            figures.add_column(side, justify="right")
        for name in next(iter(self.results.values())):
            figures.add_row(name, *(f"{side[name]:.4g}" for side in self.results.values()))
        console.print(figures)
        for check in self.checks:
            sign, mark = (">=" if check.at_least else "<="), ("[green]ok[/]" if check.ok else "[red]missed[/]")
            console.print(f"{check.name}: {check.value:.4g} {check.unit} (bound {sign} {check.bound:g}) {mark}")


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
