"""Summary: what one worker tells every router about itself, as a log of numbered updates.

The worker is the only writer of its log, so an update is known by (worker, incarnation, seq) and the newest one wins.
An update carries the whole load but only the changes of the set of keys. Who has missed some gets them again from the
ring of the last ones; who has missed more compares digests of 64 buckets and gets those that differ; and who has
nothing gets a snapshot. The digest that each update carries tells a reader that its copy is the writer's set.

Keys are checkpoint keys of prefixes (see `ladder`). The set is closed under prefix at every update: with a key it has
those of all checkpoints above it, and with one on the device those on the device. Where a worker has more than it may
publish, what is not on the device is left out first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

DEVICE, HOST, DISK = 0, 1, 2
"""Tiers: where a worker has a prefix."""

BUCKETS = 64
_WRAP = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is. `queued_tokens`: of prompts accepted and not computed yet. `running`: sequences that
    generate. `prompt_tokens_s`: measured speed, 0 while unknown. `free_blocks` can be had: free or evictable.
    `accepted` has for each router, by its unique name, the number of its last dispatch that has arrived here."""

    queued_tokens: int = 0
    running: int = 0
    prompt_tokens_s: float = 0.0
    free_blocks: int = 0
    accepted: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Update:
    """One entry of a worker's log; one without changes is the heartbeat.

    It applies to the state at sequence number `base`; with base 0 it is a snapshot and replaces everything. `added` are
    keys as '<u8', ancestors before descendants, and `tiers` has a byte for each; a key that is there already changes
    its tier. `removed` are '<u8' keys. `digest` is of all keys after it. Raises ValueError where lengths do not fit.
    """

    worker: str
    incarnation: int
    seq: int
    base: int
    load: Load
    digest: int
    added: bytes = b""
    tiers: bytes = b""
    removed: bytes = b""

    def __post_init__(self) -> None:
        if len(self.added) != 8 * len(self.tiers) or len(self.removed) % 8:
            raise ValueError("keys have 8 bytes each, and there is a tier for each key added")


@dataclass(frozen=True, slots=True)
class Repair:
    """All keys of some buckets as they are at `seq`, for a reader whose digests differ in these buckets only. `digest`
    is of all keys of all buckets. Raises ValueError where lengths do not fit."""

    worker: str
    incarnation: int
    seq: int
    load: Load
    digest: int
    buckets: bytes
    keys: bytes
    tiers: bytes

    def __post_init__(self) -> None:
        if len(self.keys) != 8 * len(self.tiers):
            raise ValueError("keys have 8 bytes each, and there is a tier for each key")


class Applied(Enum):
    """What became of an update at a reader: it counts now; it was known or superseded; or others must be had before it.
    Or the worker is one too many."""

    APPLIED = "applied"
    OLD = "old"
    GAP = "gap"
    FULL = "full"


class _Ranked:
    """Keys with their tiers, in an order: those on the device first, and of these, as of the others, ancestors before
    descendants. The lower tiers are one here: each for itself need not be closed under prefix."""

    def __init__(self) -> None:
        self.tiers: dict[int, int] = {}
        self._device = OrderedDict[int, None]()
        self._lower = OrderedDict[int, None]()

    def __len__(self) -> int:
        return len(self.tiers)

    def put(self, key: int, tier: int, ahead: bool = False) -> bool:
        """Set a key's tier; whether that changes anything. What is new, or comes to the device, goes to the end: its
        ancestors are there already. What leaves the device goes before all that had left it, as does what is put
        `ahead`: these may be its descendants."""
        before = self.tiers.get(key)
        self.tiers[key] = tier
        if before is None or (before == DEVICE) != (tier == DEVICE):
            if before is not None:
                del self._of(before)[key]
            self._of(tier)[key] = None
            if ahead or before == DEVICE:
                self._lower.move_to_end(key, last=False)
        return before != tier

    def remove(self, key: int) -> bool:
        """Whether the key was there."""
        tier = self.tiers.pop(key, None)
        if tier is not None:
            del self._of(tier)[key]
        return tier is not None

    @property
    def some_device(self) -> bool:
        """Whether some key is on the device."""
        return bool(self._device)

    @property
    def some_lower(self) -> bool:
        """Whether some key is not."""
        return bool(self._lower)

    def take_first(self) -> tuple[int, int]:
        """Remove the first key; it and its tier."""
        key, _ = (self._device or self._lower).popitem(last=False)
        return key, self.tiers.pop(key)

    def take_last(self) -> tuple[int, int]:
        """Remove the last key; it and its tier."""
        key, _ = (self._lower or self._device).popitem()
        return key, self.tiers.pop(key)

    def _of(self, tier: int) -> OrderedDict[int, None]:
        return self._device if tier == DEVICE else self._lower


