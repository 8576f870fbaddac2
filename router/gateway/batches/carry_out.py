"""CarryOut: one batch, from where it was left to its end.

A batch's lines stay as they were uploaded, and its rows are the engine's journal; both, and a lock, are in its
directory. So it can be gone on with by any gateway at any time: its record says in which status it is, its rows which
lines are done.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from router.batch.errors import BatchError, Problem, Refused
from router.batch.index import Index, Line
from router.batch.journal import Journal
from router.batch.lines import Item
from router.batch.run import resumed, run
from router.batch.send import Answer
from router.batch.tally import Tally
from router.gateway.batches.files import OUTPUT, NewFile
from router.gateway.batches.records import (
    CANCELLED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    LINES,
    ROWS,
    VALIDATING,
    Batch,
    Batches,
    Counts,
)

_log = logging.getLogger(__name__)
WATCH_S = 0.1
"""Seconds between two looks at whether a batch is to end."""
SAVE_S = 1.0
"""Seconds between two records of how far it is."""
NOT_DONE = {
    EXPIRED: ("batch_expired", "the batch has expired before this request was done"),
    CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was done"),
}
Sender = Callable[[Item], Awaitable[Answer]]
Doing = Callable[[Index, Iterable[Line], Journal, Tally], Coroutine[Any, Any, None]]


class Stopped(Exception):
    """It is to end as this; or where that is None, the gateway ends, and others go on with it."""

    def __init__(self, ending: str | None) -> None:
        super().__init__(ending)
        self.ending = ending


class CarryOut:
    """Call it in a thread. `doing` sends the requests of lines; `stop` says that the gateway ends."""

    def __init__(self, batches: Batches, name: str, doing: Doing, lanes: int, stop: threading.Event) -> None:
        self._batches = batches
        self._name = name
        self._doing = doing
        self._lanes = lanes
        self._stop = stop

    def __call__(self) -> bool:
        """Returns when it is over or the gateway ends; False at once when another one has it. Raises BatchError,
        OSError or sqlite3.OperationalError where a disk does not do what it should."""
        with self._batches.locked(self._name) as ours:
            batch = self._batches.find(self._name) if ours else None
            if batch is not None and not batch.over:
                self._carry_out(batch)
                self._batches.tidy(self._name)
            return ours

    def _carry_out(self, batch: Batch) -> None:
        try:
            self._finalize(batch if batch.status == FINALIZING else self._answer(batch))
        except Stopped as stopped:
            if stopped.ending is not None:  # before anything was sent
                self._batches.save(batch.now(stopped.ending, self._batches.clock()))
        except Refused as error:
            self._fail(batch, error.problems)
        except (BatchError, OSError, sqlite3.OperationalError):
            raise  # a disk that is full may not be so later
        except Exception as error:
            _log.error("batch %s failed", self._name, exc_info=error)
            self._fail(batch, [Problem("internal_error", "internal error")])

    def _fail(self, batch: Batch, problems: list[Problem]) -> None:
        self._batches.save(replace(batch, errors=problems).now(FAILED, self._batches.clock()))

    def _answer(self, batch: Batch) -> Batch:
        """Rows for all its lines; the same batch, with how it ends. Raises Refused, and Stopped for one that ends
        before anything was sent, or does not end here."""
        self._check_before(batch)
        lines = [self._batches.path(batch.id, LINES)]
        with Index(lines, lambda _: self._check_before(batch), [batch.input_file_id], batch.endpoint) as index:
            if not index.total:
                raise Refused("no lines", [Problem("empty_file", "the input file has no lines")])
            try:
                return self._rows(batch, index)
            except BatchError as error:
                if isinstance(error.__cause__, OSError):
                    raise
                now = self._batches.find(batch.id) or batch
                return replace(now, ending=FAILED, errors=[Problem("batch_failed", str(error))])

    def _rows(self, batch: Batch, index: Index) -> Batch:
        with Journal(self._batches.path(batch.id, ROWS)) as journal:
            if batch.status == VALIDATING:
                batch = replace(batch, counts=Counts(index.total)).now(IN_PROGRESS, self._batches.clock())
                self._batches.save(batch)
            tally = resumed(index, journal)
            try:
                self._check(batch)
                asyncio.run(self._until_stopped(batch, index, journal, tally))
            except Stopped as stopped:
                if stopped.ending is None:
                    raise
                batch = replace(batch, ending=stopped.ending)
                tally = resumed(index, journal)
                asyncio.run(run(index, journal, index.order(False, 1), _not_done(stopped.ending), 1, tally))
        return replace(batch, counts=_counts(tally))

    async def _until_stopped(self, batch: Batch, index: Index, journal: Journal, tally: Tally) -> None:
        """Carry out what is left. Raises Stopped, and what stops the engine."""
        doing = asyncio.create_task(self._doing(index, index.order(True, self._lanes), journal, tally))
        watching = asyncio.create_task(self._watch(batch, tally))
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            (doing if doing.done() else watching).result()
        finally:
            doing.cancel()
            watching.cancel()
            await asyncio.gather(doing, watching, return_exceptions=True)

    async def _watch(self, batch: Batch, tally: Tally) -> None:
        saved, saved_at = batch.counts, time.monotonic()
        while True:
            self._check(batch)
            counts = _counts(tally)
            if counts != saved and time.monotonic() >= saved_at + SAVE_S:
                self._batches.save(replace(batch, counts=counts))
                saved, saved_at = counts, time.monotonic()
            await asyncio.sleep(WATCH_S)

    def _check_before(self, batch: Batch) -> None:
        """Raises Stopped before there are rows: of a new batch there will be none, others get all of theirs."""
        if self._stop.is_set():
            raise Stopped(None)
        if batch.status == VALIDATING and self._batches.cancelled_at(self._name) is not None:
            raise Stopped(CANCELLED)

    def _check(self, batch: Batch) -> None:
        """Raises Stopped."""
        if self._stop.is_set():
            raise Stopped(None)
        if self._batches.cancelled_at(self._name) is not None:
            raise Stopped(CANCELLED)
        if self._batches.clock() >= batch.expires_at:
            raise Stopped(EXPIRED)

    def _finalize(self, batch: Batch) -> None:
        """Rows become files, and the batch is over. To do it again does no harm."""
        files = self._batches.files
        if batch.status != FINALIZING:
            batch = replace(batch, output_file_id=files.new_name(), error_file_id=files.new_name())
            batch = batch.now(FINALIZING, self._batches.clock())
            self._batches.save(batch)
        good, bad = files.new(batch.output_file_id), files.new(batch.error_file_id)
        try:
            tally = self._split(batch, good, bad)
            output = self._kept(batch, good, "output")
            error = self._kept(batch, bad, "error")
        finally:
            good.discard()
            bad.discard()
        ended = replace(
            batch,
            counts=_counts(tally),
            usage=_usage(tally),
            output_file_id=output,
            error_file_id=error,
        )
        self._batches.save(ended.now(batch.ending, self._batches.clock()))

    def _split(self, batch: Batch, good: NewFile, bad: NewFile) -> Tally:
        """Rows with an error are in a file of their own. What they come to, of all gateways that wrote them."""
        tally = Tally(batch.counts.total)
        rows = self._batches.path(batch.id, ROWS)
        if not rows.exists():
            return tally
        with rows.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # the last one is not, where the disk was full
                    row = json.loads(line)
                    tally.add(row)
                    (good if row["error"] is None else bad).write([line])
        return tally

    def _kept(self, batch: Batch, file: NewFile, kind: str) -> str | None:
        """The id of a file of rows; None where there are none."""
        if not file.content.tell():
            return None
        name = f"{batch.id}_{kind}.jsonl"
        return file.keep(name, OUTPUT, self._batches.clock(), batch.output_keep_s).id


def _not_done(ending: str) -> Sender:
    """What becomes of lines that a batch has not come to."""
    code, message = NOT_DONE[ending]

    async def send(_: Item) -> Answer:
        return Answer(None, "", None, {"code": code, "message": message})

    return send


def _counts(tally: Tally) -> Counts:
    return Counts(tally.total, tally.done - tally.failed, tally.failed)


def _usage(tally: Tally) -> dict[str, Any]:
    return {
        "input_tokens": tally.prompt_tokens,
        "input_tokens_details": {"cached_tokens": tally.cached_tokens},
        "output_tokens": tally.output_tokens,
        "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
        "total_tokens": tally.prompt_tokens + tally.output_tokens,
    }
