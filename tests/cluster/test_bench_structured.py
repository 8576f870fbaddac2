"""`headwater bench structured`: what it measures and what it makes of the figures."""

from pathlib import Path

import pytest

from cluster.bench.report import Figures
from cluster.bench.structured import BESIDE, CACHED, COMPILED, FREE, GUIDED, QUIET, TYPICAL, Shape, checks_of, run
from tests.cluster.conftest import settings

SHAPE = Shape(context=8, streams=2, steps=3, rounds=2)


def test_everything_is_measured(tiny: Path) -> None:
    report = run(settings(model__name=str(tiny), worker__kv_memory="4MiB", worker__threads=1), SHAPE)
    assert list(report.results) == [COMPILED, CACHED, FREE, GUIDED, QUIET, BESIDE]
    assert list(report.results[COMPILED]) == [f"{name}: ms" for name in TYPICAL]
    assert all(value > 0 for figures in report.results.values() for value in figures.values())
    for name, value in report.results[CACHED].items():
        assert value < report.results[COMPILED][name]
    assert len(report.checks) == 2


@pytest.mark.parametrize(
    ("side", "figure", "value"), [(GUIDED, SHAPE.step, 11.1), (BESIDE, "largest gap ms", 51.0)], ids=["step", "gap"]
)
def test_a_bound_that_is_missed(side: str, figure: str, value: float) -> None:
    results: dict[str, Figures] = {
        FREE: {SHAPE.step: 10.0},
        GUIDED: {SHAPE.step: 11.0},
        QUIET: {"median gap ms": 10.0},
        BESIDE: {"largest gap ms": 50.0},
    }
    assert all(check.ok for check in checks_of(results, SHAPE))
    results[side][figure] = value
    assert [check.ok for check in checks_of(results, SHAPE)].count(False) == 1
