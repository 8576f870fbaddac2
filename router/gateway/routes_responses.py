"""Routes of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from router.config import GatewayConfig
from router.gateway import accounts
from router.gateway.background import Background
from router.gateway.errors import ApiError, invalid
from router.gateway.http import body_as, check_query, respond
from router.gateway.openapi import body_of
from router.gateway.plans import plans
from router.gateway.response_items import FIELDS, GOES_ON, listed, own_items, stored_items, to_chat
from router.gateway.responses import ResponsesAnswer
from router.gateway.schemas.chat import ChatRequest
from router.gateway.schemas.responses import ResponsesRequest
from router.gateway.service import Service
from router.gateway.store import MAX_AGE_S, ResponseStore, Stored
from router.gateway.translate import named

MAX_BACKGROUND = 64
"""Background responses of a gateway that are under way at a time: each holds its whole conversation."""


def routes(service: Service, check_ready: Callable[[], None], config: GatewayConfig) -> APIRouter:
    """The routes, and the memory that they share."""
    router = APIRouter(prefix="/v1")
    store = ResponseStore(config.max_stored_responses, config.max_stored_bytes, MAX_AGE_S, time.monotonic)
    background = Background(MAX_BACKGROUND)

    def keep(answer: ResponsesAnswer) -> None:
        if answer.request.kept and (answer.request.background or answer.status in GOES_ON):
            store.put(_owned(answer.id), _json(answer.response()), answer.listed)

    @router.post("/responses", openapi_extra=body_of(ResponsesRequest))
    async def create(request: Request) -> Response:
        check_ready()
        wanted = await body_as(ResponsesRequest, request)
        before = _previous(wanted.previous_response_id, store, background)
        if wanted.background:
            background.check_room()
        chat, items = await asyncio.to_thread(_translate, wanted, before)
        with named(FIELDS):
            jobs = await service.chat(chat)
        answer, pieces = ResponsesAnswer(wanted, jobs, service.text, items, keep), service.pieces(jobs)
        if not wanted.background:
            return await respond(request, pieces, answer, bool(wanted.stream), plans(request, jobs))
        background.start(_owned(answer.id), answer, pieces)
        return JSONResponse(answer.response())

    @router.get("/responses/{name}")
    async def retrieve(name: str, request: Request) -> Response:
        check_query(request)
        if (answer := background.get(_owned(name))) is not None:
            return JSONResponse(answer.response())
        return Response(_stored(store, name).response, media_type="application/json")

    @router.delete("/responses/{name}")
    async def delete(name: str) -> dict[str, Any]:
        await background.cancel(_owned(name))
        if not store.drop(_owned(name)):
            raise _unknown(name)
        return {"id": name, "object": "response", "deleted": True}

    @router.post("/responses/{name}/cancel")
    async def cancel(name: str) -> Response:
        if (answer := await background.cancel(_owned(name))) is not None:
            return JSONResponse(answer.response())
        record = _stored(store, name)
        if not json.loads(record.response)["background"]:
            raise invalid(f"the response {name} was no background response, only such can be cancelled")
        return Response(record.response, media_type="application/json")

    @router.get("/responses/{name}/input_items")
    async def input_items(
        name: str,
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        check_query(request, "after", "limit", "order")
        answer = background.get(_owned(name))
        listed_items = answer.listed if answer is not None else _stored(store, name).input
        items = await asyncio.to_thread(json.loads, listed_items)
        return _page(items if order == "asc" else items[::-1], after, limit)

    return router


def _translate(wanted: ResponsesRequest, before: Stored | None) -> tuple[ChatRequest, bytes]:
    """The chat request, and what is stored of its input."""
    items = [*(stored_items(before) if before is not None else []), *own_items(wanted)]
    return to_chat(wanted, items), _json(listed(items)) if wanted.kept else b""


def _previous(name: str | None, store: ResponseStore, background: Background) -> Stored | None:
    if name is None:
        return None
    field = "previous_response_id"
    if (answer := background.get(_owned(name))) is not None:
        raise invalid(f"{field}: the response {name} is {answer.status}", field)
    if (record := store.get(_owned(name))) is None:
        raise ApiError(404, f"{field}: {_unknown(name).message}", field, "previous_response_not_found")
    return record


def _stored(store: ResponseStore, name: str) -> Stored:
    if (record := store.get(_owned(name))) is None:
        raise _unknown(name)
    return record


def _owned(name: str) -> str:
    """What a response is stored as: a tenant finds its own only."""
    return f"{accounts.current.get().name}/{name}"


def _unknown(name: str) -> ApiError:
    return ApiError(
        404,
        f"no response {name[:100]!r} is stored here. Each gateway stores its own, in memory and for a time: behind "
        "several gateways, send the whole input instead",
        code="response_not_found",
    )


def _page(items: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """At most `limit` items, from the one after `after` on."""
    names = [item["id"] for item in items]
    if after is not None and after not in names:
        raise invalid(f"after: no item has the id {after[:100]!r}", "after")
    start = names.index(after) + 1 if after is not None else 0
    shown = items[start : start + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": shown, **ends, "has_more": start + limit < len(items)}


def _json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
