"""Scheduler: who runs in the next step. A pure state machine over sequences and their cache.

Each step has a token budget. Running sequences that only need their next token come first; what is left goes to
prompts, in chunks, in this order:

1. every eighth chunk goes to the oldest prompt, whatever follows here, so that nobody waits for ever;
2. by priority;
3. the tenant that was served least;
4. within a tenant, prompts that `max_overtaken` later ones of it have gone before, oldest first;
5. hot before warm before cold: by the share of the prompt that is cached;
6. the order of arrival.

A prompt is admitted when blocks for all of it can be had, and not while a running prompt computes a beginning that
both have in common. One that cannot get its blocks lets at most `max_overtaken` others begin; one that waits for
another's beginning lets as many of its own tenant, and any number of others. When a sequence cannot grow, the one that
is last in line goes back to the queue, from where it resumes at its cached prefix.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from workers.fairness import FairShare
from workers.kv.cache import KVCache
from workers.sequence import Sequence, Stage

HOT, WARM = 0.75, 0.25
"""Cached shares of a prompt from which on it counts as hot, as warm."""
WINDOW = 16
"""Queued prompts of a tenant that are looked up in the cache when the next one is chosen."""
BY_AGE = 8
"""Of so many chunks one goes to the oldest prompt."""
MAX_PASSED = 8
"""Prompts that lack blocks, or prompts of one tenant that are to begin later, before the queue, or the tenant's part of
it, is left alone until the next step."""
MAX_LOOKED_AT = 32
"""Prompts that do not begin in a step, for whatever reason, before the queue is left alone: looking costs time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Token budget of a step, bound on the running set, and how many later prompts may go before a queued one."""

    step_tokens: int
    max_running: int
    max_overtaken: int


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the next `count` tokens of a sequence."""

    sequence: Sequence
    count: int


