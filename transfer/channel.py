"""The KV channel: reserve, write while computing, manifest, accept; and what happens when any of it fails.

Two pure state machines over a `Transport`: `Sender` on the worker that has the blocks, `Receiver` on the one that wants
them. Clock and
transport are arguments; threads and Ray calls are shells around them (workers/transfer.py).

A transfer in order:

1. The receiver keeps blocks for a request and opens a lease; the reservation names them.
2. The sender posts writes as chunks of the prompt become final.
3. When the prompt is complete and every earlier write is done, the last write goes out with the manifest as its
   notification, so the manifest can never overtake data.
4. The receiver checks lease, incarnations and the checksum of everything that travelled, and accepts or refuses.

A prefix that a worker fetches from another takes the same way: the borrower reserves, the lender is the sender, and its
manifest says how much of the lease it could give.

Invariants: a sender posts nothing for a lease that is cancelled, failed or over, even if it is asked to begin after
that; a receiver gives a lease's blocks back only
after acceptance, after the sender has confirmed that nothing is in flight, or after the sender's life has ended. What
goes wrong in one transfer, be it a bug, ends that transfer and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transfer.messages import Manifest, MessageError, Piece, Reservation, TransferStats, decode, encode

Layers = tuple[int, int]
"""Consecutive layers `[begin, end)`."""


class Pool(Protocol):
    """The blocks of one worker."""

    @property
    def layers(self) -> int:
        """How many layers they have."""

    def checksum(self, blocks: Sequence[int], layers: Layers) -> tuple[int, ...]:
        """Digests of these layers of some blocks, one for each slice of the KV heads."""

    def size(self, blocks: int, layers: Layers) -> int:
        """Bytes of these layers of so many blocks."""


FENCE_S = 900.0
"""How long a sender remembers leases that are over: longer than any call that wants them can be on its way."""


class TransportError(Exception):
    """The transport refused or lost a write, a notification or a connection."""


class Transport(Protocol):
    """Moves blocks between two pools. Handles are opaque; every method returns at once."""

    def write(self, agent: str, local: Sequence[int], remote: Sequence[int], layers: Layers, notify: bytes) -> Any:
        """Post a write of these layers of local blocks into remote ones; `notify`, if any, is delivered after the
        data."""

    def done(self, handle: Any) -> bool:
        """Whether a write has completed. Raises TransportError when it failed."""

    def release(self, handle: Any) -> None:
        """Forget a handle; must be called once for each whose write has ended, and never raises."""

    def notify(self, agent: str, message: bytes) -> None:
        """Send a message without data."""

    def receive(self) -> list[tuple[str, bytes]]:
        """Notifications that have arrived, as (agent, message)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What of a prompt's KV is final: these layers of blocks, of which `blocks[i]` on the sender is the prompt's block
    number `first + i`. The layers of equal blocks come in order, one chunk behind the other."""

    first: int
    blocks: tuple[int, ...]
    layers: Layers

    def after(self, first: int) -> Chunk:
        """The part of the chunk from the prompt's block number `first` on."""
        skip = max(0, first - self.first)
        return Chunk(self.first + skip, self.blocks[skip:], self.layers)


