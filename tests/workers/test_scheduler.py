"""The scheduler without a model: the tests advance sequences by hand."""

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.workers.drive import request
from workers.fairness import MAX_TENANTS, FairShare
from workers.kv.cache import KVCache
from workers.scheduler import Limits, Scheduler, Work
from workers.sequence import Sequence, Stage

SIZE = 4


class World:
    """A cache, a scheduler, and what an engine does between two schedules."""

    def __init__(
        self,
        blocks: int,
        step_tokens: int = 16,
        max_running: int = 8,
        reuse: bool = True,
        max_overtaken: int = 4,
        copy: bool = False,
    ) -> None:
        self.cache = KVCache(blocks, SIZE, reuse, copy=(lambda *_: None) if copy else None)
        self.scheduler = Scheduler(self.cache, Limits(step_tokens, max_running, max_overtaken))
        self.step_tokens = step_tokens
        self.finished: list[Sequence] = []
        self.admissions: list[Sequence] = []
        self.preemptions = 0
        self.computed = 0
        self._tokens = 1000

    def add(self, prompt: int, output: int, hand_off: bool = False, token: int | None = None, **more: Any) -> Sequence:
        """A prompt like no other, unless a token is given."""
        self._tokens += 1
        return self.send([self._tokens if token is None else token] * prompt, output, hand_off, **more)

    def send(self, prompt: list[int], output: int = 1, hand_off: bool = False, **more: Any) -> Sequence:
        one = Sequence(replace(request(prompt, output), **more), hand_off)
        self.scheduler.add(one)
        return one

    def step(self) -> list[Work]:
        before = set(self.scheduler.running)
        works, admitted = self.scheduler.schedule()
        self.preemptions += len(before - set(self.scheduler.running))
        self.admissions.extend(admitted)
        for one in admitted:
            if one.cached_tokens is None:
                one.cached_tokens = min(one.computed, one.prompt_length)
        self.check(works, before)
        for work in works:
            one = work.sequence
            one.computed += work.count
            self.computed += work.count if one.length == one.prompt_length else 0
            self.cache.commit(one)
            if one.computed == one.length:
                one.append(1)
                if one.hand_off:
                    one.stage = Stage.SENDING
                    self.scheduler.remove(one)
                elif one.generated == one.request.sampling.max_tokens:
                    self.done(one)
        return works

    def done(self, one: Sequence) -> None:
        self.scheduler.remove(one)
        self.cache.release(one)
        self.finished.append(one)

    def queued(self) -> list[Sequence]:
        return [one for queue in self.scheduler._queues.values() for one in queue]

    def check(self, works: list[Work], before: set[Sequence]) -> None:
        singles = sum(work.count == 1 for work in works)
        assert sum(work.count for work in works) <= max(self.step_tokens, singles + 1)
        chosen = [work.sequence for work in works]
        assert len(set(chosen)) == len(chosen)
        for work in works:
            one = work.sequence
            assert one in self.scheduler.running
            assert 1 <= work.count <= one.remaining
            assert one.computed + work.count <= len(one.blocks) * SIZE
        prompts = [one.remaining > 1 for one in chosen if one in before]
        assert prompts == sorted(prompts), "a decode behind a prompt"

    def run(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            if not (self.scheduler.running or self.scheduler.waiting):
                return
            assert self.step(), "nothing can run"
        raise AssertionError("did not finish")


def test_decodes_come_first_and_all_of_them_run() -> None:
    world = World(64)
    old = [world.add(4, 20) for _ in range(3)]
    world.step()
    long = world.add(40, 2)
    works = world.step()
    assert [work.sequence for work in works] == [*old, long]
    assert [work.count for work in works] == [1, 1, 1, 13]


def test_long_prompts_are_cut_into_chunks_oldest_first() -> None:
    world = World(64)
    first, second = world.add(20, 1), world.add(20, 1)
    assert [(work.sequence, work.count) for work in world.step()] == [(first, 16)]
    assert [(work.sequence, work.count) for work in world.step()] == [(first, 4), (second, 12)]
    assert [(work.sequence, work.count) for work in world.step()] == [(second, 8)]
    assert world.finished == [first, second]


def test_prompts_get_on_when_decodes_fill_the_budget() -> None:
    world = World(64, step_tokens=2)
    for _ in range(4):
        world.add(1, 30)
    for _ in range(8):
        world.step()
    late = world.add(5, 1)
    for _ in range(5):
        assert (world.step()[-1]).sequence is late
    assert world.finished == [late]


def test_the_running_set_is_bounded() -> None:
    world = World(64, max_running=2)
    for _ in range(5):
        world.add(2, 3)
    while world.scheduler.waiting:
        world.step()
        assert len(world.scheduler.running) <= 2
    world.run()
    assert len(world.finished) == 5


def test_two_requests_of_sixty_percent_of_the_pool_both_finish() -> None:
    world = World(10)
    first, second = world.add(6, 18), world.add(6, 18)
    world.run()
    assert world.preemptions > 0
    assert world.finished == [first, second]
    assert [one.generated for one in world.finished] == [18, 18]
    assert world.cache.available == 10


def test_the_youngest_goes_and_resumes_at_its_cached_prefix() -> None:
    world = World(8, step_tokens=32)
    first, second = world.add(12, 12), world.add(12, 12)
    while not world.preemptions:
        world.step()
    assert second.stage is Stage.WAITING
    assert world.scheduler.waiting == 1
    assert (second.blocks, second.computed) == ([], 0)
    while second not in world.scheduler.running:
        world.step()
        assert first in [*world.scheduler.running, *world.finished]
    assert second.shared_blocks > 0
    world.run()
    assert [one.generated for one in world.finished] == [12, 12]


def test_hand_offs_are_never_pushed_back() -> None:
    world = World(6)
    sending = world.add(12, 1, hand_off=True)
    world.step()
    assert sending.stage is Stage.SENDING
    blocks = list(sending.blocks)
    computing = world.add(8, 1, hand_off=True)
    growing = world.add(4, 16)  # what is left is one block
    world.step()
    computing_blocks = list(computing.blocks)
    for _ in range(8):
        world.step()
    assert world.preemptions > 0
    assert growing.stage is Stage.WAITING
    assert (sending.blocks, computing.blocks) == (blocks, computing_blocks)
    for one in (sending, computing):
        world.done(one)
    world.run()
    assert growing.generated == 16


def test_a_hand_off_in_the_middle_of_its_prompt_is_passed_over() -> None:
    world = World(10, step_tokens=2)
    old = world.add(4, 30)
    for _ in range(3):
        world.step()
    young = world.add(20, 1, hand_off=True)
    blocks = None
    while old in world.scheduler.running:
        world.step()
        blocks = blocks or list(young.blocks)
        assert young.blocks == blocks
    assert world.preemptions == 1


def test_admission_is_in_order_of_arrival_where_nobody_may_be_overtaken() -> None:
    world = World(12, max_overtaken=0)
    wanted = [world.add(length, 2) for length in (40, 4, 44, 4, 4, 30)]
    world.run()
    assert list(dict.fromkeys(world.admissions)) == wanted


def test_a_request_that_nobody_waits_for_is_forgotten() -> None:
    world = World(12)
    first, second = world.add(4, 5), world.add(44, 5)
    world.step()
    world.scheduler.remove(second)
    world.done(first)
    assert not world.scheduler.running
    assert not world.scheduler.waiting
    assert world.scheduler.schedule() == ([], [])


def test_hot_goes_before_warm_before_cold() -> None:
    world = World(64, step_tokens=20)
    world.send([1] * 16)
    world.run()
    cold = world.add(20, 1)
    warm = world.send([1] * 12 + [2] * 8)
    hot = world.send([1] * 17 + [3] * 3)
    world.run()
    assert world.admissions[1:] == [hot, warm, cold]


def test_a_cold_prompt_under_way_lets_a_hot_one_in_between_its_chunks() -> None:
    world = World(64, step_tokens=8)
    world.send([1] * 33)
    world.run()
    cold = world.add(40, 1)
    world.step()
    hot = world.send([1] * 34)
    works = world.step()
    assert [(work.sequence, work.count) for work in works] == [(hot, 2), (cold, 6)]


@pytest.mark.parametrize("bound", [0, 1, 5])
def test_nobody_is_overtaken_more_often_than_the_bound(bound: int) -> None:
    world = World(64, step_tokens=4, max_overtaken=bound)
    world.send([1] * 33)
    world.run()
    cold = world.add(4, 1)
    later = []
    while cold not in world.finished:
        later.append(world.send([1] * 33 + [2, 3, 4]))  # a steady stream of what is hot
        world.step()
    assert sum(one in world.admissions[: world.admissions.index(cold)] for one in later) == bound
    world.run()


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_holds_whatever_comes(seed: int) -> None:
    draw = random.Random(seed)
    world = World(40, step_tokens=8, max_running=4, max_overtaken=3, copy=draw.random() < 0.5)
    everybody = [
        world.send([draw.randint(1, 2)] * draw.randint(1, 60), draw.randint(1, 4), priority=draw.randint(0, 1))
        for _ in range(30)
    ]
    world.run()
    order = list(dict.fromkeys(world.admissions))
    for place, one in enumerate(order):
        # By heat and for want of blocks, each at most that often.
        later = [other for other in order[:place] if other.arrival > one.arrival]
        assert sum(other.request.priority <= one.request.priority for other in later) <= 3 + 3
    assert set(order) == set(everybody)


def test_a_higher_priority_goes_first_and_is_pushed_back_last() -> None:
    world = World(64)
    low, high = world.add(20, 1), world.add(20, 1, priority=2)
    world.run()
    assert world.admissions == [high, low]
    world = World(10)
    first, second = world.add(6, 18), world.add(6, 18, priority=1)
    world.run()
    assert world.preemptions > 0
    assert world.finished == [second, first]


def test_the_one_pushed_back_is_the_youngest_also_after_it_came_back() -> None:
    world = World(9, step_tokens=64)
    old, middle, young = (world.add(4, 20) for _ in range(3))
    victims = []
    for _ in range(200):
        before = set(world.scheduler.running)
        world.step()
        victims += [one for one in before if one.stage is Stage.WAITING]
        if not world.scheduler.running and not world.scheduler.waiting:
            break
    assert world.finished == [old, middle, young]
    assert old not in victims


def test_equal_beginnings_in_flight_are_computed_once() -> None:
    world = World(200, step_tokens=16)
    common = list(range(100, 140))
    for tail in range(6):
        world.send([*common, tail, tail, tail])
    world.run()
    assert world.computed == 40 + 6 * 3
    assert len(world.finished) == 6


def test_equal_prompts_in_flight_in_one_step() -> None:
    world = World(200, step_tokens=64)
    for _ in range(4):
        world.send(list(range(9)))
    world.run()
    assert world.computed == 9 + 3 * 1


def test_who_waits_for_anothers_prompt_goes_on_when_that_one_is_gone() -> None:
    world = World(200, step_tokens=8)
    first, second = world.send(list(range(40))), world.send(list(range(40)))
    world.step()
    assert second.stage is Stage.WAITING
    world.done(first)
    world.run()
    assert world.finished == [first, second]


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


def test_without_reuse_nobody_waits_for_anothers_beginning() -> None:
    world = World(200, step_tokens=64, reuse=False)
    for _ in range(4):
        world.send(list(range(9)))
    assert len(world.step()) == 4


def test_tenants_that_always_want_more_get_equal_shares() -> None:
    world, got = World(400, step_tokens=16, max_running=16), {"a": 0, "b": 0}
    for _ in range(400):
        for tenant, prompt in (("a", 40), ("b", 10)):
            if sum(one.request.tenant == tenant for one in world.queued()) < 3:
                world.add(prompt, 1, tenant=tenant)
        for work in world.step():
            got[work.sequence.request.tenant] += work.count
    assert abs(got["a"] - got["b"]) <= 0.05 * (got["a"] + got["b"]) + 1024


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_finish(seed: int) -> None:
    """Whatever comes, everybody finishes; the oldest request gets on, so nobody waits for ever."""
    draw = random.Random(seed)
    world = World(
        draw.choice([8, 12, 30]), draw.choice([1, 5, 16, 64]), draw.choice([1, 3, 8]), reuse=draw.random() < 0.8
    )
    tenants, urgencies = draw.choice([("",), ("a", "b", "c")]), draw.choice([(0,), (0, 1)])
    limit = world.cache.pool.total * SIZE
    pending, wanted, stuck = 40, [], 0
    for _ in range(20_000):
        if pending and draw.random() < 0.4:
            prompt = draw.randint(1, limit // 2)
            more = {"tenant": draw.choice(tenants), "priority": draw.choice(urgencies)}
            wanted.append(world.add(prompt, draw.randint(1, limit - prompt), token=draw.randint(1, 3), **more))
            pending -= 1
        oldest = next((one for one in wanted if one not in world.finished), None)
        before = (oldest.length, oldest.computed) if oldest is not None else None
        was_running = oldest in world.scheduler.running
        world.step()
        if oldest is not None and was_running:
            still = oldest not in world.finished and (oldest.length, oldest.computed) <= before
            stuck = stuck + 1 if still else 0
            assert stuck <= 40 * limit, "more than its overtakers' prompts were computed before the oldest's next token"
        if not pending and len(world.finished) == len(wanted):
            break
    assert sorted(one.id for one in world.finished) == sorted(one.id for one in wanted)
    assert all(one.generated == one.request.sampling.max_tokens for one in wanted)
    assert world.cache.available == world.cache.pool.total
    assert world.cache.counts()["pinned"] == 0


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
