"""A report's table as a PNG, with a bar for each check. Needs matplotlib (`pip install 'headwater[bench]'`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.bench.report import Check, Report
from cluster.errors import UserError

OK, MISSED, TARGET = "#2e7d32", "#c62828", "#444444"
ROW_INCHES = 0.34
WIDTH_INCHES = 13.0


def check_png(file: Path) -> None:
    """Raise UserError when the picture could not be drawn or written: before the measurements, which take long."""
    if find_spec("matplotlib") is None:
        raise UserError("--png needs matplotlib: pip install 'headwater[bench]'")
    if not file.parent.is_dir():
        raise UserError(f"--png {file}: no such directory")


def draw(report: Report, file: Path) -> None:
    """Write the picture: the table above, the checks below as value over bound on a logarithmic axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, checks = report.rows, report.checks
    heights = [len(rows) + 2, 1.5 * len(checks) + 1.5] if checks else [len(rows) + 2]
    figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * (sum(heights) + 2)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(f"headwater bench peers: {report.config.get('model', '')}")
    panels[0].axis("off")
    table = panels[0].table(
        cellText=[[name, *values] for name, values in rows],
        colLabels=["", *report.results],
        colWidths=[0.46, *([0.54 / len(report.results)] * len(report.results))],
        loc="center",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.4)
    for (_, column), cell in table.get_celld().items():
        if column == 0:
            cell.set_text_props(ha="left")
    if checks:
        _bars(panels[1], checks)
    figure.savefig(file, dpi=120)


def _bars(panel: Any, checks: list[Check]) -> None:
    """Bars that reach over the line keep their bound, whichever way it goes."""
    fractions = [margin(check) for check in checks]
    labels = [f"{check.name}\n{check.value:.3g} (bound {check.bound_text})" for check in checks]
    colours = [OK if check.ok else MISSED for check in checks]
    panel.barh(labels, fractions, color=colours, height=0.6)
    panel.axvline(1.0, color=TARGET, linewidth=1)
    panel.set_xscale("log", base=2)
    panel.invert_yaxis()
    panel.tick_params(axis="y", labelsize=8)
    panel.set_xlabel("times the bound (right of the line: kept)")


def margin(check: Check) -> float:
    """How many times better than its bound a check is; below 1 it is missed."""
    return check.value / check.bound if check.at_least else check.bound / check.value
