"""Files by the official client and by hand: what is kept, what is refused, and that nothing is held in memory."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.gateway.batches import files as files_module
from router.gateway.batches import upload
from router.gateway.batches.files import DAYS_30, Files
from router.gateway.batches.records import Stores
from router.gateway.batches.upload import Form
from router.gateway.errors import ApiError
from tests.router.batches.conftest import Start
from tests.router.serving import Client

BOUNDARY = "xyz"
FORM = {"content_type": f"multipart/form-data; boundary={BOUNDARY}"}


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(content: bytes = b"{}\n", filename: str = "in.jsonl", **fields: str) -> bytes:
    parts = [part("file", content, f'; filename="{filename}"')]
    return b"".join([*parts, *(part(name, value.encode()) for name, value in fields.items()), b"--xyz--\r\n"])


def left(tmp_path: Path) -> list[Path]:
    """What is on disk and nobody sees."""
    return list((tmp_path / "batches").glob("*/new/*"))


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds, but not long."""
    deadline = asyncio.get_running_loop().time() + 5
    while not holds():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_a_file_comes_back_as_it_went_in(start: Start, tmp_path: Path) -> None:
    client = (await start()).client()
    content = bytes(range(256)) * 10_000 + b"\r\n--" + b"\r\n--xy" * 50
    made = await client.files.create(file=("../da/t\u00e4.jsonl", content), purpose="batch")
    assert (made.object, made.bytes, made.purpose, made.status) == ("file", len(content), "batch", "processed")
    assert made.filename == "t\u00e4.jsonl"
    assert made.expires_at == made.created_at + DAYS_30
    assert await client.files.retrieve(made.id) == made
    assert {one.stat().st_mode & 0o77 for one in (tmp_path / "batches").rglob("*") if one.is_dir()} == {0}
    assert (tmp_path / "batches").stat().st_mode & 0o77 == 0
    assert (await client.files.content(made.id)).content == content
    deleted = await client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    for asked in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match=f"there is no file '{made.id}'"):
            await asked(made.id)
    assert left(tmp_path) == []


async def test_files_are_listed_in_pages(start: Start) -> None:
    client = (await start()).client()
    made = [(await client.files.create(file=(f"{number}", b"x"), purpose="batch")).id for number in range(5)]
    assert [one.id async for one in client.files.list(limit=2)] == made[::-1]
    assert [one.id async for one in client.files.list(limit=2, order="asc")] == made
    first = await client.files.list(limit=2)
    assert ([one.id for one in first.data], first.has_more) == (made[:2:-1], True)
    await client.files.delete(made[3])
    after = await client.files.list(after=made[3])
    assert [one.id for one in after.data] == made[2::-1], "it need not be there any more"
    assert (await client.files.list(purpose="batch_output")).data == []
    for wanted, why in (({"after": "x"}, "after: no id is 'x'"), ({"limit": 0}, "limit: .*1, got '0'")):
        with pytest.raises(openai.BadRequestError, match=why):
            await client.files.list(**wanted)  # type: ignore[arg-type]


async def test_a_file_expires_when_it_is_said_to(start: Start, tmp_path: Path) -> None:
    client = (await start()).client()
    made = await client.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == made.created_at + 3600
    now = made.expires_at - 1
    files = Stores(tmp_path / "batches", 10, 10, lambda: now).of("").files
    files.sweep()
    assert files.get(made.id).id == made.id
    now += 1
    assert files.page(None, 10, True, None) == ([], False)
    files.sweep()
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)


WRONG = [
    (form(purpose="fine-tune"), "purpose: must be 'batch', got 'fine-tune'"),
    (form(), "purpose: required, but missing"),
    (part("purpose", b"batch") + b"--xyz--\r\n", "file: required, but missing"),
    (form(purpose="batch", colour="red"), "colour: this parameter is not supported"),
    (form(purpose="b" * 2000), "purpose: longer than 1024 bytes"),
    (part("purpose", b"batch") + form(purpose="batch"), "purpose: given twice"),
    (part("file", b"x") + form(purpose="batch"), "file: given twice"),
    (form(purpose="batch")[:-9], "the form ends too early"),
    (b"not a form", "the body is no form"),
    (form(purpose="batch", **{"expires_after[seconds]": "1"}), "anchor: required"),
    (
        form(purpose="batch", **{"expires_after[seconds]": "1", "expires_after[anchor]": "created_at"}),
        "seconds: .*3600",
    ),
    (part("purpose", b"batch", "\r\nX: " + "x" * 20_000), "the body is no form"),
]


