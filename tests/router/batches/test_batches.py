"""Batches by the official client: every line has one row, whatever happens to gateways and workers meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from router.config import GatewayConfig
from router.gateway.accounts import Keyring
from router.gateway.batches.files import Files
from router.gateway.batches.inside import Room
from router.gateway.batches.records import LINES, ROWS, Batches, Stores
from router.tenants import hashed
from tests.router import scripted
from tests.router.batch.test_batch import BAD
from tests.router.batches.conftest import Gate, Start, all_rows, line, rows, submit, until
from tests.router.serving import MODEL, Played
from tests.router.test_http import three
from transfer.messages import Request

ACME, BEAN = "hw-acme-0123456789", "hw-bean-0123456789"
DAY_S = 86_400


async def test_a_batch_is_what_the_client_expects(start: Start) -> None:
    gateway = await start()
    client = gateway.client()
    made = await submit(client, [line(f"id-{number}") for number in range(20)], metadata={"kind": "nightly"})
    assert made.status in ("validating", "in_progress")
    assert (made.object, made.completion_window, made.endpoint) == ("batch", "24h", "/v1/completions")
    done = await until(client, made.id)
    assert (done.status, done.errors, done.error_file_id, done.model) == ("completed", None, None, MODEL)
    assert done.metadata == {"kind": "nightly"}
    assert done.expires_at == done.created_at + DAY_S
    times = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
    assert None not in times
    assert list(times) == sorted(times)  # type: ignore[type-var]
    assert (done.failed_at, done.expired_at, done.cancelling_at, done.cancelled_at) == (None, None, None, None)
    found = await all_rows(client, done)
    assert sorted(row["custom_id"] for row in found) == sorted(f"id-{number}" for number in range(20))
    assert all(list(row) == ["id", "custom_id", "response", "error"] for row in found)
    assert all(row["response"]["request_id"] for row in found)
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert done.usage is not None
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (60, 60, 120)
    assert {one.priority for one in gateway.played.requests} == {-100}
    output = await client.files.retrieve(done.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{done.id}_output.jsonl")


async def test_rows_with_errors_are_in_a_file_of_their_own(start: Start) -> None:
    """Lines that are no requests, and requests that are refused: the others are carried out."""
    client = (await start()).client()
    bad = [one.decode() for one, why in BAD.items() if b"\xff" not in one and b'"url": "/v1/images"' not in one]
    bad = [one for one in bad if '"url": "/v1/chat' not in one and '"url": "/v1/responses' not in one]
    lines = [line("a"), *bad, line("b"), line("refused", max_tokens=-1)]
    made = await submit(client, lines)
    done = await until(client, made.id)
    assert done.status == "completed"
    await all_rows(client, done)
    assert sorted(row["custom_id"] for row in await rows(client, done.output_file_id)) == ["a", "b"]
    failed = await rows(client, done.error_file_id)
    broken = [row["error"] for row in failed if row["response"] is None]
    assert sorted(one["line"] for one in broken) == list(range(2, 2 + len(bad)))
    assert all(one["message"].startswith(f"{done.input_file_id}:{one['line']}: ") for one in broken)
    (refused,) = (row for row in failed if row["response"])
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("refused", 400)
    assert "max_tokens" in refused["error"]["message"]


async def test_a_file_that_cannot_be_a_batch_fails_it_before_anything_is_sent(start: Start) -> None:
    gateway = await start()
    client = gateway.client()
    lines = [line("a"), line("b"), "null", line("a"), line("c", "/v1/embeddings"), line("d", "/v1/images"), line("b")]
    done = await until(client, (await submit(client, lines)).id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.failed_at is not None
    assert done.errors is not None
    found = [(one.line, one.code) for one in done.errors.data or []]
    twice, other = "duplicate_custom_id", "invalid_url"
    assert found == [(4, twice), (5, other), (6, other), (7, twice)]
    messages = [one.message or "" for one in done.errors.data or []]
    assert f"custom_id: 'a' is used in {done.input_file_id}:1 already" in messages[0]
    assert messages[1] == "url: must be '/v1/completions', got \"/v1/embeddings\""
    empty = await until(client, (await submit(client, [])).id)
    assert [one.code for one in (empty.errors and empty.errors.data) or []] == ["empty_file"]
    assert gateway.played.requests == []


async def test_a_gateway_that_ends_is_followed_by_its_next_life(start: Start) -> None:
    """Lines that were answered are not asked for again."""
    gate = Gate(left=10)
    first = await start(gate.play)
    made = await submit(first.client(), [*(line(f"id-{number}") for number in range(40)), "null"])
    while gate.passed < 10:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await first.runner.stop()
    assert first.played.dispatcher.in_flight == 0
    second = await start()
    client = second.client()
    done = await until(client, made.id)
    assert done.status == "completed"
    found = [row["custom_id"] for row in await all_rows(client, done)]
    assert sorted(map(str, found)) == sorted(["None", *(f"id-{number}" for number in range(40))])
    assert len(second.played.requests) == 30
    assert done.usage is not None
    assert done.usage.output_tokens == 120, "those of the first life count, too"


async def test_of_two_gateways_one_carries_it_out_and_both_answer(start: Start) -> None:
    gate = Gate(left=0)
    one, other = await start(gate.play), await start(gate.play)
    made = await submit(one.client(), [line(f"id-{number}") for number in range(8)])
    await until(other.client(), made.id, "in_progress")
    await asyncio.sleep(0.4)  # the other one looks what there is to do
    assert sorted(len(gateway.played.requests) for gateway in (one, other)) == [0, 8]
    gate.opened.set()
    done = await until(other.client(), made.id)
    assert len(await all_rows(other.client(), done)) == 8
    assert [batch.id async for batch in other.client().batches.list()] == [made.id]


async def test_a_batch_is_cancelled_through_any_gateway(start: Start) -> None:
    gate = Gate(left=3)
    one, other = await start(gate.play), await start(gate.play)
    made = await submit(one.client(), [line(f"id-{number}") for number in range(50)])
    while gate.passed < 3:
        await asyncio.sleep(0.01)
    told = await other.client().batches.cancel(made.id)
    assert told.status == "cancelling"
    assert told.cancelling_at is not None
    done = await until(one.client(), made.id)
    assert (done.status, done.completed_at) == ("cancelled", None)
    assert done.cancelled_at is not None
    found = await all_rows(one.client(), done)
    assert len({row["custom_id"] for row in found}) == len(found) == 50
    codes = [row["error"]["code"] for row in await rows(one.client(), done.error_file_id)]
    assert codes == ["batch_cancelled"] * 47
    assert await one.client().batches.cancel(made.id) == done
    whole = await until(one.client(), (await submit(one.client(), ["null"])).id)
    with pytest.raises(openai.BadRequestError, match="is completed: it cannot be cancelled"):
        await one.client().batches.cancel(whole.id)
    for gateway in (one, other):
        assert gateway.played.dispatcher.in_flight == 0


async def test_a_batch_expires_with_what_it_has(start: Start, tmp_path: Path) -> None:
    """Its day is over, as the record says."""
    gate = Gate(left=5)
    gateway = await start(gate.play)
    client = gateway.client()
    made = await submit(client, [*(line(f"id-{number}") for number in range(20)), "null"])
    batches = Stores(tmp_path / "batches", 10, 10, lambda: 0.0).of("")
    written = batches.path(made.id, ROWS)
    while not written.exists() or written.read_bytes().count(b"\n") < 6:  # five answers, and the line that is none
        await asyncio.sleep(0.01)
    await gateway.runner.stop()
    batches.save(replace(batches.get(made.id), expires_at=made.created_at))
    late = await start(gate.play)
    done = await until(late.client(), made.id)
    assert done.status == "expired"
    assert done.expired_at is not None
    found = await all_rows(late.client(), done)
    assert len(found) == 21
    codes = sorted(row["error"]["code"] for row in await rows(late.client(), done.error_file_id))
    assert codes == ["batch_expired"] * 15 + ["invalid_line"]
    assert late.played.requests == []


def keyring(tmp_path: Path, **limits: Any) -> Keyring:
    file = tmp_path / "tenants.yaml"
    tenants = {"acme": {"keys": [hashed(ACME)], **limits}, "..": {"keys": [hashed(BEAN)]}}
    file.write_text(json.dumps({"tenants": tenants}))
    return Keyring((), file)


async def test_tenants_see_their_own_and_are_served_as_themselves(start: Start, tmp_path: Path) -> None:
    """Also one whose name would lead elsewhere."""
    gateway = await start(keyring=keyring(tmp_path))
    acme, bean = gateway.client(ACME), gateway.client(BEAN)
    made, other = await submit(acme, [line("a")]), await submit(bean, [line("b")])
    done = await until(acme, made.id)
    await until(bean, other.id)
    assert [one.id async for one in acme.batches.list()] == [made.id]
    assert len([one.id async for one in bean.files.list()]) == 2
    for wanted in (bean.batches.retrieve, bean.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no batch"):
            await wanted(made.id)
    for asked in (bean.files.retrieve, bean.files.content, bean.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await asked(done.output_file_id or "")
    with pytest.raises(openai.BadRequestError, match="input_file_id: there is no file"):
        await bean.batches.create(input_file_id=made.input_file_id, endpoint="/v1/completions", completion_window="24h")
    salts = {request.tenant: request.salt for request in gateway.played.requests}
    assert salts == {"acme": b"tenant\0acme\0", "..": b"tenant\0..\0"}
    kept = b"".join(path.read_bytes() for path in (tmp_path / "batches").rglob("*") if path.is_file())
    assert ACME.encode() not in kept
    assert hashed(ACME).encode() not in kept
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == ["tenant-..", "tenant-acme"]


async def test_a_batch_waits_where_its_tenant_is_at_a_limit(start: Start, tmp_path: Path) -> None:
    """And leaves room: the client, which does not try again, is never refused."""
    running, most = 0, 0

    async def counted(played: Played, request: Request) -> None:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.01)
        await three(played, request)
        running -= 1

    gateway = await start(counted, keyring=keyring(tmp_path, max_concurrent=4, requests_per_minute=1000))
    client = gateway.client(ACME)
    made = [await submit(client, [line(f"id-{number}") for number in range(8)]) for _ in range(2)]
    for one in made:
        done = await until(client, one.id)
        assert len(await rows(client, done.output_file_id)) == 8, "none was refused"
    assert most == 2


async def test_a_tenant_without_keys_any_more_has_no_batches(start: Start, tmp_path: Path) -> None:
    gate = Gate(left=0)
    gateway = await start(gate.play, keyring=keyring(tmp_path))
    made = await submit(gateway.client(ACME), [line("a")])
    await until(gateway.client(ACME), made.id, "in_progress")
    await gateway.runner.stop()
    await start(keyring=Keyring(["another-key-0123456789"]))
    batches = Stores(tmp_path / "batches", 10, 10, lambda: 0.0).of("acme")
    while not (batch := batches.get(made.id)).over:
        await asyncio.sleep(0.02)
    assert batch.status == "failed"
    assert "the tenant of this batch has no key any more" in (batch.errors or [])[0].message


async def test_as_many_batches_as_may_be_are_remembered(start: Start) -> None:
    gate = Gate(left=1)
    client = (await start(gate.play, max_batches=2)).client()
    first = await submit(client, [line("a")])
    await until(client, first.id)
    second, third = await submit(client, [line("b")]), await submit(client, [line("c")])
    assert [one.id async for one in client.batches.list()] == [third.id, second.id]
    with pytest.raises(openai.RateLimitError, match=r"2 batches are under way.*gateway.max_batches"):
        await submit(client, [line("d")])
    gate.opened.set()
    await until(client, second.id)
    pages = await client.batches.list(limit=1)
    assert (pages.has_more, [one.id async for one in pages]) == (True, [third.id, second.id])


async def test_the_input_may_go_while_the_batch_runs(start: Start) -> None:
    gate = Gate(left=1)
    gateway = await start(gate.play)
    made = await submit(gateway.client(), [line(f"id-{number}") for number in range(5)])
    await until(gateway.client(), made.id, "in_progress")
    assert (await gateway.client().files.delete(made.input_file_id)).deleted
    await gateway.runner.stop()
    client = (await start()).client()
    assert (await until(client, made.id)).request_counts.completed == 5  # type: ignore[union-attr]


async def test_batches_for_another_model_are_left_alone(start: Start, tmp_path: Path) -> None:
    gateway = await start()
    client = gateway.client()
    file = await client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    batches = Stores(tmp_path / "batches", 10, 10, time.time).of("")
    made = batches.create("/v1/completions", file.id, "another", None, None)
    own = await submit(client, [line("a")])
    await until(client, own.id)
    await asyncio.sleep(0.3)
    assert batches.get(made.id).status == "validating"
    await client.batches.cancel(made.id)
    gateway.runner.look()
    done = await until(client, made.id)
    assert (done.status, done.request_counts.total) == ("cancelled", 0)
    assert not batches.path(made.id, LINES).exists()


async def test_a_record_that_cannot_be_read_keeps_nothing_else_from_going_on(start: Start, tmp_path: Path) -> None:
    gateway = await start()
    client = gateway.client()
    for number, text in enumerate(('{"id": 1}', "{", "[]")):
        broken = await submit(client, [line("a")])
        await until(client, broken.id)
        folder = tmp_path / "batches" / "nobody" / "batches" / broken.id
        (folder / "record.json").write_text(text)
        after = await until(client, (await submit(client, [line("b")])).id)
        assert after.status == "completed"
        assert [one.id for one in (await client.batches.list()).data].count(broken.id) == 0, number


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"^gateway\.batch_path: .*/file/batches cannot be used: Not a directory"):
        Stores(tmp_path / "file" / "batches", 10, 10, time.time).check()
    Stores(tmp_path / "batches", 10, 10, time.time).check()
    assert not list((tmp_path / "batches").iterdir())


async def test_a_place_is_not_lost_with_who_was_to_have_it() -> None:
    room = Room(lambda: 1)
    inside: list[str] = []

    async def use(name: str) -> None:
        async with room:
            inside.append(name)

    async with room:
        first, second = asyncio.create_task(use("first")), asyncio.create_task(use("second"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 5)
    assert inside == ["second"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_file_id": "file-1"}, "input_file_id: there is no file 'file-1'"),
    ({"input_file_id": "../../etc/passwd"}, "input_file_id: there is no file '../../etc/passwd'"),
    ({"endpoint": "/v1/images/edits"}, 'endpoint: .*got "/v1/images/edits"'),
    ({"completion_window": "1h"}, 'completion_window: .*got "1h"'),
    ({"metadata": {"a": "b" * 600}}, "metadata: 'a' has 600 characters, at most 512"),
    (
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        "output_expires_after.seconds: .*3600, got 1",
    ),
    ({"extra_body": {"colour": 1}}, "colour: this parameter is not supported"),
]


async def test_what_is_wrong_with_a_batch_is_named(start: Start) -> None:
    client = (await start()).client()
    for wanted, why in WRONG:
        with pytest.raises(openai.BadRequestError, match=why):
            await submit(client, [line("a")], **wanted)


def test_an_output_is_none_of_a_batchs_inputs(tmp_path: Path) -> None:
    files = Files(tmp_path, 10, lambda: 0.0)
    new = files.new()
    made = new.keep("x", "batch_output", 0.0, None)
    with pytest.raises(Exception, match="its purpose must be 'batch', got 'batch_output'"):
        Batches(tmp_path, 10, files, lambda: 0.0).create("/v1/completions", made.id, "m", None, None)


async def test_off_says_which_setting_is_missing() -> None:
    assert GatewayConfig().batch_path is None
    async with (
        scripted.gateway() as off,
        openai.AsyncOpenAI(base_url=f"{off.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for asked in (client.batches.list(), client.files.list(), client.files.retrieve("file-1")):
            with pytest.raises(openai.NotFoundError, match=r"gateway\.batch_path"):
                await asked
