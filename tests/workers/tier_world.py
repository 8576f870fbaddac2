"""A cache with tiers whose jobs are done by hand: for tests in which anything may happen in any order."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tests.workers.drive import request
from transfer.gossip.summary import DEVICE, DISK, HOST, Summary
from transfer.layout import KVLayout, LayerGeometry
from transfer.messages import pack_tokens
from transfer.prefix import block_keys
from workers.config import TiersConfig
from workers.kv.cache import KVCache
from workers.kv.disk import DiskStats
from workers.kv.journal import Journal
from workers.kv.pool import FREE
from workers.kv.tier_io import Found, Job, Load, Remove, Save, Write
from workers.kv.tiers import Tiers
from workers.sequence import Sequence

SIZE = 4
LAYOUT = KVLayout("model", "float32", SIZE, (LayerGeometry(1, 2, 2),), 1)
MB_BLOCK = KVLayout("model", "float32", SIZE, (LayerGeometry(1, 1 << 15, 1 << 15),), 1)
"""A block of it has a megabyte."""
Content = tuple[bytes, bytes]
"""Of a block: the salt and all tokens up to its end."""


class Disk:
    """Files by their names, and how much of them is too much."""

    worker = "me"
    cost = 10

    def __init__(self, blocks: int) -> None:
        self.limit = blocks * self.cost
        self.files: dict[bytes, Content] = {}
        self.strays = 0
        self.stats = DiskStats()
        self.most = 0

    @property
    def usage(self) -> int:
        return len(self.files) * self.cost

    def writable(self) -> bool:
        return not self.stats.read_only

    def put(self, digest: bytes, content: Content) -> bool:
        if self.usage + self.cost > self.limit:
            return False
        self.files[digest] = content
        self.most = max(self.most, self.usage)
        return True


class SlowIO:
    """Does jobs a bit at a time, whenever `advance` says so, and fails when `fails` does."""

    def __init__(self, disk: Disk | None) -> None:
        self.disk: Any = disk
        self.device: dict[int, Content | None] = {}
        self.host: dict[int, Content | None] = {}
        self.fails: Callable[[], bool] = lambda: False
        self.found: deque[Found] = deque()
        self.saver: deque[Job] = deque()
        self.writer: deque[Job] = deque()
        self.reader: deque[Load] = deque()
        self.over: list[Job] = []

    @property
    def pending(self) -> bool:
        return bool(self.over or self.found)

    def submit(self, job: Save | Write | Remove | Load) -> None:
        if isinstance(job, Load):
            self.reader.append(job)
        else:
            (self.saver if isinstance(job, Save) else self.writer).append(job)

    def take_found(self) -> Found | None:
        return self.found.popleft() if self.found else None

    def take(self) -> Iterator[Job]:
        while self.over:
            yield self.over.pop(0)

    def advance(self, rng: random.Random) -> None:
        busy: list[Any] = [some for some in (self.reader, self.saver, self.writer) if some]
        some = rng.choice(busy) if busy else None
        if some is self.reader:
            self.read(self.reader[0])
        elif some is not None:
            job = some.popleft()
            self.write(job)
            self.over.append(job)

    def quiet(self) -> bool:
        return not (self.saver or self.writer or self.reader or self.pending)

    def write(self, job: Job) -> None:
        if isinstance(job, Remove):
            for digest in job.digests:
                self.disk.files.pop(digest, None)
        elif self.fails():
            return
        elif isinstance(job, Save):
            for block, slot in zip(job.blocks, job.slots, strict=True):
                self.host[slot] = self.device[block]
            job.done = len(job.blocks)
        elif isinstance(job, Write):
            for block, slot in zip(job.blocks, job.slots, strict=True):
                content = self.host[slot]
                assert content is not None
                if self.fails() or not self.disk.put(block.digest, content):
                    return
                job.owners.append("me")

    def read(self, job: Load) -> None:
        """One part of it."""
        part = job.parts[job.read] if job.read < len(job.parts) and not job.stopped else None
        if part is not None and part.after is not None and part.after[0].read <= part.after[1]:
            part = None
        if part is not None and part.owner:
            content = self.disk.files.get(part.block.digest)
            if content is None or self.fails():
                job.failed, part = True, None
            else:
                self.host[part.slot] = content
        if part is not None:
            if job.targets:
                self.device[job.targets[job.read]] = self.host[part.slot]
            job.read += 1
            job.done = job.read if job.targets else 0
        if part is None or job.read == len(job.parts):
            self.reader.popleft()
            job.finished, job.host_s, job.disk_s = True, 0.001 * job.done, 0.01 * job.read
            self.over.append(job)


class World:
    """A cache with tiers, and sequences that are computed at once, as long as they do not wait for a load."""

    def __init__(self, device: int, host: int, disk: int = 0, layout: KVLayout = LAYOUT, **config: Any) -> None:
        self.now = 1000.0
        self.disk = Disk(disk) if disk else None
        self.io = SlowIO(self.disk)
        self.cache = KVCache(device, SIZE, clock=lambda: self.now)
        self.journal = Journal(layout.fingerprint)
        self.cache.watch(self.journal)
        self.summary = Summary("me", 1, 10_000)
        settings = TiersConfig(**{"host": 1, "in_flight": 4 * layout.block_bytes, **config})
        self.tiers = Tiers("me", settings, layout, host, self.cache.radix, self.io, self.journal, lambda: self.now)
        self.cache.tiers = self.tiers
        self.running: list[Sequence] = []
        self.asked: set[tuple[bytes, bytes]] = set()

    def begin(self, tokens: list[int], salt: bytes = b"") -> Sequence | None:
        one = Sequence(request(tokens, 1, salt))
        self.asked.add((pack_tokens(tokens), salt))
        if not self.cache.admit(one, one.length):
            return None
        self.running.append(one)
        return one

    def settle(self) -> None:
        for one in self.cache.settled():
            size = self.cache.block_size
            for number in range(one.computed // size):
                self.check(one.blocks[number], one, number)

    def check(self, block: int, one: Sequence, number: int) -> None:
        assert self.io.device[block] == (one.salt, one.packed((number + 1) * SIZE)), "another prefix's block"

    def compute(self, one: Sequence) -> None:
        assert one.load is None
        for number in range(one.computed // SIZE, one.length // SIZE):
            self.io.device[one.blocks[number]] = (one.salt, one.packed((number + 1) * SIZE))
        one.computed = one.length
        self.cache.commit(one)

    def end(self, one: Sequence) -> None:
        self.running.remove(one)
        self.cache.release(one)
        self.poison()

    def poison(self) -> None:
        for block, owner in enumerate(self.cache.pool.owners().tolist()):
            if owner == FREE:
                self.io.device[block] = None

    def answer(self, tokens: list[int], salt: bytes = b"", rng: random.Random | None = None) -> int:
        """A whole request; how many of its tokens were not computed."""
        rng = rng or random.Random(0)
        self.now += 0.1
        one = self.begin(tokens, salt)
        assert one is not None
        while one.load is not None:
            self.io.advance(rng)
            self.settle()
        cached = one.computed
        self.compute(one)
        self.end(one)
        return cached

    def rest(self) -> None:
        for _ in range(10_000):
            self.settle()
            if self.io.quiet() and not self.tiers.busy:
                return
            self.io.advance(random.Random(0))
        raise AssertionError("it never comes to rest")

    def forget_device(self) -> None:
        self.cache.clear()
        self.poison()

    def invariants(self) -> None:
        for entry in self.tiers.index.entries():
            path = b"".join(one.tokens for one in reversed(entry.path()))
            if entry.ready:
                assert self.io.host[entry.slot] == (entry.salt, path)
            if entry.owner:
                assert self.disk is None or self.disk.files.get(entry.digest, (entry.salt, path)) == (entry.salt, path)
        held = sum(entry.slot != -1 for entry in self.tiers.index.entries())
        assert self.tiers.host.free + held == self.tiers.host.total

    def published(self) -> dict[bytes, int]:
        """The tier of each prefix that is published; with each there is everything above it."""
        self.journal.read(self.summary)
        told = dict(self.summary._keys.tiers)
        found: dict[bytes, int] = {}
        for tokens, salt in self.asked:
            above = True
            for length, packed in enumerate(block_keys(self.journal.root(salt), tokens, 4 * SIZE), 1):
                key = int.from_bytes(packed, "little")
                assert above or key not in told, "published without its beginning"
                above = key in told
                if above:
                    found[salt + b"/" + tokens[: length * 4 * SIZE]] = told[key]
        assert len(found) == len(told)
        return found

    def held(self) -> dict[bytes, int]:
        """The best tier of each prefix that there is."""
        held: dict[bytes, int] = {}
        for entry in self.tiers.index.entries():
            tokens = b"".join(one.tokens for one in reversed(entry.path()))
            held[entry.salt + b"/" + tokens] = HOST if entry.ready else DISK
        for node in self.cache.radix.nodes():
            salt, tokens = self.cache.radix.prefix(node)
            for length in range(len(tokens), 0, -4 * SIZE):
                held[salt + b"/" + tokens[:length]] = DEVICE
        return held

    def balance(self) -> None:
        """Nothing is under way, pinned or lost."""
        self.rest()
        self.invariants()
        counts = self.cache.counts()
        assert counts["free"] + counts["cached"] == counts["total"]
        assert counts["pinned"] == counts["private"] == 0
        assert all(entry.there and not entry.pins for entry in self.tiers.index.entries())
        assert self.tiers.host.free + len(self.tiers.index.host) == self.tiers.host.total
        assert self.tiers.status().under_way == 0
        if self.disk is not None:
            assert self.disk.files.keys() == {one.digest for one in self.tiers.index.entries() if one.owner}
            assert self.disk.most <= self.disk.limit
