"""Whose prompt is next when tenants compete, without a model."""

import random
from collections import Counter
from typing import Any

import pytest

from tests.workers.world import World
from workers.fairness import MAX_TENANTS, FairShare
from workers.sequence import Sequence


def test_a_tenant_with_ten_times_the_load_does_not_keep_another_waiting() -> None:
    def steps_to_first_token(loud: bool) -> float:
        world, waits = World(400, step_tokens=16, max_running=16), []
        for _ in range(20):
            if loud:
                for _ in range(10):
                    world.add(16, 1, tenant="loud")
            quiet = world.add(16, 1, tenant="quiet")
            for steps in range(1, 11):  # a prompt is a step's work, so the queue gets longer and longer
                world.step()
                if quiet in world.finished:
                    waits.append(steps)
                    break
            for _ in range(10 - steps):
                world.step()
        assert len(waits) == 20
        return sum(waits) / len(waits)

    assert steps_to_first_token(loud=True) <= 1.5 * steps_to_first_token(loud=False)


def test_tokens_that_were_computed_while_nobody_else_was_there_are_not_held_against_a_tenant() -> None:
    world = World(400, step_tokens=16, max_running=16)
    for _ in range(500):
        world.add(16, 1, tenant="old")
        world.run()
    for _ in range(400):
        world.add(16, 1, tenant="new")
    assert (
        world.finish(world.add(16, 1, tenant="old")) <= 2 + 1024 / 16
    )  # what the other one may catch up with, not what it never had


def test_new_tenants_without_end_do_not_keep_an_old_one_or_each_other_waiting() -> None:
    world, begun, added = World(400, step_tokens=16, max_running=16), {}, {}
    for step in range(1500):
        for _ in range(1 if step % 10 else 2):  # more than the steps can compute
            one = world.add(16, 1, tenant=f"new-{step}-{_}")
            added[one] = step
        if step % 20 == 0:
            added[world.add(16, 1, tenant="old")] = step
        for work in world.step():
            begun.setdefault(work.sequence, step)
    waits = [begun.get(one, 1500) - step for one, step in added.items()]
    backlog = len(added) - len(begun)
    assert max(waits) <= 9 * backlog / 2


def test_a_long_prompt_under_way_never_takes_whole_steps_for_long() -> None:
    for urgent in (0, 1):
        world = World(2000, step_tokens=16)
        world.add(4000, 1, tenant="loud", priority=-urgent)
        world.step()
        for _ in range(40):
            assert world.finish(world.add(16, 1, tenant="light")) <= 3


def test_answers_under_way_do_not_slow_the_virtual_time() -> None:
    """Tenants that only decode do not compete; who used what they left is not put behind newcomers for it."""
    world = World(4000, step_tokens=64, max_running=64)
    for number in range(20):
        world.add(4, 700, tenant=f"talker-{number}")
    world.step()
    world.step()

    def keep_busy(tenant: str) -> None:
        if not any(one.request.tenant == tenant for one in world.queued()):
            world.add(44, 1, tenant=tenant)

    for _ in range(300):
        keep_busy("old")
        world.step()
    got = {"old": 0, "new": 0}
    for _ in range(200):
        for tenant in got:
            keep_busy(tenant)
        for work in world.step():
            if work.sequence.request.tenant in got:
                got[work.sequence.request.tenant] += work.count
    assert got["new"] - got["old"] <= 1024 + 100


def test_a_tenants_own_order_gives_it_nothing_over_others() -> None:
    world = World(2000, step_tokens=16, max_running=64)
    world.send([1] * 65, tenant="heavy")
    world.run()
    for _ in range(40):
        world.add(32, 1, tenant="heavy")
    for _ in range(20):
        world.send([1] * 65, tenant="heavy")  # hot: these overtake the cold ones
    for _ in range(30):
        world.step()
    assert world.finish(world.add(32, 1, tenant="light")) <= 3


