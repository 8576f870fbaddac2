"""Frames: what gossip nodes say to one another, and what is refused before anybody acts on it.

A frame is `HW`, version (1 byte), tag (16 bytes) and msgpack array `[sender, incarnation, counter, message, ...]`, and
a message is an array `[kind, field, ...]`. The tag is BLAKE2b of the body under the cluster key. A frame is looked at
in this order: length, first bytes, tag, sender and counter, messages; whatever is wrong refuses all of it. Nothing is
decoded before the tag has been checked, and decoding allocates at most a small multiple of the frame, whatever its
lengths claim: a first pass that makes no objects finds out whether everything that is claimed is there.

Replays: each sender counts its frames. A receiver remembers the highest counter and which of the `WINDOW` below it have
come, and refuses a frame of an older incarnation, one that has come, and one that is too old to tell.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from hashlib import blake2b
from typing import Any, TypeAlias

import msgpack
import numpy as np

from transfer.gossip.config import MIN_KEY
from transfer.gossip.summary import BUCKETS, DISK, Load, Repair, Update
from transfer.messages import check_whole

MAX_DATAGRAM = 1400
"""Bytes of a frame that travels as one datagram."""
MAX_FRAME = 1 << 20
"""Bytes of any frame; what is larger than a datagram travels over TCP."""
WINDOW = 1 << 14
"""A frame over TCP may take five seconds, in which a busy router sends thousands of datagrams. 2 kB for each sender."""
MAX_NODES = 4096
"""Nodes that a node knows at most, so that all of them fit a frame."""
MAX_NAME = 128
"""Bytes of a name in UTF-8."""

_MAGIC = b"HW\x01"
_TAG = 16
_HEADER = len(_MAGIC) + _TAG
_SEEN = (1 << WINDOW) - 1

Address: TypeAlias = tuple[str, int]
"""Numeric IP address and port; a node has the same port for UDP and TCP."""

WORKER, ROUTER = 0, 1
ALIVE, SUSPECT, DEAD, LEFT = range(4)


class FrameError(ValueError):
    """A message that is none, or cannot become one."""


class Refused(Exception):
    """A frame that is not looked into further; `reason` is one of "size", "malformed", "key", "replay", "old"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Member:
    """A node in one of its lives. `role` is WORKER or ROUTER; `incarnation` grows with every start of `name`."""

    name: str
    role: int
    host: str
    port: int
    incarnation: int

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self.host, self.port


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there, `target`? Answered with an `Ack` of the same number."""

    number: int
    target: str


@dataclass(frozen=True, slots=True)
class PingFor:
    """Ask `target` for me. Answered with an `Ack` when it answers, with a `Nack` when it does not."""

    number: int
    target: str


@dataclass(frozen=True, slots=True)
class Ack:
    """The target of ping `number` is there."""

    number: int


@dataclass(frozen=True, slots=True)
class Nack:
    """I am there, but the target of ping `number` has not answered me yet."""

    number: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What `origin` says of a node. Of two claims on a node the one with the higher `rank` holds."""

    name: str
    role: int
    host: str
    port: int
    incarnation: int
    version: int
    status: int
    origin: str

    def __post_init__(self) -> None:
        if self.role not in (WORKER, ROUTER) or self.status not in (ALIVE, SUSPECT, DEAD, LEFT):
            raise FrameError("claim with an unknown role or status")
        if not 0 < self.port < 1 << 16:
            raise FrameError("claim with a port that is none")

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of claims: a new life, then a new version (only the node itself makes these), then the worse status."""
        return self.incarnation, self.version, self.status

    @property
    def member(self) -> Member:
        """Whom it is about."""
        return Member(self.name, self.role, self.host, self.port, self.incarnation)


@dataclass(frozen=True, slots=True)
class Sync:
    """Digests of the sender's members, one for each bucket of names, as '<u8'. Answered with `State` if any differ."""

    digests: bytes


@dataclass(frozen=True, slots=True)
class State:
    """All that the sender knows of the members in some buckets (one byte each). `answer`: it wants the same back."""

    buckets: bytes
    answer: bool
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class News:
    """The newest entry of a worker's log, from the worker itself or passed on by a router that has applied it."""

    update: Update


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a worker's log or a snapshot, for somebody who asked; it is not passed on."""

    update: Update


@dataclass(frozen=True, slots=True)
class Mend:
    """The buckets of a worker's keys that differ, for somebody who asked."""

    repair: Repair


@dataclass(frozen=True, slots=True)
class Have:
    """What the sender, a router, has: (worker, incarnation, seq). `answer`: tell me where you are ahead."""

    answer: bool
    entries: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Want:
    """Send me what follows `seq` of the worker's log in its life `incarnation`, or else the buckets whose digests are
    not `digests` ('<u8'). Without sequence number or digests: everything."""

    worker: str
    incarnation: int
    seq: int
    digests: bytes = b""

    def __post_init__(self) -> None:
        if len(self.digests) not in (0, 8 * BUCKETS):
            raise FrameError("not a digest for each bucket")