@dataclass(frozen=True, slots=True)
class _Passed:
    """Prompts that do not begin in this step: those that lack blocks, and by tenant those that had better begin
    later."""

    short: set[Sequence] = field(default_factory=set)
    later: dict[str, set[Sequence]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """All of them."""
        return len(self.short) + sum(map(len, self.later.values()))

    def later_of(self, tenant: str) -> set[Sequence]:
        """Those of a tenant that had better begin later."""
        return self.later.get(tenant, set())


class Scheduler:
    """Queue and running set."""

    def __init__(self, cache: KVCache, limits: Limits) -> None:
        self._cache = cache
        self._limits = limits
        self._share = FairShare()
        self._arrivals = count(1)
        self._chunks = 0
        self._prompts: set[Sequence] = set()
        self._queues: dict[str, list[Sequence]] = {}
        self._heats: dict[Sequence, int] = {}
        self.running: list[Sequence] = []

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return sum(map(len, self._queues.values()))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that was here before gets its old place."""
        self._number(sequence)
        sequence.stage = Stage.WAITING
        if sequence not in self._prompts:
            self._prompts.add(sequence)
            self._share.enter(sequence.request.tenant)
        insort(self._queues.setdefault(sequence.request.tenant, []), sequence, key=_seniority)

    def join(self, sequence: Sequence) -> None:
        """Take in a sequence whose table is already filled."""
        self._number(sequence)
        sequence.stage = Stage.RUNNING
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self._queues.get(sequence.request.tenant, ()):
            self._unqueue(sequence)
        self._computed(sequence)

    def schedule(self) -> tuple[list[Work], list[Sequence]]:
        """The work of the next step and the sequences admitted for it. No work means nothing can run now."""
        works = self._decodes()
        self._heats.clear()
        # Prompts always get something, or a full running set could keep them waiting for ever.
        budget = max(self._limits.step_tokens - len(works), 1)
        admitted: list[Sequence] = []
        started = [one for one in self.running if one.remaining > 1]
        passed = _Passed()
        while budget > 0 and (sequence := self._next(started, passed)) is not None:
            if sequence.stage is Stage.RUNNING:
                started.remove(sequence)
            elif not self._should_start(sequence, budget, works):
                passed.later.setdefault(sequence.request.tenant, set()).add(sequence)
                continue
            elif not self._cache.admit(sequence, sequence.length):
                passed.short.add(sequence)
                continue
            else:
                self._unqueue(sequence)
                sequence.stage = Stage.RUNNING
                self.running.append(sequence)
                admitted.append(sequence)
                self._note_overtaking(sequence, passed)
            work = Work(sequence, min(sequence.remaining, budget))
            works.append(work)
            budget -= work.count
            self._chunks += 1
        for work in works:
            self._share.charge(work.sequence.request.tenant, work.count)
            if work.count == work.sequence.remaining:
                self._computed(work.sequence)
        return works, admitted

    def _decodes(self) -> list[Work]:
        works = []
        for sequence in sorted(self.running, key=_seniority):
            if sequence.stage is Stage.RUNNING and sequence.remaining == 1 and self._make_room(sequence):
                works.append(Work(sequence, 1))
        return works

    def _make_room(self, sequence: Sequence) -> bool:
        """Let the table cover the next token, at the cost of sequences behind it; False when this one had to go."""
        while not self._cache.grow(sequence, sequence.length):
            # Blocks of a hand-off may be on the wire: it is never pushed back.
            victim = max((one for one in self.running if not one.hand_off), key=_seniority)
            self._cache.release(victim)
            self._cache.stats.preemptions += 1
            self.running.remove(victim)
            self.add(victim)
            if victim is sequence:
                return False
        return True

    # --- whose prompt is next -----------------------------------------------------------------------------------

    def _next(self, started: list[Sequence], passed: _Passed) -> Sequence | None:
        """The first in line of the prompts that run and of those in the queue. Nobody is begun any more before one that
        lacks blocks and has let enough others go first, and no other of its tenant before one that is to begin later.
        """
        prompts = [*started]
        room = len(self.running) < self._limits.max_running and passed.count < MAX_LOOKED_AT
        if room and not self._enough(passed.short):
            for tenant, queue in self._queues.items():
                later = passed.later_of(tenant)
                if not self._enough(later):
                    prompts += [one for one in queue if one not in later and one not in passed.short]
        if not prompts:
            return None
        if self._chunks % BY_AGE == BY_AGE - 1:
            return min(prompts, key=lambda one: one.arrival)
        priority = max(one.request.priority for one in prompts)
        prompts = [one for one in prompts if one.request.priority == priority]
        tenant = min(prompts, key=lambda one: (self._share.served(one.request.tenant), one.arrival)).request.tenant
        mine = sorted((one for one in prompts if one.request.tenant == tenant), key=lambda one: one.arrival)
        due = next((one for one in mine if one.overtaken >= self._limits.max_overtaken), None)
        return due or min(mine[:WINDOW], key=lambda one: (self._heat(one), one.arrival))

    def _heat(self, sequence: Sequence) -> int:
        """0 for a hot prompt, 1 for a warm one, 2 for a cold one; looked up once a step."""
        if (known := self._heats.get(sequence)) is not None:
            return known
        running = sequence.stage is Stage.RUNNING
        cached = (sequence.cached_tokens or 0) if running else self._cache.found(sequence)
        share = cached / sequence.length
        heat = self._heats[sequence] = 0 if share >= HOT else 1 if share >= WARM else 2
        return heat

    def _enough(self, passed: set[Sequence]) -> bool:
        """Whether prompts that could not begin have let as many others go first as they have to."""
        return len(passed) >= MAX_PASSED or any(one.held_up >= self._limits.max_overtaken for one in passed)

    def _should_start(self, sequence: Sequence, budget: int, works: list[Work]) -> bool:
        """Whether a queued sequence is better begun in this step than in a later one."""
        missing = sequence.length - self._cache.found(sequence)
        sliver = missing > budget < self._limits.step_tokens // 2
        if sliver and any(work.count > 1 for work in works):
            # It would not finish now in any case, and would only make the step's other prompts wait for it.
            return False
        return not self._computed_by_another(sequence, sequence.length - missing)

    def _computed_by_another(self, sequence: Sequence, found: int) -> bool:
        """Whether a running prompt is about to share more of this one's beginning than is cached now."""
        if not self._cache.reuse:
            return False
        size = self._cache.block_size
        for other in self.running:
            if other.computed >= other.prompt_length or other.salt != sequence.salt:
                continue
            length = min(other.prompt_length, sequence.length - 1) // size * size
            if length <= found:
                continue
            differs = other.tokens(0, length) != sequence.tokens(0, length)
            common = int(np.argmax(differs)) // size * size if differs.any() else length
            if common > max(found, other.computed // size * size):
                return True
        return False

    def _note_overtaking(self, sequence: Sequence, passed: _Passed) -> None:
        """Count who came earlier and let `sequence` begin before: because it could not begin (`held_up`), or because
        less of it is cached, which is between prompts of a tenant and of a priority (`overtaken`)."""
        tenant = sequence.request.tenant
        kind = (tenant, sequence.request.priority)
        later = passed.later_of(tenant)
        queue = self._queues.get(tenant, [])
        for one in {*passed.short, *later, *queue, *(other for other in self.running if other.remaining > 1)}:
            if one.arrival >= sequence.arrival:
                continue
            if one in passed.short or one in later:
                one.held_up += 1
            elif (one.request.tenant, one.request.priority) == kind:
                one.overtaken += 1

    # --- bookkeeping --------------------------------------------------------------------------------------------

    def _number(self, sequence: Sequence) -> None:
        if sequence.arrival == 0:
            sequence.arrival = next(self._arrivals)

    def _computed(self, sequence: Sequence) -> None:
        """Nothing of a prompt is left to compute, so its tenant does not compete for it any more."""
        if sequence in self._prompts:
            self._prompts.remove(sequence)
            self._share.leave(sequence.request.tenant)

    def _unqueue(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.request.tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.request.tenant]


def _seniority(sequence: Sequence) -> tuple[int, int]:
    """Who keeps running when blocks are short: smaller stays longer."""
    return (-sequence.request.priority, sequence.arrival)