@dataclass(frozen=True, slots=True)
class Ending:
    """The prompt is complete: what the manifest says besides checksums."""

    first_token: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Sent:
    """The manifest of a transfer has left and nothing is in flight any more."""

    lease_id: str


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A transfer ended without a manifest. `drained`: no write of it can still be in flight."""

    lease_id: str
    reason: str
    drained: bool


@dataclass(slots=True)
class _Transfer:
    lease_id: str
    deadline: float
    reservation: Reservation | None = None
    agent: str = ""
    ready: list[Chunk] = field(default_factory=list)
    ending: Ending | None = None
    in_flight: list[Any] = field(default_factory=list)
    checksums: list[Piece] = field(default_factory=list)
    manifest_posted: bool = False
    failure: str | None = None
    stalled_at: float = float("inf")


class Sender:
    """Sender half, of a worker in its life `incarnation`. It counts in `stats`.

    A transfer of which no write completes for `stall_s` seconds, or whose deadline passes, has failed. Writes of it
    that are in flight then cannot be called back: they are polled until they end, however long that takes.
    """

    def __init__(
        self, transport: Transport, incarnation: int, pool: Pool, stall_s: float, stats: TransferStats
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._stats = stats
        self._moving_since: float | None = None
        self._stall_s = stall_s
        self._incarnation = incarnation
        self._transfers: dict[str, _Transfer] = {}
        self._stuck: list[_Transfer] = []
        self._over: dict[str, float] = {}  # leases that must not start again, and since when; the oldest first

    def start(self, lease_id: str, deadline: float) -> bool:
        """A request has begun to compute; its chunks are kept until the reservation is known. False when this lease is
        over already: the call that wants it came too late, or twice."""
        if lease_id in self._over or self.may_write(lease_id):
            return False
        self._transfers[lease_id] = _Transfer(lease_id, deadline)
        return True

    def connect(self, lease_id: str, reservation: Reservation, agent: str) -> None:
        """The receiver has answered; `agent` is its transport name."""
        if transfer := self._transfers.get(lease_id):
            transfer.reservation, transfer.agent = reservation, agent

    def offer(self, lease_id: str, chunk: Chunk, ending: Ending | None = None) -> None:
        """Blocks that are final; `ending` comes with the last chunk."""
        if transfer := self._transfers.get(lease_id):
            transfer.ready.append(chunk)
            transfer.ending = ending

    def cancel(self, lease_id: str, reason: str) -> None:
        """Post nothing more. SendFailed follows from `step` once nothing is in flight."""
        if (transfer := self._transfers.get(lease_id)) and transfer.failure is None:
            transfer.failure = reason

    def fence(self, lease_id: str, now: float) -> None:
        """The receiver wants its blocks back: cancel the transfer, or see to it that it never starts."""
        self.cancel(lease_id, "cancelled by the receiver")
        self._note_over(lease_id, now)

    def active(self, lease_id: str) -> bool:
        """Whether a manifest may still come for this lease."""
        return lease_id in self._transfers

    def may_write(self, lease_id: str) -> bool:
        """Whether this lease's blocks may still be written to."""
        return lease_id in self._transfers or any(one.lease_id == lease_id for one in self._stuck)

    @property
    def open(self) -> bool:
        """Whether `step` must look at something now and then: deadlines, or writes that outlived their transfer."""
        return bool(self._transfers or self._stuck)

    @property
    def moving(self) -> bool:
        """Whether `step` has something to post or to poll now."""
        return any(one.in_flight or one.failure or (one.ready and one.reservation) for one in self._transfers.values())

    def step(self, now: float) -> list[Sent | SendFailed]:
        """Poll and post what can be; returns the transfers that have ended, which are then forgotten."""
        if self._moving_since is not None:
            self._stats.sending_s += now - self._moving_since
        events: list[Sent | SendFailed] = []
        for transfer in list(self._transfers.values()):
            event = self._advance(transfer, now)
            if event is not None:
                del self._transfers[transfer.lease_id]
                self._note_over(transfer.lease_id, now)
                self._stats.sent += isinstance(event, Sent)
                self._stats.failed += isinstance(event, SendFailed)
                events.append(event)
        for transfer in self._stuck:
            self._poll(transfer)
        self._stuck = [transfer for transfer in self._stuck if transfer.in_flight]
        in_flight = any(one.in_flight for one in self._transfers.values())
        self._moving_since = now if in_flight else None
        return events

    def _note_over(self, lease_id: str, now: float) -> None:
        self._over.pop(lease_id, None)
        self._over[lease_id] = now
        while now - self._over[oldest := next(iter(self._over))] > FENCE_S:
            del self._over[oldest]

    def _advance(self, transfer: _Transfer, now: float) -> Sent | SendFailed | None:
        before = len(transfer.in_flight)
        self._poll(transfer)
        if len(transfer.in_flight) < before:
            transfer.stalled_at = now + self._stall_s
        stalled = bool(transfer.in_flight) and now > transfer.stalled_at
        if transfer.failure is None and (stalled or now > transfer.deadline):
            transfer.failure = "no write completed in time" if stalled else "deadline exceeded"
        if transfer.failure is None and transfer.reservation is not None and not transfer.manifest_posted:
            try:
                self._post(transfer, transfer.reservation)
            except Exception as error:
                transfer.failure = _reason(error)
        if transfer.in_flight and not stalled and now <= transfer.deadline:
            if not before:
                transfer.stalled_at = now + self._stall_s
            return None
        if transfer.in_flight:
            self._stuck.append(transfer)
        if transfer.failure is not None:
            return SendFailed(transfer.lease_id, transfer.failure, drained=not transfer.in_flight)
        return Sent(transfer.lease_id) if transfer.manifest_posted else None

    def _poll(self, transfer: _Transfer) -> None:
        still: list[Any] = []
        for handle in transfer.in_flight:
            try:
                ended = self._transport.done(handle)
            except TransportError as error:
                ended, transfer.failure = True, transfer.failure or _reason(error)
            except Exception as error:  # nobody knows whether this write has ended
                ended, transfer.failure = False, transfer.failure or _reason(error)
            if ended:
                self._transport.release(handle)
            else:
                still.append(handle)
        transfer.in_flight = still

    def _post(self, transfer: _Transfer, reservation: Reservation) -> None:
        last = transfer.ready[-1] if transfer.ending is not None and transfer.ready else None
        for ready in transfer.ready[:-1] if last else transfer.ready:
            if (chunk := ready.after(reservation.first_block)).blocks:
                self._note_checksum(transfer, chunk)
                self._write(transfer, reservation, chunk, b"")
        transfer.ready = [last] if last else []
        if last is None or transfer.ending is None or transfer.in_flight:
            return
        chunk = last.after(reservation.first_block)
        if chunk.blocks:
            self._note_checksum(transfer, chunk)
        manifest = encode(
            Manifest(
                lease_id=transfer.lease_id,
                incarnation=reservation.incarnation,
                sender_incarnation=self._incarnation,
                first_token=transfer.ending.first_token,
                cached_tokens=transfer.ending.cached_tokens,
                checksums=tuple(transfer.checksums),
            )
        )
        if chunk.blocks:
            self._write(transfer, reservation, chunk, manifest)
        else:
            self._transport.notify(transfer.agent, manifest)
        transfer.ready, transfer.manifest_posted = [], True

    def _write(self, transfer: _Transfer, reservation: Reservation, chunk: Chunk, notify: bytes) -> None:
        start = chunk.first - reservation.first_block
        remote = reservation.blocks[start : start + len(chunk.blocks)]
        handle = self._transport.write(transfer.agent, chunk.blocks, remote, chunk.layers, notify)
        transfer.in_flight.append(handle)
        size = self._pool.size(len(remote), chunk.layers)
        self._stats.sent_bytes += size
        self._stats.hidden_bytes += size if transfer.ending is None else 0

    def _note_checksum(self, transfer: _Transfer, chunk: Chunk) -> None:
        digests = self._pool.checksum(chunk.blocks, chunk.layers)
        transfer.checksums.append((chunk.first, len(chunk.blocks), *chunk.layers, *digests))