@dataclass(frozen=True, slots=True)
class Notice:
    """`router` has just sent `worker` a request of `length` tokens, of which `tokens` must be computed; `number` counts
    its dispatches to this worker. `decode` will generate, if more than one token is wanted. `keys` ('<u8') are of the
    prefixes whose heat it adds to."""

    router: str
    worker: str
    number: int
    tokens: int
    length: int
    decode: str
    keys: bytes


Message: TypeAlias = Ping | PingFor | Ack | Nack | Claim | Sync | State | News | Entry | Mend | Have | Want | Notice


@dataclass(frozen=True, slots=True)
class Frame:
    """An authentic frame that has not come before."""

    sender: str
    incarnation: int
    messages: tuple[Message, ...]


def pack(message: Message) -> bytes:
    """The bytes of a message, which `Sealer.seal` takes. Raises FrameError if it is too large for any frame."""
    if isinstance(message, News | Entry):
        update = message.update
        keys = update.base, update.added, update.tiers, update.removed
        values: tuple[Any, ...] = _worker(update), keys, _load(update.load)
    elif isinstance(message, Mend):
        repair = message.repair
        values = _worker(repair), (repair.buckets, repair.keys, repair.tiers), _load(repair.load)
    elif isinstance(message, State):
        values = message.buckets, message.answer, tuple(astuple(claim) for claim in message.claims)
    else:
        values = tuple(getattr(message, field.name) for field in fields(message))
    data: bytes = msgpack.packb((_NUMBER[type(message)], *values))
    if len(data) > MAX_FRAME - 512:  # what surrounds it is less
        raise FrameError(f"{type(message).__name__} of {len(data)} bytes is larger than a frame")
    return data


