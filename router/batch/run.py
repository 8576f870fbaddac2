"""The engine: sends what is left of a batch, so many requests at a time, and writes what comes of each."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from router.batch.index import Done, Index, Line
from router.batch.journal import BAD_LINE, Journal
from router.batch.lines import BadLine, Item, parse
from router.batch.send import Answer
from router.batch.tally import Tally

SLOTS = 32
"""Requests under way for each worker that answers: half of those that it can run, so that others find a place."""
SYNC_S = 1.0
"""What a machine that loses power may have answered for nothing."""
Send = Callable[[Item], Awaitable[Answer]]


def resumed(index: Index, journal: Journal) -> Tally:
    """Mark the lines that have rows already; how far the batch is. Raises BatchError for a row that is of no line."""
    tally = Tally(index.total)

    def there() -> Iterator[Done]:
        for row in journal.written():
            tally.failed_before += row.failed
            yield row.of

    tally.before = index.mark(there())
    return tally


async def run(
    index: Index, journal: Journal, order: Iterable[Line], send: Send, concurrency: int, tally: Tally
) -> None:
    """Do these lines; rows are written as they are ready. The first exception of `send`, of the index or of the journal
    ends it."""
    lines = iter(order)

    async def work() -> None:
        for line in lines:
            row = await _row(index, line, send)
            journal.append(row)
            tally.add(row)

    syncing = asyncio.create_task(_sync(journal))
    tasks = {asyncio.create_task(work()) for _ in range(concurrency)}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in (*tasks, syncing):
            task.cancel()
        await asyncio.gather(*tasks, syncing, return_exceptions=True)


async def _sync(journal: Journal) -> None:
    while True:
        await asyncio.sleep(SYNC_S)
        await asyncio.to_thread(journal.sync)


async def _row(index: Index, line: Line, send: Send) -> dict[str, Any]:
    """What the output says of a line: an `error`, or a response whose status is 200."""
    try:
        item = parse(index.read(line))
    except BadLine as error:
        name, number = index.where(line.number)
        problem = {"code": BAD_LINE, "message": f"{name}:{number}: {error}", "input": name, "line": number}
        return _as_row(error.custom_id, None, problem)
    answer = await send(item)
    response = None
    if answer.status is not None:
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    return _as_row(item.custom_id, response, answer.error)


def _as_row(custom_id: str | None, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