class Summary:
    """The set of keys that a worker publishes, at most `limit` of them, and its log, of which the last `ring` updates
    are kept. Not for several threads.

    The caller adds ancestors before descendants, to the device, too, and removes descendants before ancestors, from
    the device, too. What there is no room for waits; what is on the device takes the place of what is not, and
    otherwise the first to come stay. So nothing is published without its ancestors.
    """

    def __init__(self, worker: str, incarnation: int, limit: int, ring: int = 1000) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.seq = 0
        self.digest = 0
        self._limit = limit
        self._keys = _Ranked()  # as of now
        self._told: dict[int, int] = {}  # as of `seq`: key to tier
        self._touched: dict[int, None] = {}
        self._waiting = _Ranked()
        self._log: deque[Update] = deque()
        self._ring = ring
        self._logged = 0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys.tiers

    @property
    def changes(self) -> int:
        """How many keys the next update may change."""
        return len(self._touched)

    def add(self, key: int, tier: int = DEVICE) -> None:
        """The worker has a prefix, or has it in another tier than before."""
        if key not in self._keys.tiers and len(self._keys) >= self._limit:
            self._waiting.put(key, tier)
        elif self._keys.put(key, tier):
            self._touched[key] = None
        self._settle()

    def remove(self, key: int) -> None:
        """The worker has a prefix no more, in no tier."""
        if not self._waiting.remove(key) and self._keys.remove(key):
            self._touched[key] = None
            self._settle()

    def update(self, load: Load) -> Update:
        """The next entry of the log: the load and what has changed since the last one. The first is a snapshot."""
        added: dict[int, int] = {}
        removed: dict[int, int] = {}
        for key in self._touched:
            now, was = self._keys.tiers.get(key), self._told.get(key)
            if now == was:
                continue
            if was is not None:
                removed[key] = was
            if now is not None:
                added[key] = now
        self._touched.clear()
        self.digest = (self.digest + _digest(added) - _digest(removed)) & _WRAP
        self._told.update(added)
        gone = [key for key in removed if key not in added]
        for key in gone:
            del self._told[key]
        update = Update(
            self.worker, self.incarnation, self.seq + 1, self.seq, load, self.digest, *_packed(added), _pack(gone)
        )
        self.seq += 1
        self._remember(update)
        return update

    def since(self, seq: int) -> list[Update] | None:
        """The updates after number `seq`; None where the first of them is not kept any more."""
        missing = self.seq - seq
        if not 0 <= missing <= len(self._log):
            return None
        return list(self._log)[len(self._log) - missing :]

    def snapshot(self, load: Load) -> Update:
        """Everything as of the last update, with a load of now."""
        if not self.seq:
            return self.update(load)
        return Update(self.worker, self.incarnation, self.seq, 0, load, self.digest, *_packed(self._told))

    def buckets(self) -> tuple[int, ...]:
        """Digests of the 64 buckets as of the last update; their sum modulo 2**64 is `digest`."""
        return bucket_digests(*_arrays(self._told))

    def repair(self, theirs: tuple[int, ...], load: Load) -> Repair:
        """What a reader with these bucket digests needs to have the state of the last update."""
        wrong, keys, tiers = differing(*_arrays(self._told), theirs)
        return Repair(self.worker, self.incarnation, self.seq, load, self.digest, wrong, keys, tiers)

    def _settle(self) -> None:
        """Publish what waits, as far as there is room for it or something of less use to leave out. The last of what is
        published has no descendant that is published, and the first of what waits no ancestor that waits."""
        while self._waiting and (
            len(self._keys) < self._limit or (self._waiting.some_device and self._keys.some_lower)
        ):
            if len(self._keys) >= self._limit:
                key, tier = self._keys.take_last()
                self._waiting.put(key, tier, ahead=True)
                self._touched[key] = None
            key, tier = self._waiting.take_first()
            self._keys.put(key, tier)
            self._touched[key] = None

    def _remember(self, update: Update) -> None:
        """Keep an update for `since`, within the ring and as long as that is less to send than a snapshot."""
        self._log.append(update)
        self._logged += _changes(update)
        while len(self._log) > 1 and (len(self._log) > self._ring or self._logged > 2 * self._limit):
            self._logged -= _changes(self._log.popleft())


def mixed(keys: np.ndarray) -> np.ndarray:
    """Keys, uint64, with their bits mixed (the finalizer of splitmix64, Steele et al., 2014)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def digest(keys: np.ndarray, tiers: np.ndarray) -> int:
    """The digest of a set of uint64 keys with a uint8 tier each: a sum modulo 2**64, so the order does not count."""
    return int(_weights(mixed(keys), tiers).sum(dtype=np.uint64))


def bucket_digests(keys: np.ndarray, tiers: np.ndarray) -> tuple[int, ...]:
    """The digest of each bucket of a set."""
    sums = np.zeros(BUCKETS, np.uint64)
    names = mixed(keys)
    np.add.at(sums, names >> np.uint64(58), _weights(names, tiers))
    return tuple(int(one) for one in sums)


def in_buckets(keys: np.ndarray, buckets: bytes) -> np.ndarray:
    """bool `[len(keys)]`: which keys belong to one of these buckets."""
    return np.isin(mixed(keys) >> np.uint64(58), np.frombuffer(buckets, np.uint8))


def differing(keys: np.ndarray, tiers: np.ndarray, theirs: tuple[int, ...]) -> tuple[bytes, bytes, bytes]:
    """The buckets of a set whose digests are not `theirs`, and the keys and tiers in them."""
    pairs = zip(bucket_digests(keys, tiers), theirs, strict=True)
    wrong = bytes(number for number, (mine, other) in enumerate(pairs) if mine != other)
    chosen = in_buckets(keys, wrong)
    return wrong, keys[chosen].astype("<u8").tobytes(), tiers[chosen].tobytes()


def _weights(names: np.ndarray, tiers: np.ndarray) -> np.ndarray:
    return names * (tiers.astype(np.uint64) * np.uint64(2) + np.uint64(1))


def _digest(keys: dict[int, int]) -> int:
    return digest(*_arrays(keys)) if keys else 0


def _arrays(keys: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.fromiter(keys.keys(), np.uint64, len(keys)), np.fromiter(keys.values(), np.uint8, len(keys))


def _packed(keys: dict[int, int]) -> tuple[bytes, bytes]:
    return _pack(keys), bytes(keys.values())


def _pack(keys: Iterable[int]) -> bytes:
    return np.array(list(keys), "<u8").tobytes()


def _changes(update: Update) -> int:
    return len(update.tiers) + len(update.removed) // 8
