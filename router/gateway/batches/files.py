"""Files: what a tenant has uploaded, and what its batches have answered."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from router.gateway.batches.shelf import Shelf
from router.gateway.errors import ApiError, invalid

_log = logging.getLogger(__name__)

CONTENT = "content"
INPUT, OUTPUT = "batch", "batch_output"
DAYS_30 = 30 * 86_400
"""How long a file is kept where nobody says otherwise, in seconds."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's record. Times are seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {**asdict(self), "object": "file", "status": "processed", "status_details": None}


class NewFile:
    """A file while it is written; nobody sees it before `keep`."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        self.name = name
        self._draft = shelf.draft(name)
        self.content: BinaryIO = (self._draft.path / CONTENT).open("wb")

    def write(self, parts: list[bytes]) -> None:
        """Append."""
        self.content.writelines(parts)

    def keep(self, filename: str, purpose: str, now: float, keep_s: int | None) -> StoredFile:
        """Let it appear."""
        self.content.flush()
        os.fsync(self.content.fileno())
        size = self.content.tell()
        self.content.close()
        made, age = int(now), DAYS_30 if keep_s is None else keep_s
        stored = StoredFile(self.name, size, made, made + age, filename, purpose)
        self._draft.publish(asdict(stored))
        return stored

    def discard(self) -> None:
        """Leave nothing of it."""
        self.content.close()
        self._draft.discard()


class Files:
    """A tenant's files, at most `most` unless its batches answer more. Methods touch the disk."""

    def __init__(self, folder: Path, most: int, clock: Callable[[], float]) -> None:
        self._shelf = Shelf(folder, "files", "file-")
        self._most = most
        self._clock = clock

    def check_room(self) -> None:
        """Raises ApiError where there are as many files as may be, those that are being uploaded among them."""
        if (count := len(self._shelf.names()) + self._shelf.drafts()) >= self._most:
            raise invalid(
                f"file: {count} files are stored, at most {self._most} may be (gateway.max_batch_files): delete some",
                "file",
                "too_many_files",
            )

    def new(self, name: str | None = None) -> NewFile:
        """Begin a file."""
        return NewFile(self._shelf, name or self._shelf.new_name())

    def new_name(self) -> str:
        """A name for a file."""
        return self._shelf.new_name()

    def get(self, name: str) -> StoredFile:
        """Raises ApiError 404."""
        if (found := self._read(name)) is None:
            raise ApiError(404, f"there is no file {name[:100]!r}", code="file_not_found")
        return found

    def content(self, name: str) -> Path:
        """Where the bytes of a file are. Raises ApiError 404."""
        return self._shelf.path(self.get(name).id) / CONTENT

    def delete(self, name: str) -> None:
        """Raises ApiError 404."""
        self.get(name)
        self._shelf.remove(name)

    def page(
        self, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """At most `limit` files after one, and whether there are more. Raises ApiError."""
        found: list[StoredFile] = []
        for name in names_after(self._shelf, after, newest_first):
            file = self._read(name)
            if file is None or purpose not in (None, file.purpose):
                continue
            if len(found) == limit:
                return found, True
            found.append(file)
        return found, False

    def sweep(self) -> None:
        """Remove what has expired, and what others have left half done."""
        for name in self._shelf.names():
            record = self._shelf.read(name)
            if record is not None and record.get("expires_at", math.inf) <= self._clock():
                self._shelf.remove(name)
        self._shelf.sweep()

    def _read(self, name: str) -> StoredFile | None:
        record = self._shelf.read(name)
        try:
            file = None if record is None else StoredFile(**record)
        except TypeError as error:  # of another version, or damaged
            _log.warning("the record of file %s cannot be read: %s", name, error)
            return None
        return None if file is None or file.expires_at <= self._clock() else file


def names_after(shelf: Shelf, after: str | None, newest_first: bool) -> list[str]:
    """Of a shelf's names those that follow one, which need not be there any more. Raises ApiError."""
    if after is not None and not shelf.is_name(after):
        raise invalid(f"after: no id is {after[:100]!r}", "after")
    names = shelf.names()
    if newest_first:
        return [name for name in reversed(names) if after is None or name < after]
    return [name for name in names if after is None or name > after]
