"""A report's table as a PNG, with a bar for each check. Needs matplotlib (`pip install 'headwater[bench]'`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.bench.report import Check, Report
from cluster.errors import UserError

OK, MISSED, BOUND = "#2e7d32", "#c62828", "#444444"
ROW_INCHES = 0.34
WIDTH_INCHES = 13.0


def check_png(file: Path) -> None:
    """Raise UserError when the picture could not be drawn or written: before the measurements, which take long."""
    if find_spec("matplotlib") is None:
        raise UserError("--png needs matplotlib: pip install 'headwater[bench]'")
    if not file.parent.is_dir():
        raise UserError(f"--png {file}: no such directory")


def draw(report: Report, file: Path) -> None:
    """Write the picture: the table above, the checks below as multiples of their bounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, checks = report.rows, report.checks
    heights = [len(rows) + 3.0, 1.5 * len(checks) + 2] if checks else [len(rows) + 3.0]
    figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * (sum(heights) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(" ".join(f"{key}={value}" for key, value in report.config.items()), fontsize=9, wrap=True)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _table(parts[0].subplots(), list(report.results), rows)
    if checks:
        _bars(parts[1].subplots(), checks)
    figure.savefig(file, dpi=120)


def _table(panel: Any, sides: list[str], rows: list[tuple[str, list[str]]]) -> None:
    panel.axis("off")
    table = panel.table(
        cellText=[[name, *values] for name, values in rows],
        colLabels=["", *(side.replace(" / ", "\n/ ") for side in sides)],
        colWidths=[0.46, *([0.54 / len(sides)] * len(sides))],
        bbox=(0, 0, 1, 1),
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for row in range(1, len(rows) + 1):
        table[row, 0].set_text_props(ha="left")
        table[row, 0].PAD = 0.02


def _bars(panel: Any, checks: list[Check]) -> None:
    """Bars that reach over the line keep their bound, whichever way it goes."""
    labels = [f"{check.name}\n{check.value:.3g} (bound {check.bound_text})" for check in checks]
    colours = [OK if check.ok else MISSED for check in checks]
    panel.barh(labels, [margin(check) for check in checks], color=colours, height=0.6)
    panel.axvline(1.0, color=BOUND, linewidth=1)
    panel.invert_yaxis()
    panel.tick_params(axis="y", labelsize=8)
    panel.set_xlabel("times as good as the bound")


def margin(check: Check) -> float:
    """How many times better than its bound a check is; below 1 it is missed."""
    return check.value / check.bound if check.at_least else check.bound / check.value
