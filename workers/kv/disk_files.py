"""Where block files lie: `<path>/<worker>/<fingerprint>/<2 hex of the digest>/<digest in hex>.kv`.

Beside its fingerprints a worker's directory has a lock, held while the worker runs, and perhaps `quarantine/`, where
bad files wait to be looked at.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from workers.kv.blockfile import SUFFIX

LOCK = "lock"
QUARANTINE = "quarantine"
_BLOCK = re.compile(rf"([^/]+)/([0-9a-f]{{2}})/\2[0-9a-f]{{30}}{re.escape(SUFFIX)}")
_POLL_S = 0.05


def block_path(directory: str, digest: bytes) -> str:
    """Where a block lies in the directory of its fingerprint."""
    name = digest.hex()
    return f"{directory}/{name[:2]}/{name}{SUFFIX}"


def fingerprint_of(file: str) -> str | None:
    """The fingerprint that a path relative to a worker's directory names, if it is that of a block."""
    match = _BLOCK.fullmatch(file)
    return match[1] if match and match[1] != QUARANTINE else None


def occupied(status: os.stat_result) -> int:
    """Bytes of disk that a file or directory takes, as `du` counts them."""
    return status.st_blocks * 512


def files(directory: str) -> Iterator[os.DirEntry[str]]:
    """All files below a directory. What vanishes meanwhile is left out. Raises OSError."""
    for entry in entries(directory):
        if entry.is_dir(follow_symlinks=False):
            yield from files(entry.path)
        else:
            yield entry


def entries(directory: str) -> list[os.DirEntry[str]]:
    """What a directory has; nothing, when it is not there. Raises OSError."""
    try:
        with os.scandir(directory) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def listed(directory: str) -> list[os.DirEntry[str]]:
    """What a directory has, as far as that can be told."""
    try:
        return entries(directory)
    except OSError:
        return []


def workers(path: Path) -> list[str]:
    """Names of the workers that have, or had, a directory there. Raises OSError."""
    return sorted(entry.name for entry in entries(str(path)) if os.path.exists(f"{entry.path}/{LOCK}"))


def take_lock(directory: str, wait_s: float = 0.0) -> int | None:
    """Lock a worker's directory: a file descriptor that holds the lock until it is closed, or None when another
    process has held it for all of `wait_s` seconds. Raises OSError."""
    lock = os.open(f"{directory}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(lock)
                return None
            time.sleep(_POLL_S)
        except BaseException:
            os.close(lock)
            raise


def locked(directory: str) -> bool:
    """Whether a process has locked a worker's directory. Raises OSError."""
    lock = os.open(f"{directory}/{LOCK}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
