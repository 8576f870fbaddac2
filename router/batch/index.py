"""Index: all lines of a batch in a temporary database on disk, so that memory does not grow with their number."""

from __future__ import annotations

import os
import sqlite3
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from router.batch.errors import BatchError, Problem, Refused
from router.batch.lines import MAX_LINE_BYTES, URLS, BadLine, WrongUrl, parse, prefix_key

CACHE_KIB = 8 * 1024
READ_AT_ONCE = 256
"""Lines of a lane that are looked up at a time."""
TOLD_EVERY = 10_000
"""Lines between two reports of how many have been read."""
MAX_PROBLEMS = 100
"""Problems that are told of, of one kind."""


@dataclass(frozen=True, slots=True)
class Line:
    """Where a line is: its number among all lines of all inputs, from 1 on; its input, and the bytes there."""

    number: int
    input: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Done:
    """A row that is in the output: by its `custom_id`, or where the line had none by its input and line number."""

    custom_id: str | None
    input: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"custom_id {self.custom_id!r}" if self.custom_id is not None else f"{self.input}:{self.line}"


class Index:
    """The lines of some inputs. SQLite deletes a temporary database itself, however the process ends."""

    def __init__(
        self,
        inputs: Sequence[Path],
        told: Callable[[int], None] = lambda _: None,
        names: Sequence[str] | None = None,
        url: str | None = None,
    ) -> None:
        """Read all inputs; `told` is told how many lines there are so far. In rows and errors they have these `names`,
        or their paths. Raises BatchError for one that cannot be read, what `told` raises, and Refused for a `custom_id`
        that is used twice and, where there is a `url`, for lines that have another."""
        self.inputs = list(inputs)
        self._names = list(names) if names is not None else [str(path) for path in inputs]
        self._urls = (url,) if url is not None else URLS
        self._wrong: list[Problem] = []
        self._files: list[tuple[int, int]] = []
        self._starts: list[int] = []
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        for setting in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{CACHE_KIB}", "temp_store=FILE"):
            self._db.execute(f"PRAGMA {setting}")
        self._db.execute("CREATE TABLE lines (input INT, start INT, length INT, id TEXT, key BLOB, done INT)")
        self._db.execute("BEGIN")
        self.total = 0
        try:
            self._read_all(told)
            self._db.execute("CREATE INDEX ids ON lines (id)")
            self._refuse(url is not None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Forget everything."""
        self._db.close()
        for file, _ in self._files:
            os.close(file)
        self._files.clear()

    def where(self, number: int) -> tuple[str, int]:
        """The input that a line is in, and its number there."""
        file = bisect_right(self._starts, number) - 1
        return self._names[file], number - self._starts[file] + 1

    def mark(self, rows: Iterable[Done]) -> int:
        """These need not be done again; how many there are. Raises BatchError for one that is of no line."""
        marked = 0
        for row in rows:
            marked += 1
            if not self._mark(row):
                raise BatchError(f"row {marked} of the output is that of {row}, which is not in the input")
        return marked

    def order(self, grouped: bool, lanes: int) -> Iterator[Line]:
        """What is left to do. `grouped`: sorted by prefix, and cut into as many `lanes` as there are workers,
        from which lines are taken in turn: each worker then has a prefix of its own. Otherwise in the inputs' order."""
        by = "key, rowid" if grouped else "rowid"
        self._db.execute("DROP TABLE IF EXISTS ranked")
        self._db.execute("CREATE TABLE ranked (line INT)")
        self._db.execute(f"INSERT INTO ranked SELECT rowid FROM lines WHERE done = 0 ORDER BY {by}")
        (count,) = self._db.execute("SELECT count(*) FROM ranked").fetchone()
        lanes = lanes if grouped else 1
        edges = [count * lane // lanes for lane in range(lanes + 1)]
        waiting = deque(self._lane(first, last) for first, last in pairwise(edges))
        while waiting:
            lane = waiting.popleft()
            if (line := next(lane, None)) is not None:
                yield line
                waiting.append(lane)

    def read(self, line: Line) -> bytes:
        """The line's bytes. Raises BatchError when its input was changed meanwhile."""
        file, changed = self._files[line.input]
        if os.fstat(file).st_mtime_ns != changed:
            raise BatchError(f"{self._names[line.input]}: was changed while the batch ran")
        return os.pread(file, min(line.length, MAX_LINE_BYTES + 1), line.offset)

    # --- inside -------------------------------------------------------------------------------------------------

    def _read_all(self, told: Callable[[int], None]) -> None:
        for number, path in enumerate(self.inputs):
            self._starts.append(self.total + 1)
            try:
                with path.open("rb") as file:
                    self._files.append((os.dup(file.fileno()), os.fstat(file.fileno()).st_mtime_ns))
                    self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, 0)", self._rows(number, file, told))
            except OSError as error:
                raise BatchError(f"{self._names[number]}: cannot be read: {error.strerror}") from error

    def _rows(
        self, number: int, file: BinaryIO, told: Callable[[int], None]
    ) -> Iterator[tuple[int, int, int, str | None, bytes]]:
        for start, length, line in _lines(file):
            self.total += 1
            custom_id, key = self._described(line)
            yield number, start, length, custom_id, key
            if self.total % TOLD_EVERY == 0:
                told(self.total)

    def _described(self, line: bytes) -> tuple[str | None, bytes]:
        """The id and the sort key of the last line so far; one that is no request comes first."""
        try:
            item = parse(line, self._urls)
        except BadLine as error:
            if isinstance(error, WrongUrl) and len(self._wrong) < MAX_PROBLEMS:
                self._wrong.append(Problem("invalid_url", str(error), self.where(self.total)[1]))
            return error.custom_id, b""
        return item.custom_id, prefix_key(item)

    def _refuse(self, one_url: bool) -> None:
        """Raises Refused for what no row could make good."""
        repeated = self._repeated()
        wrong = self._wrong if one_url else []
        if not (repeated or wrong):
            return
        problems = [Problem("duplicate_custom_id", told, self.where(second)[1]) for second, told in repeated] + wrong
        problems.sort(key=lambda one: one.line or 0)
        message = problems[0].message
        if repeated:
            name, line = self.where(repeated[0][0])
            message = f"{name}:{line}: {repeated[0][1]}"
        raise Refused(message, problems[:MAX_PROBLEMS])

    def _repeated(self) -> list[tuple[int, str]]:
        """Of ids that are used more than once the first ones: the second line that has it, and what to say of it."""
        twice = "SELECT min(rowid) AS one, id FROM lines WHERE id IS NOT NULL GROUP BY id HAVING count(*) > 1"
        (count,) = self._db.execute(f"SELECT count(*) FROM ({twice})").fetchone()
        told: list[tuple[int, str]] = []
        for first, custom_id in self._db.execute(f"{twice} ORDER BY one LIMIT {MAX_PROBLEMS}").fetchall():
            same = "SELECT min(rowid) FROM lines WHERE id = ? AND rowid > ?"
            (second,) = self._db.execute(same, (custom_id, first)).fetchone()
            name, line = self.where(first)
            more = f"; {count - 1} more are used more than once" if count > 1 and not told else ""
            told.append((second, f"custom_id: {custom_id[:100]!r} is used in {name}:{line} already{more}"))
        return told

    def _mark(self, row: Done) -> bool:
        if row.custom_id is not None:
            return bool(self._db.execute("UPDATE lines SET done = 1 WHERE id = ?", (row.custom_id,)).rowcount)
        if row.input not in self._names:
            return False
        file = self._names.index(row.input)
        same = "UPDATE lines SET done = 1 WHERE rowid = ? AND input = ? AND id IS NULL"
        return bool(self._db.execute(same, (self._starts[file] + row.line - 1, file)).rowcount)

    def _lane(self, first: int, last: int) -> Iterator[Line]:
        """The lines after the first `first` in order, up to the `last`."""
        places = "SELECT lines.rowid, input, start, length FROM ranked JOIN lines ON lines.rowid = ranked.line"
        some = f"{places} WHERE ranked.rowid > ? AND ranked.rowid <= ? ORDER BY ranked.rowid"
        for start in range(first, last, READ_AT_ONCE):
            for row in self._db.execute(some, (start, min(start + READ_AT_ONCE, last))).fetchall():
                yield Line(*row)


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Where each line begins, its length without the line's end, and the line: of one that is too long, enough to see
    that."""
    start = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        end, more = start + len(line), line
        while not more.endswith(b"\n") and (more := file.readline(MAX_LINE_BYTES)):
            end += len(more)
        yield start, end - start - more.endswith(b"\n"), line.removesuffix(b"\n")
        start = end
