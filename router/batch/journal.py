"""Journal: the output of a batch, which also says what is done. A row is one line, and is only ever appended."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from router.batch.errors import BatchError
from router.batch.index import Done

BAD_LINE = "invalid_line"
"""The code of rows of lines that are no requests."""
_ROW_START = b'{"id": "batch_req_'


@dataclass(frozen=True, slots=True)
class Written:
    """A row that is in the output already: of which line, and whether it failed."""

    of: Done
    failed: bool


class Journal:
    """The output file, for one process at a time."""

    def __init__(self, path: Path) -> None:
        """Open it, or make it. Raises BatchError where that cannot be, or where another process writes to it."""
        self._path = path
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise BatchError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise BatchError(f"{path}: another batch writes to it now") from None
        except OSError:
            pass  # a file system without locks
        self._unsynced = True

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        try:
            self.sync()
        finally:
            self._file.close()

    def written(self) -> Iterator[Written]:
        """The rows that are there. A last line that is not whole was being written when a batch was killed: it is cut
        off. Raises BatchError for a line that is no row: it would be somebody's file."""
        whole = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if number == 1 and not _ROW_START.startswith(line[: len(_ROW_START)]):
                        raise BatchError(f"{self._path}:1: is no row of a batch; give another output file")
                    break
                yield self._row(line, number)
                whole += len(line)
        self._file.truncate(whole)

    def append(self, row: dict[str, Any]) -> None:
        """Write a row; it outlives this process at once, and the machine after `sync`. Raises BatchError."""
        rest = memoryview(f"{json.dumps(row)}\n".encode())  # in ASCII: some readers end lines at Unicode's separators
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise BatchError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._unsynced = True

    def sync(self) -> None:
        """Let the rows so far outlive the machine."""
        if self._unsynced:
            self._unsynced = False
            os.fsync(self._file.fileno())

    def _row(self, line: bytes, number: int) -> Written:
        try:
            row = json.loads(line)
            error, custom_id = row["error"], row["custom_id"]
            row["response"]
            of = Done(custom_id) if custom_id is not None else Done(None, error["input"], error["line"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise BatchError(f"{self._path}:{number}: is no row of a batch; give another output file") from None
        return Written(of, error is not None)