def _reason(error: Exception) -> str:
    """What the transport says is meant to be read; anything else is a bug, whose kind says most."""
    return str(error) if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"


class _Unproved(Exception):
    """A manifest that does not prove its lease's blocks."""


@dataclass(slots=True)
class Lease:
    """A promise of the receiver: `blocks` stay for this sender's writes until the lease is closed.

    `deadline` (seconds, monotonic) is when the receiver asks whether the sender is still at it. In `quarantine` the
    request no longer waits for the data, but the sender may still write. An `open_end` lease is also fulfilled by its
    first blocks alone, or by none: the sender gives what it has.
    """

    lease_id: str
    sender: str
    sender_agent: str
    sender_incarnation: int
    first_block: int
    blocks: tuple[int, ...]
    deadline: float
    open_end: bool = False
    quarantine: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """The lease's first `count` blocks are there and verified: all of them, unless its end is open."""

    lease: Lease
    manifest: Manifest
    count: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A manifest came for the lease that does not prove its blocks; they must not be used."""

    lease: Lease
    reason: str


def _slices_that_differ(found: Sequence[int], wanted: Sequence[int]) -> str:
    """Which they are, for an error; where there is only one, that is all."""
    if len(found) != len(wanted):
        return f": it has {len(found)} slices here and {len(wanted)} there"
    wrong = [number for number, (mine, its) in enumerate(zip(found, wanted, strict=True)) if mine != its]
    return f" in slices {', '.join(map(str, wrong))}" if len(found) > 1 else ""


class Receiver:
    """Receiver half, of a worker in its life `incarnation`. It counts in `stats`."""

    def __init__(self, incarnation: int, pool: Pool, stats: TransferStats) -> None:
        self._incarnation = incarnation
        self._pool = pool
        self._stats = stats
        self._leases: dict[str, Lease] = {}

    def open(self, lease: Lease) -> None:
        """Begin to expect writes."""
        self._leases[lease.lease_id] = lease

    def quarantine(self, lease_id: str) -> Lease | None:
        """The request is over but its blocks may still be written; None when the lease is already closed."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.quarantine = True
        return lease

    def close(self, lease_id: str) -> Lease | None:
        """Nothing can be written under this lease any more; None when it was closed before."""
        return self._leases.pop(lease_id, None)

    def overdue(self, now: float) -> list[Lease]:
        """Leases past their deadline whose request still waits."""
        return [lease for lease in self._leases.values() if now > lease.deadline and not lease.quarantine]

    def extend(self, lease_id: str, deadline: float) -> None:
        """The sender has said that it is still at it."""
        if lease := self._leases.get(lease_id):
            lease.deadline = deadline

    @property
    def waiting(self) -> bool:
        """Whether any manifest can still come."""
        return bool(self._leases)

    def on_notification(self, agent: str, data: bytes) -> Accepted | Refused | None:
        """Judge a notification. None: not for an open lease of this sender (late, doubled or foreign), ignored.

        An accepted lease is closed. A refused one stays, in quarantine, until the sender is asked.
        """
        try:
            manifest = decode(Manifest, data)
        except MessageError:
            return None
        lease = self._leases.get(manifest.lease_id)
        if lease is None or lease.quarantine or agent != lease.sender_agent:
            return None
        try:
            count = self._verified(lease, manifest)
        except _Unproved as error:
            reason = str(error)
        except Exception as error:
            reason = f"checking the manifest failed: {_reason(error)}"
        else:
            del self._leases[lease.lease_id]
            self._stats.accepted += 1
            self._stats.received_bytes += self._pool.size(count, (0, self._pool.layers))
            return Accepted(lease, manifest, count)
        self._stats.refused += 1
        lease.quarantine = True
        return Refused(lease, reason)

    def _verified(self, lease: Lease, manifest: Manifest) -> int:
        """How many of the lease's blocks the manifest proves, from the first on. Raises _Unproved when that is not what
        the lease is for."""
        if manifest.incarnation != self._incarnation:
            raise _Unproved("manifest is for an earlier life of this worker")
        if manifest.sender_incarnation != lease.sender_incarnation:
            raise _Unproved("manifest is from another life of the sender")
        layers = self._pool.layers
        done, piece, layer = 0, 0, 0  # whole blocks; blocks whose layers are being gone through, and how far
        for entry in manifest.checksums:
            if not (isinstance(entry, tuple) and len(entry) >= 5 and all(type(value) is int for value in entry)):
                raise _Unproved("malformed checksum list")
            first, count, begin, end, *digests = entry
            in_order = first == lease.first_block + done and begin == layer and (count == piece or not layer)
            if not in_order or count < 1 or done + count > len(lease.blocks) or not begin < end <= layers:
                raise _Unproved("checksums do not cover the lease's blocks in order")
            found = self._pool.checksum(lease.blocks[done : done + count], (begin, end))
            if found != tuple(digests):
                raise _Unproved(
                    f"checksum of blocks {first} to {first + count - 1}, layers {begin} to {end - 1} differs"
                    f"{_slices_that_differ(found, digests)}"
                )
            done, piece, layer = (done + count, 0, 0) if end == layers else (done, count, end)
        if layer or not (lease.open_end or done == len(lease.blocks)):
            raise _Unproved("checksums do not cover the lease's blocks")
        return done