def test_urgent_prompts_without_end_keep_nobody_for_ever() -> None:
    world = World(400, step_tokens=16, max_overtaken=4)
    patient, steps = world.add(16, 1, tenant="patient"), 0
    while patient not in world.finished:
        world.add(16, 1, tenant="urgent", priority=1)
        world.step()
        steps += 1
    assert 2 <= steps <= 8


def test_tenants_that_always_want_more_get_equal_shares() -> None:
    world, got = World(400, step_tokens=16, max_running=16), {"a": 0, "b": 0}
    for _ in range(400):
        for tenant, prompt in (("a", 40), ("b", 10)):
            if sum(one.request.tenant == tenant for one in world.queued()) < 3:
                world.add(prompt, 1, tenant=tenant)
        for work in world.step():
            got[work.sequence.request.tenant] += work.count
    assert abs(got["a"] - got["b"]) <= 0.05 * (got["a"] + got["b"]) + 1024


def test_a_tenant_that_was_away_gets_a_bounded_credit() -> None:
    share = FairShare()
    share.charge("steady", 1_000_000)
    share.settle(["steady"])
    assert share.served("back") == share.served("steady") - 1024


def test_bursts_of_a_light_tenant_are_let_in_each_time() -> None:
    share = FairShare()
    for _ in range(20):
        share.charge("loud", 10_000)
        share.settle(["loud"])
        assert share.served("light") == share.served("loud") - 1024
        for _ in range(4):
            share.charge("light", 250)
        assert share.served("light") < share.served("loud")
        share.settle(["loud"])


def test_who_came_late_in_a_rush_does_not_pay_for_it_later() -> None:
    share = FairShare()
    for number in range(200):
        share.charge(f"new-{number}", 1000)
        share.settle(["patient"])
    assert share.served("new-199") == share.served("new-0") == share.served("patient") + 1000


