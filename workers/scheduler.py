"""Scheduler: who runs in the next step. A pure state machine over sequences and their cache.

Each step has a token budget. Running sequences that only need their next token come first; what is left goes to
prompts, in chunks. Every eighth step with prompts serves them in order of arrival, whatever follows here, so that
nobody waits for ever. The others serve them

1. by priority;
2. the tenant first that was served least, compared within a priority;
3. within a tenant, prompts that `max_overtaken` later ones of it have gone before, oldest first;
4. hot before warm before cold: by the share of the prompt that is cached;
5. in order of arrival.

Priorities below 0 are for work that nobody waits for. While somebody else is served, or was lately, their prompts get a
small part of a step: a step cannot be broken off, so its length is what everybody waits who comes meanwhile. A step
with a prompt that somebody waits for has nothing of theirs, not even next tokens, unless it is one by arrival.

A prompt is admitted when blocks for all of it can be had, and not while a running prompt computes a beginning that
both have in common. Whatever keeps it from beginning, at most `max_overtaken` later ones of its own tenant begin
before it. One that cannot get its blocks also lets at most as many others begin, whosever they are. When a sequence
cannot grow, the one that is last in line goes back to the queue, from where it resumes at its cached prefix.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count, islice

import numpy as np

from workers.fairness import CREDIT_TOKENS, FairShare
from workers.kv.cache import KVCache
from workers.sequence import Behind, Sequence, Stage

HOT, WARM = 0.75, 0.25
"""Cached shares of a prompt from which on it counts as hot, as warm."""
WINDOW = 16
"""Queued prompts of a tenant that are looked up in the cache when the next one is chosen."""
BY_AGE = 8
"""Of so many steps with prompts one serves them in order of arrival."""
MAX_PASSED = 8
"""Prompts that lack blocks, or prompts of one tenant that are to begin later, before the queue, or the tenant's part of
it, is left alone until the next step."""
MAX_LOOKED_AT = 32
"""Prompts that turn out not to begin in a step, for whatever reason, before the queue is left alone: looking costs
time. Those that are known to wait for another's beginning are not looked at."""
PATIENT_PART = 8
"""The part of a step's tokens that prompts of priorities below 0 get beside others."""
BESIDE_STEPS = 256
"""For so many steps after somebody was served who waits, the next one is expected."""
PREFETCHED = 8
"""Queued prompts for which what lies on disk is brought nearer."""


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
    """Prompts that turn out not to begin in this step: those that lack blocks, and by tenant those that had better
    begin later."""

    short: set[Sequence] = field(default_factory=set)
    later: defaultdict[str, set[Sequence]] = field(default_factory=lambda: defaultdict(set))

    @property
    def count(self) -> int:
        """All of them."""
        return len(self.short) + sum(map(len, self.later.values()))


