"""Tiers: a cache below the device, in host memory and on disk: what goes down, what comes back and what goes.

It belongs to the engine's thread, as the radix tree does, and moves nothing itself: it gives jobs to `io`
(workers/kv/tier_io.py) and looks between two steps what has become of them. What is on its way down is pinned in the
tree until it is copied. What comes back goes to blocks of the sequence that was admitted for it.

Nothing is loaded that is computed sooner: both speeds are measured, and as many blocks are loaded from the beginning
on as make the prompt ready first. A load that takes much longer than expected is given up.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from transfer.gossip.ladder import between
from transfer.gossip.summary import DISK, HOST
from transfer.layout import KVLayout
from transfer.messages import TierStats, TierStatus
from workers.config import TiersConfig
from workers.kv.discovery import Discovery
from workers.kv.disk import DiskStore
from workers.kv.journal import Journal
from workers.kv.pool import BlockPool
from workers.kv.radix import TOKEN_BYTES, Node, RadixCache
from workers.kv.records import RecordLayout
from workers.kv.tier_index import NO_SLOT, Dropped, Entry, TierIndex
from workers.kv.tier_io import EXTENT, Found, Job, Load, Part, Remove, Save, Write
from workers.kv.tier_speeds import START_S, TierSpeeds

PATIENCE, GRACE_S = 2.0, 0.1
"""A load is given up after so many times what was expected, and this much more."""
PAUSE_S = 1.0
"""For how long nothing more is written after a write that failed, and nothing copied ahead after host memory was full
of what is under way."""
OLDEST = 8
"""Of so many times as many entries as have to leave host memory, those leave that are on disk: the others are about to
be written, unless the disk cannot keep up."""
MAX_PREFETCHES = 4
MAX_OFFERS = 1024
AHEAD_S = 0.02
"""How often write-back looks at what will be evicted."""
VICTIMS = 8
"""Leaves of the tree that write-back copies ahead of their eviction, at a time."""


class IO(Protocol):
    """See `workers.kv.tier_io.TierIO`."""

    disk: DiskStore | None

    @property
    def pending(self) -> bool:
        """Whether there is something to take."""

    def submit(self, job: Save | Write | Remove | Load) -> None:
        """Have a job done."""

    def take(self) -> Iterable[Job]:
        """What is over."""

    def take_found(self) -> Found | None:
        """What was found on disk, a few blocks at a time."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A prefix that is to be copied down, and until when it is to be kept."""

    salt: bytes
    tokens: bytes
    keep_until: float


