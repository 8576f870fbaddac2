"""Who is in the cluster: SWIM with Lifeguard's additions, as a pure state machine.

A. Das, I. Gupta, A. Motivala: SWIM (2002); A. Dadgar, J. Phillips, J. Currey: Lifeguard (2018). docs/gossip.md says
what is done here, with the numbers. All that a node knows of another is the highest claim it has heard
(`Claim.rank`), so that nodes agree once they have heard the same claims, in whatever order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import (
    ALIVE,
    DEAD,
    LEFT,
    MAX_NODES,
    ROUTER,
    SUSPECT,
    Ack,
    Address,
    Claim,
    Member,
    Message,
    Nack,
    Ping,
    PingFor,
    State,
    Sync,
    as_u64,
    hash64,
    pack,
)
from transfer.gossip.summary import BUCKETS

INDIRECT = 3
FANOUT = 3
CONFIRMATIONS = 2
"""So many further suspicions shorten the time that a suspect has to the least."""
PATIENCE = 6.0
"""A suspicion that nobody confirms lasts so many times longer."""
MAX_HEALTH = 8
MAX_CLAIMS = 2000
"""In one message. A claim has 420 bytes at most."""
PAUSE_S = 0.25
"""A tick that comes later than this was late because this node stood still."""


@dataclass(frozen=True, slots=True)
class Letter:
    """The same messages for some nodes."""

    to: tuple[Address, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Up:
    """A node has come, or has come back in another life or from suspicion that was believed."""

    member: Member


@dataclass(frozen=True, slots=True)
class Down:
    """A node is gone. `left`: it said so itself."""

    member: Member
    left: bool


@dataclass(slots=True)
class _Entry:
    claim: Claim
    since: float
    origins: set[str] = field(default_factory=set)
    deadline: float = math.inf

    @property
    def up(self) -> bool:
        return self.claim.status < DEAD

    @property
    def mark(self) -> int:
        """What a digest of members counts; who is gone counts nothing, because it will be forgotten."""
        return hash64(self.claim.name, self.claim.incarnation, self.claim.version) if self.up else 0


@dataclass(slots=True)
class _Probe:
    target: str
    number: int
    timeout: float
    end: float
    answered: bool = False
    asked: int = 0
    nacks: int = 0


@dataclass(slots=True)
class _Favour:
    """A probe for somebody else."""

    asker: Address
    number: int
    nack_at: float


class Membership:
    """One node's view of all others."""

    def __init__(self, me: Member, config: GossipConfig, random: Random) -> None:
        self.me = me
        self.events: list[Up | Down] = []
        self.health = 0
        """0 is well; each step makes this node slower to call others dead."""
        self.superseded = False
        """Somebody knows a later life of this node's name."""
        self._config = config
        self._random = random
        self._version = 0
        self._left = False
        self._entries: dict[str, _Entry] = {}
        self._suspects: dict[str, None] = {}  # dicts, because the order of a set differs from process to process
        self._gone: dict[str, None] = {}
        self._up: list[Member] | None = []  # None: to be made anew
        self._routers: list[tuple[Member, bool]] | None = []
        self._order: list[str] = []
        self._rumours: dict[str, tuple[bytes, int]] = {}  # name: packed claim, how often it has been told
        self._digests = [0] * BUCKETS
        self._digests[_bucket(me.name)] = _Entry(self.claim, 0.0).mark
        self._number = random.getrandbits(64)  # so that nobody's recorded answer is one to this node
        self._probe: _Probe | None = None
        self._favours: dict[int, _Favour] = {}
        self._last_tick: float | None = None
        # Relative to the first tick, which knows the time; drawn, so that not all nodes speak at once.
        self._next_probe = self._next_spread = self._next_sync = random.random() * config.probe_interval_s

    @property
    def claim(self) -> Claim:
        """What this node says of itself."""
        me = self.me
        status = LEFT if self._left else ALIVE
        return Claim(me.name, me.role, me.host, me.port, me.incarnation, self._version, status, me.name)

    @property
    def members(self) -> list[Member]:
        """All others that are up, suspects among them; do not change it."""
        if self._up is None:
            self._up = [entry.claim.member for entry in self._entries.values() if entry.up]
        return self._up

    def routers(self) -> list[tuple[Member, bool]]:
        """All other routers that are up, and whether somebody suspects them; do not change it."""
        if self._routers is None:
            routers = [member for member in self.members if member.role == ROUTER]
            self._routers = [(router, router.name in self._suspects) for router in routers]
        return self._routers

    def find(self, name: str) -> Member | None:
        """A node that is up."""
        entry = self._entries.get(name)
        return entry.claim.member if entry is not None and entry.up else None

    def held(self, name: str) -> Claim | None:
        """The claim that holds of another node, up or gone; None where nobody knows it."""
        entry = self._entries.get(name)
        return None if entry is None else entry.claim

    def leave(self) -> list[Letter]:
        """Say good-bye, to all routers and some others."""
        self._left = True
        told = {member.address for member, _ in self.routers()} | {member.address for member in self._some(2 * FANOUT)}
        return [Letter((address,), (self.claim,)) for address in sorted(told)]

    def sync(self, to: Address) -> Letter:
        """Compare members with a node."""
        return Letter((to,), (self.claim, Sync(as_u64(self._digests))))

    def rumours(self, room: int) -> list[bytes]:
        """Packed claims for a frame with so many bytes of room, those first that were told least."""
        if not self._rumours:
            return []
        limit = math.ceil(4 * math.log10(len(self._entries) + 2))
        chosen = []
        for name, (data, told) in heapq.nsmallest(32, self._rumours.items(), key=lambda item: item[1][1]):
            if len(data) > room:
                break
            room -= len(data)
            chosen.append(data)
            if told + 1 >= limit:
                del self._rumours[name]
            else:
                self._rumours[name] = data, told + 1
        return chosen

    # What others say.

    def hear(self, claim: Claim, now: float, tell: bool = True) -> None:
        """Take a claim in. `tell`: what is new is passed on."""
        if claim.name == self.me.name:
            self._hear_of_me(claim)
            return
        entry = self._entries.get(claim.name)
        if entry is None:
            if claim.status < DEAD and len(self._entries) < MAX_NODES:  # the gone of others would never be forgotten
                self._set(claim, now, tell)
        elif claim.rank > entry.claim.rank:
            self._set(claim, now, tell)
        elif claim.rank == entry.claim.rank and claim.status == SUSPECT:
            self._confirm(entry, claim)

    def hear_state(self, state: State, now: float) -> None:
        """Take another node's knowledge in. Whom it holds dead, this node only suspects: the news may be old, and who
        is alive must be able to say so."""
        for claim in state.claims:
            mine = self._entries.get(claim.name)
            if claim.status == DEAD and mine is not None and mine.up and claim.incarnation == mine.claim.incarnation:
                if claim.version >= mine.claim.version:
                    self.hear(replace(claim, status=SUSPECT, origin=self.me.name), now)
            else:
                self.hear(claim, now, tell=False)

    def answer_sync(self, sync: Sync) -> list[Message]:
        """What to tell a node that has these digests."""
        if len(sync.digests) != 8 * BUCKETS:
            return []
        mine = as_u64(self._digests)
        differ = bytes(i for i in range(BUCKETS) if mine[8 * i : 8 * i + 8] != sync.digests[8 * i : 8 * i + 8])
        return self.states(differ, answer=True) if differ else []

    def states(self, buckets: bytes, answer: bool) -> list[Message]:
        """All that this node knows of the members in some buckets, itself included, in parts that fit a frame."""
        wanted = set(buckets)
        claims = [self.claim, *(entry.claim for name, entry in self._entries.items() if _bucket(name) in wanted)]
        parts = [tuple(claims[at : at + MAX_CLAIMS]) for at in range(0, len(claims), MAX_CLAIMS)]
        first = State(bytes(sorted(wanted)), answer, parts[0])
        return [first, *(State(b"", False, part) for part in parts[1:])]

    def on_ping(self, ping: Ping) -> list[Message]:
        """Answer, if it is this node that was meant."""
        return [Ack(ping.number)] if ping.target == self.me.name and not self._left else []

    def on_ping_for(self, ping: PingFor, asker: Address, now: float) -> list[Letter]:
        """Probe for another node."""
        target = self.find(ping.target)
        if target is None:
            return []
        nack_at = now + 0.8 * (self._config.probe_interval_s - self._config.probe_timeout_s)
        number = self._count()
        self._favours[number] = _Favour(asker, ping.number, nack_at)
        return [Letter((target.address,), (Ping(number, target.name),))]

    def on_ack(self, number: int) -> list[Letter]:
        """A probe was answered: one of this node's own, or one for another node."""
        favour = self._favours.pop(number, None)
        if favour is not None:
            return [Letter((favour.asker,), (Ack(favour.number),))]
        probe = self._probe
        if probe is not None and number == probe.number and not probe.answered:
            probe.answered = True
            self.health = max(0, self.health - 1)
        return []

    def on_nack(self, number: int) -> None:
        """A helper is well, and could not reach the target."""
        if self._probe is not None and number == self._probe.number:
            self._probe.nacks += 1

    # Time.

    def tick(self, now: float) -> list[Letter]:
        """What is due by now; to be called some twenty times a second."""
        self._excuse_pause(now)
        letters = [*self._tick_probe(now), *self._tick_favours(now)]
        self._tick_suspects(now)
        if now >= self._next_spread:
            self._next_spread = now + self._config.spread_interval_s
            if self._rumours:
                letters += [Letter((member.address,), ()) for member in self._some(FANOUT)]
        if now >= self._next_sync:
            self._next_sync = now + self._config.sync_interval_s * (0.9 + 0.2 * self._random.random())
            letters += [self.sync(member.address) for member in self._some(1)]
        return letters

    def _excuse_pause(self, now: float) -> None:
        """While this node stood still nobody could reach it: that time counts against nobody."""
        if self._last_tick is None:
            self._next_probe += now
            self._next_spread += now
            self._next_sync += now
        elif (pause := now - self._last_tick) > PAUSE_S:
            if self._probe is not None:
                self._probe.timeout += pause
                self._probe.end += pause
            for name in self._suspects:
                self._entries[name].since += pause
                self._entries[name].deadline += pause
        self._last_tick = now

    def _tick_probe(self, now: float) -> Iterator[Letter]:
        probe = self._probe
        if probe is not None and not probe.answered:
            if now >= probe.end:
                self._probe_failed(probe, now)
                self._probe = None
            elif now >= probe.timeout and not probe.asked:
                helpers = self._some(INDIRECT, without=probe.target)
                probe.asked = len(helpers)
                probe.timeout = math.inf
                for helper in helpers:
                    yield Letter((helper.address,), (PingFor(probe.number, probe.target),))
        if now >= self._next_probe and (self._probe is None or self._probe.answered):
            self._next_probe = now + self._config.probe_interval_s * (1 + self.health)
            yield from self._begin_probe(now)
            yield from self._try_gone()

    def _begin_probe(self, now: float) -> Iterator[Letter]:
        self._probe = None
        target = self._next_target()
        if target is not None:
            slow = 1 + self.health
            timeout, end = self._config.probe_timeout_s * slow, self._config.probe_interval_s * slow
            self._probe = _Probe(target.name, self._count(), now + timeout, now + end)
            yield Letter((target.address,), (Ping(self._probe.number, target.name),))

    def _next_target(self) -> Member | None:
        """Everybody in turn, in an order that is drawn anew for each round."""
        while True:
            if not self._order:
                if not self.members:
                    return None
                self._order = [member.name for member in self.members]
                self._random.shuffle(self._order)
            target = self.find(self._order.pop())
            if target is not None:
                return target

    def _try_gone(self) -> Iterator[Letter]:
        """All nodes together try each dead one about twice a second: a partition ends when somebody notices."""
        if self._gone:
            rate = 2.0 * len(self._gone) / (1 + len(self.members)) * self._config.probe_interval_s * (1 + self.health)
            tries = int(rate) + (self._random.random() < rate % 1)
            for name in self._random.sample(list(self._gone), min(tries, FANOUT, len(self._gone))):
                claim = self._entries[name].claim
                if claim.status == DEAD:
                    yield Letter((claim.member.address,), (Ping(self._count(), name),))

    def _probe_failed(self, probe: _Probe, now: float) -> None:
        silent = probe.asked - probe.nacks if probe.asked else 1
        self.health = min(MAX_HEALTH, self.health + max(0, silent))
        entry = self._entries.get(probe.target)
        if entry is not None and entry.up:
            self.hear(replace(entry.claim, status=SUSPECT, origin=self.me.name), now)

    def _tick_favours(self, now: float) -> Iterator[Letter]:
        for number, favour in list(self._favours.items()):
            if now >= favour.nack_at:
                del self._favours[number]
                yield Letter((favour.asker,), (Nack(favour.number),))

    def _tick_suspects(self, now: float) -> None:
        for name in [name for name in self._suspects if now >= self._entries[name].deadline]:
            self.hear(replace(self._entries[name].claim, status=DEAD, origin=self.me.name), now)

    def expired(self, now: float) -> list[str]:
        """Forget whom nobody has heard of for long, and name them."""
        names = [name for name in self._gone if now - self._entries[name].since > self._config.forget_s]
        for name in names:
            del self._entries[name]
            del self._gone[name]
            self._rumours.pop(name, None)
        return names

    # Bookkeeping.

    def _suspicion_s(self, confirmations: int) -> float:
        """How long a suspect may contradict: the less, the more nodes suspect it."""
        nodes = len(self._entries) - len(self._gone) + 1  # `members` may have to be made anew
        least = self._config.suspicion * max(1.0, math.log10(nodes)) * self._config.probe_interval_s
        wanted = min(CONFIRMATIONS, nodes - 2)
        if wanted < 1:
            return least
        share = math.log(confirmations + 1) / math.log(wanted + 1)
        return max(least, least * (PATIENCE - (PATIENCE - 1) * share))

    def _confirm(self, entry: _Entry, claim: Claim) -> None:
        if claim.origin not in entry.origins and len(entry.origins) <= CONFIRMATIONS:
            entry.origins.add(claim.origin)
            entry.deadline = entry.since + self._suspicion_s(len(entry.origins) - 1)
            self._rumour(claim)

    def _hear_of_me(self, claim: Claim) -> None:
        mine = self.claim
        self.superseded |= claim.incarnation > mine.incarnation
        if claim.incarnation == mine.incarnation and claim.rank > mine.rank and not self._left:
            bucket = _bucket(self.me.name)
            self._digests[bucket] = (self._digests[bucket] - _Entry(mine, 0.0).mark) % 2**64
            self._version = claim.version + 1
            self._digests[bucket] = (self._digests[bucket] + _Entry(self.claim, 0.0).mark) % 2**64
            if claim.status != ALIVE:
                self.health = min(MAX_HEALTH, self.health + 1)
            self._rumour(self.claim)

    def _set(self, claim: Claim, now: float, tell: bool) -> None:
        old = self._entries.get(claim.name)
        new = self._entries[claim.name] = _Entry(claim, now)
        bucket = _bucket(claim.name)
        self._digests[bucket] = (self._digests[bucket] + new.mark - (old.mark if old else 0)) % 2**64
        self._routers = None
        self._suspects.pop(claim.name, None)
        self._gone.pop(claim.name, None)
        was_up = old is not None and old.up
        if old is None or was_up != new.up or old.claim.member != claim.member:
            self._up = None
        if claim.status == SUSPECT:
            self._suspects[claim.name] = None
            new.origins.add(claim.origin)
            new.deadline = now + self._suspicion_s(0)
        elif not new.up:
            self._gone[claim.name] = None
        if new.up and (old is None or not was_up or old.claim.incarnation != claim.incarnation):
            self.events.append(Up(claim.member))
        elif was_up and not new.up:
            self.events.append(Down(claim.member, left=claim.status == LEFT))
        if tell:
            self._rumour(claim)

    def _rumour(self, claim: Claim) -> None:
        self._rumours.pop(claim.name, None)
        self._rumours[claim.name] = pack(claim), 0

    def _some(self, count: int, without: str = "") -> list[Member]:
        drawn = self._random.sample(self.members, min(count + 1, len(self.members)))
        return [member for member in drawn if member.name != without][:count]

    def _count(self) -> int:
        self._number = (self._number + 1) % 2**64
        return self._number


def _bucket(name: str) -> int:
    return hash64(name) % BUCKETS
