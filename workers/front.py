"""Front: what a worker's asyncio thread holds: its jobs, its background tasks, and the ways to and from its threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from transfer.guide import Guide, Guides
from transfer.messages import Outcome, Request
from workers.engine.engine import Engine
from workers.engine.step import Reserved
from workers.loop import Loop
from workers.tracing import Trace
from workers.transfer import TransferLoop

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One request on this worker; `deadline` is monotonic.

    A job of `generate` has an `outcome` to set; `decode` names the worker that its prompt is handed to, which was asked
    for room at the time `reserving` (ns). A job of
    `reserve` has none; `reserved` is what it waits for, until its lease is open: None if it is aborted. A job that
    fetches has neither; `borrowed` is set when its lease has come to an end, one way or the other. One that lends or
    fetches is `aside`: no client asked for it. Before the engine knows it, `queued_tokens` are to be computed of it.
    Those that are traced have a `trace`.
    """

    request: Request
    deadline: float
    outcome: asyncio.Future[Outcome] | None = None
    decode: str | None = None
    reserving: int = 0
    computed_at: float | None = None
    connected_at: float = 0.0
    aside: bool = False
    queued_tokens: int = 0
    refused: Outcome | None = None
    reserved: asyncio.Future[Reserved | None] | None = None
    borrowed: asyncio.Future[None] | None = None
    trace: Trace | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    def end(self, outcome: Outcome) -> None:
        """Set the outcome, unless there is none to set or somebody has set it before."""
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(outcome)

    def leaves(self, error: str = "") -> None:
        """This worker has nothing to do with it any more."""
        if self.trace is not None:
            self.trace.over(error)
            self.trace = None


class Front:
    """Made in the thread of the running event loop, which owns it. `name` is the worker's, for the log."""

    def __init__(
        self, name: str, engine: Engine, engine_loop: Loop, transfer_loop: TransferLoop, guides: Guides
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self._name = name
        self._engine = engine
        self._engine_loop = engine_loop
        self._transfer_loop = transfer_loop
        self._guides = guides
        self._loop = asyncio.get_running_loop()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run in the background; an error ends in the log."""
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._task_done)

    def from_thread(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function in the event loop; other threads call this."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    async def guide(self, request: Request) -> Guide | None:
        """A fresh guide for a request that has a grammar. Raises GuideError, which is a ValueError."""
        if not (grammar := request.sampling.guide):
            return None
        return await self._guides.guide(grammar)

    async def on_engine(self, function: Callable[[Engine], Any]) -> Any:
        """Run a function in the engine thread, between two steps; its result."""
        return await asyncio.wrap_future(self._engine_loop.call(lambda: function(self._engine)))

    async def on_transfer(self, function: Callable[[TransferLoop], Any]) -> Any:
        """Run a function in the transfer thread, between two polls; its result."""
        return await asyncio.wrap_future(self.post(function))

    def post(self, function: Callable[[TransferLoop], Any]) -> Future[Any]:
        """As `on_transfer`, without waiting."""
        return self._transfer_loop.call(lambda: function(self._transfer_loop))

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: background task failed", self._name, exc_info=error)
