"""A comparison as text that fits into a terminal of 80 columns: a row for each policy."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from cluster.bench.report import Report

WIDTH = 80
NAME_WIDTH = 13
COLUMNS = {
    "hit_rate": ("hit rate", "{:.4f}"),
    "mean": ("mean s", "{:.3f}"),
    "p50": ("p50 s", "{:.3f}"),
    "p90": ("p90 s", "{:.3f}"),
    "p99": ("p99 s", "{:.3f}"),
    "imbalance": ("imbalance", "{:.3f}"),
}
"""A figure's heading and form."""
COLUMN_WIDTH = 11


def table(report: Report, title: str) -> str:
    """The report for people; `title` says what was played."""
    return "\n".join(_lines(report, title))


def _lines(report: Report, title: str) -> Iterator[str]:
    # A flag and its value stay on one line.
    flags = title.replace(" ", "\xa0").replace(",\xa0", ", ")
    yield from (line.replace("\xa0", " ") for line in wrap(flags, WIDTH, break_on_hyphens=False))
    yield ""
    yield _row("", [heading for heading, _ in COLUMNS.values()])
    for name, figures in report.results.items():
        yield _row(name, [form.format(figures[figure]) for figure, (_, form) in COLUMNS.items()])
    if report.checks:
        yield ""
    for check in report.checks:
        yield f"{check.name}: {check.value:.3f} ({check.bound_text}) {'ok' if check.ok else 'missed'}"
    if report.notes:
        yield ""
    for note in report.notes:
        yield from wrap(note, WIDTH, subsequent_indent="  ")


def _row(name: str, cells: list[str]) -> str:
    return name.ljust(NAME_WIDTH) + "".join(cell.rjust(COLUMN_WIDTH) for cell in cells)
