"""TierIO: the threads that move blocks between the tiers. They decide nothing: the engine's thread gives them jobs, and
takes back what became of them (see workers/kv/tiers.py).

One thread copies to host memory, one writes and deletes files, one brings blocks back: what a disk takes its time for
holds up neither the others nor a request. A fourth one reads the headers of what lies on disk, a bounded number a
second.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from workers.kv.blockfile import Block
from workers.kv.disk import DiskStore
from workers.kv.records import Records

_log = logging.getLogger(__name__)
NICE = 19
"""Of the threads that work beside an engine and that no request waits for. On Linux each thread has its own."""
SCANNED_S = 5000
"""Headers of files that are read in a second."""
SCAN_BATCH = 100
OTHERS_S = 2.0
"""How often other workers' directories are looked through."""


@dataclass(slots=True)
class Save:
    """Copy device blocks to host slots; `done` of them are copied."""

    blocks: list[int]
    slots: list[int]
    done: int = 0


@dataclass(slots=True)
class Write:
    """Write host slots to files, in order, until one fails. `owners` are the workers in whose directories they are."""

    blocks: list[Block]
    slots: list[int]
    owners: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete files."""

    digests: list[bytes]


@dataclass(frozen=True, slots=True)
class Part:
    """A block to bring back: it is in a host slot, or comes there first from the file of `block` in the directory of
    `owner`, or with that part of an earlier load."""

    slot: int
    block: Block
    owner: str = ""
    after: tuple[Load, int] | None = None


class Load:
    """Bring blocks back to the device blocks `targets`, in order, as far as that goes: `read` parts are in their host
    slots, and `done` of them on the device; without targets only to host memory. A file that cannot be read is where it
    `failed`. Nothing is written to a target after `stop`."""

    def __init__(self, parts: list[Part], targets: list[int]) -> None:
        self.parts = parts
        self.targets = targets
        self.read = 0
        self.done = 0
        self.failed = False
        self.finished = False
        self.disk_s = 0.0
        self.host_s = 0.0
        self.stopped = False
        self.until = 0.0
        self.lock = threading.Lock()

    def stop(self) -> int:
        """Write to no target any more, for whatever reason; how many of them have their blocks."""
        with self.lock:
            self.stopped = True
            return self.done


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks that lie in the directory of a worker, and when they were last used; and digests of files that are not
    there any more. With `last` all that was there at the start has been found."""

    owner: str
    blocks: list[tuple[Block, float]]
    gone: list[bytes] = field(default_factory=list)
    last: bool = False


Job = Save | Write | Remove | Load
EXTENT = 16
"""Blocks that are copied at a time: between two of them a load can be stopped."""
AHEAD = 6
"""Files that are read ahead of the one that is waited for."""


