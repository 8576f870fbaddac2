"""Routes of OpenAI's Files and Batch APIs. All that they know is on disk, so that any gateway answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, Response

from router.config import GatewayConfig
from router.gateway import accounts
from router.gateway.batches.records import Batches, Stores
from router.gateway.batches.runner import Runner
from router.gateway.batches.upload import FIELDS, FILE, upload
from router.gateway.errors import ApiError
from router.gateway.http import body_as, check_query
from router.gateway.openapi import body_of
from router.gateway.schemas.batches import BatchRequest

MAX_PAGE_FILES, MAX_PAGE_BATCHES, PAGE_BATCHES = 10_000, 100, 20
OFF = "files and batches are off here: gateway.batch_path, the directory that they need, is not set"
_FIELDS: dict[str, Any] = {FILE: {"type": "string", "format": "binary"}} | {name: {"type": "string"} for name in FIELDS}
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {**_FIELDS, "purpose": {"const": "batch"}},
                    "required": [FILE, "purpose"],
                    "additionalProperties": False,
                }
            }
        },
    }
}


def stores_of(config: GatewayConfig, clock: Callable[[], float] = time.time) -> Stores | None:
    """Where files and batches are; None where they are off."""
    if config.batch_path is None:
        return None
    return Stores(config.batch_path, config.max_batch_files, config.max_batches, clock)


def routes(stores: Stores | None, runner: Runner | None, model: str, config: GatewayConfig) -> APIRouter:
    """The routes over what is on disk; all of them say so where they are off. New batches are for `model`, and the
    `runner` hears of them."""
    router = APIRouter(prefix="/v1")

    def own() -> Batches:
        """Those of the tenant that asks."""
        return _off() if stores is None else stores.of(accounts.current.get().name)

    _add_files(router, own, config)

    @router.post("/batches", openapi_extra=body_of(BatchRequest))
    async def create(request: Request) -> dict[str, Any]:
        batches = own()
        wanted = await body_as(BatchRequest, request)
        keep = wanted.output_expires_after
        given = wanted.endpoint, wanted.input_file_id, model, wanted.metadata, keep.seconds if keep else None
        batch = await asyncio.to_thread(batches.create, *given)
        if runner is not None:
            runner.look()
        return await asyncio.to_thread(batches.shown, batch)

    @router.get("/batches")
    async def several(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_BATCHES)] = PAGE_BATCHES,
    ) -> dict[str, Any]:
        check_query(request, "after", "limit")
        return _page(*await asyncio.to_thread(own().page, after, limit))

    @router.get("/batches/{batch_id}")
    async def one(batch_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(_shown, own(), batch_id)

    @router.post("/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> dict[str, Any]:
        batches = own()
        await asyncio.to_thread(batches.cancel, batch_id)
        return await asyncio.to_thread(_shown, batches, batch_id)

    return router


def _add_files(router: APIRouter, own: Callable[[], Batches], config: GatewayConfig) -> None:
    @router.post("/files", openapi_extra=FORM)
    async def create(request: Request) -> dict[str, Any]:
        files = own().files
        return (await upload(request, files, config.max_batch_file_bytes, config.body_timeout_s)).shown()

    @router.get("/files")
    async def several(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_FILES)] = MAX_PAGE_FILES,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> dict[str, Any]:
        check_query(request, "after", "limit", "order", "purpose")
        found, more = await asyncio.to_thread(own().files.page, after, limit, order == "desc", purpose)
        return _page([file.shown() for file in found], more)

    @router.get("/files/{file_id}")
    async def one(file_id: str) -> dict[str, Any]:
        return (await asyncio.to_thread(own().files.get, file_id)).shown()

    @router.get("/files/{file_id}/content", response_class=FileResponse)
    async def content(file_id: str) -> Response:
        path = await asyncio.to_thread(own().files.content, file_id)
        return FileResponse(path, media_type="application/octet-stream")

    @router.delete("/files/{file_id}")
    async def delete(file_id: str) -> dict[str, Any]:
        await asyncio.to_thread(own().files.delete, file_id)
        return {"id": file_id, "object": "file", "deleted": True}


def _off() -> NoReturn:
    raise ApiError(404, OFF, code="batches_off")


def _shown(batches: Batches, name: str) -> dict[str, Any]:
    return batches.shown(batches.get(name))


def _page(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": more}
