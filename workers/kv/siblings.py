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


@dataclass(slots=True)
class _Shard:
    """What has been seen in a directory of blocks. A file may come within the same tick of the clock as the change that
    was seen last, so the list is only `settled` when it was made again at an unchanged time."""

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

    def news(self) -> Iterator[tuple[str, str]]:
        """Workers, and paths of block files that have come to their directories since the last time. Directories that
        have not changed are not listed."""
        seen = set()
        for name in self._list():
            for shard in listed(self._of(name)):
                seen.add(shard.path)
                for path in self._new_files(shard.path):
                    yield name, path
        self._shards = {path: shard for path, shard in self._shards.items() if path in seen}

    def owner(self, digest: bytes) -> str | None:
        """Some worker whose directory has a block now."""
        names = self._names if self._clock() < self._fresh_until else self._list()
        return next((name for name in names if os.path.exists(block_path(self._of(name), digest))), None)

    def _of(self, name: str) -> str:
        return f"{self._path}/{name}/{self._fingerprint}"

    def _list(self) -> list[str]:
        names = self._names
        with suppress(OSError):
            names = self._names = [name for name in workers(self._path) if name != self._worker]
        self._fresh_until = self._clock() + FRESH_S
        return names

    def _new_files(self, directory: str) -> list[str]:
        shard = self._shards.setdefault(directory, _Shard())
        try:
            changed_ns = os.stat(directory).st_mtime_ns
            if changed_ns == shard.changed_ns and shard.settled:
                return []
            names = {name for name in os.listdir(directory) if name.endswith(SUFFIX)}
        except OSError:
            return []
        shard.settled = changed_ns == shard.changed_ns
        news, shard.known, shard.changed_ns = names - shard.known, names, changed_ns
        return [f"{directory}/{name}" for name in news]
