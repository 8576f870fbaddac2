"""Batches: what is to be done, how far it is, and the files it is done with."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from router.batch.errors import Problem
from router.gateway.batches.files import INPUT, Files, names_after
from router.gateway.batches.shelf import Shelf, folder_of
from router.gateway.errors import ApiError, invalid

_log = logging.getLogger(__name__)

WINDOW, WINDOW_S = "24h", 86_400
VALIDATING, IN_PROGRESS, FINALIZING = "validating", "in_progress", "finalizing"
COMPLETED, FAILED, EXPIRED, CANCELLED = OVER = ("completed", "failed", "expired", "cancelled")
CANCELLING = "cancelling"
LOCK, CANCEL, LINES, ROWS = "lock", "cancel", "input", "rows"
"""Files in a batch's directory: held by who carries it out; there when it is to be cancelled; its lines; its rows."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch's record. Times are seconds since 1970; `reached` has that of each status after the first. `ending` is
    what its status will be once it is finalized; files have their names before they are there."""

    id: str
    endpoint: str
    input_file_id: str
    model: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_keep_s: int | None = None
    status: str = VALIDATING
    ending: str = COMPLETED
    reached: dict[str, int] = field(default_factory=dict)
    counts: Counts = Counts()
    usage: dict[str, Any] | None = None
    errors: list[Problem] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    @classmethod
    def of(cls, record: dict[str, Any]) -> Batch:
        """From what `asdict` made of it."""
        errors = record["errors"]
        own = {
            "counts": Counts(**record["counts"]),
            "errors": None if errors is None else [Problem(**one) for one in errors],
        }
        return cls(**{**record, **own})

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in OVER

    def now(self, status: str, at: float) -> Batch:
        """The same, in its next status."""
        return replace(self, status=status, reached={**self.reached, status: int(at)})

    def shown(self, cancelling_at: int | None) -> dict[str, Any]:
        """OpenAI's batch object."""
        at = dict(self.reached)
        if cancelling_at is not None:
            at[CANCELLING] = cancelling_at
        status = CANCELLING if cancelling_at is not None and not self.over else self.status
        times = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)
        problems = None if self.errors is None else [{**asdict(one), "param": None} for one in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": None if problems is None else {"object": "list", "data": problems},
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": status,
            "output_file_id": self.output_file_id if self.over else None,
            "error_file_id": self.error_file_id if self.over else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": at.get(name) for name in times},
            "request_counts": asdict(self.counts),
            "usage": self.usage,
            "metadata": self.metadata,
        }


