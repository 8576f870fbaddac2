"""How tables for people look."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table


def table(*columns: str) -> Table:
    """An empty table that fits a terminal of 80 columns, where its cells do."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for column in columns:
        made.add_column(column, no_wrap=column != "model", overflow="fold")
    return made
