"""Uploads: a form whose file goes to disk as it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from router.gateway.batches.files import INPUT, Files, StoredFile
from router.gateway.errors import ApiError, invalid
from router.gateway.http import ClientGone
from router.gateway.schemas.batches import ExpiresAfter
from router.gateway.schemas.common import validate

FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
FILE = "file"
MAX_FIELD_BYTES = 1024
FORM_BYTES = 64 * 2**10
"""What a form may have beside its file."""
WRITE_BYTES = 2**20
"""Bytes that are written at a time."""
MAX_UPLOAD_S = 3600.0
"""How long a file may take to arrive, however steadily."""
MAX_NAME = 255


class Form:
    """A form, fed with its bytes: what its fields say, and what there is of its file. The parser bounds the headers of
    parts. Raises ApiError for a form that is wrong, or whose file has more than `limit` bytes."""

    def __init__(self, content_type: str, limit: int) -> None:
        kind, options = parse_options_header(content_type.encode("latin-1"))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise invalid("the body must be multipart/form-data with a boundary", code="not_a_form")
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._begin,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )
        self._limit = limit
        self._header: tuple[bytearray, bytearray] = bytearray(), bytearray()
        self._disposition = b""
        self._field = ""
        self._fields: dict[str, bytearray] = {}
        self._over = False
        self._file_bytes = 0
        self.filename: str | None = None
        self.parts: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """More of it. What is of the file is added to `parts`."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise invalid(f"the body is no form: {error}", code="not_a_form") from None

    def fields(self) -> dict[str, str]:
        """All fields, at the end. Raises ApiError where that has not come, or there is no file."""
        if not self._over:
            raise invalid("the form ends too early", code="not_a_form")
        if self.filename is None:
            raise invalid(f"{FILE}: required, but missing", FILE)
        return {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}

    def _part(self) -> None:
        self._header = bytearray(), bytearray()
        self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = bytearray(), bytearray()

    def _begin(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        if self._field in self._fields or (self._field == FILE and self.filename is not None):
            raise invalid(f"{self._field}: given twice", self._field)
        if self._field == FILE:
            name = options.get(b"filename", b"").decode("utf-8", "replace").replace("\\", "/")
            self.filename = name.rsplit("/", 1)[-1][:MAX_NAME] or "upload"
        elif self._field in FIELDS:
            self._fields[self._field] = bytearray()
        else:
            shown = self._field[:100]
            raise invalid(f"{shown}: this parameter is not supported", shown, "unsupported_parameter")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field != FILE:
            field = self._fields[self._field]
            if len(field) + end - start > MAX_FIELD_BYTES:
                raise invalid(f"{self._field}: longer than {MAX_FIELD_BYTES} bytes", self._field)
            field += data[start:end]
            return
        self._file_bytes += end - start
        if self._file_bytes > self._limit:
            raise too_large(self._limit)
        self.parts.append(data[start:end])

    def _end(self) -> None:
        self._over = True


async def upload(
    request: Request, files: Files, limit: int, idle_s: float, clock: Callable[[], float] = time.time
) -> StoredFile:
    """Keep the file of a form. Raises ApiError 400, 408 where nothing comes for `idle_s`, 413 for one of more than
    `limit` bytes, and ClientGone."""
    if int(request.headers.get("content-length", 0)) > limit + FORM_BYTES:
        raise too_large(limit)
    form = Form(request.headers.get("content-type", ""), limit)
    await asyncio.to_thread(files.check_room)
    file = await asyncio.to_thread(files.new)
    try:
        beside = -limit
        async with aclosing(_parts(request, idle_s)) as parts:
            waiting = 0
            async for part in parts:
                beside += len(part)
                if beside > FORM_BYTES:
                    raise too_large(limit)
                form.feed(part)
                waiting += len(part)
                if waiting >= WRITE_BYTES:
                    await asyncio.to_thread(file.write, _taken(form))
                    waiting = 0
        keep_s = _keep_s(form.fields())
        await asyncio.to_thread(file.write, _taken(form))
        return await asyncio.to_thread(file.keep, form.filename or "", INPUT, clock(), keep_s)
    finally:
        await asyncio.to_thread(file.discard)  # of one that is kept nothing is there


def _taken(form: Form) -> list[bytes]:
    parts, form.parts = form.parts, []
    return parts


def _keep_s(fields: dict[str, str]) -> int | None:
    """How long the file is to be kept, if the fields say so. Raises ApiError for what they may not say."""
    if "purpose" not in fields:
        raise invalid("purpose: required, but missing", "purpose")
    if fields["purpose"] != INPUT:
        raise invalid(f"purpose: must be {INPUT!r}, got {fields['purpose'][:80]!r}", "purpose")
    given = {name[len("expires_after[") : -1]: value for name, value in fields.items() if name != "purpose"}
    if not given:
        return None
    seconds = given.get("seconds", "")
    data = {**given, "seconds": int(seconds) if seconds.isascii() and seconds.isdigit() else seconds}
    return validate(ExpiresAfter, data).seconds


async def _parts(request: Request, idle_s: float) -> AsyncGenerator[bytes, None]:
    """The body as it comes. Raises ApiError 408, and ClientGone."""
    stream = aiter(request.stream())
    until = time.monotonic() + MAX_UPLOAD_S
    while True:
        coming = asyncio.ensure_future(anext(stream, None))
        try:
            # Not `wait_for`: before Python 3.12 it can swallow a cancellation.
            await asyncio.wait({coming}, timeout=max(0.0, min(idle_s, until - time.monotonic())))
            if not coming.done():
                raise ApiError(408, f"nothing of the body came for {idle_s:g} s", code="body_timeout")
            part = coming.result()
        except ClientDisconnect:
            raise ClientGone from None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        if part is None:
            return
        yield part


def too_large(limit: int) -> ApiError:
    """The answer to a file that is larger."""
    return ApiError(413, f"file: larger than {limit} bytes (gateway.max_batch_file_bytes)", FILE, code="file_too_large")
