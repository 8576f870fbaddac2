"""Requests of batches to the gateway's own application, without a connection and for a tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
from starlette.types import ASGIApp

from router.gateway import accounts
from router.gateway.accounts import Account
from router.gateway.errors import ApiError

SHARE = 0.5
"""What batches use of their tenant's limits, so that whoever waits for an answer is not refused because of them."""
LOOK_S = 1.0
"""Seconds after which who waits for a place sees that there are more than before."""


class Room:
    """Places for requests of all batches together: as many as `limit` says now."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._used = 0
        self._freed = asyncio.Event()

    async def __aenter__(self) -> None:
        # Everybody looks again: a word to one alone is lost when that one has just been cancelled.
        while self._used >= max(1, self._limit()):
            self._freed.clear()
            waking = asyncio.create_task(self._freed.wait())
            try:
                await asyncio.wait({waking}, timeout=LOOK_S)
            finally:
                waking.cancel()
        self._used += 1

    async def __aexit__(self, *_: object) -> None:
        self._used -= 1
        self._freed.set()


class Inside(httpx.AsyncBaseTransport):
    """Takes requests from any thread's event loop to that of the application. There they are those of an `account`,
    within its limits; where there is none any more they are refused with 403."""

    def __init__(
        self, app: ASGIApp, loop: asyncio.AbstractEventLoop, account: Callable[[], Account | None], room: Room
    ) -> None:
        self._inner = httpx.ASGITransport(app)
        self._loop = loop
        self._account = account
        self._room = room

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(request), self._loop))

    async def _ask(self, request: httpx.Request) -> httpx.Response:
        async with self._room:
            account = self._account()
            if account is None:
                return _refused(ApiError(403, "the tenant of this batch has no key any more", code="no_tenant"))
            try:
                account.begin(SHARE)
            except ApiError as error:
                return _refused(error)
            accounts.current.set(account)  # in this task alone
            try:
                return await self._inner.handle_async_request(request)
            finally:
                account.end()


def _refused(error: ApiError) -> httpx.Response:
    response: Any = error.response()
    return httpx.Response(response.status_code, headers=response.raw_headers, content=response.body)
