"""Headwater's real routers and gossip over simulated workers."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from cluster.simulate.gossiping import Gossiping
from cluster.simulate.headwater import Exact
from cluster.simulate.policies import BASELINES
from cluster.simulate.run import MakeRouters, Outcome, Settings, World, simulate
from cluster.simulate.trace import BLOCK_TOKENS, Request
from tests.cluster.simulate.conftest import chats, request

SMALL = Settings(workers=8, routers=4, capacity=400, rate=4000.0)


def played(trace: Sequence[Request], make: MakeRouters = Gossiping, **changed: object) -> Outcome:
    return simulate(trace, replace(SMALL, **changed), make)  # type: ignore[arg-type]


class Watched(Gossiping):
    """Remembers the last that was made."""

    last: Gossiping

    def __init__(self, world: World) -> None:
        super().__init__(world)
        Watched.last = self


def ceiling(trace: Sequence[Request]) -> float:
    """The hit rate of one unlimited cache."""
    seen: set[int] = set()
    hits = 0
    for one in trace:
        hits += len(seen & set(one.blocks))
        seen |= set(one.blocks)
    return hits / sum(len(one.blocks) for one in trace)


def test_turns_go_where_their_chat_is_whichever_router_they_come_to() -> None:
    trace = chats(40, 8, seed=1, rate=6.0, beginning=2)
    outcome = played(trace)
    assert outcome.hit_rate() > 0.9 * ceiling(trace)
    assert outcome.hit_rate() > 2 * played(trace, BASELINES["round-robin"].made({})).hit_rate()
    assert outcome.figures()["imbalance"] < 2


def test_every_router_ends_up_with_what_every_worker_has() -> None:
    trace = [*chats(30, 8, seed=2), request(240, 200.0, 10**6 + 1)]  # a quiet time, then one more
    last = played(trace, Watched, capacity=60, loss=0.1).workers[-1]
    summaries = Watched.last.summaries
    for replicas in Watched.last.replicas:
        for number, (name, summary) in enumerate(summaries.items()):
            if number != last:  # what the last request changed is still on its way
                assert replicas.state(name)[2] == summary.digest
    assert sum(len(summary) for summary in summaries.values()) > 200


def test_what_routers_count_as_under_way_ends_with_the_requests() -> None:
    trace = chats(20, 6, seed=3)
    played(trace, Watched, decode=True)
    for view in Watched.last.views:
        assert sum(worker.decodes + worker.computing for worker in view.workers.values()) == 0


def test_one_prompt_five_hundred_times_at_once() -> None:
    """No worker gets more than 1.3 times the mean, through one router or four."""
    blocks = range(1, 9)
    trace = [request(number, 0.0, *blocks) for number in range(500)]
    for routers in (1, 4):
        for make in (Gossiping, Exact):
            counts = np.bincount(played(trace, make, routers=routers).workers, minlength=8)
            assert counts.max() <= 1.3 * counts.mean(), (routers, make, counts)


def test_a_slow_worker_takes_nothing_from_the_others_hits() -> None:
    trace = chats(60, 10, seed=4, rate=5.0)
    even, uneven = played(trace), played(trace, slow={0: 0.25})
    assert (uneven.workers == 0).sum() < 0.7 * (even.workers == 0).sum()
    assert uneven.hit_rate(uneven.workers != 0) >= 0.98 * even.hit_rate(even.workers != 0)


def test_many_routers_with_old_news_do_not_herd() -> None:
    """Workers refuse what is too much for them, and what dispatches add to their queues is told at once."""
    trace = chats(60, 10, seed=5, rate=7.0, beginning=2)
    exact, stale = played(trace, Exact), played(trace, routers=16, staleness_s=1.0)
    assert stale.seconds.mean() < 1.25 * exact.seconds.mean()


def test_without_notices_workers_refuse() -> None:
    """The same requests at the same moment at several routers: only the workers can know."""

    class Mute(Gossiping):
        def announce(self, *_: object) -> None:
            pass

    draw = Random(6)
    trace = [request(n, n // 12 * 4.0, *range(n * 10, n * 10 + draw.randint(1, 8))) for n in range(120)]
    assert played(trace, Mute, routers=8).refusals > 0


def test_lost_datagrams_cost_little() -> None:
    traces = [chats(60, 10, seed=seed, rate=5.0, beginning=2) for seed in range(7, 11)]
    none, some = ([played(trace, loss=loss) for trace in traces] for loss in (0.0, 0.1))
    assert np.mean([one.hit_rate() for one in some]) > 0.98 * np.mean([one.hit_rate() for one in none])
    assert np.mean([one.seconds.mean() for one in some]) < 1.1 * np.mean([one.seconds.mean() for one in none])


def test_a_partition_heals() -> None:
    """Half of the routers hear no gossip for 30 s. From 5 s after it on, all is as it was without it."""
    trace = chats(100, 8, seed=8, rate=6.0, beginning=2)
    cut = {"cut_off": frozenset({0, 1}), "cut_from_s": 40.0, "cut_until_s": 70.0}
    whole, divided = played(trace), played(trace, **cut)
    after = whole.arrivals > 75.0
    assert after.sum() > 200
    assert divided.hit_rate(after) >= 0.98 * whole.hit_rate(after)
    during = (whole.arrivals > 45.0) & (whole.arrivals < 70.0)
    mine, others = (during & ((whole.routers < 2) == cut_off) for cut_off in (True, False))
    assert divided.hit_rate(mine) < 0.8 * whole.hit_rate(mine)  # it did matter
    assert divided.hit_rate(others) > 0.8 * whole.hit_rate(others)
    assert divided.seconds[during].max() < 10


def test_prefixes_are_copied_where_that_is_faster_than_computing() -> None:
    trace = chats(60, 10, seed=9, rate=7.0, beginning=6)
    copy = {"kv_bytes_per_token": 131_072, "block_copy_s": 0.0067}
    for make in (Gossiping, Exact):
        plain, copied = played(trace, make), played(trace, make, **copy)
        assert copied.hit_rate() > plain.hit_rate()
        assert copied.seconds.mean() < plain.seconds.mean()


def test_a_prompt_without_a_whole_block_is_served() -> None:
    trace = [Request(0, 0.0, 10, 0, ()), request(1, 0.5, 1), Request(2, 1.0, BLOCK_TOKENS - 1, 0, ())]
    assert (played(trace).seconds > 0).all()


def test_one_worker_and_one_router() -> None:
    trace = chats(3, 3, seed=1)
    assert played(trace, workers=1, routers=1).hit_rate() == pytest.approx(ceiling(trace))
