"""Gossip: what one node says and believes, as a pure state machine. Clock, randomness and transport are arguments.

It puts together membership (membership.py), the spread of summaries (spread.py) and frames (frames.py); node.py runs it
on sockets, and the tests run a thousand of them in virtual time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from transfer.gossip.config import GossipConfig
from transfer.gossip.frames import (
    DEAD,
    MAX_DATAGRAM,
    MAX_FRAME,
    ROUTER,
    SUSPECT,
    Ack,
    Address,
    Claim,
    Entry,
    Frame,
    Have,
    Member,
    Mend,
    Message,
    Nack,
    News,
    Notice,
    Opener,
    Ping,
    PingFor,
    Refused,
    Sealer,
    State,
    Sync,
    Want,
    pack,
)
from transfer.gossip.membership import Down, Letter, Membership, Up
from transfer.gossip.spread import Collector, Publisher
from transfer.gossip.summary import Load, Summary

if TYPE_CHECKING:
    from transfer.gossip.replicas import Replicas  # compiles its table, which only a router needs

INQUIRY_S = 1.0
SEED_S = 10.0
"""How often seeds that are no members are tried by a node that has others; one that is alone tries more often."""
MAX_ANSWERS = 64
"""No honest frame asks for more; what is behind it in a frame is ignored."""
_BULK = (State, Entry, Mend, Have)
"""What goes over TCP, in as few frames as can be, where it does not fit one datagram."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Send:
    """A frame to be sent: as a datagram, or over TCP where it is `reliable`."""

    address: Address
    data: bytes
    reliable: bool


