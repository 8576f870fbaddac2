"""A cache, a scheduler, and what an engine does between two schedules: for tests that advance sequences by hand."""

from dataclasses import replace
from typing import Any

from tests.workers.drive import request
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

    def finish(self, one: Sequence) -> int:
        """The number of steps until a sequence is finished."""
        steps = 0
        while one not in self.finished:
            self.step()
            steps += 1
        return steps

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
