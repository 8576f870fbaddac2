"""How what workers say reaches every router: `Publisher` on a worker, `Collector` on a router; both pure.

A worker streams its log to two home routers. The first of them passes it on to all other routers; the second waits a
little and does so too, unless it has seen the first do it. Whoever finds an entry missing asks for it: first whom it
fits best, then the other one of the worker and the router that had it. docs/gossip.md has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import Address, Entry, Have, Member, Mend, Message, News, Notice, Want, as_u64, hash64
from transfer.gossip.membership import Letter, Membership
from transfer.gossip.summary import Applied, Load, Repair, Summary, Update

if TYPE_CHECKING:
    from transfer.gossip.replicas import Replicas  # compiles its table, which only a router needs

HOMES = 2
HOLD_S = 0.15
"""How long a second home waits for the first one to pass an entry on."""
GRACE_S = 0.04
"""What is missing may be on its way."""
RETRY_S = 0.5
DOUBLINGS = 2
"""So often the time to the next question grows."""
MAX_ASKED = 32
"""Workers whose logs are asked for in one tick; the others wait their turn."""
LAG = 2
"""Entries that a router may be behind another one because they are under way."""
LONG = 100
"""Who lacks more entries sends digests of what it has, in case the log does not go back so far."""


@lru_cache(maxsize=1 << 16)
def _score(worker: str, router: str) -> int:
    return hash64(worker, router)


def homes(worker: str, routers: Iterable[tuple[Member, bool]]) -> list[Member]:
    """A worker's home routers by rendezvous hashing (D. Thaler, C. Ravishankar, 1998), the first one first.

    `routers` come with whether they are suspected. There are `HOMES` that are not, and any suspected ones before them.
    """
    chosen, sure = [], 0
    for router, suspected in sorted(routers, key=lambda item: _score(worker, item[0].name), reverse=True):
        if sure == HOMES:
            break
        chosen.append(router)
        sure += not suspected
    return chosen


class Publisher:
    """A worker's side: streams its summary's log and answers who lacks a part of it."""

    def __init__(
        self,
        summary: Summary,
        load: Callable[[], Load],
        before_tick: Callable[[], None],
        membership: Membership,
        config: GossipConfig,
    ) -> None:
        self._summary = summary
        self._load = load
        self._before_tick = before_tick
        self._membership = membership
        self._config = config
        self._next = 0.0

    def tick(self, now: float) -> list[Letter]:
        """The next entry of the log, when it is time or much has changed."""
        self._before_tick()
        if now < self._next and self._summary.changes < self._config.update_changes:
            return []
        # A fixed rhythm, so that late ticks do not make it slower; after a pause it starts anew.
        self._next = max(self._next, now - self._config.update_interval_s) + self._config.update_interval_s
        update = self._summary.update(self._load())
        to = tuple(home.address for home in homes(self._membership.me.name, self._membership.routers()))
        return [Letter(to, (News(update),))]

    def answer(self, want: Want) -> list[Message]:
        """What somebody lacks: entries of the log; else, where these are not kept any more, buckets; else all."""
        summary = self._summary
        if want.worker != self._membership.me.name:
            return []
        if want.seq and want.incarnation == self._membership.me.incarnation:
            updates = summary.since(want.seq)
            if updates is not None:
                return [Entry(update) for update in updates]
            if want.digests:
                return [Mend(summary.repair(_digests(want), self._load()))]
        return [Entry(summary.snapshot(self._load()))]


@dataclass(slots=True)
class _Missing:
    """A worker's log, of which this router lacks what leads up to `state`, as `informant` has shown it."""

    state: tuple[int, int]
    informant: str
    ask_at: float
    tries: int = 0


