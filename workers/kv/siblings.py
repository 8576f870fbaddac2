"""Siblings: what other workers have in their directories beside this worker's. It only looks at names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from workers.kv.blockfile import SUFFIX
from workers.kv.disk_files import block_path, listed, workers

FRESH_S = 10.0
"""For how long the list of other workers is good."""
MAX_BAD = 10_000


@dataclass(slots=True)
class _Shard:
    """What has been seen in a directory of blocks. A file may come within the same tick of the clock as the change that
    was seen last, so the list is only `settled` when it was made again at an unchanged time."""

    worker: str
    changed_ns: int = -1
    settled: bool = False
    known: set[str] = field(default_factory=set)


class Siblings:
    """The directories of the other workers below `path`. One thread may look for news, another one for owners."""

    def __init__(self, path: Path, worker: str, fingerprint: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._worker = worker
        self._fingerprint = fingerprint
        self._clock = clock
        self._names: list[str] = []
        self._fresh_until = clock()
        self._shards: dict[str, _Shard] = {}
        self._gone: list[tuple[str, str]] = []
        self._bad: set[tuple[str, bytes]] = set()

    def news(self) -> Iterator[tuple[str, str]]:
        """Workers, and paths of block files that have come to their directories since the last time. Directories that
        have not changed are not listed."""
        seen = set()
        for name in self._list():
            for shard in listed(self._of(name)):
                seen.add(shard.path)
                for path in self._new_files(name, shard.path):
                    yield name, path
        for path in [path for path in self._shards if path not in seen]:
            shard_gone = self._shards.pop(path)
            self._gone += [(shard_gone.worker, name) for name in shard_gone.known]

    def vanished(self) -> dict[str, list[bytes]]:
        """Digests of the blocks that have gone from each worker's directory, of which `news` told before."""
        gone: dict[str, list[bytes]] = {}
        for worker, name in self._gone:
            with suppress(ValueError):
                gone.setdefault(worker, []).append(bytes.fromhex(name.removesuffix(SUFFIX)))
        self._gone = []
        return gone

    def owner(self, digest: bytes) -> str | None:
        """Some worker whose directory has a block now."""
        names = self._names if self._clock() < self._fresh_until else self._list()
        for name in names:
            if (name, digest) not in self._bad and os.path.exists(block_path(self._of(name), digest)):
                return name
        return None

    def distrust(self, worker: str, digest: bytes) -> None:
        """A worker's file of a block is bad: it is nobody's who wants the block."""
        if len(self._bad) < MAX_BAD:
            self._bad.add((worker, digest))

    def _of(self, name: str) -> str:
        return f"{self._path}/{name}/{self._fingerprint}"

    def _list(self) -> list[str]:
        names = self._names
        with suppress(OSError):
            names = self._names = [name for name in workers(self._path) if name != self._worker]
        self._fresh_until = self._clock() + FRESH_S
        return names

    def _new_files(self, worker: str, directory: str) -> list[str]:
        shard = self._shards.setdefault(directory, _Shard(worker))
        try:
            changed_ns = os.stat(directory).st_mtime_ns
            if changed_ns == shard.changed_ns and shard.settled:
                return []
            names = {name for name in os.listdir(directory) if name.endswith(SUFFIX)}
        except OSError:
            return []
        shard.settled = changed_ns == shard.changed_ns
        self._gone += [(worker, name) for name in shard.known - names]
        news, shard.known, shard.changed_ns = names - shard.known, names, changed_ns
        return [f"{directory}/{name}" for name in news]
