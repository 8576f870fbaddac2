"""Shelves: things on disk that appear whole and go whole, for several processes that share a directory."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
RECORD = "record.json"
NEW = "new"
"""Beside the shelves of a tenant: what is not there yet, and what is there no more."""
STALE_S = 86_400.0
"""Age of what lies there from processes that have died."""
NOBODY = "nobody"
"""Directory of those who need no key. No tenant's: those begin with `tenant-`."""


def folder_of(root: Path, tenant: str) -> Path:
    """Where a tenant's things are. Names of tenants may be `..`."""
    return root / (f"tenant-{tenant}" if tenant else NOBODY)


def tenants_of(root: Path) -> list[str]:
    """Who has things there."""
    with suppress(FileNotFoundError):
        names = (one.name for one in os.scandir(root) if one.is_dir())
        return [name.removeprefix("tenant-") if name != NOBODY else "" for name in names]
    return []


class Draft:
    """A directory that nobody sees until it is published."""

    def __init__(self, path: Path, final: Path) -> None:
        self.path = path
        self._final = final

    def publish(self, record: dict[str, Any]) -> None:
        """Let it appear, unless it has before: then what it was is kept."""
        write_json(self.path / RECORD, record)
        _sync(self.path)
        self._final.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            self.path.rename(self._final)
        except OSError:
            if not self._final.exists():
                raise
            self.discard()
        _sync(self._final.parent)

    def discard(self) -> None:
        """Leave nothing of it."""
        shutil.rmtree(self.path, ignore_errors=True)


class Shelf:
    """Things of one kind of one tenant: each a directory with a record, under a name that begins with `prefix`. Names
    are made here and sort by age; what has another name is not there, so that no name leads elsewhere."""

    def __init__(self, folder: Path, kind: str, prefix: str) -> None:
        self._folder = folder
        self._path = folder / kind
        self._prefix = prefix
        self._valid = re.compile(re.escape(prefix) + "[0-9a-f]{32}")

    def new_name(self) -> str:
        """A name that nothing has."""
        return f"{self._prefix}{time.time_ns():016x}{secrets.token_hex(8)}"

    def is_name(self, name: str) -> bool:
        """Whether something could have it."""
        return self._valid.fullmatch(name) is not None

    def path(self, name: str) -> Path:
        """The directory of what has this name, one that is valid."""
        assert self.is_name(name)
        return self._path / name

    def names(self) -> list[str]:
        """Of all that is there, oldest first."""
        try:
            return sorted(name for name in os.listdir(self._path) if self.is_name(name))
        except FileNotFoundError:
            return []

    def drafts(self) -> int:
        """How many things, of whichever kind, are begun and not there yet, or on their way out."""
        try:
            return len(os.listdir(self._folder / NEW))
        except FileNotFoundError:
            return 0

    def read(self, name: str) -> dict[str, Any] | None:
        """A record; None where there is none that can be read."""
        if not self.is_name(name):
            return None
        try:
            record = json.loads((self.path(name) / RECORD).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            _log.warning("the record of %s cannot be read: %s", name, error)
            return None
        return record if isinstance(record, dict) else None

    def write(self, name: str, record: dict[str, Any]) -> None:
        """Replace a record."""
        write_json(self.path(name) / RECORD, record)

    def draft(self, name: str) -> Draft:
        """Begin what will have this name."""
        path = self._folder / NEW / secrets.token_hex(8)
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for one in (self._folder, path.parent, path):
            one.mkdir(mode=0o700, exist_ok=True)
        return Draft(path, self.path(name))

    def remove(self, name: str) -> bool:
        """Whether it was there. Who reads it may read on."""
        if not self.is_name(name):
            return False
        gone = self._folder / NEW / secrets.token_hex(8)
        try:
            self.path(name).rename(gone)
        except FileNotFoundError:
            return False
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def sweep(self) -> None:
        """Remove what was never published, or not removed to its end."""
        with suppress(FileNotFoundError):
            for one in os.scandir(self._folder / NEW):
                with suppress(FileNotFoundError):
                    if time.time() - one.stat().st_mtime > STALE_S:
                        shutil.rmtree(one.path, ignore_errors=True)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a file, so that it is never half there."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(json.dumps(data).encode())
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _sync(directory: Path) -> None:
    """Let names outlive the machine."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
