"""Hit rate against the 90 % quantile of the waiting time, a dot for each policy. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster.bench.report import Figures, Report
from cluster.simulate.policies import HEADWATER, ORACLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

OURS, EXACT, OTHER = "#1565c0", "#90a4ae", "#c62828"
SIZE_INCHES = (9.0, 6.0)
SAME = 0.01
"""Dots so close, as a share of the axes, have one label."""
SIDES: tuple[tuple[Literal["left", "right"], int], ...] = (("left", 7), ("right", -7))
RISES = (4, -12, 16, -24, 28, -36, 40, -48, 52)
"""Where a label may be, in points from its dot; the first place that is free is taken."""


def draw(report: Report, file: Path) -> None:
    """Write the picture; good is above and to the left."""
    picture(report.results).savefig(file, dpi=120)


def picture(results: dict[str, Figures]) -> Figure:
    """A dot for each policy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    dots = {name: (figures["p90"], 100 * figures["hit_rate"]) for name, figures in results.items()}
    for name, dot in dots.items():
        panel.scatter(*dot, color={HEADWATER: OURS, ORACLE: EXACT}.get(name, OTHER))
    panel.set_xlabel("seconds until a prompt is computed, 90 % quantile")
    panel.set_ylabel("blocks that did not have to be computed, %")
    right, top = (1.15 * max(values) or 1.0 for values in zip(*dots.values(), strict=True))
    panel.set_xlim(0, right)
    panel.set_ylim(0, top)
    panel.grid(alpha=0.3)
    figure.draw_without_rendering()  # places of texts are known from here on
    labels: list[Annotation] = []
    for dot, names in _merged(dots, right, top).items():
        text = ", ".join(names)
        label = panel.annotate(text, dot, (0, 0), textcoords="offset points", fontsize=9, annotation_clip=False)
        _place(label, labels)
        labels.append(label)
    return figure


def _merged(dots: dict[str, tuple[float, float]], right: float, top: float) -> dict[tuple[float, float], list[str]]:
    """Names by dot; those of dots that all but coincide are together."""
    merged: dict[tuple[float, float], list[str]] = {}
    for name, (x, y) in dots.items():
        near = (dot for dot in merged if abs(dot[0] - x) <= SAME * right and abs(dot[1] - y) <= SAME * top)
        merged.setdefault(next(near, (x, y)), []).append(name)
    return merged


def _place(label: Annotation, others: list[Annotation]) -> None:
    """Where it covers no other label and stays within the axes."""
    assert label.axes is not None
    inside = label.axes.get_window_extent()
    taken = [other.get_window_extent() for other in others]
    for rise in RISES:
        for side, shift in SIDES:
            label.set_horizontalalignment(side)
            label.xyann = (shift, rise)
            box = label.get_window_extent()
            fits = inside.containsx(box.x0) and inside.containsx(box.x1)
            fits = fits and inside.containsy(box.y0) and inside.containsy(box.y1)
            if fits and not any(box.overlaps(one) for one in taken):
                return
