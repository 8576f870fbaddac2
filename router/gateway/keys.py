"""The check of API keys, before anything else is done for a request. Plain ASGI, as router/gateway/middleware.py."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.gateway import accounts
from router.gateway.accounts import Account, Keyring
from router.gateway.errors import ApiError
from router.gateway.messages import error_body

OPEN = ("/health", "/ready", "/metrics", "/metrics/targets", "/docs", "/docs/oauth2-redirect", "/openapi.json")
"""Paths for operators and browsers, which tell nothing of requests."""
MESSAGES = "/v1/messages"
DASHBOARD, DASHBOARD_DATA = "/dashboard", "/dashboard/api/"
"""The page, which has nothing to hide, and what it shows."""


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    page = path == DASHBOARD or path.startswith(f"{DASHBOARD}/")
    return path in OPEN or (page and not path.startswith(DASHBOARD_DATA))


def is_looked_at(path: str) -> bool:
    """Whether a path is for people and operators, who are not counted among clients."""
    return is_open(path) or path.startswith(DASHBOARD_DATA)


class Keys:
    """Lets through who has a key, within the limits of its tenant; whom it lets through, `accounts.current` names. A
    browser's preflight has no key, and needs none. To look at the dashboard takes a key, but nothing of its limits."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or is_open(scope["path"]) or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        looks = scope["path"].startswith(DASHBOARD_DATA)
        try:
            account = self._account(scope)
            if not looks:
                account.begin()
        except ApiError as error:
            await _response(scope["path"], error)(scope, receive, send)
            return
        before = accounts.current.set(account)
        try:
            await self._app(scope, receive, send)
        finally:
            if not looks:
                account.end()
            accounts.current.reset(before)

    def _account(self, scope: Scope) -> Account:
        given = dict(scope["headers"])
        scheme, _, bearer = given.get(b"authorization", b"").decode("latin-1").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else given.get(b"x-api-key", b"").decode("latin-1")
        if not key:
            raise ApiError(401, "no API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`", code="no_api_key")
        if (account := self._keyring.account(key)) is None:
            raise ApiError(401, "the API key is not known here", code="invalid_api_key")
        return account


def _response(path: str, error: ApiError) -> JSONResponse:
    response = error.response()
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        kept = {"retry-after": response.headers["retry-after"]} if "retry-after" in response.headers else {}
        response = JSONResponse(error_body(error), error.status, headers=kept)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