class Tiers:
    """Host memory of `slots` blocks, and what `io` has of a disk, below the tree `radix` of the worker `name`."""

    def __init__(
        self,
        name: str,
        config: TiersConfig,
        layout: KVLayout,
        slots: int,
        radix: RadixCache,
        io: IO,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        records = RecordLayout(layout, config.format)
        self._record_bytes = records.record_bytes
        self._step = layout.block_size * TOKEN_BYTES
        self.index = TierIndex(layout.fingerprint, records.fingerprint, name, self._step)
        self.host = BlockPool(slots)
        self.stats = TierStats()
        self.speeds = TierSpeeds(self._record_bytes, layout.block_size, clock)
        self.policy, self.hits = config.policy, config.hits
        self._config = config
        self._layout = layout
        self._radix = radix
        self._io = io
        self._journal = journal
        self._clock = clock
        self._most = max(1, config.in_flight // self._record_bytes)
        self._offers: OrderedDict[str, _Offer] = OrderedDict()
        self._to_write: deque[Entry] = deque(maxlen=MAX_OFFERS)
        self._saves: dict[int, tuple[list[Entry], Node]] = {}
        self._writes: dict[int, list[Entry]] = {}
        self._loads: dict[int, list[Entry]] = {}
        self._saving = self._writing = self._removing = 0
        self._late: set[int] = set()
        self._write_at = self._ahead_at = 0.0
        self._discovery = Discovery(self.index)

    # --- speeds -------------------------------------------------------------------------------------------------

    @property
    def host_bytes_s(self) -> float:
        """Measured, in bytes that come to the device; 0 while unknown."""
        return self.speeds.bytes_s(HOST) * self._layout.block_bytes / self._record_bytes

    @property
    def disk_bytes_s(self) -> float:
        """Measured, in the same bytes; 0 while unknown."""
        return self.speeds.bytes_s(DISK) * self._layout.block_bytes / self._record_bytes

    def status(self) -> TierStatus:
        """What is where. Other threads call this, too."""
        disk = self._io.disk
        return TierStatus(
            format=self._config.format,
            host_blocks=self.host.total,
            host_cached=len(self.index.host),
            disk_cached=len(self.index.disk),
            disk_bytes=disk.usage if disk is not None else 0,
            under_way=self._saving + self._writing + sum(map(len, list(self._loads.values()))),
            read_only=disk is not None and disk.stats.read_only,
            bad_files=disk.stats.bad_files if disk is not None else 0,
            write_errors=disk.stats.write_errors if disk is not None else 0,
            stats=replace(self.stats),
        )

    @property
    def busy(self) -> bool:
        """Whether there is something to do: what waits to go down, or what is over."""
        return bool(self._io.pending or self._offers or (self._to_write and self._writable()))

    # --- down ---------------------------------------------------------------------------------------------------

    def offer(self, name: str, salt: bytes, tokens: bytes, keep_until: float = 0.0) -> None:
        """Have the cached prefix of packed `tokens` copied down, when there is time for it; it takes the place of what
        was offered under the same `name`. Before `keep_until` it is only evicted from there when nothing else can
        be."""
        before = self._offers.get(name)
        if before is not None:
            keep_until = max(keep_until, before.keep_until)
        elif len(self._offers) == MAX_OFFERS:
            self._offers.popitem(last=False)
            self.stats.skipped += 1
        self._offers[name] = _Offer(salt, tokens, keep_until)

    def pump(self, pressed: bool) -> None:
        """Take in what is over, and begin what may be begun. Called between two steps. `pressed`: the device has little
        room left."""
        for job in self._io.take():
            self._take_in(job)
        if (found := self._io.take_found()) is not None:
            self._discovered(found)
        if self.policy == "write-back":
            self._look_ahead(pressed)
        while self._offers and self._saving < self._most and self._save(*self._offers.popitem(last=False)):
            pass
        while self._to_write and self._writing < self._most and (disk := self._writable()) is not None:
            self._write(disk, self._to_write.popleft())

    def _writable(self) -> DiskStore | None:
        """The disk, if it is worth writing to it now."""
        disk = self._io.disk
        return disk if disk is not None and disk.writable() and self._clock() >= self._write_at else None

    def _look_ahead(self, pressed: bool) -> None:
        """Copy what will be evicted soon, from the device and from host memory, while there is still time."""
        if self._clock() < self._ahead_at:
            return
        self._ahead_at = self._clock() + AHEAD_S
        if pressed and not self._saves and not self._offers:
            for node in self._radix.least(VICTIMS):
                salt, tokens = self._radix.prefix(node)
                if len(self.index.walk(salt, tokens)) * self._step < len(tokens):
                    self.offer(f"leaf {id(node)}", salt, tokens)
        if self._writable() is not None and not self._writes and self.host.free * 4 < self.host.total:
            oldest = islice(self.index.host.oldest(self._clock()), self._most)
            kept = (one for one in oldest if not one.owner and not one.writing)
            if (entry := next(kept, None)) is not None:
                self._to_write.append(entry)

    def _save(self, name: str, offer: _Offer) -> bool:
        """Copy what is not below yet, some blocks at a time. False when that has to wait for what is under way."""
        salt, tokens, keep_until = offer.salt, offer.tokens, offer.keep_until
        match = self._radix.match(salt, tokens)
        known = self.index.walk(salt, tokens[: len(match.blocks) * self._step])
        wanted = match.blocks[len(known) :]
        if known:
            self.index.keep(known[-1], keep_until)
        if not wanted or not all(one.there or one.slot != NO_SLOT for one in known):
            return True
        count = min(len(wanted), EXTENT, self._most - self._saving)
        if known:
            self.index.pin(known[-1])
        slots = self._slots(count, salt)
        waits = not slots and bool(self._saves or self._writes or self._loads)
        entries: list[Entry] = []
        above = known[-1] if known else None
        for number, slot in enumerate(slots, len(known)):
            above = self.index.grow(above, salt, tokens[number * self._step : (number + 1) * self._step])
            above.slot, above.keep_until = slot, keep_until
            entries.append(above)
        if entries:
            self.index.hold(entries)
            self._radix.pin(match.node)
            job = Save(wanted[: len(slots)], slots)
            self._saves[id(job)] = entries, match.node
            self._saving += len(slots)
            self._io.submit(job)
        if known:
            self._forget(self.index.unpin(known[-1]))
        if waits or 0 < len(slots) < len(wanted):
            self._offers.setdefault(name, offer)
            self._offers.move_to_end(name, last=False)
        elif not slots:
            self.stats.skipped += 1
            self._ahead_at = self._clock() + PAUSE_S
        return not waits

    def _saved(self, job: Save) -> None:
        entries, node = self._saves.pop(id(job))
        self._saving -= len(entries)
        self._radix.unpin(node)
        if job.done:
            self.index.stored(entries)
            self.stats.saved_blocks += len(entries)
            self._announce(entries, HOST)
            if self._io.disk is not None and self.policy != "write-back":
                self._to_write.append(entries[-1])
        else:
            self._empty(entries)
        self._forget(self.index.let_go(entries))

    def _write(self, disk: DiskStore, entry: Entry) -> None:
        """Write an entry and what is above it, as far as no file has it."""
        if entry.gone:
            return
        chain = [one for one in reversed(entry.path()) if not one.owner and not one.writing][:EXTENT]
        if not chain or not all(one.ready for one in chain):
            return
        if chain[-1] is not entry:
            self._to_write.appendleft(entry)
        self.index.hold(chain)
        for one in chain:
            one.writing = True
        self._make_room(disk, len(chain), entry.salt)
        job = Write([one.block for one in chain], [one.slot for one in chain])
        self._writes[id(job)] = chain
        self._writing += len(chain)
        self._io.submit(job)

    def _written(self, job: Write) -> None:
        chain = self._writes.pop(id(job))
        self._writing -= len(chain)
        for one in chain:
            one.writing = False
        self.index.written(chain, job.owners)
        self._announce(chain[: len(job.owners)], DISK)
        if len(job.owners) < len(chain):
            self._write_at = self._clock() + PAUSE_S
            self._to_write.append(chain[-1])
        self._forget(self.index.let_go(chain))

    def _make_room(self, disk: DiskStore, blocks: int, salt: bytes) -> None:
        """Delete the files used least lately, if so many more would be too many."""
        share = int(self._config.tenant_share * disk.limit)
        excess = (self.index.disk.count(salt) + blocks) * disk.cost - share
        over = disk.usage - disk.strays + (self._writing + blocks - self._removing) * disk.cost - disk.limit
        if over > 0 and (useless := self._discovery.useless(-(-over // disk.cost))):
            over -= len(useless) * disk.cost
            self._remove(useless)
        now = self._clock()
        self._delete(self.index.disk.oldest(now, salt), -(-excess // disk.cost))
        self._delete(self.index.disk.oldest(now), -(-over // disk.cost) - max(0, -(-excess // disk.cost)))

    def _delete(self, oldest: Iterable[Entry], count: int) -> None:
        for entry in list(islice(oldest, max(0, count))):
            if not entry.gone:  # with one above it
                self.stats.evicted_files += 1
                self._leave_disk(entry)

    def _slots(self, count: int, salt: bytes) -> list[int]:
        """Up to so many free slots, those of entries that were used least lately if need be."""
        share = max(1, int(self._config.tenant_share * self.host.total))
        count = min(count, share)
        self._leave_host(salt, self.index.host.count(salt) + count - share)
        self._leave_host(None, count - self.host.free)
        return self.host.allocate(min(count, self.host.free))

    def _leave_host(self, salt: bytes | None, count: int) -> None:
        """Have some of the oldest entries leave host memory; among these those first that are on disk, too."""
        if count <= 0:
            return
        now = self._clock()
        oldest = list(islice(self.index.host.oldest(now, salt), OLDEST * count))
        if self._writable() is not None:
            oldest.sort(key=lambda one: (one.keep_until > now, not one.owner))
        for entry in oldest[:count]:
            if not entry.gone:
                self.stats.evicted_slots += 1
                self.stats.lost_blocks += not entry.owner
                dropped = self.index.leave_host(entry)
                if not dropped.entries:
                    self._tell_gone([entry], HOST)
                self._forget(dropped)

    def _leave_disk(self, entry: Entry) -> None:
        self._forget(self.index.leave_disk(entry))
        if entry.ready:  # otherwise it is told when it leaves the index, with all below it
            self._tell_gone([entry], DISK)

    def _remove(self, digests: list[bytes]) -> None:
        self._removing += len(digests)
        self._io.submit(Remove(digests))

    def _forget(self, dropped: Dropped) -> None:
        self.host.release(dropped.slots)
        if dropped.files:
            self._remove(dropped.files)
        if self._journal is not None and (keys := self._checkpoints(dropped.entries)):
            self._journal.lost(keys)

    # --- up -----------------------------------------------------------------------------------------------------

    def found(self, salt: bytes, tokens: bytes, blocks: int) -> int:
        """How many blocks of packed `tokens` could be loaded behind the first `blocks`."""
        return len(self._behind(self.index.walk(salt, tokens), blocks))

    def find(self, salt: bytes, tokens: bytes, blocks: int) -> list[Entry]:
        """A request uses the prefix `tokens`, whose first `blocks` blocks the device has: the entries behind them that
        had better be loaded than computed."""
        path = self.index.walk(salt, tokens)
        if path:
            self.index.touch(path[-1])
        entries = self._behind(path, blocks)
        if not entries or self._late:
            return []
        if self._config.guard:
            entries = entries[: self.speeds.worth(entries, len(tokens) // self._step - blocks, self._before())]
        return entries

    def prefetch(self, salt: bytes, tokens: bytes, blocks: int) -> bool:
        """A request that waits will use the prefix `tokens`: bring what only a disk has of it to host memory, unless it
        had better be computed. False when there is too much under way to look at it now."""
        if len(self._loads) >= MAX_PREFETCHES:
            return False
        entries = self.find(salt, tokens, blocks)
        first = next((number for number, one in enumerate(entries) if not one.ready and one.coming is None), None)
        if first is not None:
            self.load(entries[first:], ())
        return True

    def load(self, entries: list[Entry], targets: Sequence[int]) -> Load | None:
        """Begin to load what was found to the device blocks `targets`, or only to host memory if there are none; None
        when there is no room to do so."""
        self.index.hold(entries)
        absent = [one for one in entries if not one.ready and one.coming is None]
        slots = self._slots(len(absent), entries[0].salt)
        for one, slot in zip(absent, slots, strict=False):
            one.slot = slot
        short = next((number for number, one in enumerate(entries) if one.slot == NO_SLOT), len(entries))
        found, entries = entries, entries[:short]
        if entries:
            self.index.hold(entries)
        self._forget(self.index.let_go(found))
        if not entries:
            return None
        job = Load([self._part(one) for one in entries], list(targets[: len(entries)]))
        for number, one in enumerate(entries):
            if not one.ready and one.coming is None:
                one.coming = job, number
        expected = START_S + sum(self.speeds.seconds(one) for one in entries)
        job.until = self._clock() + PATIENCE * (expected + self._before()) + GRACE_S
        self._loads[id(job)] = entries
        self._io.submit(job)
        return job

    def over(self, job: Load | None) -> bool:
        """Whether a load has ended, or has taken too long."""
        return job is not None and (job.finished or self._clock() > job.until)

    def stop(self, job: Load) -> tuple[int, int]:
        """End a load: how many blocks have come, and how many of these from disk. Until a late one has ended, nothing
        else is loaded."""
        done = job.stop()
        if not job.finished and self._clock() > job.until:
            self.stats.given_up += 1
            self._late.add(id(job))
        return done, sum(bool(part.owner or part.after) for part in job.parts[:done])

    def _behind(self, path: list[Entry], blocks: int) -> list[Entry]:
        entries: list[Entry] = []
        for one in path[blocks:]:
            if not one.there:
                break
            entries.append(one)
        return entries

    def _before(self) -> float:
        """What the loads that have been begun are expected to take together."""
        return sum(self.speeds.seconds(one) for some in self._loads.values() for one in some)

    def _loaded(self, job: Load) -> None:
        entries = self._loads.pop(id(job))
        self._late.discard(id(job))
        mine = [one for one in entries if one.coming is not None and one.coming[0] is job]
        came = [one for one in mine if one.coming is not None and one.coming[1] < job.read]
        for one in mine:
            one.coming = None
        self._empty(mine[len(came) :])
        self.index.stored(came)
        self._announce(came, HOST)
        self.speeds.measured(HOST, job.done, job.host_s)
        self.speeds.measured(DISK, len(came), job.disk_s)
        self.stats.loaded_blocks += job.done
        self.stats.read_blocks += len(came)
        if job.failed:
            bad = entries[job.read]
            self.stats.failed_loads += 1
            if bad.owner:
                self._leave_disk(bad)
        self._forget(self.index.let_go(entries))

    def _empty(self, entries: Iterable[Entry]) -> None:
        """What should have come to these slots has not."""
        for one in entries:
            self.host.release([one.slot])
            one.slot = NO_SLOT

    @staticmethod
    def _part(entry: Entry) -> Part:
        if entry.ready:
            return Part(entry.slot, entry.block)
        if entry.coming is not None:
            return Part(entry.slot, entry.block, after=entry.coming)
        return Part(entry.slot, entry.block, entry.owner)

    # --- what is told -------------------------------------------------------------------------------------------

    def _take_in(self, job: Job) -> None:
        if isinstance(job, Save):
            self._saved(job)
        elif isinstance(job, Write):
            self._written(job)
        elif isinstance(job, Load):
            self._loaded(job)
        else:
            self._removing -= len(job.digests)

    def _discovered(self, found: Found) -> None:
        for digest in found.gone:
            entry = self.index.by_digest(digest)
            if entry is not None and entry.owner == found.owner and not entry.held:
                self._leave_disk(entry)
        for block, used in found.blocks:
            for entry in self._discovery.found(found.owner, block, used):
                self._announce([entry], DISK)
        if found.last:
            self._discovery.complete()

    def _announce(self, entries: Sequence[Entry], tier: int) -> None:
        """Tell that these entries, each behind the one before, are in a tier. If one above them got lost on its way,
        they will go with it."""
        keys = self._checkpoints(entries) if self._journal is not None else []
        if self._journal is not None and keys and all(one.there for one in entries[-1].path()):
            self._journal.stored(keys, tier)

    def _tell_gone(self, entries: Sequence[Entry], tier: int) -> None:
        if self._journal is not None and (keys := self._checkpoints(entries)):
            self._journal.dropped(keys, tier)

    def _checkpoints(self, entries: Sequence[Entry]) -> list[int]:
        size = self._layout.block_size
        return [int.from_bytes(one.key, "little") for one in entries if between(one.depth, one.depth + 1, size)]
