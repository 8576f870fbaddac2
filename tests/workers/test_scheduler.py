"""The scheduler without a model: the tests advance sequences by hand."""

import random

import pytest

from tests.workers.world import SIZE, World
from workers.scheduler import BESIDE_STEPS, BY_AGE, Work
from workers.sequence import Sequence, Stage


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
        # All are of one tenant, so it does not matter what kept them from beginning.
        later = [other for other in order[:place] if other.arrival > one.arrival]
        assert sum(other.request.priority <= one.request.priority for other in later) <= 3
    assert set(order) == set(everybody)


@pytest.mark.parametrize("bound", [4, 16])
def test_one_bound_for_being_less_hot_and_for_waiting_for_a_beginning(bound: int) -> None:
    world = World(20000, max_overtaken=bound)
    hot = [1] * 40
    world.send(hot)
    world.run()
    trunk = list(range(2000, 5000))
    world.send([*trunk, 1], tenant="other")
    world.step()
    waiter = world.send([*trunk[:2000], 7])
    later: list[Sequence] = []
    while waiter not in world.admissions:
        if sum(one not in world.finished for one in later) < 3:
            later.append(world.send([*hot, 9000 + len(later)]))
        world.step()
    assert sum(one in world.admissions[: world.admissions.index(waiter)] for one in later) == bound


def test_who_waited_for_a_beginning_and_then_lacks_blocks_lets_others_begin() -> None:
    world = World(100, max_overtaken=4)
    sending = world.add(240, 1, hand_off=True)
    while sending.stage is not Stage.SENDING:
        world.step()
    trunk = list(range(2000, 2080))
    first = world.send(trunk, tenant="trunk", priority=1)
    world.step()
    waiter = world.send([*trunk, *range(5000, 5200)], tenant="waiter", priority=1)
    own = [world.add(4, 1, tenant="waiter", priority=1) for _ in range(8)]
    while first not in world.finished:
        world.step()
    assert sum(one in world.admissions for one in own) == 4
    others = [world.add(4, 1, tenant="other") for _ in range(8)]
    for _ in range(20):
        world.step()
    assert waiter not in world.admissions
    assert sum(one in world.admissions for one in others) == 4
    world.done(sending)
    world.run()
    assert len(world.finished) == 1 + 1 + 1 + 8 + 8


@pytest.mark.parametrize(("prompt", "output"), [(100, 1), (100, 8), (60, 4)])
@pytest.mark.parametrize("kind", ["urgent", "newcomers", "another"])
def test_a_large_prompt_gets_its_blocks_whoever_comes(kind: str, prompt: int, output: int) -> None:
    """Others without end need blocks, too, and go before it: by priority, or because less was computed for them."""
    world = World(100, step_tokens=32, max_running=64, max_overtaken=4)

    def keep_busy(step: int) -> None:
        while world.scheduler.waiting < 3:
            tenant = f"new-{step}-{world.scheduler.waiting}" if kind == "newcomers" else "other"
            world.add(prompt, output, tenant=tenant, priority=int(kind == "urgent"))

    for step in range(100):
        keep_busy(step)
        world.step()
    large = world.add(320, 1, tenant="large")
    for step in range(100, 200):
        keep_busy(step)
        world.step()
    assert large in world.admissions
    assert large.held_up <= 4


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


def test_without_reuse_nobody_waits_for_anothers_beginning() -> None:
    world = World(200, step_tokens=64, reuse=False)
    for _ in range(4):
        world.send(list(range(9)))
    assert len(world.step()) == 4


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


def test_an_urgent_prompt_does_not_wait_for_a_beginning_that_less_urgent_work_computes() -> None:
    def steps(shared: bool) -> int:
        world = World(20000)
        trunk = list(range(2000, 4000))
        world.send([*trunk, 1], tenant="bulk", priority=-1)
        world.step()
        urgent = world.send([*(trunk[:500] if shared else range(9000, 9500)), 7], tenant="urgent", priority=5)
        taken = 0
        while urgent not in world.finished:
            if len(world.queued()) < 4:
                world.add(40, 1, tenant="usual")
            world.step()
            taken += 1
        return taken

    assert steps(shared=True) <= steps(shared=False)


def test_the_oldest_prompt_gets_an_eighth_whatever_is_left_of_the_steps() -> None:
    world = World(4000, step_tokens=256, max_running=64)
    old, steps = world.add(4000, 1, tenant="old", priority=0), 0
    while old not in world.finished:
        for _ in range(7):
            world.add(36, 1, tenant="new", priority=1)
        world.step()
        steps += 1
    assert steps <= 8 * 4000 / 256


def tokens_of(works: list[Work], *some: Sequence) -> int:
    return sum(work.count for work in works if work.sequence in some)


def test_what_nobody_waits_for_takes_little_of_a_step_beside_others() -> None:
    world = World(4000, step_tokens=64)
    bulk = [world.add(1000, 1, tenant="bulk", priority=-1) for _ in range(3)]
    assert tokens_of(world.step(), *bulk) == 64  # alone it has all
    waits = world.add(100, 3)
    works = [world.step() for _ in range(4)]
    assert [tokens_of(one, waits) for one in works] == [64, 36, 1, 1]
    assert [tokens_of(one, *bulk) for one in works] == [0, 0, 8, 8]
    assert waits in world.finished
    after = [tokens_of(world.step(), *bulk) for _ in range(BESIDE_STEPS + 1)]
    assert after == [8] * BESIDE_STEPS + [64]


def test_what_nobody_waits_for_comes_to_its_end_beside_others() -> None:
    world = World(4000, step_tokens=64, max_running=64)
    bulk, steps = [world.add(200, 1, tenant="bulk", priority=-1) for _ in range(3)], 0
    while not set(bulk) <= set(world.finished):
        for _ in range(4):
            world.add(30, 1)
        world.step()
        steps += 1
    assert steps <= BY_AGE * (3 * 200 // 8 + 1)


def test_next_tokens_that_nobody_waits_for_are_put_off_while_a_prompt_is_computed_that_somebody_does() -> None:
    world = World(4000, step_tokens=64, max_running=16)
    bulk = [world.add(4, 400, tenant="bulk", priority=-1) for _ in range(8)]
    world.step()
    waits = [world.add(100, 3) for _ in range(10)]
    shares = []
    while not set(waits) <= set(world.finished):
        works = world.step()
        if any(work.sequence in waits and work.count > 1 for work in works):
            shares.append((tokens_of(works, *waits), tokens_of(works, *bulk)))
        else:
            assert tokens_of(works, *bulk) == 8  # beside next tokens they cost next to nothing
    assert [bulk for _, bulk in shares] == [
        8 if number % BY_AGE == BY_AGE - 1 else 0 for number in range(1, len(shares) + 1)
    ]
    assert shares[0] == (64, 0)  # its place in the step is theirs, too


def test_tenants_get_their_shares_by_weight() -> None:
    world = World(400, step_tokens=16, max_running=4)
    served = {"heavy": 0, "light": 0}
    for _ in range(60):
        for tenant, weight in (("heavy", 3.0), ("light", 1.0)):
            while sum(one.request.tenant == tenant for one in world.queued()) < 4:
                world.add(16, 1, tenant=tenant, weight=weight)
        for work in world.step():
            served[work.sequence.request.tenant] += work.count
    assert 2.5 < served["heavy"] / served["light"] < 3.5
