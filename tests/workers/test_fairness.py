"""Whose prompt is next when tenants compete, without a model."""

from typing import Any

import pytest

from tests.workers.world import World
from workers.fairness import MAX_TENANTS, FairShare


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
    old, steps = world.add(16, 1, tenant="old"), 0
    while old not in world.finished:
        world.step()
        steps += 1
    assert steps <= 2 + 1024 / 16  # what the other one may catch up with, not what it never had


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
            light, steps = world.add(16, 1, tenant="light"), 0
            while light not in world.finished:
                world.step()
                steps += 1
            assert steps <= 3


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
    light, steps = world.add(32, 1, tenant="light"), 0
    while light not in world.finished:
        world.step()
        steps += 1
    assert steps <= 3


def test_urgent_prompts_without_end_keep_nobody_for_ever() -> None:
    world = World(400, step_tokens=16, max_overtaken=4)
    patient, steps = world.add(16, 1, tenant="patient", priority=-100), 0
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
    share.enter("steady")
    share.charge("steady", 1_000_000)
    share.enter("back")
    assert share.served("back") == share.served("steady") - 1024


def test_bursts_of_a_light_tenant_are_let_in_each_time() -> None:
    share = FairShare()
    share.enter("loud")
    for _ in range(20):
        share.charge("loud", 10_000)
        share.enter("light")
        assert share.served("light") == share.served("loud") - 1024
        for _ in range(4):
            share.charge("light", 250)
        assert share.served("light") < share.served("loud")
        share.leave("light")


def test_who_came_late_in_a_rush_does_not_pay_for_it_later() -> None:
    share = FairShare()
    share.enter("patient")
    for number in range(200):
        share.enter(f"new-{number}")
        share.charge(f"new-{number}", 1000)
        share.leave(f"new-{number}")
    share.charge("patient", 10)  # now alone
    share.enter("new-199")
    assert share.served("new-199") <= share.served("patient")


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


def test_tenants_that_do_not_compete_are_forgotten() -> None:
    share = FairShare()
    share.enter("steady")
    for number in range(MAX_TENANTS + 1000):
        share.charge(f"decoding-{number}", 1)
        share.enter(f"prompt-{number}")
        share.leave(f"prompt-{number}")
        assert len(share._served) <= MAX_TENANTS + 1
    share.charge("steady", 5)
    assert share.served("steady") == 5


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
