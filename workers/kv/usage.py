"""Usage: what a worker's directory takes of the disk, known at any time without walking it again.

It is never less than `du` counts. A file is taken to need all the blocks of its length, though a file system that
compresses may need fewer, and those that allocate late show none at first; and one more, where it is long enough to be
in so many pieces that their list does not fit into its inode (ext4 has room for four). So what is subtracted with a
file is what was added with it, however it lies on the disk by then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from workers.kv.blockfile import UNFINISHED
from workers.kv.disk_files import entries, files, fingerprint_of, occupied

QUARANTINED, FOREIGN, OWN = range(3)
"""Kinds of files, those first that matter least."""


class Usage:
    """Bytes below `directory`, whose own blocks lie in `own` and bad files in `quarantine`, in a file system of `unit`
    bytes a block. Walks it once; unfinished files and empty directories, which a crash has left, go. Only for the one
    who writes there; everything raises OSError."""

    def __init__(self, directory: str, own: str, quarantine: str, lock: str, unit: int) -> None:
        self._directory = directory
        self._fingerprint = os.path.basename(own)
        self._quarantine = quarantine
        self._lock = lock
        self._unit = unit
        self._directories: dict[str, int] = {}
        self.total = 0
        """Everything, directories included."""
        self.strays = 0
        """The part that belongs to files other than own blocks."""
        self._count(directory)

    def _count(self, directory: str) -> None:
        kept = False
        for entry in entries(directory):
            if entry.is_dir(follow_symlinks=False):
                self._count(entry.path)
                kept = kept or entry.path in self._directories
            elif entry.name.endswith(UNFINISHED):
                os.unlink(entry.path)
            else:
                with suppress(FileNotFoundError):
                    self._add(entry.path, entry.stat(follow_symlinks=False), 1)
                    kept = True
        if not kept:
            with suppress(FileNotFoundError):
                os.rmdir(directory)
        self.directory(directory)

    def directory(self, path: str) -> None:
        """Something has come to a directory or gone from it."""
        try:
            now = occupied(os.lstat(path))
        except FileNotFoundError:
            self.total -= self._directories.pop(path, 0)
        else:
            self.total += now - self._directories.get(path, 0)
            self._directories[path] = now

    def added(self, path: str) -> None:
        """A file has come."""
        self._add(path, os.lstat(path), 1)
        self.directory(os.path.dirname(path))

    def delete(self, path: str) -> None:
        """Delete a file, and its directory with the last one. Directories never shrink, so that empty ones would
        take ever more of a small limit."""
        status = os.lstat(path)
        os.unlink(path)
        self._add(path, status, -1)
        self._prune(os.path.dirname(path))

    def move(self, path: str, target: str) -> None:
        """Rename a file."""
        status = os.lstat(path)
        os.rename(path, target)
        self._add(path, status, -1)
        self._add(target, status, 1)
        self._prune(os.path.dirname(path))
        self.directory(os.path.dirname(target))

    def ranked(self, own: bool) -> Iterator[tuple[int, float, str]]:
        """Kind, time of the last use, and path of every file that is a stray, or with `own` of every file."""
        for entry in files(self._directory):
            kind = self._kind(entry.path)
            if entry.path == self._lock or entry.name.startswith(".nfs"):  # NFS keeps what is still open
                continue
            if own or kind != OWN:
                with suppress(FileNotFoundError):
                    yield kind, entry.stat(follow_symlinks=False).st_mtime, entry.path

    def _prune(self, directory: str) -> None:
        """Delete a directory that is empty, and those that it leaves empty."""
        gone = True
        while gone and directory != self._directory:
            try:
                os.rmdir(directory)
            except OSError:
                gone = False
            self.directory(directory)
            directory = os.path.dirname(directory)

    def _add(self, path: str, status: os.stat_result, sign: int) -> None:
        blocks = -(-status.st_size // self._unit)
        size = sign * max(occupied(status), (blocks + (blocks > 4)) * self._unit)
        self.total += size
        if self._kind(path) != OWN:
            self.strays += size

    def _kind(self, path: str) -> int:
        if path.startswith(self._quarantine + "/"):
            return QUARANTINED
        mine = fingerprint_of(path[len(self._directory) + 1 :]) == self._fingerprint
        return OWN if mine else FOREIGN