async def test_what_is_wrong_with_a_form_is_named(start: Start, tmp_path: Path) -> None:
    gateway = await start()
    async with httpx.AsyncClient(verify=False) as http:
        headers = {"content-type": FORM["content_type"]}
        for body, why in WRONG:
            answer = await http.post(f"{gateway.url}/v1/files", content=body, headers=headers)
            assert answer.status_code == 400, answer.text
            assert re.search(why, answer.json()["error"]["message"])
        answer = await http.post(f"{gateway.url}/v1/files", json={"file": "x"})
        assert "the body must be multipart/form-data" in answer.text
        assert (await http.get(f"{gateway.url}/v1/files")).json()["data"] == []
    assert left(tmp_path) == []


async def test_a_file_that_is_too_large_is_refused_while_it_comes(start: Start, tmp_path: Path) -> None:
    """With its length said before, and without."""
    gateway = await start(max_batch_file_bytes=200_000)
    client = gateway.client()
    exact = await client.files.create(file=("a", b"x" * 200_000), purpose="batch")
    assert exact.bytes == 200_000
    with pytest.raises(openai.APIStatusError, match=r"file: larger than 200000 bytes .*max_batch_file_bytes") as caught:
        await client.files.create(file=("a", b"x" * 200_001), purpose="batch")
    assert caught.value.status_code == 413

    async def without_length() -> Any:
        yield part("purpose", b"batch") + part("file", b"", '; filename="a"')[:-2]
        for _ in range(300):
            yield b"x" * 4096

    headers = {"content-type": FORM["content_type"]}
    async with httpx.AsyncClient(verify=False, timeout=5) as http:
        answer = await http.post(f"{gateway.url}/v1/files", content=without_length(), headers=headers)
    assert answer.status_code == 413
    assert left(tmp_path) == []


async def test_an_upload_that_stops_or_leaves_leaves_nothing(start: Start, tmp_path: Path) -> None:
    gateway = await start(body_timeout_s=0.2)
    port = int(gateway.url.rsplit(":", 1)[1])
    slow, gone = await Client.connect(port), await Client.connect(port)
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\nContent-Type: {FORM['content_type']}\r\n\r\n"
    for one in (slow, gone):
        one.writer.write(head.encode() + form(purpose="batch")[:100])
    await until(lambda: len(left(tmp_path)) == 2)
    gone.leave()
    status, _, answer = await slow.answer()
    assert (status, answer["error"]["message"]) == (408, "nothing of the body came for 0.2 s")
    await until(lambda: not left(tmp_path))
    slow.leave()


async def test_as_many_files_as_may_be(start: Start) -> None:
    client = (await start(max_batch_files=2)).client()
    for _ in range(2):
        last = await client.files.create(file=("a", b"x"), purpose="batch")
    with pytest.raises(
        openai.BadRequestError, match=r"2 files are stored, at most 2 may be \(gateway.max_batch_files\)"
    ):
        await client.files.create(file=("a", b"x"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match=r"gateway\.max_batch_files"):
        await client.batches.create(input_file_id=last.id, endpoint="/v1/completions", completion_window="24h")


@pytest.mark.parametrize(
    "name", ["..", "../..", ".", "file-", "file-" + "0" * 31, "file-" + "g" * 32, "new", "a/b", ""]
)
def test_a_name_that_is_none_is_not_there(name: str, tmp_path: Path) -> None:
    files = Files(tmp_path / "tenant-a", 10, lambda: 0.0)
    files.new().keep("x", "batch", 0.0, None)
    (tmp_path / "record.json").write_text("{}")
    for asked in (files.get, files.content, files.delete):
        with pytest.raises(ApiError, match="there is no file"):
            asked(name)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_a_form_is_read_the_same_however_it_comes(step: int) -> None:
    content = b"\r\n--xy\r\n\r\n--xyZ\r\n-" + b"a" * 300
    body = form(content, purpose="batch")
    one = Form(FORM["content_type"], 10_000)
    for place in range(0, len(body), step):
        one.feed(body[place : place + step])
    assert (b"".join(one.parts), one.fields(), one.filename) == (content, {"purpose": "batch"}, "in.jsonl")


async def test_an_upload_holds_little_in_memory(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    write = files_module.NewFile.write

    def noted(self: Any, parts: list[bytes]) -> None:
        held.append(sum(map(len, parts)))
        write(self, parts)

    monkeypatch.setattr(files_module.NewFile, "write", noted)
    client = (await start()).client()
    line = json.dumps({"custom_id": "a"}).encode() + b"\n"
    made = await client.files.create(file=("a", line * 500_000), purpose="batch")
    assert made.bytes == sum(held) == len(line) * 500_000
    assert max(held) < 2 * upload.WRITE_BYTES
