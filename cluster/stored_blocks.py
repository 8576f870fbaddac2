"""What lies in the directories of `tiers.disk_path`, whether or not a cluster runs: for `headwater cache`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import UserError
from workers.kv import blockfile
from workers.kv.blockfile import BadFile, Block
from workers.kv.disk_files import QUARANTINE, files, fingerprint_of, locked, occupied, take_lock, workers

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A block file. `bytes` is what it takes of the disk, `used` when it was written or read last, in seconds since the
    epoch. `fingerprint` is None of a bad file that was put aside."""

    worker: str
    fingerprint: str | None
    path: str
    bytes: int
    used: float


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A prefix that is not part of a longer one. `bytes` is what all its blocks in this directory take."""

    digest: str
    worker: str
    fingerprint: str
    tokens: int
    bytes: int
    used: float


def worker_names(path: Path, only: str | None = None) -> list[str]:
    """Workers that have a directory below `path`. Raises UserError when there is no such directory, or not the one of
    the worker `only`."""
    try:
        os.listdir(path)
        names = workers(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if only is not None and only not in names:
        raise UserError(f"--worker {only}: has no directory in {path}; there are {', '.join(names) or 'none'}")
    return names if only is None else [only]


def stored_files(path: Path, worker: str) -> Iterator[StoredFile]:
    """A worker's block files. What is no block file by its name, or vanishes meanwhile, is left out. Raises
    UserError."""
    directory = f"{path}/{worker}"
    try:
        for entry in files(directory):
            relative = entry.path[len(directory) + 1 :]
            fingerprint = fingerprint_of(relative)
            if fingerprint is None and not relative.startswith(f"{QUARANTINE}/"):
                continue
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield StoredFile(worker, fingerprint, entry.path, occupied(status), status.st_mtime)
    except OSError as error:
        raise UserError(f"{error.filename or directory}: {error.strerror}") from None


def prefixes(blocks: list[tuple[StoredFile, Block]]) -> list[StoredPrefix]:
    """The longest prefixes among a worker's blocks."""
    sizes: dict[tuple[str | None, bytes], int] = {}
    for file, block in sorted(blocks, key=lambda one: one[1].depth):
        sizes[file.fingerprint, block.digest] = file.bytes + sizes.get((file.fingerprint, block.parent), 0)
    inner = {(file.fingerprint, block.parent) for file, block in blocks}
    return [
        StoredPrefix(
            digest=block.digest.hex(),
            worker=file.worker,
            fingerprint=file.fingerprint,
            tokens=(block.depth + 1) * (len(block.tokens) // TOKEN_BYTES),
            bytes=sizes[file.fingerprint, block.digest],
            used=file.used,
        )
        for file, block in blocks
        if file.fingerprint is not None and (file.fingerprint, block.digest) not in inner
    ]


def header(file: StoredFile) -> Block | None:
    """The block in a file; None when it is bad or gone."""
    try:
        return blockfile.read_header(file.path, file.fingerprint or "")
    except (BadFile, OSError):
        return None


def problem(file: StoredFile) -> str | None:
    """What is wrong with a file; None when it is good, or gone meanwhile."""
    try:
        blockfile.verify(file.path, file.fingerprint or "")
    except FileNotFoundError:
        return None
    except (BadFile, OSError) as error:
        return str(error)
    return None


def running(path: Path, worker: str) -> bool:
    """Whether a process uses the worker's directory. Raises UserError."""
    try:
        return locked(f"{path}/{worker}")
    except OSError as error:
        raise UserError(f"{path}/{worker}: {error.strerror}") from None


def clear(path: Path, worker: str, before: float, force: bool) -> tuple[int, int] | None:
    """Delete a worker's block files that were used last before some time: how many there were, and their bytes. None,
    with nothing deleted, when the worker runs, unless with `force`. Raises UserError."""
    directory = f"{path}/{worker}"
    try:
        lock = take_lock(directory)
        if lock is None and not force:
            return None
        try:
            return _delete([one for one in stored_files(path, worker) if one.used < before], directory)
        finally:
            if lock is not None:
                os.close(lock)
    except OSError as error:
        raise UserError(f"{error.filename or directory}: {error.strerror}") from None


def _delete(stored: list[StoredFile], directory: str) -> tuple[int, int]:
    count = size = 0
    for file in stored:
        with suppress(FileNotFoundError):
            os.unlink(file.path)
            count, size = count + 1, size + file.bytes
    for parent, _, _ in os.walk(directory, topdown=False):
        if parent != directory:
            with suppress(OSError):  # it is not empty
                os.rmdir(parent)
    return count, size
