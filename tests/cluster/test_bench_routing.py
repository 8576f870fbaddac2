"""`headwater bench router`: what it measures and what it makes of the figures."""

import pytest

from cluster.bench.report import Figures
from cluster.bench.routing import Shape, checks_of, run

KEPT = {"decision_p50_us": 300.0, "decision_p99_us": 1000.0, "keys_p50_us": 400.0, "view_mbytes": 250.0}


def test_small_views_are_measured() -> None:
    report = run(Shape((2, 20), keys=200, prompt=512, decisions=20))
    assert list(report.results) == ["2 workers", "20 workers"]
    for figures in report.results.values():
        assert set(figures) == set(KEPT)
        assert 0 < figures["decision_p50_us"] <= figures["decision_p99_us"]
    assert report.checks == []


@pytest.mark.parametrize(
    ("view", "figure", "missed"),
    [
        ("100 workers", "decision_p50_us", "decision, 100 workers, median"),
        ("100 workers", "decision_p99_us", "decision, 100 workers, p99"),
        ("100 workers", "keys_p50_us", "keys of a prompt"),
        ("1000 workers", "decision_p50_us", "decision, 1000 workers, median"),
        ("1000 workers", "view_mbytes", "view of 1000 workers"),
    ],
)
def test_a_bound_that_is_missed(view: str, figure: str, missed: str) -> None:
    results: dict[str, Figures] = {"100 workers": dict(KEPT), "1000 workers": dict(KEPT)}
    assert all(check.ok for check in checks_of(results))
    results[view][figure] = 1501.0
    assert [check.name for check in checks_of(results) if not check.ok] == [missed]
