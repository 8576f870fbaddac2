"""Responses that are computed while no client waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from router.gateway import accounts
from router.gateway.accounts import Account
from router.gateway.choice import Piece
from router.gateway.errors import ApiError, failed, overloaded
from router.gateway.responses import ResponsesAnswer

_log = logging.getLogger(__name__)


class Background:
    """Those that are under way, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._answers: dict[str, ResponsesAnswer] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def check_room(self) -> None:
        """Raises ApiError 429 where there are as many as may be."""
        if len(self._tasks) >= self._limit:
            raise overloaded(f"background: {self._limit} responses are under way")

    def start(self, name: str, answer: ResponsesAnswer, pieces: AsyncGenerator[Piece, None]) -> None:
        """Carry it out under this name; whatever goes wrong is what the response ends with."""
        self._answers[name] = answer
        account = accounts.current.get()
        account.go_on()
        task = self._tasks[name] = asyncio.create_task(self._run(answer, pieces))
        task.add_done_callback(lambda _: self._over(name, answer, account))

    def get(self, name: str) -> ResponsesAnswer | None:
        """None for what is not under way."""
        return self._answers.get(name)

    async def cancel(self, name: str) -> ResponsesAnswer | None:
        """End it, and what workers do for it. None for what is not under way."""
        answer, task = self._answers.get(name), self._tasks.get(name)
        if answer is None or task is None:
            return None
        task.cancel()
        await asyncio.wait({task})
        return answer

    async def _run(self, answer: ResponsesAnswer, pieces: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(pieces):
                await answer.whole(pieces)
        except ApiError as error:
            answer.fail(error)
        except Exception as error:
            _log.error("a background response failed", exc_info=error)
            answer.fail(failed("internal error"))

    def _over(self, name: str, answer: ResponsesAnswer, account: Account) -> None:
        """A task that was cancelled before it began has run no line of its own."""
        account.end()
        if not answer.over:
            answer.cancel()
        del self._answers[name], self._tasks[name]
