"""Hit rate against the 90 % quantile of the waiting time, a dot for each policy. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from cluster.bench.report import Report
from cluster.simulate.policies import HEADWATER, ORACLE

OURS, EXACT, OTHER = "#1565c0", "#90a4ae", "#c62828"
SIZE_INCHES = (9.0, 6.0)


def draw(report: Report, file: Path) -> None:
    """Write the picture; good is above and to the left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for name, figures in report.results.items():
        colour = {HEADWATER: OURS, ORACLE: EXACT}.get(name, OTHER)
        at = figures["p90"], 100 * figures["hit_rate"]
        panel.scatter(*at, color=colour)
        panel.annotate(name, at, textcoords="offset points", xytext=(7, 4), fontsize=9)
    panel.set_xlabel("seconds until a prompt is computed, 90 % quantile")
    panel.set_ylabel("blocks that did not have to be computed, %")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.margins(0.1)
    panel.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
