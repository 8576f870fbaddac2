"""The KV channel: reserve, write while computing, manifest, accept; and what happens when any of it fails.

Two pure state machines over a `Transport`: `Sender` on the prefill worker, `Receiver` on the decode worker. Clock and
transport are arguments; threads and Ray calls are shells around them (workers/transfer.py).

A transfer in order:

1. The receiver keeps blocks for a request and opens a lease; the reservation names them.
2. The sender posts writes as chunks of the prompt become final.
3. When the prompt is complete and every earlier write is done, the last write goes out with the manifest as its
   notification, so the manifest can never overtake data.
4. The receiver checks lease, incarnations and the checksum of every block that travelled, and accepts or refuses.

Invariants: a sender posts nothing for a lease that is cancelled or failed; a receiver gives a lease's blocks back only
after acceptance, after the sender has confirmed that nothing is in flight, or after the sender's life has ended. What
goes wrong in one transfer, be it a bug, ends that transfer and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transfer.messages import Manifest, MessageError, Reservation, decode, encode

Checksum = Callable[[Sequence[int]], int]


class TransportError(Exception):
    """The transport refused or lost a write, a notification or a connection."""


class Transport(Protocol):
    """Moves blocks between two pools. Handles are opaque; every method returns at once."""

    def write(self, agent: str, local: Sequence[int], remote: Sequence[int], notify: bytes) -> Any:
        """Post a write of local blocks into remote ones; `notify`, if any, is delivered after the data."""

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
    """Blocks of a prompt that are final: `blocks[i]` on the sender is the prompt's block number `first + i`."""

    first: int
    blocks: tuple[int, ...]

    def after(self, first: int) -> Chunk:
        """The part of the chunk from the prompt's block number `first` on."""
        skip = max(0, first - self.first)
        return Chunk(self.first + skip, self.blocks[skip:])


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
    checksums: list[tuple[int, int, int]] = field(default_factory=list)
    manifest_posted: bool = False
    failure: str | None = None
    stalled_at: float = float("inf")


class Sender:
    """Sender half. `checksum(blocks)` digests local blocks; `incarnation` is this worker's.

    A transfer of which no write completes for `stall_s` seconds, or whose deadline passes, has failed. Writes of it
    that are in flight then cannot be called back: they are polled until they end, however long that takes.
    """

    def __init__(self, transport: Transport, incarnation: int, checksum: Checksum, stall_s: float) -> None:
        self._transport = transport
        self._stall_s = stall_s
        self._incarnation = incarnation
        self._checksum = checksum
        self._transfers: dict[str, _Transfer] = {}
        self._stuck: list[_Transfer] = []

    def start(self, lease_id: str, deadline: float) -> None:
        """A request has begun to compute; its chunks are kept until the reservation is known."""
        self._transfers[lease_id] = _Transfer(lease_id, deadline)

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
        events: list[Sent | SendFailed] = []
        for transfer in list(self._transfers.values()):
            event = self._advance(transfer, now)
            if event is not None:
                del self._transfers[transfer.lease_id]
                events.append(event)
        for transfer in self._stuck:
            self._poll(transfer)
        self._stuck = [transfer for transfer in self._stuck if transfer.in_flight]
        return events

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
        for chunk in transfer.ready[:-1] if last else transfer.ready:
            self._write(transfer, reservation, chunk, b"")
        transfer.ready = [last] if last else []
        if last is None or transfer.ending is None or transfer.in_flight:
            return
        chunk = last.after(reservation.first_block)
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
            remote = self._remote(reservation, chunk)
            transfer.in_flight.append(self._transport.write(transfer.agent, chunk.blocks, remote, manifest))
        else:
            self._transport.notify(transfer.agent, manifest)
        transfer.ready, transfer.manifest_posted = [], True

    def _write(self, transfer: _Transfer, reservation: Reservation, chunk: Chunk, notify: bytes) -> None:
        chunk = chunk.after(reservation.first_block)
        if chunk.blocks:
            self._note_checksum(transfer, chunk)
            remote = self._remote(reservation, chunk)
            transfer.in_flight.append(self._transport.write(transfer.agent, chunk.blocks, remote, notify))

    def _note_checksum(self, transfer: _Transfer, chunk: Chunk) -> None:
        if chunk.blocks:
            transfer.checksums.append((chunk.first, len(chunk.blocks), self._checksum(chunk.blocks)))

    @staticmethod
    def _remote(reservation: Reservation, chunk: Chunk) -> tuple[int, ...]:
        start = chunk.first - reservation.first_block
        return reservation.blocks[start : start + len(chunk.blocks)]


def _reason(error: Exception) -> str:
    """What the transport says is meant to be read; anything else is a bug, whose kind says most."""
    return str(error) if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class Lease:
    """A promise of the receiver: `blocks` stay for this sender's writes until the lease is closed.

    `deadline` (seconds, monotonic) is when the receiver asks whether the sender is still at it. In `quarantine` the
    request no longer waits for the data, but the sender may still write.
    """

    lease_id: str
    sender: str
    sender_agent: str
    sender_incarnation: int
    first_block: int
    blocks: tuple[int, ...]
    deadline: float
    quarantine: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """Every block of the lease is there and verified."""

    lease: Lease
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Refused:
    """A manifest came for the lease that does not prove its blocks; they must not be used."""

    lease: Lease
    reason: str


class Receiver:
    """Receiver half. `checksum(blocks)` digests local blocks; `incarnation` is this worker's."""

    def __init__(self, incarnation: int, checksum: Checksum) -> None:
        self._incarnation = incarnation
        self._checksum = checksum
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
            reason = self._verify(lease, manifest)
        except Exception as error:
            reason = f"checking the manifest failed: {_reason(error)}"
        if reason is not None:
            lease.quarantine = True
            return Refused(lease, reason)
        del self._leases[lease.lease_id]
        return Accepted(lease, manifest)

    def _verify(self, lease: Lease, manifest: Manifest) -> str | None:
        if manifest.incarnation != self._incarnation:
            return "manifest is for an earlier life of this worker"
        if manifest.sender_incarnation != lease.sender_incarnation:
            return "manifest is from another life of the sender"
        expected = lease.first_block
        for entry in manifest.checksums:
            if not (isinstance(entry, tuple) and len(entry) == 3 and all(type(value) is int for value in entry)):
                return "malformed checksum list"
            first, count, digest = entry
            start = first - lease.first_block
            if first != expected or count < 1 or start + count > len(lease.blocks):
                return "checksums do not cover the lease's blocks in order"
            if self._checksum(lease.blocks[start : start + count]) != digest:
                return f"checksum of blocks {first} to {first + count - 1} differs"
            expected += count
        if expected != lease.first_block + len(lease.blocks):
            return "checksums do not cover the lease's blocks"
        return None