@pytest.mark.parametrize(
    ("lights", "tokens", "gap", "step_tokens"),
    [
        (2, 250, 1, 256),
        (3, 250, 2, 256),
        (2, 120, 1, 128),
        (3, 900, 1, 256),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_tenant_with_a_backlog_gets_its_share_beside_ones_that_come_and_go(
    lights: int, tokens: int, gap: int, step_tokens: int, seed: int
) -> None:
    """Each light one sends its next prompt `gap` steps after the last; for all seeds but the first, around that."""
    draw = random.Random(seed)
    world, got = World(4000, step_tokens, max_running=64), Counter[str]()
    backlog: list[Sequence] = []
    under_way: dict[str, Sequence | None] = dict.fromkeys(f"light-{number}" for number in range(lights))
    due = dict.fromkeys(under_way, 0)
    for step in range(600):
        backlog = [one for one in backlog if one not in world.finished[-100:]]
        backlog += [world.add(500, 1, tenant="heavy") for _ in range(20 - len(backlog))]
        for tenant, one in under_way.items():
            if one in world.finished[-100:]:
                due[tenant] = step + (draw.randint(0, 2 * gap) if seed else gap)
                under_way[tenant] = None
            if under_way[tenant] is None and step >= due[tenant]:
                under_way[tenant] = world.add(tokens, 1, tenant=tenant)
        for work in world.step():
            got[work.sequence.request.tenant] += work.count
    share = got["heavy"] / got.total() * (lights + 1)
    assert share >= 0.8
    assert seed or share <= 1.25, "the others want all of theirs"


@pytest.mark.parametrize("others", [0, 1])
def test_answers_that_took_nothing_from_others_are_not_held_against_a_tenant(others: int) -> None:
    """Neither while nobody else has prompts, nor while there is room for all of those."""
    world = World(4000, step_tokens=64, max_running=64)
    for step in range(600):
        if step % 100 == 0:
            for _ in range(16):
                world.add(10, 100, tenant="talker")
        for _ in range(others):
            world.add(4, 1, tenant="other")
        world.step()
    for _ in range(40):
        world.add(640, 1, tenant="late")
    for _ in range(1 + 1024 // 64):  # what the late one may have first
        world.step()
    for _ in range(3):
        assert world.finish(world.add(40, 1, tenant="talker")) <= 2


def test_what_is_taken_from_lower_priorities_is_not_held_against_a_tenant() -> None:
    world, got = World(4000, step_tokens=64, max_running=64), Counter[str]()

    def keep_busy(tenant: str, priority: int = 0) -> None:
        if sum(one.request.tenant == tenant for one in world.queued()) < 3:
            world.add(100, 1, tenant=tenant, priority=priority)

    for step in range(800):
        keep_busy("batch", -1)
        keep_busy("old")
        if step >= 600:
            keep_busy("new")
        for work in world.step():
            got[work.sequence.request.tenant] += work.count if step >= 600 else 0
    assert got["new"] - got["old"] <= 1024 + 200


@pytest.mark.parametrize("waiters", [32, 100])
def test_tenants_that_wait_for_one_beginning_do_not_shut_out_the_others(waiters: int) -> None:
    world = World(20000, step_tokens=64, max_running=600)
    trunk = list(range(2000, 8000))
    world.send(trunk, tenant="first")
    world.add(20, 1, tenant="quiet")
    for _ in range(3):
        world.step()
    for number in range(waiters):
        world.send([*trunk, number], tenant=f"tenant-{number}")
    for _ in range(3):
        assert world.finish(world.add(20, 1, tenant="quiet")) <= 2 + waiters // 32


def test_many_tenants_that_wait_for_one_beginning_cost_a_bounded_time() -> None:
    world = World(20000, step_tokens=64, max_running=600)
    trunk = list(range(2000, 6000))
    world.send(trunk, tenant="first")
    world.step()
    for number in range(500):
        world.send([*trunk, number], tenant=f"tenant-{number}")
    looked: list[Any] = []
    original = world.scheduler._should_start
    world.scheduler._should_start = lambda *args: (looked.append(args), original(*args))[1]  # type: ignore[method-assign]
    for _ in range(5):
        looked.clear()
        world.step()
        assert 1 <= len(looked) <= 32


def test_a_bounded_number_of_tenants_is_remembered() -> None:
    share = FairShare()
    share.charge("steady", 5)
    before = share.served("steady")
    for number in range(MAX_TENANTS + 1000):
        share.charge(f"passing-{number}", 1)
        assert len(share._served) <= MAX_TENANTS
    assert share.served("steady") == before


@pytest.mark.parametrize("sharing", [1, 9])
def test_who_waits_for_anothers_beginning_keeps_no_other_tenant_waiting(sharing: int) -> None:
    world = World(20000, step_tokens=64, max_running=64, max_overtaken=16)
    trunk = list(range(2000, 10_000))
    world.send([*trunk, 1], tenant="loud")
    world.step()
    for number in range(sharing):
        world.send([*trunk, 2 + number], tenant="other")
    for step in range(110):
        quiet = world.add(8, 1, tenant=f"quiet-{step % 3}")
        world.step()
        if quiet not in world.finished:
            world.step()
        assert quiet in world.finished


def test_nobody_waits_for_a_beginning_whose_tenant_is_far_behind_in_line() -> None:
    def steps_to_first_token(shared: bool) -> int:
        world = World(40000, step_tokens=64, max_running=200, max_overtaken=16)

        def step() -> None:
            for number in range(6):
                if sum(one.request.tenant == f"busy-{number}" for one in world.queued()) < 2:
                    world.add(200, 1, tenant=f"busy-{number}")
            world.step()

        for _ in range(30):  # answers, which are computed while others are left wanting
            world.add(4, 1500, tenant="loud")
        for _ in range(600):
            step()
        trunk = list(range(200_000, 200_900))
        loud = world.send([*trunk, 1], tenant="loud")
        while loud not in world.admissions:
            step()
        quiet = world.send([*(trunk if shared else range(300_000, 300_900)), 7], tenant="quiet")
        steps = 0
        while quiet not in world.finished:
            step()
            steps += 1
        return steps

    assert steps_to_first_token(shared=True) <= steps_to_first_token(shared=False)
