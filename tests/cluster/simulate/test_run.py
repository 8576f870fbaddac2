"""Whole simulations of baselines: figures by hand, the reference figures, and that a run is a function of its seed."""

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from cluster.simulate.policies import BASELINES, NAMES, made
from cluster.simulate.run import DECODE_STEP_S, Outcome, Settings, simulate
from cluster.simulate.trace import read
from cluster.simulate.tune import first_quarter, tune
from tests.cluster.simulate.conftest import chats, request

ROUND_ROBIN = BASELINES["round-robin"].made({})
SMALL = Settings(workers=4, routers=2, capacity=60, rate=4000.0)


def test_figures_by_hand() -> None:
    trace = [request(0, 0, 1, 2), request(1, 0, 1, 2), request(2, 1, 1, 2, 3), request(3, 1, 9)]
    outcome = simulate(trace, Settings(workers=2, routers=1, capacity=10, rate=512), ROUND_ROBIN)
    assert outcome.workers.tolist() == [0, 1, 0, 1]
    assert outcome.seconds.tolist() == [2, 2, 2, 2]  # the third waits one second and lacks one block
    assert outcome.figures() == pytest.approx(
        {"hit_rate": 2 / 8, "mean": 2, "p50": 2, "p90": 2, "p99": 2, "imbalance": 1}
    )


def test_a_slow_worker_computes_at_its_share_of_the_rate() -> None:
    trace = [request(0, 0, 1), request(1, 0, 2)]
    outcome = simulate(trace, Settings(workers=2, routers=1, rate=512, slow={1: 0.25}), ROUND_ROBIN)
    assert outcome.seconds.tolist() == [1, 4]
    assert outcome.figures()["imbalance"] == pytest.approx(1.6)


def test_answers_keep_their_blocks_where_decoding_is_simulated() -> None:
    trace = [request(0, 0, 1, 2, 3, output=100), request(1, 2, 4, 5), request(2, 4, 1, 2, 3)]
    settings = Settings(workers=1, routers=1, capacity=4, rate=5120, decode=True)
    assert 2 < 0.3 + 100 * DECODE_STEP_S < 4  # the first answer ends between the others' arrivals
    assert simulate(trace, settings, ROUND_ROBIN).cached.tolist() == [0, 0, 3]
    assert simulate(trace, replace(settings, decode=False), ROUND_ROBIN).cached.tolist() == [0, 0, 2]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_a_function_of_its_seed(name: str) -> None:
    trace = chats(12, 8, seed=5)

    def run(seed: int) -> Outcome:
        return simulate(trace, replace(SMALL, seed=seed), made(name, {}))

    one, again, other = run(1), run(1), run(2)
    assert np.array_equal(one.workers, again.workers)
    assert np.array_equal(one.seconds, again.seconds)
    assert not np.array_equal(one.routers, other.routers)


def test_every_policy_gets_the_same_requests_at_the_same_routers() -> None:
    trace = chats(6, 4, seed=5)
    routers = [simulate(trace, SMALL, made(name, {})).routers.tolist() for name in BASELINES]
    assert all(one == routers[0] for one in routers)
    assert set(routers[0]) == {0, 1}


def test_tuning_takes_the_best_on_the_first_quarter() -> None:
    trace = chats(30, 6, seed=2, beginning=1)
    part = first_quarter(trace)
    assert 0 < len(part) < len(trace) / 2
    assert max(one.arrival for one in part) <= trace[-1].arrival / 4
    chwbl = BASELINES["chwbl"]
    tried: list[None] = []
    best, mean = tune(trace, SMALL, chwbl, lambda: tried.append(None))
    means = [simulate(part, SMALL, chwbl.made(constants)).seconds.mean() for constants in chwbl.choices]
    assert len(tried) == 12
    assert mean == min(means) < max(means)
    assert simulate(part, SMALL, chwbl.made(best)).seconds.mean() == mean


@pytest.mark.parametrize(
    ("raw", "policy", "within", "hit_rate", "mean", "p50", "p90", "p99"),
    [
        (True, "round-robin", 0.01, 0.0714, 2.92, 1.58, 7.93, 15.85),
        (False, "round-robin", 0.01, 0.0714, 2.89, 1.52, 7.89, 15.77),
        # Chance plays a part in this one: from seed to seed its figures differ by so much.
        (True, "two-choices", 0.03, 0.069, 1.91, 1.23, 4.36, 11.41),
    ],
)
def test_the_reference_figures(
    conversation: Path,
    raw: bool,
    policy: str,
    within: float,
    hit_rate: float,
    mean: float,
    p50: float,
    p90: float,
    p99: float,
) -> None:
    """An independent model of the same workers, on the same trace, gave these."""
    outcome = simulate(read(conversation, 2, raw), Settings(staleness_s=0.0), made(policy, {}))
    wanted = {"hit_rate": hit_rate, "mean": mean, "p50": p50, "p90": p90, "p99": p99}
    figures = outcome.figures()
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted, rel=within)


@pytest.mark.long
def test_an_unlimited_cache_has_the_traces_own_hit_rate(conversation: Path) -> None:
    """On one worker: 36.64 % of the references."""
    trace = read(conversation, 2)
    outcome = simulate(trace, Settings(workers=1, routers=1, capacity=300_000), ROUND_ROBIN)
    assert outcome.figures()["hit_rate"] == pytest.approx(0.3664, abs=5e-5)


def test_order_of_arrival_does_not_depend_on_chance() -> None:
    draw = Random(0)
    trace = [request(number, draw.random(), number) for number in range(20)]
    trace.sort(key=lambda one: one.arrival)
    outcome = simulate(trace, Settings(workers=2, routers=3), ROUND_ROBIN)
    assert outcome.workers.tolist() == [0, 1] * 10
