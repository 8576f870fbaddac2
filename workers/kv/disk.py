"""DiskStore: KV blocks as files in a directory of this worker's own, and those in other workers' directories.

It only moves bytes: which blocks are written and which go is the caller's to say. What it sees to is that nothing is
visible before it is complete, that nothing is read that is not exactly the block asked for, that the directory never
takes more than its limit, and that a full or broken disk is a store that cannot be written to for a while, no error.

One thread writes and removes; others read and look through the directories.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workers.config import StartError
from workers.kv import blockfile
from workers.kv.blockfile import MAX_HEAD_BYTES, SUFFIX, BadFile, Block, Payload
from workers.kv.disk_files import LOCK, QUARANTINE, block_path, entries, listed, take_lock
from workers.kv.siblings import Siblings
from workers.kv.usage import Usage

_log = logging.getLogger(__name__)
GROWTH_BLOCKS = 6
"""Blocks of the file system that a new file may take beside its content: a new directory or two, a directory that grows
(by up to three at once), a list of extents."""
RETRY_S, MAX_RETRY_S = 1.0, 60.0
RECOUNT_S, RECOUNT_SHARE = 60.0, 50
"""How often the directory is counted anew while it seems to be full, since somebody else may have deleted files: not
for so many seconds, nor for so many times as long as counting took."""
LOCK_WAIT_S = 2.0
"""How long an earlier process of this worker may take to end."""
MAX_QUARANTINED = 16
_MANY = 1 << 16


@dataclass(slots=True)
class DiskStats:
    """Counters since the start. `read_only` while nothing is written because of an I/O error."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    write_errors: int = 0
    bad_files: int = 0
    read_only: bool = False