class Gossip:
    """One node. `replicas` makes it a router; `summary` and `load` make it a worker, and `before_tick` may bring the
    summary up to date.

    `seeds` are addresses of nodes to join through; it may hold the node's own. `key` is the cluster's secret, at least
    16 bytes. The caller hands in what arrives (`receive`), calls `tick` some twenty times a second, sends what both
    return, and takes what has happened from `take_events`. All `now` are seconds of one clock that never goes back.
    """

    def __init__(
        self,
        me: Member,
        config: GossipConfig,
        key: bytes,
        random: Random,
        replicas: Replicas | None = None,
        summary: Summary | None = None,
        load: Callable[[], Load] | None = None,
        seeds: Sequence[Address] = (),
        before_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.me = me
        self.membership = Membership(me, config, random)
        self.refused: Counter[str] = Counter()
        """Frames that were not looked into, by reason."""
        self.failed: Counter[str] = Counter()
        """Times that a part of `tick` has raised something, by part; the first of each is logged."""
        self._sealer = Sealer(me.name, me.incarnation, key)
        self._opener = Opener(key)
        self._collector = Collector(replicas, self.membership, config, random) if replicas is not None else None
        self._publisher: Publisher | None = None
        if summary is not None and load is not None:
            self._publisher = Publisher(summary, load, before_tick, self.membership, config)
        self._seeds = list(seeds)
        self._random = random
        self._events: list[Up | Down | Notice] = []
        self._warned: set[str] = set()
        self._next_seed = 0.0
        self._next_expiry = 0.0
        self._next_inquiry = 0.0

    def receive(self, now: float, data: bytes, sender: Address) -> list[Send]:
        """Take in what came from `sender`, and answer."""
        try:
            frame = self._opener.open(data)
        except Refused as refused:
            self._refuse(refused.reason, sender)
            return []
        if frame.sender == self.me.name:
            if frame.incarnation != self.me.incarnation:
                self._refuse("name", sender)
            return []
        letters: list[Letter] = []
        answers: list[Message] = []
        before = self.membership.claim
        for message in frame.messages:
            if len(answers) + len(letters) >= MAX_ANSWERS:
                break
            answers += self._take(message, frame, self._address(frame, sender), now, letters)
        if self.membership.claim != before:
            answers.append(self.membership.claim)  # whoever doubted it hears it first
        if self.membership.superseded:
            self._warn("life", "knows of a later start of %s: this one is ignored.", sender, self.me.name)
        held = self.membership.held(frame.sender)
        if held is None or held.incarnation < frame.incarnation:
            if len(data) <= MAX_DATAGRAM:  # else it came over TCP, from a port where nobody listens
                letters += self._inquire(sender, now)
        elif held.incarnation == frame.incarnation and held.status in (SUSPECT, DEAD):
            answers.append(held)  # it is there: let it say so to all
        if answers:
            letters.append(Letter((self._address(frame, sender),), tuple(answers)))
        return self._post(letters, rumours=True)

    def tick(self, now: float) -> list[Send]:
        """What is due by now. A part that fails takes nothing from the others."""
        sends = self._part("membership", self._tick_members, now)
        if self._publisher is not None:
            sends += self._part("publisher", self._publisher.tick, now)
        if self._collector is not None:
            sends += self._part("collector", self._collector.tick, now)
        if now >= self._next_seed:
            self._next_seed = now + (SEED_S if self.membership.members else INQUIRY_S)
            sends += self._part("seeds", self._try_seed, now)
        if now >= self._next_expiry:
            self._next_expiry = now + 1.0
            sends += self._part("expiry", self._expire, now)
        return sends

    def dispatched(self, notice: Notice) -> list[Send]:
        """Routers: tell all others of a dispatch that has just gone."""
        if self._collector is None:
            raise ValueError("only a router dispatches")
        return self._post([self._collector.notice(notice)])

    def leave(self, now: float) -> list[Send]:
        """Say good-bye; nothing is to be called after this."""
        return self._post(self.membership.leave())

    def take_events(self) -> list[Up | Down | Notice]:
        """What has happened since the last call: nodes that came or went, dispatches of other routers."""
        events, self._events = self._events, []
        return events

    def _address(self, frame: Frame, source: Address) -> Address:
        """Where to answer: a connection's source is not where its node listens; that of an unknown node must do."""
        held = self.membership.held(frame.sender)
        return source if held is None or held.incarnation != frame.incarnation else held.member.address

    def _take(self, message: Message, frame: Frame, sender: Address, now: float, out: list[Letter]) -> list[Message]:
        """Act on a message. What goes back to the sender is returned; what goes to others is added to `out`."""
        membership = self.membership
        match message:
            case Ping():
                return membership.on_ping(message)
            case PingFor():
                out += membership.on_ping_for(message, sender, now)
            case Ack():
                out += membership.on_ack(message.number)
            case Nack():
                membership.on_nack(message.number)
            case Claim():
                membership.hear(message, now)
                out += self._settle()
            case Sync():
                return membership.answer_sync(message)
            case State():
                membership.hear_state(message, now)
                out += self._settle()
                return membership.states(message.buckets, answer=False) if message.answer else []
            case Notice():
                if message.router == frame.sender:
                    self._events.append(message)
            case Want():
                answerer = self._publisher or self._collector
                return answerer.answer(message) if answerer is not None else []
            case News() | Entry() | Mend() | Have() if self._collector is not None:
                return self._collect(self._collector, message, frame.sender, sender, now, out)
        return []

    def _collect(
        self,
        collector: Collector,
        message: News | Entry | Mend | Have,
        sender: str,
        address: Address,
        now: float,
        out: list[Letter],
    ) -> list[Message]:
        match message:
            case News():
                if not collector.on_news(message.update, sender, now):
                    out += self._inquire(address, now)
            case Entry():
                collector.on_entry(message.update, sender, now)
            case Mend():
                collector.on_mend(message.repair, sender, now)
            case Have():
                return collector.on_have(message, sender, now)
        return []

    def _part(self, what: str, tick: Callable[[float], list[Letter]], now: float) -> list[Send]:
        try:
            return self._post(tick(now), rumours=what == "membership")
        except Exception:
            self.failed[what] += 1
            if self.failed[what] == 1:
                _logger.exception("gossip: a tick of %s failed. Further ones are only counted.", what)
            return []

    def _tick_members(self, now: float) -> list[Letter]:
        return self.membership.tick(now) + self._settle()

    def _expire(self, now: float) -> list[Letter]:
        for name in self.membership.expired(now):
            self._opener.forget(name)
        return []

    def _settle(self) -> list[Letter]:
        """Act on what membership has found out. Whoever learns of a router introduces itself to it."""
        events, self.membership.events = self.membership.events, []
        self._events += events
        if self._collector is not None:
            for event in events:
                self._collector.forget(event.member.name)
        new = [event.member for event in events if isinstance(event, Up) and event.member.role == ROUTER]
        return [Letter(tuple(router.address for router in new), (self.membership.claim,))] if new else []

    def _inquire(self, address: Address, now: float) -> list[Letter]:
        """Ask a node that knows, or is, somebody whom this node does not; once a second is enough to learn of all."""
        if now < self._next_inquiry:
            return []
        self._next_inquiry = now + INQUIRY_S
        return [self.membership.sync(address)]

    def _try_seed(self, now: float) -> list[Letter]:
        """Join, or join again: a seed that is not among the members, if there is one, is asked."""
        known = {member.address for member in self.membership.members} | {self.me.address}
        strangers = [seed for seed in self._seeds if seed not in known]
        return [self.membership.sync(self._random.choice(strangers))] if strangers else []

    def _post(self, letters: Iterable[Letter], rumours: bool = False) -> list[Send]:
        """Seal letters. `rumours`: news of members fill the room that is left."""
        sends: list[Send] = []
        for letter in letters:
            parts = [pack(message) for message in letter.messages]
            size = self._sealer.overhead + sum(map(len, parts))
            bulk = any(isinstance(message, _BULK) for message in letter.messages)
            if rumours and not bulk:
                parts += self.membership.rumours(MAX_DATAGRAM - size)
            if not parts or not letter.to:
                continue
            limit = MAX_FRAME if bulk and size > MAX_DATAGRAM else MAX_DATAGRAM
            for batch in self._sealer.batches(parts, limit):
                data = self._sealer.seal(batch)
                sends += [Send(address, data, len(data) > MAX_DATAGRAM) for address in letter.to]
        return sends

    def _refuse(self, reason: str, sender: Address) -> None:
        self.refused[reason] += 1
        what = {
            "key": "is not authentic: another cluster key?",
            "name": "comes from another node of the same name.",
        }
        if reason in what:
            self._warn(reason, what[reason] + " Further ones are only counted.", sender)

    def _warn(self, about: str, text: str, sender: Address, *values: object) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _logger.warning("A gossip frame from %s:%d " + text, *sender, *values)
