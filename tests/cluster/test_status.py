"""`headwater status`: what its tables show."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from cluster.simulate.status import stand_in
from cluster.status import as_tables
from transfer.messages import Speeds, TierStats, TierStatus, WorkerStatus

COLUMNS = ["tiers", "host", "disk", "MB", "saved", "loaded", "read", "lost", "bad", "late", "state"]
ROW = ["124/125", "234", "99", "1234", "567", "89", "0", "0", "0", "ok"]
BLOCKS = dict.fromkeys(("total", "free", "cached", "pinned", "quarantined"), 1000)


def shown(statuses: list[WorkerStatus]) -> str:
    """On a terminal of 80 columns."""
    out = StringIO()
    Console(file=out, width=80).print(as_tables(statuses))
    return out.getvalue()


@pytest.mark.parametrize("form", ["exact", "int8", "fp8"])
def test_tiers_are_shown_with_their_format(form: str) -> None:
    """In full."""
    tiers = TierStatus(form, 125, 124, 234, 99_000_000, 3, False, 0, 0, TierStats(1234, 567, 89))
    workers = [
        replace(stand_in(name, "both", Speeds(), 1), blocks=BLOCKS, tiers=tiers) for name in ("prefill-0", "decode-0")
    ]
    lines = shown(workers).splitlines()
    head = next(number for number, line in enumerate(lines) if f"{form} tiers" in line)
    assert lines[head].split() == [form, *COLUMNS]
    assert [line.split() for line in lines[head + 2 : head + 4]] == [["prefill-0", *ROW], ["decode-0", *ROW]]
    assert "tiers" not in shown([replace(one, tiers=None) for one in workers])
