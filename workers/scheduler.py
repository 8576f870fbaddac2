"""Scheduler: who runs in the next step. A pure state machine over sequences and their cache.

Each step has a token budget. Running sequences that only need their next token come first; what is left goes to
prompts, oldest first, in chunks. A sequence is admitted when blocks for all its known tokens can be had; one that
cannot grow pushes the youngest back to the queue, from where it resumes at its cached prefix.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from workers.kv.cache import KVCache
from workers.sequence import Sequence, Stage


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the next `count` tokens of a sequence."""

    sequence: Sequence
    count: int


class Scheduler:
    """Queue and running set. `step_tokens` is the budget of a step, `max_running` bounds the running set."""

    def __init__(self, cache: KVCache, step_tokens: int, max_running: int) -> None:
        self._cache = cache
        self._step_tokens = step_tokens
        self._max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind the others."""
        sequence.stage = Stage.WAITING
        self.waiting.append(sequence)

    def join(self, sequence: Sequence) -> None:
        """Take in a sequence whose table is already filled."""
        sequence.stage = Stage.RUNNING
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> tuple[list[Work], list[Sequence]]:
        """The work of the next step and the sequences admitted for it. No work means nothing can run now."""
        works: list[Work] = []
        for sequence in list(self.running):
            if sequence.stage is Stage.RUNNING and sequence.remaining == 1 and self._make_room(sequence):
                works.append(Work(sequence, 1))
        # Prompts always get something, or a full running set could keep them waiting for ever.
        budget = max(self._step_tokens - len(works), 1)
        for sequence in self.running:
            if budget > 0 and sequence.remaining > 1:
                count = min(sequence.remaining, budget)
                works.append(Work(sequence, count))
                budget -= count
        prompts = any(work.count > 1 for work in works)
        admitted = self._admit(budget, prompts)
        for sequence in admitted:
            count = min(sequence.remaining, budget)
            works.append(Work(sequence, count))
            budget -= count
        return works, admitted

    def _admit(self, budget: int, prompts: bool) -> list[Sequence]:
        """Take sequences from the queue; `prompts` says whether the step computes others' prompts already."""
        admitted: list[Sequence] = []
        while budget > 0 and self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            sliver = budget < self._step_tokens // 2 and self._cache.missing(sequence) > budget
            if sliver and prompts:
                # It would not finish now in any case, and would only make the step's other prompts wait for it.
                break
            if not self._cache.admit(sequence, sequence.length):
                break
            prompts = True
            self.waiting.popleft()
            self.join(sequence)
            admitted.append(sequence)
            budget -= sequence.remaining
        return admitted

    def _make_room(self, sequence: Sequence) -> bool:
        """Let the table cover the next token, at the cost of younger sequences; False when this one had to go."""
        while not self._cache.grow(sequence, sequence.length):
            # Blocks of a hand-off may be on the wire: it is never pushed back.
            victim = next(one for one in reversed(self.running) if not one.hand_off)
            self._cache.release(victim)
            self.running.remove(victim)
            victim.stage = Stage.WAITING
            self.waiting.appendleft(victim)
            if victim is sequence:
                return False
        return True