class TierIO:
    """Threads over the `records` of a device's pool in host memory, and perhaps a directory. `wake` is called, by any
    thread, when there is something to `take`."""

    def __init__(self, records: Records, disk: DiskStore | None, wake: Callable[[], object]) -> None:
        self.disk = disk
        self.records = records
        self._wake = wake
        self._done: deque[Job] = deque()
        self._found: deque[Found] = deque()
        self._saves: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(self._saves, NICE), name="tier-saver", daemon=True),
            threading.Thread(target=self._run, args=(self._writes, NICE), name="tier-writer", daemon=True),
            threading.Thread(target=self._run, args=(self._loads, 0), name="tier-reader", daemon=True),
        ]
        if disk is not None:
            self._threads.append(threading.Thread(target=self._scan, args=(disk,), name="tier-scanner", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def pending(self) -> bool:
        """Whether there is something to take."""
        return bool(self._done or self._found)

    def submit(self, job: Save | Write | Remove | Load) -> None:
        """Have a job done after those of its kind that were given before."""
        if isinstance(job, Load):
            self._loads.put(job)
        else:
            (self._saves if isinstance(job, Save) else self._writes).put(job)

    def take(self) -> Iterator[Job]:
        """Jobs that are over, those of each kind in order. For the engine's thread, like `take_found`."""
        while self._done:
            yield self._done.popleft()

    def take_found(self) -> Found | None:
        """Some of what was found on disk."""
        return self._found.popleft() if self._found else None

    def stop(self, timeout: float) -> None:
        """End the threads after the jobs that are queued, and give the directory back."""
        self._stopping.set()
        for jobs in (self._saves, self._writes, self._loads):
            jobs.put(None)
        until = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self.disk is not None:
            self.disk.close()

    # --- the threads --------------------------------------------------------------------------------------------

    def _run(self, jobs: queue.SimpleQueue[Job | None], nice: int) -> None:
        if nice:
            os.nice(nice)
        while (job := jobs.get()) is not None:
            try:
                self._do(job)
            except Exception:
                # What is not done is not there; the thread goes on with the next one.
                _log.exception("%s failed", type(job).__name__.lower())
            if isinstance(job, Load):
                job.finished = True
            self._done.append(job)
            self._wake()

    def _do(self, job: Job) -> None:
        if isinstance(job, Load):
            self._load(job)
        elif isinstance(job, Save):
            self._save(job)
        elif isinstance(job, Write):
            self._write(job)
        elif isinstance(job, Remove) and self.disk is not None:
            for digest in job.digests:
                self.disk.remove(digest)

    def _save(self, job: Save) -> None:
        self.records.save(job.blocks, job.slots)
        job.done = len(job.blocks)

    def _write(self, job: Write) -> None:
        assert self.disk is not None
        for block, slot in zip(job.blocks, job.slots, strict=True):
            other = self.disk.owner(block.digest)
            if other is None and not self.disk.write(block, memoryview(self.records.rows[slot])):
                return
            job.owners.append(other or self.disk.worker)

    def _load(self, job: Load) -> None:
        for start in range(0, len(job.parts), EXTENT):
            parts = job.parts[start : start + EXTENT]
            begun = time.perf_counter()
            for number, part in enumerate(parts, start):
                self._read_ahead(job, number + AHEAD)
                if job.stopped or not self._fetch(job, part):
                    break
                job.read += 1
            copied = time.perf_counter()
            job.disk_s += copied - begun
            slots = [part.slot for part in job.parts[start : job.read]]
            with job.lock:
                if job.stopped:
                    return
                if job.targets:
                    self.records.load(slots, job.targets[start : job.read])
                    job.done = job.read
            job.host_s += time.perf_counter() - copied
            if job.read < start + len(parts):
                return

    def _read_ahead(self, job: Load, number: int) -> None:
        """Let the disk begin with a part that is wanted soon."""
        if self.disk is not None and number < len(job.parts) and (part := job.parts[number]).owner:
            self.disk.prefetch(part.owner, part.block)

    def _fetch(self, job: Load, part: Part) -> bool:
        """Let a part's slot have its bytes."""
        if part.after is not None:
            earlier, number = part.after
            return earlier.read > number
        if part.owner and self.disk is not None:
            try:
                job.failed = not self.disk.read(part.owner, part.block, memoryview(self.records.rows[part.slot]))
            except OSError as error:
                _log.warning("cannot read from disk: %s", error)
                return False
        return not job.failed

    def _scan(self, disk: DiskStore) -> None:
        """Others' blocks first: this worker's own may go on from them."""
        os.nice(NICE)
        try:
            self._report((owner, block, 0.0) for owner, block in disk.others())
            self._report((disk.worker, block, used) for block, used in disk.own())
            self._tell(Found(disk.worker, [], last=True))
            while not self._stopping.wait(OTHERS_S):
                self._report((owner, block, 0.0) for owner, block in disk.others())
                for owner, digests in disk.vanished().items():
                    self._tell(Found(owner, [], digests))
        except Exception:
            _log.exception("cannot look through %s", disk.path)

    def _report(self, found: Iterable[tuple[str, Block, float]]) -> None:
        batch: dict[str, list[tuple[Block, float]]] = {}
        for number, (owner, block, used) in enumerate(found, 1):
            batch.setdefault(owner, []).append((block, used))
            if number % SCAN_BATCH == 0:
                self._tell_all(batch)
                batch = {}
                if self._stopping.wait(SCAN_BATCH / SCANNED_S):
                    return
        self._tell_all(batch)

    def _tell_all(self, batch: dict[str, list[tuple[Block, float]]]) -> None:
        for owner, blocks in batch.items():
            self._tell(Found(owner, blocks))

    def _tell(self, found: Found) -> None:
        self._found.append(found)
        self._wake()