def _typed(values: Any, types: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values` if it is a tuple of just these types, with whole numbers of 0 to 2**64 - 1 and short names."""
    if type(values) is not tuple or len(values) != len(types):
        raise FrameError("wrong number of fields")
    for value, kind in zip(values, types, strict=True):
        if type(value) is not kind or (kind is int and value < 0) or (kind is str and len(value.encode()) > MAX_NAME):
            raise FrameError("a field of the wrong type or size")
    return values


def _worker(log: Update | Repair) -> tuple[Any, ...]:
    return log.worker, log.incarnation, log.seq, log.digest


def _load(load: Load) -> tuple[Any, ...]:
    return load.queued_tokens, load.running, float(load.prompt_tokens_s), load.free_blocks, load.accepted


def _read_load(values: Any) -> Load:
    queued, running, speed, free, accepted = _typed(values, (int, int, float, int, tuple))
    if not 0.0 <= speed < float("inf"):
        raise FrameError("a speed that is none")
    return Load(queued, running, speed, free, tuple(_typed(entry, (str, int)) for entry in accepted))


def _update(values: Any) -> Update:
    names, keys, load = _typed(values, (tuple, tuple, tuple))
    worker, incarnation, seq, digest = _typed(names, (str, int, int, int))
    base, added, tiers, removed = _typed(keys, (int, bytes, bytes, bytes))
    if base >= seq or max(tiers, default=0) > DISK:
        raise FrameError("an update that contradicts itself")
    return Update(worker, incarnation, seq, base, _read_load(load), digest, added, tiers, removed)


def _repair(values: Any) -> Repair:
    names, keys, load = _typed(values, (tuple, tuple, tuple))
    worker, incarnation, seq, digest = _typed(names, (str, int, int, int))
    buckets, added, tiers = _typed(keys, (bytes, bytes, bytes))
    if not seq or max(buckets, default=0) >= BUCKETS or max(tiers, default=0) > DISK:
        raise FrameError("a repair that contradicts itself")
    return Repair(worker, incarnation, seq, _read_load(load), digest, buckets, added, tiers)


def _claim(values: Any) -> Claim:
    claim = Claim(*_typed(values, _TYPES[Claim]))
    try:
        ipaddress.ip_address(claim.host)  # a name would have to be looked up, and that can block
    except ValueError:
        raise FrameError("a claim whose host is not an IP address") from None
    return claim


def _state(values: Any) -> State:
    buckets, answer, claims = _typed(values, _TYPES[State])
    return State(buckets, answer, tuple(_claim(claim) for claim in claims))


def _notice(values: Any) -> Notice:
    notice = Notice(*_typed(values, _TYPES[Notice]))
    if len(notice.keys) % 8:
        raise FrameError("keys have 8 bytes each")
    return notice


def _have(values: Any) -> Have:
    answer, entries = _typed(values, _TYPES[Have])
    return Have(answer, tuple(_typed(entry, (str, int, int)) for entry in entries))


_KINDS = (Ping, PingFor, Ack, Nack, Claim, Sync, State, News, Entry, Mend, Have, Want, Notice)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}
_BUILTIN = {"int": int, "str": str, "bytes": bytes, "bool": bool}
_TYPES: dict[type, tuple[type, ...]] = {
    kind: tuple(_BUILTIN.get(str(field.type), tuple) for field in fields(kind)) for kind in _KINDS
}
_READERS: dict[type, Callable[[Any], Message]] = {
    Claim: _claim,
    State: _state,
    Have: _have,
    Notice: _notice,
    News: lambda values: News(_update(values)),
    Entry: lambda values: Entry(_update(values)),
    Mend: lambda values: Mend(_repair(values)),
}


def _message(item: Any) -> Message:
    if type(item) is not tuple or not item or type(item[0]) is not int or not 0 <= item[0] < len(_KINDS):
        raise FrameError("not a message")
    kind = _KINDS[item[0]]
    reader = _READERS.get(kind)
    return reader(item[1:]) if reader else kind(*_typed(item[1:], _TYPES[kind]))


def _unused(*_: object) -> None:
    """Even an empty map would be an object of 64 bytes for its one."""
    raise FrameError("a map or an extension")


def _derive(key: bytes) -> bytes:
    if len(key) < MIN_KEY:
        raise ValueError(f"the cluster key has {len(key)} bytes; it needs {MIN_KEY} or more")
    return blake2b(key, digest_size=32, person=b"headwater gossip").digest()


class Sealer:
    """Makes the frames of one node in one life."""

    def __init__(self, name: str, incarnation: int, key: bytes) -> None:
        self._key = _derive(key)
        self._sender = msgpack.packb(name) + msgpack.packb(incarnation)
        self._counter = 0
        self.overhead = _HEADER + len(self._sender) + 5 + 9
        """Bytes of a frame besides its messages, at most."""

    def seal(self, messages: Iterable[bytes]) -> bytes:
        """One frame of packed messages."""
        parts = list(messages)
        self._counter += 1
        head = msgpack.Packer().pack_array_header(3 + len(parts)) + self._sender + msgpack.packb(self._counter)
        body = head + b"".join(parts)
        return _MAGIC + blake2b(body, digest_size=_TAG, key=self._key).digest() + body

    def batches(self, messages: Iterable[bytes], limit: int) -> list[list[bytes]]:
        """The messages in order, in batches whose frames are within `limit` bytes where a single message allows it."""
        batches: list[list[bytes]] = []
        room = 0
        for message in messages:
            if not batches or len(message) > room:
                batches.append([])
                room = limit - self.overhead
            batches[-1].append(message)
            room -= len(message)
        return batches


@dataclass(slots=True)
class _Window:
    """Which counters of a sender's life have come: bit i of `seen` is `highest - i`."""

    incarnation: int
    highest: int = 0
    seen: int = 0

    def accept(self, counter: int) -> bool:
        ahead = counter - self.highest
        if ahead > 0:
            self.seen = ((self.seen << min(ahead, WINDOW)) | 1) & _SEEN
            self.highest = counter
            return True
        if -ahead >= WINDOW or self.seen >> -ahead & 1:
            return False
        self.seen |= 1 << -ahead
        return True


class Opener:
    """Checks and reads frames that reach one node."""

    def __init__(self, key: bytes) -> None:
        self._key = _derive(key)
        self._windows: dict[str, _Window] = {}

    def open(self, data: bytes) -> Frame:
        """The frame in `data`. Raises Refused."""
        if not _HEADER < len(data) <= MAX_FRAME:
            raise Refused("size")
        if data[: len(_MAGIC)] != _MAGIC:
            raise Refused("malformed")
        body = memoryview(data)[_HEADER:]
        tag = blake2b(body, digest_size=_TAG, key=self._key).digest()
        if not hmac.compare_digest(tag, data[len(_MAGIC) : _HEADER]):
            raise Refused("key")
        try:
            check_whole(body)
            items = msgpack.unpackb(body, use_list=False, object_pairs_hook=_unused, ext_hook=_unused)
            sender, incarnation, counter = _typed(items[:3], (str, int, int))
            self._check_new(sender, incarnation, counter)
            return Frame(sender, incarnation, tuple(_message(item) for item in items[3:]))
        except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError):
            raise Refused("malformed") from None

    def forget(self, sender: str) -> None:
        """Drop what is remembered of a sender that is gone for good."""
        self._windows.pop(sender, None)

    def _check_new(self, sender: str, incarnation: int, counter: int) -> None:
        window = self._windows.get(sender)
        if window is not None and incarnation < window.incarnation:
            raise Refused("old")
        if window is None or incarnation > window.incarnation:
            window = self._windows[sender] = _Window(incarnation)
            if len(self._windows) > MAX_NODES:
                del self._windows[next(iter(self._windows))]
        if not window.accept(counter):
            raise Refused("replay")


def hash64(*parts: str | int) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def as_u64(numbers: Iterable[int]) -> bytes:
    """Numbers as '<u8'."""
    return np.fromiter(numbers, dtype="<u8").tobytes()