class Batches:
    """A tenant's batches, at most `most`: then the oldest that is over makes room. Methods touch the disk."""

    def __init__(self, folder: Path, most: int, files: Files, clock: Callable[[], float]) -> None:
        self.files = files
        self.clock = clock
        self._shelf = Shelf(folder, "batches", "batch_")
        self._most = most

    def create(self, endpoint: str, file: str, model: str, metadata: Any, output_keep_s: int | None) -> Batch:
        """Raises ApiError for a file that is none of an upload's, and where there are as many batches as may be."""
        try:
            stored = self.files.get(file)
        except ApiError as error:
            raise invalid(f"input_file_id: {error.message}", "input_file_id", error.code) from None
        if stored.purpose != INPUT:
            raise invalid(f"input_file_id: its purpose must be {INPUT!r}, got {stored.purpose!r}", "input_file_id")
        self.files.check_room()  # for what it answers
        self._make_room()
        name, now = self._shelf.new_name(), int(self.clock())
        batch = Batch(name, endpoint, file, model, now, now + WINDOW_S, metadata, output_keep_s)
        draft = self._shelf.draft(name)
        try:
            _share(self.files.content(file), draft.path / LINES)
            draft.publish(asdict(batch))
        except BaseException:
            draft.discard()
            raise
        return batch

    def get(self, name: str) -> Batch:
        """Raises ApiError 404."""
        if (batch := self.find(name)) is None:
            raise ApiError(404, f"there is no batch {name[:100]!r}", code="batch_not_found")
        return batch

    def find(self, name: str) -> Batch | None:
        """None where there is none."""
        record = self._shelf.read(name)
        try:
            return None if record is None else Batch.of(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # of another version, or damaged
            _log.warning("the record of batch %s cannot be read: %r", name, error)
            return None

    def shown(self, batch: Batch) -> dict[str, Any]:
        """OpenAI's batch object."""
        return batch.shown(self.cancelled_at(batch.id))

    def page(self, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """At most `limit` batches older than one, newest first, and whether there are more. Raises ApiError."""
        names = names_after(self._shelf, after, newest_first=True)
        found = [self.find(name) for name in names[:limit]]
        return [self.shown(one) for one in found if one is not None], len(names) > limit

    def cancel(self, name: str) -> Batch:
        """One that nobody has begun is over at once, any other when whoever carries it out sees that. Raises ApiError
        404, and 400 for one that is over in another way."""
        batch = self.get(name)
        if batch.status == CANCELLED:
            return batch
        if batch.over or batch.status == FINALIZING:
            raise invalid(f"the batch {name} is {batch.status}: it cannot be cancelled", code="batch_not_running")
        (self._shelf.path(name) / CANCEL).touch()
        with self.locked(name) as ours:
            batch = self.get(name)
            if ours and batch.status == VALIDATING:
                batch = batch.now(CANCELLED, self.clock())
                self.save(batch)
                self.tidy(name)
        return batch

    def is_to_end(self, batch: Batch) -> bool:
        """Whether nothing more of it is to be sent, whoever could do that."""
        return self.cancelled_at(batch.id) is not None or self.clock() >= batch.expires_at

    def tidy(self, name: str) -> None:
        """Remove what a batch that is over does not need any more."""
        batch = self.find(name)
        if batch is not None and batch.over:
            for part in (ROWS, LINES):
                self.path(name, part).unlink(missing_ok=True)

    def cancelled_at(self, name: str) -> int | None:
        """When a client has wanted its end."""
        try:
            return int((self._shelf.path(name) / CANCEL).stat().st_mtime)
        except FileNotFoundError:
            return None

    def save(self, batch: Batch) -> None:
        """Replace its record: only by who has its lock."""
        self._shelf.write(batch.id, asdict(batch))

    def path(self, name: str, part: str) -> Path:
        """Of a file in its directory."""
        return self._shelf.path(name) / part

    def names(self) -> list[str]:
        """Of all, oldest first."""
        return self._shelf.names()

    @contextmanager
    def locked(self, name: str) -> Iterator[bool]:
        """Whether nobody else carries it out, nor will in this block. A process that dies loses its locks."""
        try:
            file = os.open(self.path(name, LOCK), os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:
            yield False
            return
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(file)

    def _make_room(self) -> None:
        names = self.names()
        excess = len(names) - self._most + 1
        for name in names if excess > 0 else []:
            if (record := self._shelf.read(name)) is not None and record.get("status") in OVER and excess > 0:
                self._shelf.remove(name)
                excess -= 1
        if excess > 0:
            raise ApiError(
                429,
                f"{self._most} batches are under way, more are not allowed (gateway.max_batches)",
                code="too_many_batches",
                retry_after_s=60,
            )


def _share(content: Path, lines: Path) -> None:
    """The client may delete its file, or that may expire, while the batch needs it."""
    try:
        os.link(content, lines)
    except OSError:  # a file system without links
        shutil.copyfile(content, lines)


class Stores:
    """Files and batches of all tenants under a directory."""

    def __init__(self, root: Path, max_files: int, max_batches: int, clock: Callable[[], float]) -> None:
        self.root = root
        self._max_files = max_files
        self._max_batches = max_batches
        self._clock = clock

    def check(self) -> None:
        """Raises OSError that names the setting, where nothing can be kept or locked there."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.root) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(f"gateway.batch_path: {self.root} cannot be used: {error.strerror}") from None

    def of(self, tenant: str) -> Batches:
        """Those of one tenant; "" is nobody in particular."""
        folder = folder_of(self.root, tenant)
        files = Files(folder, self._max_files, self._clock)
        return Batches(folder, self._max_batches, files, self._clock)
