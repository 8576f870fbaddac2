"""Cores: how many threads a worker computes with, when several workers share a machine's cores.

Threads that wait for a core lose far more than they gain, so busy workers share the cores; one that is busy alone gets
all of them. A worker that has something to compute holds a lock on one byte of a file, the byte that its process id
numbers. Such locks need no server, anybody can ask who holds one, and they end with their process.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import tempfile
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)
_FLOCK = "@hhqqi4x"
"""C's `struct flock`: type, whence, start, length, process id."""
_TYPE, _START, _LENGTH, _PID = 0, 2, 3, 4
_LAST = 1 << 31
"""Beyond every process id."""


def shared_cores() -> Cores | None:
    """This worker's share among this user's workers on the machine; None where they cannot know of each other."""
    path = Path(tempfile.gettempdir()) / f"headwater-{os.getuid()}.busy"
    try:
        cores = Cores(path)
        cores.enter()
        cores.leave()
        return cores
    except OSError as error:
        _log.warning("workers on one machine keep to fixed shares of its cores: %s", error)
        return None


class Cores:
    """One worker's share. The file stays open: POSIX ends all of a process's locks when it closes a file once."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._busy = False

    def enter(self) -> int:
        """Be one of those that compute; how many threads that gives this worker now. At least one."""
        if not self._busy:
            self._set(fcntl.F_WRLCK)
        mine = os.sched_getaffinity(0)
        return max(1, len(mine) // (1 + self._others(mine, 0, _LAST)))

    def leave(self) -> None:
        """Nothing to compute for now."""
        if self._busy:
            self._set(fcntl.F_UNLCK)

    def close(self) -> None:
        """Leave for good."""
        os.close(self._file)

    def _set(self, kind: int) -> None:
        lock = struct.pack(_FLOCK, kind, os.SEEK_SET, os.getpid(), 1, 0)
        with suppress(OSError):  # a process of the same number in another container has locked this byte
            fcntl.fcntl(self._file, fcntl.F_SETLK, lock)
        self._busy = kind == fcntl.F_WRLCK

    def _others(self, mine: set[int], begin: int, end: int) -> int:
        """Workers that compute on some of these cores, and whose bytes are in `[begin, end)`. The system names one of
        them, whichever it likes."""
        if begin == end:
            return 0
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, begin, end - begin, 0)
        found = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, query))
        if found[_TYPE] == fcntl.F_UNLCK:
            return 0
        at, pid = found[_START], found[_PID]
        return self._others(mine, begin, at) + _computes_on(mine, pid) + self._others(mine, at + found[_LENGTH], end)


def _computes_on(mine: set[int], pid: int) -> bool:
    """Whether a process may use some of these cores. One in another container has no number here; it has, most likely,
    cores of its own."""
    try:
        return pid > 0 and not mine.isdisjoint(os.sched_getaffinity(pid))
    except OSError:  # it has just ended
        return False
