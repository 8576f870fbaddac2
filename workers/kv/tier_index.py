"""TierIndex: which blocks lie below the device, in host memory and on disk. Pure bookkeeping: it moves no bytes.

A trie by tokens, one entry a block, one tree a salt: an entry is found by walking down from the root by the exact
tokens, so that no hash vouches for a block. Each entry knows the tiers that have it. With an entry go all below it,
since nothing could find them any more; so the index is closed under prefix at all times.

Each tier forgets what was used least lately. A use of an entry counts for everything above it, as if that had been
used a moment later, so that the one to go is never above another one of its tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transfer.prefix import block_keys, root_key
from workers.kv.blockfile import Block, child_digest, root_digest

if TYPE_CHECKING:
    from workers.kv.tier_io import Load

NO_SLOT = -1


class Entry:
    """One block. `slot` is where host memory has it, or NO_SLOT; `owner` the worker in whose directory it is, or "".
    It counts as there once it is `ready` or has an owner; before that, its bytes are on their way to its slot. While it
    has `pins` it stays in the index, and so does all above it; while it is `held` somebody uses its slot or its file.
    It is `old` until it is used, if it was found on disk, and `writing` while it goes to a file; `coming` is the load
    that brings it from its file to its slot, and its number there. Before `keep_until` a tier gives it up only when it
    has nothing else. `key` is its chain key, as summaries have it."""

    __slots__ = (
        "children",
        "coming",
        "depth",
        "digest",
        "gone",
        "held",
        "keep_until",
        "key",
        "old",
        "owner",
        "parent",
        "pins",
        "ready",
        "salt",
        "slot",
        "tokens",
        "writing",
    )

    def __init__(self, parent: Entry | None, salt: bytes, tokens: bytes, digest: bytes, key: bytes) -> None:
        self.parent = parent
        self.salt = salt
        self.tokens = tokens
        self.digest = digest
        self.key = key
        self.depth: int = parent.depth + 1 if parent else -1
        self.children: dict[bytes, Entry] = _NO_CHILDREN
        self.slot = NO_SLOT
        self.ready = False
        self.owner = ""
        self.pins = 0
        self.held = 0
        self.writing = False
        self.old = False
        self.keep_until = 0.0
        self.coming: tuple[Load, int] | None = None
        self.gone = False

    @property
    def there(self) -> bool:
        """Whether some tier has it."""
        return self.ready or bool(self.owner)

    @property
    def may_leave_host(self) -> bool:
        """Whether nobody uses its slot, and it stays in the index if it has to."""
        return not self.held and (bool(self.owner) or not self.pins)

    @property
    def may_leave_disk(self) -> bool:
        """Whether nobody uses its file, and it stays in the index if it has to."""
        return not self.held and (self.ready or not self.pins)

    @property
    def block(self) -> Block:
        """What it is called in a file."""
        assert self.parent is not None
        return Block(self.digest, self.parent.digest, self.depth, self.salt, self.tokens)

    def path(self) -> list[Entry]:
        """It and all above it, deepest first, without the root."""
        entries: list[Entry] = []
        at = self
        while at.parent is not None:
            entries.append(at)
            at = at.parent
        return entries


_NO_CHILDREN: dict[bytes, Entry] = {}
"""Shared by all leaves; never written to."""


class Recency:
    """The entries of a tier by their last use, each salt for itself, so that the oldest of one can be found. Those
    that `may` not leave are passed over."""

    def __init__(self, may: Callable[[Entry], bool]) -> None:
        self._may = may
        self._all: OrderedDict[Entry, None] = OrderedDict()
        self._salts: dict[bytes, OrderedDict[Entry, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._all

    def count(self, salt: bytes) -> int:
        """Entries of a salt."""
        return len(self._salts.get(salt, ()))

    def add(self, entry: Entry, last: bool = True) -> None:
        """An entry is here from now on, as used now, or with `last` off as used before all others."""
        mine = self._salts.setdefault(entry.salt, OrderedDict())
        for some in (self._all, mine):
            some[entry] = None
            some.move_to_end(entry, last)

    def use(self, entry: Entry) -> None:
        """An entry is used now, if it is here."""
        if entry in self._all:
            self._all.move_to_end(entry)
            self._salts[entry.salt].move_to_end(entry)

    def remove(self, entry: Entry) -> None:
        """An entry is not here any more."""
        if entry in self._all:
            mine = self._salts[entry.salt]
            del self._all[entry], mine[entry]
            if not mine:
                del self._salts[entry.salt]

    def oldest(self, now: float, salt: bytes | None = None) -> Iterator[Entry]:
        """Entries that may leave, of one salt or of all, those first that were used least lately, and last of all those
        to be kept. Not to be changed meanwhile."""
        kept: list[Entry] = []
        for entry in filter(self._may, self._all if salt is None else self._salts.get(salt, ())):
            if entry.keep_until > now:
                kept.append(entry)
            else:
                yield entry
        yield from kept


@dataclass(frozen=True, slots=True)
class Dropped:
    """What became free when entries went: their slots, the digests of own files, and the entries themselves, those
    below before those above."""

    entries: list[Entry]
    slots: list[int]
    files: list[bytes]


_NOTHING = Dropped([], [], [])


class TierIndex:
    """The entries of a worker named `owner`, for a pool with this `fingerprint`, by which keys are told, and `records`
    with theirs, by which files are named; in blocks of `step` bytes of tokens. `host` and `disk` are the recencies of
    what it has in host memory and in its own directory."""

    def __init__(self, fingerprint: str, records: str, owner: str, step: int) -> None:
        self._fingerprint = fingerprint
        self._records = records
        self.owner = owner
        self._step = step
        self._roots: dict[bytes, Entry] = {}
        self._by_digest: dict[bytes, Entry] = {}
        self.host = Recency(lambda entry: entry.may_leave_host)
        self.disk = Recency(lambda entry: entry.may_leave_disk)

    def __len__(self) -> int:
        return len(self._by_digest)

    @property
    def roots(self) -> dict[bytes, Entry]:
        """The root of each salt's entries; do not change it."""
        return self._roots

    def walk(self, salt: bytes, tokens: bytes) -> list[Entry]:
        """The entries of packed `tokens`, in whole blocks from the first on, as far as there are some; those on their
        way to a tier included."""
        at = self._roots.get(salt)
        entries: list[Entry] = []
        for start in range(0, len(tokens) - self._step + 1, self._step):
            at = at.children.get(tokens[start : start + self._step]) if at is not None else None
            if at is None:
                break
            entries.append(at)
        return entries

    def by_digest(self, digest: bytes) -> Entry | None:
        """The entry of a file."""
        return self._by_digest.get(digest)

    def grow(self, above: Entry | None, salt: bytes, tokens: bytes) -> Entry:
        """A new entry for a block behind the entry `above`, or at the beginning. Nothing has it yet."""
        parent = above or self._root(salt)
        (key,) = block_keys(parent.key, tokens, self._step)
        entry = Entry(parent, salt, tokens, child_digest(parent.digest, tokens), key)
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[tokens] = entry
        self._by_digest[entry.digest] = entry
        return entry

    def link(self, block: Block) -> Entry | None:
        """The entry of a block that was found in a directory: None while what is above it is not known."""
        known = self._by_digest.get(block.digest)
        if known is not None:
            return known
        if block.depth == 0:
            parent = self._root(block.salt)
            entry = self.grow(None, block.salt, block.tokens) if parent.digest == block.parent else None
        else:
            above = self._by_digest.get(block.parent)
            fits = above is not None and above.depth == block.depth - 1 and above.salt == block.salt
            entry = self.grow(above, block.salt, block.tokens) if fits else None
        self._drop_empty_root(block.salt)
        return entry

    def stored(self, entries: Sequence[Entry]) -> None:
        """The slots of these entries, each behind the one before, have their bytes."""
        for entry in entries:
            entry.ready = True
            self.host.add(entry)
        if entries:
            self.touch(entries[-1])

    def written(self, entries: Sequence[Entry], owners: Sequence[str]) -> None:
        """Files in the directories of `owners` have the bytes of the first of these entries, each behind the one
        before."""
        entry = None
        for entry, owner in zip(entries, owners, strict=False):
            entry.owner = owner
            if owner == self.owner:
                self.disk.add(entry)
        if entry is not None:
            self.touch(entry)

    def discovered(self, entry: Entry, owner: str) -> None:
        """A file that was there before, in the directory of `owner`, has an entry's bytes. Nobody uses it now."""
        entry.owner, entry.old = owner, True
        if owner == self.owner:
            self.disk.add(entry, last=False)

    def in_order(self, entries: Iterable[Entry]) -> None:
        """The order in which discovered entries were last used, the latest first. They come before all that has been
        used since."""
        placed: set[Entry] = set()
        for entry in entries:
            path = entry.path()
            for one in reversed(path):
                if one.old and one not in placed and one in self.disk:
                    placed.add(one)
                    self.disk.add(one, last=False)

    def touch(self, entry: Entry) -> None:
        """A request uses the prefix that ends with an entry."""
        for one in entry.path():
            one.old = False
            self.host.use(one)
            self.disk.use(one)

    def keep(self, entry: Entry, until: float) -> None:
        """Keep an entry and all above it; never for a shorter time than before."""
        for one in entry.path():
            one.keep_until = max(one.keep_until, until)

    def pin(self, entry: Entry) -> None:
        """Keep an entry and all above it in the index until `unpin`."""
        for one in entry.path():
            one.pins += 1

    def unpin(self, entry: Entry) -> Dropped:
        """Undo one `pin`. What no tier has got meanwhile, or has any more, goes."""
        lost = None
        for one in entry.path():
            one.pins -= 1
            if not one.pins and not one.there:
                lost = one
        return self.drop(lost) if lost is not None else _NOTHING

    def hold(self, entries: Sequence[Entry]) -> None:
        """Somebody uses the slots or files of these entries, each behind the one before, until `let_go`."""
        self.pin(entries[-1])
        for one in entries:
            one.held += 1

    def let_go(self, entries: Sequence[Entry]) -> Dropped:
        """Undo one `hold`; see `unpin`."""
        for one in entries:
            one.held -= 1
        return self.unpin(entries[-1])

    def leave_host(self, entry: Entry) -> Dropped:
        """Host memory gives up an entry that may leave. Without another tier it goes, and so does all below it."""
        self.host.remove(entry)
        if not entry.owner:
            return self.drop(entry)
        slot, entry.slot, entry.ready = entry.slot, NO_SLOT, False
        return Dropped([], [slot], [])

    def leave_disk(self, entry: Entry) -> Dropped:
        """An entry's file is given up, or turned out to be useless. Without another tier it goes, and so does all below
        it: at once, or when nobody pins it any more."""
        self.disk.remove(entry)
        files = [entry.digest] if entry.owner == self.owner else []
        entry.owner = ""
        below = self.drop(entry) if not entry.there and not entry.pins else _NOTHING
        return Dropped(below.entries, below.slots, files + below.files)

    def drop(self, entry: Entry) -> Dropped:
        """Forget an entry and all below it, pinned by nobody."""
        assert entry.parent is not None
        order = [entry]
        for one in order:
            order.extend(one.children.values())
        order.reverse()
        del entry.parent.children[entry.tokens]
        slots = [one.slot for one in order if one.slot != NO_SLOT]
        files = [one.digest for one in order if one.owner == self.owner]
        for one in order:
            one.gone = True
            self.host.remove(one)
            self.disk.remove(one)
            del self._by_digest[one.digest]
        self._drop_empty_root(entry.salt)
        return Dropped(order, slots, files)

    def entries(self) -> Iterator[Entry]:
        """All of them, those above before those below."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            entry = stack.pop()
            yield entry
            stack.extend(entry.children.values())

    def _root(self, salt: bytes) -> Entry:
        root = self._roots.get(salt)
        if root is None:
            digest = root_digest(self._records, salt)
            root = self._roots[salt] = Entry(None, salt, b"", digest, root_key(self._fingerprint, tenant=salt))
        return root

    def _drop_empty_root(self, salt: bytes) -> None:
        root = self._roots.get(salt)
        if root is not None and not root.children:
            del self._roots[salt]