class Scheduler:
    """Queue and running set."""

    def __init__(self, cache: KVCache, limits: Limits) -> None:
        self._cache = cache
        self._limits = limits
        self._shares: defaultdict[int, FairShare] = defaultdict(FairShare)
        self._arrivals = count(1)
        self._prompt_steps = 0
        self._steps = 0
        self._served_at = -math.inf  # the step in which somebody was served who waits
        self._queues: dict[str, list[Sequence]] = {}
        self._short: set[Sequence] = set()
        self._heats: dict[Sequence, int] = {}
        self.running: list[Sequence] = []

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return sum(map(len, self._queues.values()))

    @property
    def oldest(self) -> float:
        """The smallest number of those in the queue."""
        return min((one.arrival for queue in self._queues.values() for one in queue), default=math.inf)

    @property
    def short(self) -> bool:
        """Whether some in the queue lack blocks."""
        return bool(self._short)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; one that was here before gets its old place."""
        self.number(sequence)
        sequence.stage = Stage.WAITING
        insort(self._queues.setdefault(sequence.request.tenant, []), sequence, key=_seniority)

    def join(self, sequence: Sequence) -> None:
        """Take in a sequence whose table is already filled."""
        self.number(sequence)
        sequence.stage = Stage.RUNNING
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        self._short.discard(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self._queues.get(sequence.request.tenant, ()):
            self._unqueue(sequence)

    def schedule(self, incoming: int = 0) -> tuple[list[Work], list[Sequence]]:
        """The work of the next step and the sequences admitted for it; one that loads cached blocks first is not among
        them. No work means nothing can run now. `incoming` sequences are about to join, and have places in the running
        set."""
        ready = self._ready()
        decodes = [self._work(one, 1) for one in ready if self._by_age or one.request.priority >= 0]
        patient = ready[len(decodes) :]
        self._wake()
        # Prompts always get something, or a full running set could keep them waiting for ever.
        budget = max(self._limits.step_tokens - len(decodes), 1)
        room = self._patient_room(max(budget - len(patient), 1))
        chunks, admitted = self._chunks(budget, room, self._limits.max_running - len(self.running) - incoming)
        if not _awaited(chunks):
            decodes += [self._work(one, 1) for one in patient]
        self._prompt_steps += bool(chunks)
        self._steps += 1
        if _awaited(decodes) or _awaited(chunks):
            self._served_at = self._steps
        self._settle(chunks)
        self._heats.clear()
        waiting = (one for one in chain.from_iterable(self._queues.values()) if not one.prefetched)
        for sequence in islice(waiting, PREFETCHED):
            self._cache.prefetch(sequence)
        return decodes + chunks, admitted

    def _ready(self) -> list[Sequence]:
        """Those that only need their next token, with room for it."""
        return [
            one
            for one in sorted(self.running, key=_seniority)
            if one.stage is Stage.RUNNING and one.remaining == 1 and self._make_room(one)
        ]

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

    @property
    def _by_age(self) -> bool:
        """Whether the next step with prompts serves them in order of arrival."""
        return self._prompt_steps % BY_AGE == BY_AGE - 1

    # --- whose prompt is next -----------------------------------------------------------------------------------

    def _chunks(self, budget: int, patient: int, places: int) -> tuple[list[Work], list[Sequence]]:
        """Prompts for a budget of tokens, of which those may have `patient` that nobody waits for; and the prompts that
        are admitted, at most `places`."""
        chunks: list[Work] = []
        admitted: list[Sequence] = []
        started = [one for one in self.running if one.remaining > 1 and one.load is None]
        begun = 0
        passed = _Passed()
        while budget > 0:
            queued = self._may_begin(passed) if begun < places else ()
            prompts = [one for one in chain(started, queued) if patient or one.request.priority >= 0]
            if not prompts:
                break
            sequence = self._first(prompts)
            room = budget if sequence.request.priority >= 0 else min(budget, patient)
            if sequence.stage is Stage.RUNNING:
                started.remove(sequence)
            elif not self._should_start(sequence, room, bool(chunks)):
                passed.later[sequence.request.tenant].add(sequence)
                continue
            elif not self._cache.admit(sequence, sequence.length):
                passed.short.add(sequence)
                self._short.add(sequence)
                continue
            else:
                self._begin(sequence)
                begun += 1
                if sequence.load is not None:
                    continue
                admitted.append(sequence)
            chunks.append(self._work(sequence, min(sequence.remaining, room)))
            budget -= chunks[-1].count
            if sequence.request.priority < 0:
                patient -= chunks[-1].count
            elif not self._by_age:
                patient = 0
        return chunks, admitted

    def _patient_room(self, budget: int) -> int:
        """How much of a step's budget prompts may have that nobody waits for."""
        beside = self._steps - self._served_at < BESIDE_STEPS or any(
            one.request.priority >= 0 for one in chain(self.running, *self._queues.values())
        )
        return min(budget, max(1, self._limits.step_tokens // PATIENT_PART)) if beside else budget

    def _may_begin(self, passed: _Passed) -> Iterator[Sequence]:
        """The queued prompts that may begin, seen from those that did not. Nobody begins any more before one that lacks
        blocks and has let enough others go first."""
        if passed.count >= MAX_LOOKED_AT or len(passed.short) >= MAX_PASSED:
            return
        due = [one for one in self._short if one.held_up >= self._limits.max_overtaken]
        if due:
            yield from (one for one in due if one not in passed.later[one.request.tenant] and one not in passed.short)
            return
        for tenant, queue in self._queues.items():
            later = passed.later.get(tenant, set())
            if len(later) < MAX_PASSED:
                yield from (one for one in self._not_overtaking(queue) if one not in later and one not in passed.short)

    def _not_overtaking(self, queue: list[Sequence]) -> Iterator[Sequence]:
        """The prompts of a tenant that do not wait for a beginning and would not go before one that was overtaken often
        enough, and that does not rank below them."""
        before = math.inf
        for one in queue:
            if one.arrival < before and one.behind is None:
                yield one
            if one.overtaken >= self._limits.max_overtaken:
                before = min(before, one.arrival)

    def _first(self, prompts: list[Sequence]) -> Sequence:
        """Whose turn it is."""
        if self._by_age:
            return min(prompts, key=lambda one: one.arrival)
        priority = max(one.request.priority for one in prompts)
        share = self._shares[priority]
        prompts = [one for one in prompts if one.request.priority == priority]
        tenant = min(prompts, key=lambda one: (share.served(one.request.tenant), one.arrival)).request.tenant
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

    def _should_start(self, sequence: Sequence, budget: int, others: bool) -> bool:
        """Whether a queued sequence is better begun in this step, in which there are chunks of others, than later."""
        found = self._cache.found(sequence)
        if others and sequence.length - found > budget < self._limits.step_tokens // 2:
            # It would not finish now in any case, and would only make the step's other prompts wait for it.
            return False
        sequence.behind = self._behind(sequence, found) if self._cache.reuse else None
        if sequence.behind is not None:
            self._short.discard(sequence)  # blocks are not what it lacks now
        return sequence.behind is None

    def _behind(self, sequence: Sequence, found: int) -> Behind | None:
        """A running prompt that is about to share more of this one's beginning than is cached now."""
        if sequence.request.sees_all_rows:
            return None
        size = self._cache.block_size
        for other in self.running:
            if other.computed >= other.prompt_length or other.salt != sequence.salt:
                continue
            if self._ranks_below(other, sequence):
                # Others go before that one, and would go before this one with it.
                continue
            length = min(other.prompt_length, sequence.length - 1) // size * size
            # What another one loads need not be loaded twice.
            had = found if other.load is None else min(found, other.computed)
            if length <= had:
                continue
            differs = other.tokens(0, length) != sequence.tokens(0, length)
            common = int(np.argmax(differs)) // size * size if differs.any() else length
            if common > max(had, other.computed // size * size):
                return Behind(other, common)
        return None

    def _ranks_below(self, one: Sequence, other: Sequence) -> bool:
        """Whether others go before `one` that would not go before `other`: by priority, or by what its tenant owes."""
        if one.request.priority != other.request.priority:
            return one.request.priority < other.request.priority
        share = self._shares[one.request.priority]
        return share.served(one.request.tenant) > share.served(other.request.tenant) + CREDIT_TOKENS

    def _wake(self) -> None:
        """Queued prompts no longer wait for beginnings that are computed, or that nobody computes any more."""
        running = set(self.running)
        for one in chain.from_iterable(self._queues.values()):
            if one.behind and not (one.behind.other in running and one.behind.other.computed < one.behind.tokens):
                one.behind = None

    def _begin(self, sequence: Sequence) -> None:
        """Move an admitted sequence to the running set, and count the earlier ones that it goes before."""
        self._unqueue(sequence)
        self._short.discard(sequence)
        sequence.stage = Stage.RUNNING
        for one in self._short:
            one.held_up += one.arrival < sequence.arrival
        tenant, priority = sequence.request.tenant, sequence.request.priority
        prompts = (one for one in self.running if one.remaining > 1 and one.request.tenant == tenant)
        for one in chain(self._queues.get(tenant, ()), prompts):
            one.overtaken += one.arrival < sequence.arrival and one.request.priority >= priority
        self.running.append(sequence)

    # --- bookkeeping --------------------------------------------------------------------------------------------

    def number(self, sequence: Sequence) -> None:
        """Note when a sequence came, if that is not known yet."""
        if sequence.arrival == 0:
            sequence.arrival = next(self._arrivals)

    def _work(self, sequence: Sequence, tokens: int) -> Work:
        request = sequence.request
        self._shares[request.priority].charge(request.tenant, tokens / request.weight)
        return Work(sequence, tokens)

    def _settle(self, chunks: list[Work]) -> None:
        """Tell the shares who is left wanting. Whoever waits for another's beginning wants no tokens now."""
        finished = {work.sequence for work in chunks if work.count == work.sequence.remaining}
        queued = (one for one in chain.from_iterable(self._queues.values()) if one.behind is None)
        started = (one for one in self.running if one.remaining > 1 and one not in finished)
        wanting: dict[int, set[str]] = {}
        for one in chain(queued, started):
            wanting.setdefault(one.request.priority, set()).add(one.request.tenant)
        for priority, share in self._shares.items():
            share.settle(wanting.get(priority, ()))

    def _unqueue(self, sequence: Sequence) -> None:
        queue = self._queues[sequence.request.tenant]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.request.tenant]


def _seniority(sequence: Sequence) -> tuple[int, int]:
    """Who keeps running when blocks are short: smaller stays longer."""
    return (-sequence.request.priority, sequence.arrival)


def _awaited(works: list[Work]) -> bool:
    """Whether somebody waits for one of these."""
    return any(work.sequence.request.priority >= 0 for work in works)
