"""The transport of a worker of several ranks, a gang: rank 0's, which writes and reads for all of them.

Every rank has a pool of its own, with some of the KV heads of every block, and a transport over it. Rank 0 works out
which rank writes which slices to which rank of the other worker (transfer/pairs.py), writes its own share and asks the
others for theirs. A write is done when all of its parts are; only then is the other worker's rank 0 notified. A part
that fails fails the whole, once nothing of it is in flight any more. Between two workers of one rank nothing of this
happens: there is one write, with its notification.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from transfer.channel import Layers, Pool, TransportError
from transfer.layout import KVLayout, Slices
from transfer.messages import Peer
from transfer.pairs import Pair, holders, mismatch, pairs

_log = logging.getLogger(__name__)
EXPECT_S = 1.0
"""For so long at a time the other ranks are told to look after what may be written to them."""


class RankTransport(Protocol):
    """One rank's transport over its own pool. See `Transport`; `slices` are all that the rank holds, unless it is said
    which."""

    agent: str

    def describe(self, name: str, incarnation: int) -> Peer:
        """What others need to write here."""

    def connect(self, peer: Peer) -> None:
        """Learn how to write to a rank. Raises TransportError."""

    def disconnect(self, agent: str) -> None:
        """Forget one."""

    def write(
        self,
        agent: str,
        local: Sequence[int],
        remote: Sequence[int],
        layers: Layers,
        notify: bytes,
        slices: Slices | None = None,
    ) -> Any:
        """Post a write."""

    def done(self, handle: Any) -> bool:
        """Whether it has completed."""

    def release(self, handle: Any) -> None:
        """Forget it."""

    def notify(self, agent: str, message: bytes) -> None:
        """Send a message without data."""

    def receive(self) -> list[tuple[str, bytes]]:
        """Notifications that have arrived."""

    def close(self) -> None:
        """Forget everybody."""


class Ranks(Protocol):
    """The other ranks of a gang."""

    def call(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        """What `RankEnd.ask` of that rank says. The caller has the deadline."""


class RankEnd:
    """The end of the channel of a rank other than 0: does what rank 0 asks for. One thread owns it, and calls `step`
    while there is something to look after."""

    METHODS = frozenset({"describe", "connect", "disconnect", "write", "checksum", "expect"})

    def __init__(self, transport: RankTransport, pool: Pool) -> None:
        self._transport = transport
        self._pool = pool
        self._writes: list[tuple[Any, Future[Any]]] = []
        self._expected_until = 0.0

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """The result of one of `METHODS`: that of a write comes when it has ended."""
        if method not in self.METHODS:
            raise ValueError(f"a rank is not asked for {method}")
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # nobody can take back what was asked for
        try:
            if method == "write":
                self._writes.append((self._write(*arguments), answer))
            else:
                answer.set_result(getattr(self, f"_{method}")(*arguments))
        except Exception as error:
            answer.set_exception(error)
        return answer

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._writes) or time.monotonic() < self._expected_until

    def step(self) -> None:
        """Let what is under way move, and answer for the writes that have ended."""
        self._transport.receive()
        for one in list(self._writes):
            handle, answer = one
            try:
                if not self._transport.done(handle):
                    continue
                failure = None
            except TransportError as error:
                failure = error
            except Exception:
                _log.exception("whether a write has ended is unknown")
                continue
            self._writes.remove(one)
            self._transport.release(handle)
            answer.set_exception(failure) if failure else answer.set_result(None)

    def _describe(self, name: str, incarnation: int) -> Peer:
        return self._transport.describe(name, incarnation)

    def _connect(self, peer: Peer) -> None:
        self._transport.connect(peer)

    def _disconnect(self, agent: str) -> None:
        self._transport.disconnect(agent)

    def _checksum(self, blocks: Sequence[int], layers: Layers) -> tuple[int, ...]:
        return self._pool.checksum(blocks, layers)

    def _expect(self, seconds: float) -> None:
        self._expected_until = time.monotonic() + seconds

    def _write(self, agent: str, local: Sequence[int], remote: Sequence[int], layers: Layers, slices: Slices) -> Any:
        return self._transport.write(agent, local, remote, layers, b"", slices)


@dataclass(frozen=True, slots=True)
class _Target:
    """Another worker, and who writes what there."""

    peer: Peer
    pairs: tuple[Pair, ...]

    @property
    def direct(self) -> bool:
        """Whether rank 0 writes all of it to rank 0."""
        return [(one.sender, one.receiver) for one in self.pairs] == [(0, 0)]


@dataclass(slots=True)
class _Parts:
    """A write of several ranks: parts of rank 0's that are in flight, answers that others owe, and what is to be told
    in the end."""

    agent: str
    notify: bytes
    own: list[Any] = field(default_factory=list)
    owed: list[Future[Any]] = field(default_factory=list)
    failure: str | None = None


class GangTransport:
    """A `Transport`, of the worker `name`, over those of its ranks. `own` is rank 0's; the others of `size` are reached
    through `ranks` and have `answer_s` seconds to answer. Raises TransportError when they do not, or when their pools
    do not go together."""

    def __init__(
        self,
        own: RankTransport,
        name: str,
        incarnation: int,
        ranks: Ranks | None = None,
        size: int = 1,
        answer_s: float = 10.0,
    ) -> None:
        self.own = own
        self._ranks = ranks
        self._answer_s = answer_s
        asked = {rank: self._call(rank, "describe", f"{name}/{rank}", incarnation) for rank in range(1, size)}
        others = self.answers(asked)
        self.peer = replace(own.describe(name, incarnation), others=tuple(others[rank] for rank in sorted(others)))
        """What others need to write here, to all ranks."""
        self._layouts = layouts_of(self.peer)
        if (reason := mismatch(self._layouts, self._layouts)) is not None:
            raise TransportError(f"the ranks of {name} do not go together: {reason}")
        self._targets: dict[str, _Target] = {}
        self._expected_until = 0.0

    def connect(self, peer: Peer) -> None:
        """Learn how to write to all ranks of a worker. Raises TransportError, naming the field, when the heads that
        they hold cannot be mapped to those here."""
        if (known := self._targets.get(peer.agent)) is not None and known.peer == peer:
            return
        theirs = layouts_of(peer)
        if (reason := mismatch(self._layouts, theirs)) is not None:
            raise TransportError(f"KV layouts of {self.own.agent} and {peer.agent} do not fit: {reason}")
        found = pairs([one.shard for one in self._layouts], [one.shard for one in theirs])
        asked = {one: self._call(one.sender, "connect", peer.ranks[one.receiver]) for one in found if one.sender}
        self.own.connect(peer)  # rank 0 notifies it even if it writes nothing there
        for one in found:
            if one.sender == 0 and one.receiver:
                self.own.connect(peer.ranks[one.receiver])
        self.answers(asked)
        self._targets[peer.agent] = _Target(peer, tuple(found))

    def disconnect(self, agent: str) -> None:
        """Forget a worker whose life has ended, by its rank 0's agent."""
        self.own.disconnect(agent)
        if (target := self._targets.pop(agent, None)) is None:
            return
        for one in target.pairs:
            its = target.peer.ranks[one.receiver].agent
            if one.sender:
                self._call(one.sender, "disconnect", its).add_done_callback(_log_failure)
            else:
                self.own.disconnect(its)

    def write(self, agent: str, local: Sequence[int], remote: Sequence[int], layers: Layers, notify: bytes) -> Any:
        """Post a write, by whoever has a part of it; see `Transport`."""
        if (target := self._targets.get(agent)) is None:
            raise TransportError(f"not connected to {agent}")
        if target.direct:
            return self.own.write(agent, local, remote, layers, notify, target.pairs[0].slices)
        parts = _Parts(agent, notify)
        for pair in sorted(target.pairs, key=lambda one: one.sender == 0):  # asking takes longer
            its = target.peer.ranks[pair.receiver].agent
            try:
                if pair.sender:
                    arguments = its, tuple(local), tuple(remote), layers, pair.slices
                    parts.owed.append(self._call(pair.sender, "write", *arguments))
                else:
                    parts.own.append(self.own.write(its, local, remote, layers, b"", pair.slices))
            except Exception as error:  # what has been posted before is in flight, so the caller needs a handle
                parts.failure = f"rank {pair.sender}: {error}"
                break
        return parts

    def done(self, handle: Any) -> bool:
        """Whether all parts of a write have completed, and its notification is sent; see `Transport`. Raises
        TransportError once all have ended, if one has failed."""
        if not isinstance(handle, _Parts):
            return self.own.done(handle)
        # Any other error leaves what it is about where it is: nobody knows whether that has ended.
        for part in list(handle.own):
            try:
                if not self.own.done(part):
                    continue
            except TransportError as error:
                handle.failure = handle.failure or str(error)
            handle.own.remove(part)
            self.own.release(part)
        for answer in [one for one in handle.owed if one.done()]:
            try:
                answer.result()
            except TransportError as error:
                handle.failure = handle.failure or str(error)
            handle.owed.remove(answer)
        if handle.own or handle.owed:
            return False
        if handle.failure is not None:
            raise TransportError(handle.failure)
        if handle.notify:
            self.own.notify(handle.agent, handle.notify)
        return True

    def release(self, handle: Any) -> None:
        """Forget a handle; see `Transport`. Parts are released as they end."""
        if not isinstance(handle, _Parts):
            self.own.release(handle)

    def notify(self, agent: str, message: bytes) -> None:
        """Send a message to a worker; see `Transport`."""
        self.own.notify(agent, message)

    def receive(self) -> list[tuple[str, bytes]]:
        """Notifications that have arrived; see `Transport`."""
        return self.own.receive()

    def expect(self) -> None:
        """Somebody may write to any rank now: without being polled, its transport may not take it."""
        now = time.monotonic()
        if self.peer.others and now > self._expected_until - EXPECT_S / 2:
            self._expected_until = now + EXPECT_S
            for rank in range(1, len(self.peer.ranks)):
                self._call(rank, "expect", EXPECT_S).add_done_callback(_log_failure)

    def close(self) -> None:
        """Close rank 0's transport; those of other ranks are their owners'."""
        self.own.close()

    def sending(self, pool: Pool) -> Pool:
        """What a `Sender` reads, given rank 0's pool: of each slice the copy that it sends."""
        return self._spanning(pool, [ranks[:1] for ranks in self._holders])

    def receiving(self, pool: Pool) -> Pool:
        """What a `Receiver` checks, given rank 0's pool: every copy of each slice."""
        return self._spanning(pool, self._holders)

    def checksums(self, ranks: Iterable[int], blocks: Sequence[int], layers: Layers) -> dict[int, Future[Any]]:
        """Ask ranks other than 0 for the digests of what they hold."""
        return {rank: self._call(rank, "checksum", tuple(blocks), layers) for rank in ranks if rank}

    def answers(self, asked: dict[Any, Future[Any]]) -> dict[Any, Any]:
        """What ranks answer, all of it. Raises TransportError, at the latest after `answer_s`."""
        until = time.monotonic() + self._answer_s
        found = {}
        for one, answer in asked.items():
            try:
                found[one] = answer.result(max(0.0, until - time.monotonic()))
            except TransportError:
                raise
            except concurrent.futures.TimeoutError:
                raise TransportError(f"another rank does not answer within {self._answer_s:g} s") from None
            except Exception as error:
                raise TransportError(f"another rank fails: {type(error).__name__}: {error}") from error
        return found

    @property
    def _holders(self) -> list[tuple[int, ...]]:
        return holders([one.shard for one in self._layouts])

    def _spanning(self, pool: Pool, copies: list[tuple[int, ...]]) -> Pool:
        if not self.peer.others:
            return pool
        return _GangPool(self, pool, [one.shard.first for one in self._layouts], copies)

    def _call(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        assert self._ranks is not None
        return self._ranks.call(rank, method, *arguments)


class _GangPool:
    """The blocks of all ranks, as a `Pool`: `own` is rank 0's. Rank i's slices begin with number `firsts[i]`, and of
    slice j the copies of the ranks `copies[j]` count."""

    def __init__(
        self, transport: GangTransport, own: Pool, firsts: Sequence[int], copies: Sequence[tuple[int, ...]]
    ) -> None:
        self._transport = transport
        self._own = own
        self._firsts = firsts
        self._copies = copies
        self._asked = sorted({rank for ranks in copies for rank in ranks})

    @property
    def layers(self) -> int:
        """See `Pool`."""
        return self._own.layers

    def checksum(self, blocks: Sequence[int], layers: Layers) -> tuple[int, ...]:
        """See `Pool`. Raises TransportError when ranks do not answer, or have different copies of a slice."""
        asked = self._transport.checksums(self._asked, blocks, layers)
        by_rank = {0: self._own.checksum(blocks, layers)} | self._transport.answers(asked)
        digests = []
        for number, ranks in enumerate(self._copies):
            found = {by_rank[rank][number - self._firsts[rank]] for rank in ranks}
            if len(found) > 1:
                raise TransportError(f"ranks {', '.join(map(str, ranks))} have different copies of slice {number}")
            digests.append(found.pop())
        return tuple(digests)

    def size(self, blocks: int, layers: Layers) -> int:
        """See `Pool`: each slice counts once."""
        held = len({number for number, ranks in enumerate(self._copies) if 0 in ranks})
        return self._own.size(blocks, layers) // held * len(self._copies)


def layouts_of(peer: Peer) -> list[KVLayout]:
    """What the ranks of a worker hold. Raises TransportError."""
    try:
        return [KVLayout.from_tuple(one.layout) for one in peer.ranks]
    except ValueError as error:
        raise TransportError(f"KV layout of {peer.agent}: {error}") from None


def _log_failure(answer: Future[Any]) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        _log.debug("another rank fails: %s", error)