class Collector:
    """A router's side: keeps its replicas up to date and other routers' too."""

    def __init__(self, replicas: Replicas, membership: Membership, config: GossipConfig, random: Random) -> None:
        self._replicas = replicas
        self._membership = membership
        self._config = config
        self._random = random
        self._held: dict[str, list[tuple[float, Update]]] = {}  # to be passed on, and when
        self._missing: dict[str, _Missing] = {}
        self._ranked: list[tuple[Member, bool]] = []  # the routers by whom `_first_homes` are known
        self._first_homes: dict[str, str] = {}
        self._next_relay = self._next_compare = 0.0

    def on_news(self, update: Update, sender: str, now: float) -> bool:
        """An entry of a worker's log, from itself or from a router. False: this node knows no such life of a worker."""
        if not self._present(update.worker, update.incarnation):
            return False
        # Through a second home it has taken longer, and would make a dead worker look alive for longer.
        direct = sender in (update.worker, self._first_home(update.worker))
        outcome = self._apply(update, sender, now, now if direct else now - HOLD_S)
        if sender != update.worker:
            held = self._held.get(update.worker)
            if held:
                self._held[update.worker] = [item for item in held if item[1].seq > update.seq]
        elif outcome is Applied.APPLIED:
            first = next(iter(self._sure_homes(update.worker)), None)
            due = now if first == self._membership.me.name else now + HOLD_S
            self._held.setdefault(update.worker, []).append((due, update))
        return True

    def on_entry(self, update: Update, sender: str, now: float) -> None:
        """What this router has asked for. What another router remembers does not show that the worker is alive."""
        if self._present(update.worker, update.incarnation):
            self._apply(update, sender, now, now if sender == update.worker else None)

    def on_mend(self, repair: Repair, sender: str, now: float) -> None:
        """What this router has asked for. If it does not fit, the next question is another one."""
        if self._present(repair.worker, repair.incarnation):
            self._replicas.mend(repair, now if sender == repair.worker else None)

    def on_have(self, have: Have, sender: str, now: float) -> list[Message]:
        """Another router's state: ask for what it is ahead in, and tell it what it lacks."""
        theirs = {}
        for worker, incarnation, seq in have.entries:
            theirs[worker] = incarnation, seq
            if _ahead((incarnation, seq), self._state(worker)):
                self._miss(worker, (incarnation, seq), sender, now)
        if not have.answer:
            return []
        ahead = [entry for entry in self._entries() if _ahead(entry[1:], theirs.get(entry[0], (0, 0)))]
        return [Have(False, tuple(ahead))] if ahead else []

    def answer(self, want: Want) -> list[Message]:
        """A worker's log as this router has it, for another router."""
        if self._state(want.worker) <= (want.incarnation, want.seq):
            return []
        if want.digests:
            repair = self._replicas.repair(want.worker, _digests(want))
            return [] if repair is None else [Mend(repair)]
        snapshot = self._replicas.snapshot(want.worker)
        return [] if snapshot is None else [Entry(snapshot)]

    def notice(self, notice: Notice) -> Letter:
        """Tell all routers of a dispatch."""
        return Letter(self._routers(), (notice,))

    def forget(self, worker: str) -> None:
        """The worker is gone, or has begun another life."""
        self._replicas.forget(worker)
        self._held.pop(worker, None)
        self._missing.pop(worker, None)
        self._first_homes.pop(worker, None)

    def tick(self, now: float) -> list[Letter]:
        """What is due by now."""
        letters = []
        if now >= self._next_relay:
            self._next_relay = now + self._config.relay_interval_s
            letters += self._relay(now)
        if now >= self._next_compare:
            self._next_compare = now + self._config.compare_interval_s
            routers = self._routers()
            if routers:
                have = Have(True, tuple(self._entries()))
                letters.append(Letter((self._random.choice(routers),), (have,)))
        return letters + self._ask(now)

    def _apply(self, update: Update, sender: str, now: float, heard: float | None) -> Applied:
        outcome = self._replicas.apply(update, heard)
        if outcome is Applied.GAP:
            self._miss(update.worker, (update.incarnation, update.seq), sender, now)
        return outcome

    def _present(self, worker: str, incarnation: int) -> bool:
        """Only what a member says in its present life counts, so that nothing outlives its worker here."""
        member = self._membership.find(worker)
        return member is not None and member.incarnation == incarnation

    def _relay(self, now: float) -> list[Letter]:
        news: list[Message] = []
        for worker, held in list(self._held.items()):
            news += [News(update) for due, update in held if due <= now]
            later = [item for item in held if item[0] > now]
            if later:
                self._held[worker] = later
            else:
                del self._held[worker]
        return [Letter(self._routers(), tuple(news))] if news else []

    def _miss(self, worker: str, state: tuple[int, int], informant: str, now: float) -> None:
        missing = self._missing.get(worker)
        if missing is None:
            self._missing[worker] = _Missing(state, informant, now + GRACE_S)
        elif state > missing.state:
            missing.state = state
            missing.informant = informant

    def _ask(self, now: float) -> list[Letter]:
        questions: dict[Address, list[Message]] = {}
        for worker, missing in list(self._missing.items()):
            state = self._state(worker)
            member = self._membership.find(worker)
            if member is None or missing.state <= state:
                del self._missing[worker]
            elif now >= missing.ask_at and sum(map(len, questions.values())) < MAX_ASKED:
                target, want = self._question(member, missing, state)
                questions.setdefault(target.address, []).append(want)
                missing.ask_at = now + RETRY_S * 2 ** min(missing.tries, DOUBLINGS)
                missing.tries += 1
        return [Letter((to,), tuple(wants)) for to, wants in questions.items()]

    def _question(self, worker: Member, missing: _Missing, state: tuple[int, int]) -> tuple[Member, Want]:
        """Whom to ask for what.

        Who knows part of the log asks the worker, which has the entries. Who has nothing asks the router that has:
        there many workers' are in one place. What is not answered is asked of the other one, and then for a snapshot.
        """
        informant = self._membership.find(missing.informant)
        if informant is None or (state[1] > 0) == (missing.tries % 2 == 0):
            target = worker
        else:
            target = informant
        if not state[1] or missing.tries > 1:
            return target, Want(worker.name, 0, 0)
        # A router has no log, and the worker's may not go back so far.
        digests = target is not worker or missing.state[1] - state[1] > LONG
        return target, Want(worker.name, *state, as_u64(self._replicas.buckets(worker.name)) if digests else b"")

    def _state(self, worker: str) -> tuple[int, int]:
        return self._replicas.state(worker)[:2]

    def _entries(self) -> Iterable[tuple[str, int, int]]:
        for worker in filter(None, self._replicas.workers):
            incarnation, seq = self._state(worker)
            if seq:
                yield worker, incarnation, seq

    def _routers(self) -> tuple[Address, ...]:
        return tuple(router.address for router, _ in self._membership.routers())

    def _first_home(self, worker: str) -> str:
        """A worker's first home router, suspected or not."""
        routers = self._membership.routers()
        if routers is not self._ranked:
            self._ranked, self._first_homes = routers, {}
        first = self._first_homes.get(worker)
        if first is None:
            first = homes(worker, [*routers, (self._membership.me, False)])[0].name
            self._first_homes[worker] = first
        return first

    def _sure_homes(self, worker: str) -> list[str]:
        routers = self._membership.routers()
        suspected = {router.name for router, doubt in routers if doubt}
        ranked = homes(worker, [*routers, (self._membership.me, False)])
        return [router.name for router in ranked if router.name not in suspected]


def _digests(want: Want) -> tuple[int, ...]:
    return tuple(np.frombuffer(want.digests, "<u8").tolist())


def _ahead(state: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Whether a state is so much later than another one that the difference is not just under way."""
    return state[0] > of[0] or (state[0] == of[0] and state[1] > of[1] + (LAG if of[1] else 0))
