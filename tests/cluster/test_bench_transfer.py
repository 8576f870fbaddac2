"""`headwater bench transfer`: what it measures and what it makes of the figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.bench.load import Timing
from cluster.bench.transfer import channel
from cluster.bench.transfer.channel import CHANNEL, MBYTES_S, MS, PACED_MS, RAW, TAIL_MS, UNCHECKED
from cluster.bench.transfer.run import (
    BOTH_ROLES,
    DISTURBED,
    FIRST,
    GAP,
    HANDING,
    HIDDEN,
    PAIR,
    PINNED,
    QUIET,
    SECOND,
    SECOND_TURN,
    Shape,
    checks_of,
    gaps,
)
from transfer.layout import KVLayout, LayerGeometry

SHAPE = Shape(2048, 16, (16, 64), (0.0, 1.0), 8, 4000, 1)
GRID = ("16 tokens, 0% cached: s", "16 tokens, 100% cached: s", "64 tokens, 0% cached: s", "64 tokens, 100% cached: s")


def test_the_channel_is_measured_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "PACE_S", 0.05)
    layout = KVLayout("model", "bfloat16", 16, (LayerGeometry(3, 64, 64),) * 8, 64)
    figures = channel.measure(layout, 32, rounds=1)
    assert list(figures) == [RAW, CHANNEL, UNCHECKED]
    size = 32 * layout.block_bytes
    for side in figures.values():
        assert side[MBYTES_S] == pytest.approx(size / side[MS] / 1000)
        assert 0 < side[MS] < 1000
    for side in (figures[CHANNEL], figures[UNCHECKED]):
        assert 138 < side[PACED_MS] < 5000
        assert 0 < side[TAIL_MS] < side[PACED_MS] - 120


def timing(*at: float) -> Timing:
    return Timing(0.0, 0.0, 1, 0, len(at), (), at)


def test_gaps_are_told_apart_by_what_else_runs() -> None:
    one, other = timing(0.0, 1.0, 2.0, 3.5, 9.0, 10.0), timing(0.5, 1.5, 2.5, 4.0, 9.5)
    quiet, disturbed = gaps([one, other], sent=3.0, computed=9.2)
    assert quiet == [1.0, 1.0, 1.0]
    assert disturbed == [1.5, 5.5, 1.0, 1.5, 5.5]


def results(**changes: float) -> dict[str, dict[str, float]]:
    """Figures that keep every bound by little."""
    at = {
        "channel": 85.0,
        "hidden": 0.9,
        "first": 1.05,
        "second": 0.0499,
        "sent": 5.0,
        "grid": 1.049,
        "worst": 1.049,
        "gap": 0.0299,
        "ms": 1.029,
    }
    at |= changes
    return {
        RAW: {MBYTES_S: 100.0},
        CHANNEL: {MBYTES_S: at["channel"], PACED_MS: at["ms"]},
        UNCHECKED: {PACED_MS: 1.0},
        PAIR: {
            FIRST: at["first"],
            SECOND: at["second"],
            GAP: 0.02,
            HIDDEN: at["hidden"],
            **dict.fromkeys(GRID, at["grid"]),
            GRID[0]: at["worst"],
        },
        BOTH_ROLES: {FIRST: 1.0, **dict.fromkeys(GRID, 1.0)},
        HANDING: {SECOND_TURN: at["sent"]},
        PINNED: {QUIET: 0.02, DISTURBED: at["gap"]},
    }


def test_figures_that_keep_every_bound() -> None:
    checks = checks_of(results(), SHAPE, block_size=16)
    assert len(checks) == 9
    assert [check.name for check in checks if not check.ok] == []


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"channel": 84.0}, "bandwidth against NIXL alone"),
        ({"hidden": 0.89}, "bytes on their way before the prompt is computed"),
        ({"first": 1.06}, "first token against both roles"),
        ({"second": 0.051}, "second token beyond 1.5 gaps"),
        ({"sent": 6.0}, "second turn: blocks sent by P"),
        ({"grid": 1.06}, "grid: time against both roles, mean"),
        ({"worst": 1.21, "grid": 0.9}, "grid: time against both roles, worst"),
        ({"gap": 0.031}, "p99 gap beside a prefill, a core each"),
        ({"ms": 1.031}, "what checks add to a transfer behind computation"),
    ],
)
def test_a_bound_that_is_missed(changes: dict[str, float], missed: str) -> None:
    checks = checks_of(results(**changes), SHAPE, block_size=16)
    assert [check.name for check in checks if not check.ok] == [missed]


@pytest.mark.long
def test_the_command(tiny: Path) -> None:
    sizes = ["--prompt", "900", "--output", "4", "--length", "20", "--share", "0.5", "--long", "900", "--rounds", "1"]
    command = [sys.executable, "-m", "cluster.cli", "bench", "transfer", "--model", str(tiny), "--dtype", "float32"]
    ran = subprocess.run([*command, "--json", *sizes], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert {PAIR, HANDING, BOTH_ROLES, RAW, CHANNEL, UNCHECKED} <= set(report["results"])
    assert {check["name"] for check in report["checks"]} >= {"first token against both roles"}
