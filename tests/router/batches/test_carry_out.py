"""One batch without a gateway: cut off at every write to the disk, and gone on with."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from router.batch.errors import BatchError
from router.batch.index import Index, Line
from router.batch.journal import Journal
from router.batch.lines import Item
from router.batch.run import run
from router.batch.send import Answer
from router.batch.tally import Tally
from router.gateway.batches import records, shelf
from router.gateway.batches.carry_out import CarryOut
from router.gateway.batches.records import Batches, Stores
from tests.router.batches.conftest import line

URL = "/v1/completions"


class Killed(BaseException):
    """Nothing of the program runs after this."""


async def echo(item: Item) -> Answer:
    if item.custom_id == "wrong":
        return Answer(400, "r", {}, {"code": "failed", "message": "no"})
    return Answer(200, "r", {"usage": {"prompt_tokens": 2, "completion_tokens": 1}}, None)


async def doing(index: Index, order: Iterable[Line], journal: Journal, tally: Tally) -> None:
    await run(index, journal, order, echo, 2, tally)


def made(folder: Path, now: Callable[[], float] = lambda: 1000.0) -> tuple[Batches, str]:
    batches = Stores(folder, 10, 10, now).of("")
    new = batches.files.new()
    new.write(["\n".join([line("a"), "null", line("wrong"), line("b")]).encode()])
    file = new.keep("in.jsonl", "batch", 1000.0, None)
    return batches, batches.create(URL, file.id, "m", None, None).id


def carried_out(batches: Batches, name: str) -> bool:
    return CarryOut(batches, name, doing, 1, threading.Event())()


def outcome(batches: Batches, name: str) -> Any:
    """What a client sees at the end, without the names of files."""
    batch = batches.get(name)
    found = []
    for file in (batch.output_file_id, batch.error_file_id):
        rows = [json.loads(one) for one in batches.files.content(file or "").read_bytes().splitlines()]
        found.append(sorted((str(row["custom_id"]), bool(row["error"])) for row in rows))
    return batch.status, batch.counts, batch.usage, found, len(batches.files.page(None, 100, True, None)[0])


def test_a_batch_that_is_killed_at_any_write_ends_as_if_it_were_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, name = made(tmp_path / "whole")
    assert carried_out(batches, name)
    expected = outcome(batches, name)
    assert expected[:2] == ("completed", records.Counts(4, 2, 2))
    assert expected[3] == [[("a", False), ("b", False)], [("None", True), ("wrong", True)]]
    for before in (True, False):
        for cut in range(20):
            batches, name = made(tmp_path / f"{before}-{cut}")
            writes = 0

            def dying(write: Callable[..., Any]) -> Callable[..., Any]:
                def one(*arguments: Any, **more: Any) -> Any:
                    nonlocal writes
                    writes += 1
                    if before and writes == cut + 1:  # noqa: B023
                        raise Killed
                    result = write(*arguments, **more)
                    if writes == cut + 1:  # noqa: B023
                        raise Killed
                    return result

                return one

            with monkeypatch.context() as patched:
                for place, method in ((shelf.Draft, "publish"), (shelf.Shelf, "write"), (Path, "unlink")):
                    patched.setattr(place, method, dying(getattr(place, method)))
                patched.setattr(shelf.Draft, "discard", lambda _: None)
                try:
                    carried_out(batches, name)
                    died = False
                except Killed:
                    died = True
            assert carried_out(batches, name)
            assert outcome(batches, name) == expected, (before, cut)
            if not died:
                assert cut >= 5
                break
        else:
            pytest.fail("it never came to its end")


def test_a_batch_is_carried_out_by_one(tmp_path: Path) -> None:
    batches, name = made(tmp_path)
    with batches.locked(name) as ours:
        assert ours
        assert not carried_out(batches, name)
    assert carried_out(batches, name)
    assert carried_out(batches, name), "nobody else has it, and it is over"


def test_a_row_that_is_half_written_is_no_row(tmp_path: Path) -> None:
    """As a full disk leaves it: then it is not in the output, either."""
    batches, name = made(tmp_path)

    async def full(index: Index, order: Iterable[Line], journal: Journal, tally: Tally) -> None:
        await run(index, journal, [next(iter(order))], echo, 1, tally)
        with batches.path(name, records.ROWS).open("ab") as rows:
            rows.write(b'{"id": "batch_req_')
        raise BatchError("the disk is full")

    CarryOut(batches, name, full, 1, threading.Event())()
    batch = batches.get(name)
    assert (batch.status, batch.counts.total, batch.counts.completed + batch.counts.failed) == ("failed", 4, 1)
    assert [one.message for one in batch.errors or []] == ["the disk is full"]


def test_a_batch_whose_day_is_over_before_it_begins(tmp_path: Path) -> None:
    now = 1000.0
    batches, name = made(tmp_path, lambda: now)
    now += 86_400
    carried_out(batches, name)
    batch = batches.get(name)
    assert (batch.status, batch.counts) == ("expired", records.Counts(4, 0, 4))
    assert batch.expires_at == batch.reached["expired"]


def test_a_batch_that_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    batches, name = made(tmp_path)
    with batches.locked(name):  # somebody is about to begin it
        batches.cancel(name)
    assert batches.shown(batches.get(name))["status"] == "cancelling"
    carried_out(batches, name)
    batch = batches.get(name)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("cancelled", None, None)


def test_a_batch_that_waits_is_cancelled_at_once(tmp_path: Path) -> None:
    """It may wait for hours, for the place of another."""
    batches, name = made(tmp_path)
    assert batches.shown(batches.cancel(name))["status"] == "cancelled"
    assert not batches.path(name, records.LINES).exists()
    assert batches.cancel(name) == batches.get(name)


def test_a_gateway_that_ends_leaves_a_batch_as_it_is(tmp_path: Path) -> None:
    batches, name = made(tmp_path)
    stop = threading.Event()
    stop.set()
    assert CarryOut(batches, name, doing, 1, stop)()
    assert batches.get(name).status == "validating"
