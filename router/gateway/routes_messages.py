"""Routes of Anthropic's Messages API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from router.gateway.errors import ApiError
from router.gateway.http import body_as, respond
from router.gateway.messages import FIELDS, MessagesAnswer, error_body, to_chat
from router.gateway.openapi import ERRORS, body_of
from router.gateway.plans import plans
from router.gateway.schemas.messages import CountTokensRequest, MessagesError, MessagesRequest
from router.gateway.service import Service
from router.gateway.translate import named

KEPT_HEADERS = ("retry-after", "connection")
"""Of an error's response; the others describe its body."""


class MessagesRoute(APIRoute):
    """A route whose errors have Anthropic's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except ApiError as error:
                kept = {name: text for name, text in error.response().headers.items() if name in KEPT_HEADERS}
                return JSONResponse(error_body(error), error.status, headers=kept)

        return handled


def routes(service: Service, check_ready: Callable[[], None]) -> APIRouter:
    """The routes."""
    errors = {status: {**described, "model": MessagesError} for status, described in ERRORS.items()}
    router = APIRouter(prefix="/v1", route_class=MessagesRoute, responses=errors)

    @router.post("/messages", openapi_extra=body_of(MessagesRequest))
    async def create(request: Request) -> Response:
        check_ready()
        wanted = await body_as(MessagesRequest, request)
        chat = await asyncio.to_thread(to_chat, wanted)
        with named(FIELDS):
            jobs = await service.chat(chat)
        answer = MessagesAnswer(wanted, jobs)
        return await respond(request, service.pieces(jobs), answer, bool(wanted.stream), plans(request, jobs))

    @router.post("/messages/count_tokens", openapi_extra=body_of(CountTokensRequest))
    async def count_tokens(request: Request) -> dict[str, int]:
        wanted = await body_as(CountTokensRequest, request)
        chat = await asyncio.to_thread(to_chat, wanted)
        with named(FIELDS):
            return {"input_tokens": await service.prompt_tokens(chat)}

    return router
