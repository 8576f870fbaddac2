"""Gateways: sends a request to one of them, and again where that makes sense, until it has an answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from router.batch.errors import BatchError
from router.batch.lines import Item

LATER = (408, 429, 502, 503)
"""Statuses of requests that were not accepted, and may be later."""
MAX_FAILED = 3
"""How often a request may be accepted and fail (status 500) before that is its answer."""
MIN_WAIT_S, MAX_WAIT_S = 0.5, 30.0
CONNECT_S = 10.0
REST_S = 5.0
"""How long a gateway that could not be reached is left alone while there are others."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to: a status with a body, or where no gateway answered, neither; and what went wrong."""

    status: int | None
    request_id: str
    body: Any
    error: dict[str, Any] | None


class Gateways:
    """The gateways of a cluster, each asked in turn, over HTTP or another `transport`. `find` gives their URLs anew,
    when one cannot be reached; a request may take `timeout_s` in all."""

    def __init__(
        self,
        find: Callable[[], list[str]],
        timeout_s: float,
        key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Raises what `find` raises."""
        self._find = find
        self._timeout_s = timeout_s
        self._urls = find()
        self._resting: dict[str, float] = {}
        self._turn = 0
        self._finding: asyncio.Task[list[str]] | None = None
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            verify=any(url.startswith("https:") for url in self._urls),
            transport=transport,
        )

    async def __aenter__(self) -> Gateways:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._client.aclose()

    async def send(self, item: Item) -> Answer:
        """The answer, after as many attempts as there is time for. Raises BatchError where the key is refused: so would
        be all other requests."""
        content, until = item.sent, time.monotonic() + self._timeout_s
        attempts = failed = 0
        while True:
            attempts += 1
            wait_s = min(MAX_WAIT_S, MIN_WAIT_S * 2 ** min(attempts - 1, 10)) * random.uniform(0.5, 1)
            url = self._next()
            try:
                response = await self._post(url, item.url, content, until - time.monotonic())
            except httpx.TransportError as error:
                answer = _unanswered(url, error)
                await self._cannot_be_reached(url)
            else:
                answer = _answered(url, response)
                failed += response.status_code == 500
                if not (response.status_code in LATER or (response.status_code == 500 and failed < MAX_FAILED)):
                    return answer
                wait_s = _retry_after(response) or wait_s
            if time.monotonic() + wait_s >= until:
                return answer
            await asyncio.sleep(wait_s)

    async def _post(self, url: str, path: str, content: bytes, timeout_s: float) -> httpx.Response:
        timeout = httpx.Timeout(max(timeout_s, 1.0), connect=CONNECT_S)
        headers = {"Content-Type": "application/json"}
        response = await self._client.post(f"{url}{path}", content=content, headers=headers, timeout=timeout)
        if response.status_code in (401, 403):
            raise BatchError(f"{url}: the API key is refused ({response.status_code}): {_message(response)}")
        return response

    def _next(self) -> str:
        now = time.monotonic()
        rested = [url for url in self._urls if self._resting.get(url, 0.0) <= now]
        self._turn += 1
        urls = rested or self._urls
        return urls[self._turn % len(urls)]

    async def _cannot_be_reached(self, url: str) -> None:
        """Leave it alone for a while, and look where the gateways are now."""
        self._resting[url] = time.monotonic() + REST_S
        if self._finding is None:
            self._finding = asyncio.create_task(asyncio.to_thread(self._find))
            self._finding.add_done_callback(self._found)
        await asyncio.wait({self._finding})

    def _found(self, task: asyncio.Task[list[str]]) -> None:
        """Where nobody can say, they are where they were."""
        self._finding = None
        if not task.cancelled() and task.exception() is None and task.result():
            self._urls = task.result()


def _answered(url: str, response: httpx.Response) -> Answer:
    request_id = response.headers.get("x-request-id", "")
    try:
        body = response.json()
        if not isinstance(body, dict):
            raise ValueError
    except ValueError:
        error = {"code": "invalid_answer", "message": f"{url}: {response.status_code}: {_message(response)}"}
        return Answer(response.status_code, request_id, None, error)
    if response.status_code == 200:
        return Answer(200, request_id, body, None)
    told = body.get("error")
    code = told.get("code") or told.get("type") if isinstance(told, dict) else None
    return Answer(response.status_code, request_id, body, {"code": code or "failed", "message": _message(response)})


def _unanswered(url: str, error: httpx.TransportError) -> Answer:
    code = "timeout" if isinstance(error, httpx.ReadTimeout) else "unreachable"
    return Answer(None, "", None, {"code": code, "message": f"{url}: {type(error).__name__}: {error}".rstrip(": ")})


def _message(response: httpx.Response) -> str:
    """What the answer says for people."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return " ".join(response.text.split())[:300]


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, where the answer says so; never a date: gateways do not send one."""
    text = response.headers.get("retry-after", "")
    return min(float(text), MAX_WAIT_S) if text.isdigit() else None
