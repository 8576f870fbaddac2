"""Headwater's real routers and gossip over simulated workers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from cluster.simulate.engine import Engine, Job
from cluster.simulate.gossiping import Gossiping
from cluster.simulate.headwater import Exact
from cluster.simulate.loop import Loop
from cluster.simulate.policies import BASELINES, PEERS, POLICIES, made
from cluster.simulate.run import MakeRouters, Outcome, Settings, World, simulate
from cluster.simulate.trace import BLOCK_TOKENS, Request, read
from cluster.simulate.tune import tune
from tests.cluster.simulate.conftest import chats, request, talks
from transfer.messages import Source

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


@pytest.mark.long
def test_a_slow_worker_takes_nothing_from_the_others_hits() -> None:
    trace = chats(60, 10, seed=4, rate=5.0)
    even, uneven = played(trace), played(trace, slow={0: 0.25})
    assert (uneven.workers == 0).sum() < 0.7 * (even.workers == 0).sum()
    assert uneven.hit_rate(uneven.workers != 0) >= 0.98 * even.hit_rate(even.workers != 0)


def test_without_notices_workers_refuse() -> None:
    """The same requests at the same moment at several routers: only the workers can know."""

    class Mute(Gossiping):
        def announce(self, *_: object) -> None:
            pass

    draw = Random(6)
    trace = [request(n, n // 12 * 4.0, *range(n * 10, n * 10 + draw.randint(1, 8))) for n in range(120)]
    assert played(trace, Mute, routers=8).refusals > 0


def test_where_nobody_else_is_able_one_that_refused_takes_it() -> None:
    """Three workers that are busy and, because datagrams are lost, silent at times."""
    draw = Random(16)
    times = sorted(burst * 0.25 + draw.random() * 0.002 for burst in range(60) for _ in range(draw.randint(1, 10)))
    trace = [request(n, at, *range(n * 10, n * 10 + draw.randint(1, 8))) for n, at in enumerate(times)]
    outcome = played(trace, workers=3, routers=8, rate=24_000.0, loss=0.9)
    assert outcome.refusals > 0
    assert (outcome.seconds > 0).all()


def test_a_router_hears_of_what_was_not_there_with_the_first_token_and_of_the_worker_that_lacked_it() -> None:
    """Which is the one that it was to be copied from."""
    lacked: list[tuple[float, str, int]] = []

    class Told(Gossiping):
        def __init__(self, world: World) -> None:
            super().__init__(world)
            loop = world.loop
            for router in self.routers:
                router.lacks = lambda name, _, cached: lacked.append((loop.now, name, cached))  # type: ignore[method-assign]

    asked, settings = request(0, 0.0, 1, 2, 3, 4), replace(SMALL, workers=2, block_copy_s=0.001, kv_bytes_per_token=100)
    loop = Loop()
    engines = [Engine(f"w{number}", settings.rate, 100, loop.clock) for number in range(2)]
    routers = Told(World(settings, engines, loop, Random(1)))
    choice = routers.choose(0, asked, frozenset(), False)
    plan = routers._asked[0].plan
    other = "w1" if plan.prefill == "w0" else "w0"
    routers._asked[0].plan = replace(plan, cached=3 * BLOCK_TOKENS, fetch=Source(other, 3 * BLOCK_TOKENS))
    job = engines[choice.worker].accept(asked)
    routers.placed(0, asked, choice.worker, job)
    assert not lacked
    loop.now = job.end
    routers.computed(0, asked, choice.worker, job)
    assert lacked == [(job.end, other, 0)]


def test_nothing_is_old_where_staleness_is_0() -> None:
    """All routers know all at the moment it happens."""
    behind = []

    class Compared(Gossiping):
        def placed(self, router: int, request: Request, worker: int, job: Job) -> None:
            super().placed(router, request, worker, job)
            # Whatever happens at one moment happens in the order it was planned in.
            self._world.loop.after(1e-9, self._compare, self._world.engines[worker].name)

        def _compare(self, worker: str) -> None:
            if self._world.loop.now > 5:
                digest = self.summaries[worker].digest
                behind.append(sum(replicas.state(worker)[2] != digest for replicas in self.replicas))

    played(talks(15.0, 6.0, seed=1), Compared, staleness_s=0.0)
    assert len(behind) > 50
    assert not any(behind)


# --- what old news, loss and many routers cost, averaged over seeds ---------------------------------------------------

SEEDS = range(1, 4)
MORE_SEEDS = range(1, 9)
"""Where chance makes more of a difference, up to 6 % either way on one seed, than what is to be seen."""


@cache
def averaged(seeds: range = SEEDS, **changed: object) -> float:
    """Mean time."""
    settings = {"workers": 6, "rate": 16_000.0, **changed}
    return float(np.mean([played(talks(40.0, 12.0, seed), **settings).seconds.mean() for seed in seeds]))


@pytest.mark.long
def test_sixteen_routers_cost_little_beside_one() -> None:
    assert averaged(routers=16) <= 1.03 * averaged(routers=1)


def test_news_of_a_second_ago_cost_little_beside_instant_ones() -> None:
    assert averaged(staleness_s=1.0) <= 1.06 * averaged(staleness_s=0.0)


@pytest.mark.long
def test_lost_datagrams_cost_little() -> None:
    assert averaged(MORE_SEEDS, loss=0.1) <= 1.02 * averaged(MORE_SEEDS)


@pytest.mark.long
def test_a_partition_heals() -> None:
    """Half of the routers hear no gossip for 30 s. From 5 s after it on, all is as it was without it."""
    cut = {"cut_off": frozenset({0, 1}), "cut_from_s": 10.0, "cut_until_s": 40.0}
    means: list[tuple[float, float]] = []
    for seed in SEEDS:
        trace = talks(70.0, 12.0, seed)
        whole, divided = (played(trace, workers=6, rate=16_000.0, **more) for more in ({}, cut))
        after = whole.arrivals > 45.0
        assert after.sum() > 200
        means.append((whole.seconds[after].mean(), divided.seconds[after].mean()))
        during = (whole.arrivals > 15.0) & (whole.arrivals < 40.0)
        mine, others = (during & ((whole.routers < 2) == cut_off) for cut_off in (True, False))
        assert divided.hit_rate(mine) < 0.8 * whole.hit_rate(mine)  # it did matter
        assert divided.hit_rate(others) > 0.8 * whole.hit_rate(others)
        assert divided.seconds[during].max() < 10
    undivided, healed = np.mean(means, axis=0)
    assert healed <= 1.02 * undivided


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_conversation_trace(conversation: Path) -> None:
    """Bounds on every figure, on what old news, loss and many routers cost, and beside other routers' rules."""
    trace = read(conversation, 2)

    def run(**changed: object) -> Outcome:
        return simulate(trace, replace(Settings(), **changed), Gossiping)  # type: ignore[arg-type]

    plain = run()
    figures, mean = plain.figures(), plain.seconds.mean()
    assert figures["hit_rate"] >= 0.30
    assert figures["mean"] <= 1.13
    assert figures["p90"] <= 2.8
    assert figures["p99"] <= 9.6
    peers = {}
    for name in PEERS:
        constants, _ = tune(trace, Settings(), POLICIES[name])
        peers[name] = simulate(trace, Settings(), made(name, constants)).seconds.mean()
    assert mean <= 0.9 * min(peers.values()), peers
    copied = run(block_copy_s=BLOCK_TOKENS * 131_072 / 1e10, kv_bytes_per_token=131_072).figures()
    assert copied["mean"] <= 1.05
    assert copied["hit_rate"] >= 0.32
    assert run(routers=16).seconds.mean() <= 1.03 * run(routers=1).seconds.mean()
    assert run(staleness_s=1.0).seconds.mean() <= 1.06 * run(staleness_s=0.0).seconds.mean()
    assert run(loss=0.1).seconds.mean() <= 1.02 * mean
    divided = run(cut_off=frozenset({0, 1}), cut_from_s=600.0, cut_until_s=630.0)
    after = plain.arrivals > 635.0
    assert divided.seconds[after].mean() <= 1.02 * plain.seconds[after].mean()


@pytest.mark.long
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
