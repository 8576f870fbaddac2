"""What a router believes of workers: from their summaries, from other routers' notices, from its own dispatches."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from router.config import RouterConfig
from router.route import NoWorkers, Router
from router.view import ALIKE, NOTICE_S, REFRESH_S, UNTRIED_S, Ladder, View
from tests.router.test_route import BLOCK, LONG, chain, report
from transfer.gossip.frames import Notice
from transfer.gossip.ladder import checkpoints
from transfer.gossip.replicas import Replicas
from transfer.gossip.summary import Load, Summary
from transfer.messages import Plan

SPEED = 1000.0
SILENT_S = 1.0


class House:
    """A router, its view, and the summaries of the workers that it hears of."""

    def __init__(self, prefill: int = 3, decode: int = 1, name: str = "r0", **settings: float) -> None:
        self.now = 100.0
        self.replicas = Replicas(1000)
        workers = [(f"p{number}", "prefill") for number in range(prefill)]
        workers += [(f"d{number}", "decode") for number in range(decode)]
        self.view = View(workers, lambda: self.now, self.replicas, SILENT_S)
        config = RouterConfig(**{"local_tokens": 0, **settings})
        self.router = Router(self.view, config, name)
        self.summaries = {name: Summary(name, 1, 1000) for name, _ in workers}
        self.loads = {name: Load(prompt_tokens_s=SPEED, free_blocks=10_000) for name, _ in workers}
        self.hear(*self.summaries)

    def hear(self, *names: str, **load: object) -> None:
        """Updates of some workers arrive."""
        for name in names:
            if load:
                self.loads[name] = Load(**{"prompt_tokens_s": SPEED, "free_blocks": 10_000, **load})  # type: ignore[arg-type]
            self.replicas.apply(self.summaries[name].update(self.loads[name]), self.now)
        self.view._refreshed = -1.0

    def holds(self, name: str, tokens: list[int]) -> None:
        """A worker publishes that it has a prompt."""
        keys = chain(tokens).numbers(checkpoints(len(tokens) // BLOCK, BLOCK))
        for key in keys.tolist():
            self.summaries[name].add(key)
        self.hear(name)

    def plan(self, tokens: list[int], avoid: Iterable[str] = ()) -> Plan:
        return self.router.plan(chain(tokens), len(tokens), True, frozenset(avoid))

    def send(self, tokens: list[int]) -> Plan:
        plan = self.plan(tokens)
        self.router.dispatch(plan, chain(tokens), len(tokens))
        return plan


def told(number: int, worker: str = "p0", tokens: int = 500, decode: str = "", keys: bytes = b"") -> Notice:
    return Notice("r1", worker, number, tokens, tokens, decode, keys)


def test_a_prompt_goes_where_the_summary_says_its_prefix_is() -> None:
    house = House(prefill=8)
    for holder in ("p1", "p6"):
        prompt = [ord(holder[1])] * 1500
        house.holds(holder, prompt)
        plan = house.plan([*prompt, *range(100)])
        assert (plan.prefill, plan.cached) == (holder, 1280)


def test_of_many_workers_those_that_hold_the_prefix_are_candidates() -> None:
    house = House(prefill=60)
    house.holds("p57", LONG)
    plan = house.plan(LONG)
    assert plan.prefill == "p57"
    assert plan.why["candidates"] < 20
    # With nobody that holds it, homes and two at random are looked at.
    assert house.plan(LONG[::-1]).why["candidates"] in (5, 6)


def test_a_queue_is_what_was_reported_less_what_is_computed_since_and_what_was_sent() -> None:
    house = House()
    house.hear("p0", queued_tokens=3000)
    worker = house.view.workers["p0"]
    house.view.able("prefill")
    assert worker.queue(house.now) == 3000
    assert worker.queue(house.now + 1.0) == 2000
    assert worker.queue(house.now + 9.0) == 0
    house.view.notice(told(1))
    assert worker.queue(house.now) == 3500
    house.hear("p0", queued_tokens=3400, accepted=(("r1", 1),))
    house.view.able("prefill")
    assert worker.queue(house.now) == 3400


def test_what_this_router_sent_counts_until_the_worker_reports_it() -> None:
    house = House(prefill=1)
    house.send(LONG)
    worker = house.view.workers["p0"]
    assert (worker.queue(house.now), worker.in_flight) == (2000, 1)
    house.hear("p0", queued_tokens=1900, accepted=(("r0", 1),))
    house.view.able("prefill")
    assert (worker.queue(house.now), worker.in_flight) == (1900, 1)


def test_a_busy_answer_has_in_it_what_was_sent_before() -> None:
    house = House(prefill=1)
    house.send(LONG)
    house.send(LONG[::-1])
    house.view.queue_is("p0", 3000, "r0", 1)
    assert house.view.workers["p0"].queue(house.now) == 3000 + 2000


def test_a_notice_that_is_never_reported_is_forgotten() -> None:
    house = House()
    house.view.notice(told(1))
    house.now += NOTICE_S
    house.view.able("prefill")
    assert house.view.workers["p0"].queue(house.now) == 0
    assert house.view.workers["p0"].in_flight == 0


def test_another_life_remembers_nothing() -> None:
    house = House()
    house.holds("p0", LONG)
    house.view.able("prefill")
    house.view.notice(told(7))
    house.summaries["p0"] = Summary("p0", 2, 1000)
    house.hear("p0", queued_tokens=0)
    house.view.able("prefill")
    worker = house.view.workers["p0"]
    assert worker.queue(house.now) == 0
    assert house.view.holdings(Ladder.of(chain(LONG))).soon("p0").total == 0
    house.view.notice(told(1))  # its numbers begin anew
    assert worker.queue(house.now) == 500


def test_an_answer_of_another_life_is_told_apart() -> None:
    house = House()
    report(house.view, "p0", incarnation=1)
    house.view.able("prefill")
    assert not house.view.update(house.view.workers["p0"].status)  # type: ignore[arg-type]
    house.view.notice(told(7))
    # Most often the summary of the new life is there first.
    house.summaries["p0"] = Summary("p0", 2, 1000)
    house.hear("p0", queued_tokens=0)
    house.view.able("prefill")
    assert house.view.update(replace(house.view.workers["p0"].status, incarnation=2))  # type: ignore[type-var]
    assert house.view.workers["p0"].queue(house.now) == 0


def test_a_silent_worker_gets_nothing_unless_all_are_or_the_others_are_avoided() -> None:
    house = House()
    house.now += SILENT_S - 0.1
    house.hear("p1", "d0")
    house.now += 0.2
    assert set(house.view.able("prefill").workers) == {"p1"}
    assert house.plan(LONG).prefill == "p1"
    assert house.plan(LONG, avoid=["p1"]).prefill in ("p0", "p2")
    with pytest.raises(NoWorkers):
        house.plan(LONG, avoid=["p0", "p1", "p2"])
    house.now += SILENT_S
    house.view._refreshed = -1.0
    assert set(house.view.able("prefill").workers) == {"p0", "p1", "p2"}


def test_a_worker_that_was_never_heard_gets_nothing_while_others_are() -> None:
    house = House()
    house.replicas.forget("p2")
    house.view.workers["p2"].heard = None
    house.view._refreshed = -1.0
    assert set(house.view.able("prefill").workers) == {"p0", "p1"}


def test_nothing_is_fetched_from_the_silent() -> None:
    house = House(prefill=2)
    for name in house.view.workers:
        report(house.view, name)
    house.holds("d0", LONG)
    plan = house.plan([*LONG, 7])
    assert plan.fetch is not None
    house.now += SILENT_S
    house.hear("p0", "p1")
    assert house.plan([*LONG, 7]).fetch is None


def test_speeds_that_are_alike_are_equal_and_others_are_not() -> None:
    house = House(prefill=4)
    for name, speed in (("p0", 900.0), ("p1", 1000.0), ("p2", 1000.0 / ALIKE - 1), ("p3", 1000.0 * ALIKE - 1)):
        house.hear(name, prompt_tokens_s=speed)
    house.hear("d0", prompt_tokens_s=0.0)
    for worker in house.view.workers.values():
        worker.assign(1, house.now)
    house.view.able("prefill")
    speeds = {name: worker.prompt_tokens_s for name, worker in house.view.workers.items()}
    typical = speeds["p1"]
    assert speeds["p0"] == speeds["p1"] == speeds["d0"] == typical
    assert speeds["p3"] == 1000.0 * ALIKE - 1
    house.now += UNTRIED_S + 1
    house.hear(*house.summaries)
    house.view.able("prefill")
    assert house.view.workers["p3"].prompt_tokens_s == typical


def test_answers_are_counted_by_report_and_since_by_all_routers() -> None:
    house = House(decode=2)
    house.hear("d0", running=10)
    house.hear("d1", running=9)
    for number in range(20):
        house.send([number] * 100)
        house.view.notice(told(number + 1, decode="d1"))
    answering = {name: house.view.workers[name].answering for name in ("d0", "d1")}
    assert abs(answering["d0"] - answering["d1"]) <= 1
    assert sum(answering.values()) == 19 + 40


def test_promises_that_are_never_reported_are_forgotten() -> None:
    house = House()
    for number in range(10):
        house.view.notice(told(number + 1, decode="d0"))
    worker = house.view.workers["d0"]
    assert (worker.answering, worker.promised_tokens) == (10, 5000)
    house.now += NOTICE_S
    house.view.able("decode")
    assert (worker.answering, worker.promised_tokens) == (0, 0)


def test_what_was_not_computed_leaves_no_debt() -> None:
    """It had decayed: taken away whole, the worker would count as the one that had least to do, for all prompts."""
    house = House(prefill=4)
    plan = house.plan(LONG)
    other = house.router.dispatch(plan, chain([1] * 500), 500)
    ticket = house.router.dispatch(plan, chain(LONG), len(LONG))
    house.now += 30.0
    house.hear(*house.summaries)
    ticket.close()
    worker = house.view.workers[plan.prefill]
    assert worker.assigned_lately(house.now) == pytest.approx(250 * 500 / 500)
    other.close()
    assert worker.assigned_lately(house.now) == pytest.approx(0)
    assert len({house.plan([seed] * 200).prefill for seed in range(30)}) == 4


def test_a_decode_worker_without_blocks_or_without_a_place_comes_last() -> None:
    house = House(decode=3)
    house.holds("d0", LONG)
    house.hear("d0", free_blocks=0)
    house.holds("d1", LONG)
    assert house.plan(LONG).decode == "d1"
    house.view.full("d1")
    assert house.plan(LONG * 2).decode == "d2"
    house.now += 1.0
    house.hear("p0", "d0", "d1", "d2")
    house.hear("d1", free_blocks=10_000)
    assert house.plan(LONG).decode == "d1"
    house.hear("d1", free_blocks=3)
    assert house.plan(LONG * 2).decode == "d2"


def test_a_prompt_that_is_hot_at_other_routers_has_several_homes() -> None:
    house = House(prefill=4)
    prompt = [3] * 200
    keys = b"".join(Ladder.of(chain(prompt)).keys)
    assert house.plan(prompt).why["homes"] == 1
    for number in range(1, 60):
        house.router.notice(told(number, "p0", 200, keys=keys))
        house.view.workers["p0"].noticed.arrived("r1", number)
    plan = house.plan(prompt)
    assert plan.why["homes"] > 1
    assert plan.prefill != "p0"  # which had all of them


def test_what_everybody_begins_with_draws_nobody_to_those_that_have_it() -> None:
    """New chats go to their own homes, though only one worker has computed the long system prompt so far."""
    house = House(prefill=4)
    system = list(range(1000, 2000))
    house.holds("p0", system)
    for number in range(40):
        plan = house.plan([*system, *[number] * 200])
        house.router.dispatch(plan, chain([*system, *[number] * 200]), 1200).computed()
        house.now += 0.2
        house.hear(*house.summaries)
    shares = {name: worker.assigned_lately(house.now) for name, worker in house.view.workers.items()}
    assert min(shares[f"p{number}"] for number in range(4)) > 0


def test_a_home_that_had_to_compute_more_than_its_share_is_passed_over() -> None:
    house = House(prefill=4)
    home = house.plan(LONG).prefill
    house.view.workers[home].assign(100_000, house.now)
    house.now += REFRESH_S
    second = house.plan(LONG)
    assert second.prefill != home
    assert second.why["home"] == home


def test_whoever_waits_much_longer_than_the_mean_is_left_out() -> None:
    house = House(load_slack_s=1.0)
    house.holds("p0", list(range(9000)))
    assert house.plan(list(range(9000))).prefill == "p0"
    house.hear("p0", queued_tokens=3000)
    assert house.plan(list(range(9000))).prefill != "p0"


@pytest.mark.parametrize(("weight", "stays"), [(1.0, False), (2.0, True)])
def test_computing_counts_more_than_waiting(weight: float, stays: bool) -> None:
    house = House(cache_weight=weight)
    house.holds("p0", LONG)
    house.hear("p0", queued_tokens=2500)  # 1.8 s of work are cached there
    assert (house.plan([*LONG, 1]).prefill == "p0") == stays
