"""Watch: looks after everything on a worker that could otherwise wait for ever: deadlines, leases, gateways."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from transfer.messages import Delta
from workers.front import Front
from workers.gateways import TIMEOUT_S, Gateways
from workers.takeover import TakeOver

_log = logging.getLogger(__name__)
INTERVAL_S = 0.5


class Watch:
    """Of the worker `name`; `abort` is awaited with the id of a request that is given up."""

    def __init__(
        self, name: str, front: Front, gateways: Gateways, takeover: TakeOver, abort: Callable[[str], Awaitable[None]]
    ) -> None:
        self._name = name
        self._front = front
        self._gateways = gateways
        self._takeover = takeover
        self._abort = abort

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self._look_after()
            except Exception:
                # Whatever went wrong once must not leave everything unwatched from then on.
                _log.exception("%s: watch failed", self._name)

    async def _look_after(self) -> None:
        now = time.monotonic()
        jobs = list(self._front.jobs.values())
        for job in [job for job in jobs if job.outcome is None and now > job.deadline]:
            delta = Delta(job.id, 0, (), 0, error="deadline exceeded")
            self._front.spawn(self._gateways.deliver(job.request.gateway, [delta], now + TIMEOUT_S))
            await self._abort(job.id)
        await self._takeover.check_leases()
        gateways = {job.request.gateway for job in self._front.jobs.values()}
        self._gateways.only(gateways)
        for gateway in gateways:
            self._front.spawn(self._gateways.check(gateway))
