"""`headwater bench gateway`: a real gateway over recorded tokens, and what is made of the figures."""

import pytest

from cluster.bench.gateway import FIRST_MS, GROWN_MB, HELD_MB, MANY, MEMORY, ONE, TOKENS_S, Shape, checks_of, run
from cluster.bench.report import Figures
from tests.cluster.conftest import settings


@pytest.mark.long
def test_a_gateway_is_measured() -> None:
    report = run(settings(), Shape(streams=10, tokens=50, firsts=10, requests=250))
    assert {side: set(figures) for side, figures in report.results.items()} == {
        ONE: {FIRST_MS},
        MANY: {FIRST_MS, TOKENS_S},
        MEMORY: {HELD_MB, GROWN_MB},
    }
    assert 0 < report.results[ONE][FIRST_MS] < 1000
    assert report.results[MANY][TOKENS_S] > 400
    assert report.results[MEMORY][GROWN_MB] < 50


@pytest.mark.long
def test_the_gateway_keeps_its_bounds() -> None:
    report = run(settings(), Shape(streams=100, tokens=400, firsts=300, requests=20_000))
    assert report.ok, report.checks


@pytest.mark.parametrize(
    ("side", "figure", "value", "missed"),
    [
        (MANY, TOKENS_S, 3999.0, "streamed"),
        (ONE, FIRST_MS, 5.1, "added to the first token of one stream"),
        (MANY, FIRST_MS, 25.1, "added to the first token beside other streams"),
        (MEMORY, GROWN_MB, 10.1, "memory gained from the second to the last fifth"),
    ],
)
def test_a_bound_that_is_missed(side: str, figure: str, value: float, missed: str) -> None:
    results: dict[str, Figures] = {
        ONE: {FIRST_MS: 5.0},
        MANY: {FIRST_MS: 25.0, TOKENS_S: 4000.0},
        MEMORY: {HELD_MB: 500.0, GROWN_MB: 10.0},
    }
    assert all(check.ok for check in checks_of(results))
    results[side][figure] = value
    assert [check.name for check in checks_of(results) if not check.ok] == [missed]
    del results[MEMORY]
    assert len(checks_of(results)) == 3
