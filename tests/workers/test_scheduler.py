"""The scheduler without a model: the tests advance sequences by hand."""

import random

import pytest

from tests.workers.drive import request
from workers.kv.cache import KVCache
from workers.scheduler import Scheduler, Work
from workers.sequence import Sequence, Stage

SIZE = 4


class World:
    """A cache, a scheduler, and what an engine does between two schedules."""

    def __init__(self, blocks: int, step_tokens: int = 16, max_running: int = 8, reuse: bool = True) -> None:
        self.cache = KVCache(blocks, SIZE, reuse)
        self.scheduler = Scheduler(self.cache, step_tokens, max_running)
        self.step_tokens = step_tokens
        self.finished: list[Sequence] = []
        self.admissions: list[Sequence] = []
        self.preemptions = 0
        self._tokens = 1000

    def add(self, prompt: int, output: int, hand_off: bool = False, token: int | None = None) -> Sequence:
        """A prompt like no other, unless a token is given."""
        self._tokens += 1
        one = Sequence(request([self._tokens if token is None else token] * prompt, output), hand_off)
        self.scheduler.add(one)
        return one

    def step(self) -> list[Work]:
        before = set(self.scheduler.running)
        works, admitted = self.scheduler.schedule()
        self.preemptions += len(before - set(self.scheduler.running))
        self.admissions.extend(admitted)
        self.check(works, before)
        for work in works:
            one = work.sequence
            one.computed += work.count
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
    assert world.scheduler.waiting[0] is second
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
    assert growing in world.scheduler.waiting
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


def test_admission_is_in_order_of_arrival() -> None:
    world = World(12)
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


@pytest.mark.parametrize("seed", range(40))
def test_random_loads_finish(seed: int) -> None:
    """Whatever comes, everybody finishes; the oldest request always gets on, so nobody waits for ever."""
    draw = random.Random(seed)
    world = World(
        draw.choice([8, 12, 30]), draw.choice([1, 5, 16, 64]), draw.choice([1, 3, 8]), reuse=draw.random() < 0.8
    )
    limit = world.cache.pool.total * SIZE
    pending, wanted = 40, []
    for _ in range(20_000):
        if pending and draw.random() < 0.4:
            prompt = draw.randint(1, limit // 2)
            wanted.append(world.add(prompt, draw.randint(1, limit - prompt), token=draw.randint(1, 3)))
            pending -= 1
        oldest = next((one for one in wanted if one not in world.finished), None)
        before = (oldest.length, oldest.computed) if oldest is not None else None
        was_running = oldest in world.scheduler.running
        world.step()
        if oldest is not None and was_running:
            assert oldest in world.finished or (oldest.length, oldest.computed) > before
        if not pending and len(world.finished) == len(wanted):
            break
    assert sorted(one.id for one in world.finished) == sorted(one.id for one in wanted)
    assert all(one.generated == one.request.sampling.max_tokens for one in wanted)
    assert world.cache.available == world.cache.pool.total
    assert world.cache.counts()["pinned"] == 0