class DiskStore:
    """The directory `<path>/<worker>` for blocks of one layout, `limit` bytes at most, and a reader of its siblings.
    Raises StartError."""

    def __init__(
        self,
        path: Path,
        worker: str,
        fingerprint: str,
        limit: int,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.worker = worker
        self.stats = DiskStats()
        self._fingerprint = fingerprint
        self.limit = limit
        self._clock = clock
        self._directory = f"{path}/{worker}"
        self._own = f"{self._directory}/{fingerprint}"
        self._quarantine = f"{self._directory}/{QUARANTINE}"
        self._siblings = Siblings(path, worker, fingerprint, clock)
        self._retry_at = self._recount_at = clock()
        self._retry_s = RETRY_S
        self._uncertain = False
        self._victims: list[str] = []
        self._changing = threading.Lock()
        self._lock = _occupy(path, self._directory)
        try:
            self._unit = os.statvfs(self._directory).f_frsize
            self.cost = (-(-(MAX_HEAD_BYTES + block_bytes) // self._unit) + GROWTH_BLOCKS) * self._unit
            """Bytes that one more block takes at most."""
            if limit < (least := self.cost + self._unit):
                raise StartError(f"tiers.disk: {limit} bytes are less than one block takes there, {least} bytes")
            self._usage = self._count()
            self._shrink(limit, own=True)
        except OSError as error:
            self.close()
            raise StartError(f"tiers.disk_path: cannot use {self._directory}: {error}") from None
        except BaseException:
            self.close()
            raise
        self._victims.clear()  # no block goes any more that the caller does not name

    def close(self) -> None:
        """Give the directory back; nothing may be called after that."""
        os.close(self._lock)

    @property
    def usage(self) -> int:
        """Bytes that the directory takes, never less than `du` counts."""
        return self._usage.total

    @property
    def strays(self) -> int:
        """Bytes of `usage` that are not this layout's blocks, and go as soon as `write` needs the room."""
        return self._usage.strays

    def writable(self) -> bool:
        """Whether it is worth trying; not for a while after an I/O error."""
        return not self.stats.read_only or self._clock() >= self._retry_at

    def write(self, block: Block, payload: Payload) -> bool:
        """Have a block in the directory. False when there is no room, or an I/O error."""
        if not self.writable():
            return False
        with self._changing:
            try:
                return self._write(block, payload)
            except OSError as error:
                self._failed(error)
                return False

    def remove(self, digest: bytes) -> None:
        """Delete a block, if it is there."""
        with self._changing:
            try:
                self._usage.delete(block_path(self._own, digest))
            except FileNotFoundError:
                pass
            except OSError as error:
                self._failed(error)

    def read(self, owner: str, block: Block, out: memoryview) -> bool:
        """Read a block from the directory of `owner` into `out`. False when it is not there or not exactly that; a bad
        file of this worker's own is put aside. Raises OSError when the disk fails: it may be there."""
        path = self._path(owner, block)
        try:
            blockfile.read(path, self._fingerprint, block, out)
            if owner == self.worker:
                _touch(path)
        except BadFile as error:
            self._bad(path, error, mine=owner == self.worker)
            self._siblings.distrust(owner, block.digest)
            return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        self.stats.read_blocks += 1
        self.stats.read_bytes += out.nbytes
        return True

    def prefetch(self, owner: str, block: Block) -> None:
        """A block will be read soon. To say so a few blocks ahead keeps a disk busy that reads one by one would leave
        waiting."""
        with suppress(OSError):
            blockfile.prefetch(self._path(owner, block))

    def own(self) -> Iterator[tuple[Block, float]]:
        """The blocks in this worker's directory, with the time of their last use in seconds since the epoch. Reads
        headers: the caller sets the pace. Bad files are put aside."""
        for shard in listed(self._own):
            for entry in listed(shard.path):
                block = self._header(entry.path, mine=True) if entry.name.endswith(SUFFIX) else None
                if block is not None:
                    with suppress(OSError):
                        yield block, os.stat(entry.path).st_mtime

    def others(self) -> Iterator[tuple[str, Block]]:
        """Owners and blocks that have come to other workers' directories since the last time; to be called every few
        seconds."""
        for owner, path in self._siblings.news():
            if (block := self._header(path, mine=False)) is not None:
                yield owner, block

    def vanished(self) -> dict[str, list[bytes]]:
        """Digests of the blocks that are no longer in the directory of each other worker; see `Siblings.vanished`."""
        return self._siblings.vanished()

    def owner(self, digest: bytes) -> str | None:
        """Some other worker whose directory has a block now."""
        return self._siblings.owner(digest)

    # --- writing ------------------------------------------------------------------------------------------------

    def _write(self, block: Block, payload: Payload) -> bool:
        path = block_path(self._own, block.digest)
        if self._has(path, block):
            return True
        if self._uncertain:
            self._usage = self._count()
            self._uncertain = False
        if not self._make_room():
            return False
        self._put(path, block, payload)
        self._usage.added(path)
        self.stats.written_blocks += 1
        self.stats.written_bytes += memoryview(payload).nbytes
        if self.stats.read_only:
            _log.warning("%s can be written to again", self._directory)
            self.stats.read_only = False
            self._retry_s = RETRY_S
        return True

    def _has(self, path: str, block: Block) -> bool:
        """Whether an earlier run has written it; a bad file will be written over."""
        try:
            good = blockfile.read_header(path, self._fingerprint) == block
        except FileNotFoundError:
            return False
        except BadFile:
            good = False
        if good:
            _touch(path)
        else:
            self._usage.delete(path)
        return good

    def _put(self, path: str, block: Block, payload: Payload) -> None:
        try:
            blockfile.write(path, self._fingerprint, block, payload)
        except FileNotFoundError:
            shard = os.path.dirname(path)
            os.makedirs(shard, exist_ok=True)
            for directory in (self._directory, self._own, shard):
                self._usage.directory(directory)
            blockfile.write(path, self._fingerprint, block, payload)

    def _make_room(self) -> bool:
        """Whether one more block fits, if need be without the strays."""
        target = self.limit - self.cost
        if self._usage.total > target and self._clock() >= self._recount_at:
            self._usage = self._count()
        return self._shrink(target, own=False)

    def _count(self) -> Usage:
        begun = self._clock()
        usage = Usage(self._directory, self._own, self._quarantine, f"{self._directory}/{LOCK}", self._unit)
        now = self._clock()
        self._recount_at = now + max(RECOUNT_S, RECOUNT_SHARE * (now - begun))
        return usage

    def _shrink(self, target: int, own: bool) -> bool:
        """Delete strays, and with `own` blocks after them, those first that matter least, until no more than `target`
        bytes are left; whether that is so."""
        while self._usage.total > target:
            if not self._victims and (own or self._usage.strays):
                self._victims = [path for _, _, path in heapq.nsmallest(_MANY, self._usage.ranked(own))][::-1]
            if not self._victims:
                return False
            with suppress(FileNotFoundError):
                self._usage.delete(self._victims.pop())
        return True

    def _failed(self, error: OSError) -> None:
        """Write nothing for a while, twice as long as the last time."""
        self.stats.write_errors += 1
        self._uncertain = True  # directories may have grown, and a file may be left
        if not self.stats.read_only:
            _log.warning("%s cannot be written to, and is only read for now: %s", self._directory, error)
            self.stats.read_only = True
        self._retry_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    # --- reading ------------------------------------------------------------------------------------------------

    def _path(self, owner: str, block: Block) -> str:
        return block_path(f"{self.path}/{owner}/{self._fingerprint}", block.digest)

    def _header(self, path: str, mine: bool) -> Block | None:
        """The block in a file, if there is a good one."""
        try:
            block = blockfile.read_header(path, self._fingerprint)
        except BadFile as error:
            self._bad(path, error, mine)
            return None
        except OSError:
            return None
        return block if path.endswith(block_path("", block.digest)) else None

    def _bad(self, path: str, error: BadFile, mine: bool) -> None:
        """Put a bad file aside, if it is in this worker's own directory."""
        with self._changing:
            self.stats.bad_files += 1
            if mine:
                _log.warning("%s is put aside: %s", path, error)
                with suppress(OSError):
                    self._set_aside(path)

    def _set_aside(self, path: str) -> None:
        """Into the quarantine, where only the newest files stay; or it goes, if there is no room for that."""
        if self._usage.total + GROWTH_BLOCKS * self._unit > self.limit:
            self._usage.delete(path)
            return
        target = f"{self._quarantine}/{os.path.basename(path)}"
        with suppress(FileNotFoundError):
            self._usage.delete(target)
        os.makedirs(self._quarantine, exist_ok=True)
        kept = sorted(entries(self._quarantine), key=lambda entry: entry.stat().st_mtime)
        for entry in kept[: max(0, len(kept) + 1 - MAX_QUARANTINED)]:
            self._usage.delete(entry.path)
        self._usage.move(path, target)
        _touch(target)
        self._usage.directory(self._directory)


def _touch(path: str) -> None:
    """Note the time of a use in a file, so that it is known after a restart."""
    with suppress(OSError):
        os.utime(path)


def _occupy(path: Path, directory: str) -> int:
    """Make a worker's directory, and lock it. Raises StartError."""
    try:
        os.makedirs(path, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)  # headers have the tokens of prompts
        lock = take_lock(directory, LOCK_WAIT_S)
    except (FileExistsError, NotADirectoryError):
        raise StartError(f"tiers.disk_path: {path} is not a directory, or {directory} is not") from None
    except OSError as error:
        raise StartError(f"tiers.disk_path: cannot write to {directory}: {error.strerror}") from None
    if lock is None:
        raise StartError(f"tiers.disk_path: {directory} is in use by another process")
    if not os.access(directory, os.W_OK | os.X_OK):
        os.close(lock)
        raise StartError(f"tiers.disk_path: cannot write to {directory}: {os.strerror(13)}")
    return lock
