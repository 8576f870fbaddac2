"""The FastAPI application: routes, errors, and what all of them pass through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException

from router.config import GatewayConfig
from router.gateway import request_id, routes_batches, routes_messages, routes_responses, routes_tokens
from router.gateway.accounts import Keyring
from router.gateway.answers import ChatAnswer, CompletionAnswer
from router.gateway.batches.runner import Runner
from router.gateway.errors import ApiError, invalid, unavailable
from router.gateway.http import CLIENT_CLOSED, ClientGone, body_as, respond
from router.gateway.keys import Keys
from router.gateway.middleware import Bugs, Counted, RequestIds, Traced
from router.gateway.openapi import ERRORS, body_of, document
from router.gateway.plans import PLAN_HEADER, plans
from router.gateway.schemas.chat import ChatRequest
from router.gateway.schemas.completions import CompletionRequest
from router.gateway.service import Service

CORS_MAX_AGE_S = 600
"""How long a browser may remember what it was allowed."""
NOT_FASTAPIS: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""It measures requests itself, too; ours say more under fewer names, and nothing of what clients send."""


def create_app(
    service: Service,
    ready: Callable[[], bool],
    render: Callable[[], bytes],
    config: GatewayConfig,
    keyring: Keyring,
    targets: Callable[[], list[dict[str, Any]]] = list,
    more: Sequence[APIRouter] = (),
) -> FastAPI:
    """The application over a service, for those with a key of the `keyring`. `ready` says whether it can serve now,
    `render` gives the metrics' text, `targets` says where others have theirs, and `more` are routes besides. Its
    `state.runner` carries out batches once it is started; None where they are off."""

    def check_ready() -> None:
        if not ready():
            raise unavailable("no worker of each role is ready")

    asked = (
        _openai_routes(service, check_ready),
        routes_tokens.routes(service, check_ready),
        routes_responses.routes(service, check_ready, config),
    )
    model, stores = service.limits.model, routes_batches.stores_of(config)
    inner = _application(asked, config)
    runner = None if stores is None else Runner(stores, model, inner, keyring)
    batches = routes_batches.routes(stores, runner, model, config)
    app = _application((_operator_routes(check_ready, render, targets), *asked, batches), config, keyring)
    for routes in (routes_messages.routes(service, check_ready), *more):
        app.include_router(routes)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    app.state.runner = runner
    return app


def _application(routers: Iterable[APIRouter], config: GatewayConfig, keyring: Keyring | None = None) -> FastAPI:
    """These routes, for those with a key; without a `keyring` for the gateway itself."""
    app = FastAPI(
        title="Headwater",
        description="OpenAI-compatible gateway",
        docs_url="/docs" if keyring is not None else None,
        openapi_url="/openapi.json" if keyring is not None else None,
        redoc_url=None,
        telemetry=NOT_FASTAPIS,
    )
    app.state.config = config
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    app.add_exception_handler(ClientGone, _on_client_gone)
    _pass_through(app, config.cors_origins, keyring or Keyring())
    for one in routers:
        app.include_router(one, responses=ERRORS)
    return app


def _pass_through(app: FastAPI, origins: list[str], keyring: Keyring) -> None:
    """What every request passes, from the innermost on."""
    app.add_middleware(Bugs)
    if keyring.needed:
        app.add_middleware(Keys, keyring=keyring)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[request_id.HEADER, PLAN_HEADER, "retry-after"],
            max_age=CORS_MAX_AGE_S,
        )
    app.add_middleware(RequestIds)
    app.add_middleware(Traced)
    app.add_middleware(Counted)


def _operator_routes(
    check_ready: Callable[[], None], render: Callable[[], bytes], targets: Callable[[], list[dict[str, Any]]]
) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/ready")
    async def is_ready() -> dict[str, str]:
        check_ready()
        return {"status": "ready"}

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        return Response(await asyncio.to_thread(render), media_type="text/plain; version=0.0.4; charset=utf-8")

    @routes.get("/metrics/targets")
    async def metrics_targets() -> list[dict[str, Any]]:
        return targets()

    return routes


def _openai_routes(service: Service, check_ready: Callable[[], None]) -> APIRouter:
    routes = APIRouter(prefix="/v1")

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        check_ready()
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @routes.post("/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat(request: Request) -> Response:
        check_ready()
        wanted = await body_as(ChatRequest, request)
        jobs = await service.chat(wanted)
        answer = ChatAnswer(wanted, jobs, service.text, service.limits.tier_format)
        return await respond(request, service.pieces(jobs), answer, bool(wanted.stream), plans(request, jobs))

    @routes.post("/completions", openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        check_ready()
        wanted = await body_as(CompletionRequest, request)
        jobs = await service.completion(wanted)
        answer = CompletionAnswer(wanted, jobs, service.text, service.limits.tier_format)
        return await respond(request, service.pieces(jobs), answer, bool(wanted.stream), plans(request, jobs))

    return routes


async def _on_api_error(request: Request, error: Any) -> Response:
    return error.response()


async def _on_http_error(request: Request, error: Any) -> Response:
    """No such path or no such method there, which `Allow` names."""
    response = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}").response()
    response.headers.update(error.headers or {})
    return response


async def _on_bad_parameter(request: Request, error: Any) -> Response:
    """A part of the path or a query parameter that is not what its route declares."""
    problem = error.errors()[0]
    name = str(problem["loc"][-1])
    return await _on_api_error(request, invalid(f"{name}: {problem['msg']}, got {str(problem['input'])[:80]!r}", name))


async def _on_client_gone(request: Request, _: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


def _model(service: Service) -> dict[str, Any]:
    limits = service.limits
    return {
        "id": limits.model,
        "object": "model",
        "created": 0,
        "owned_by": "headwater",
        "max_model_len": limits.max_model_len,
    }
