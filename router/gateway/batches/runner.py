"""Runner: which batches this gateway carries out, of all that are in the directory."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from starlette.types import ASGIApp

from router.batch.index import Index, Line
from router.batch.journal import Journal
from router.batch.run import SLOTS, run
from router.batch.send import Gateways
from router.batch.tally import Tally
from router.gateway.accounts import Keyring
from router.gateway.batches.carry_out import CarryOut
from router.gateway.batches.inside import SHARE, Inside, Room
from router.gateway.batches.records import WINDOW_S, Stores
from router.gateway.batches.shelf import tenants_of

_log = logging.getLogger(__name__)
MAX_RUNNING = 16
"""Batches that a gateway carries out at a time: each has a thread and a temporary database."""
MAX_OF_TENANT = 4
"""Of these, those of one tenant."""
LOOK_S = 5.0
"""Seconds between two looks at what others have left or may not have begun."""
SWEEP_S = 600.0
INSIDE = "http://gateway"
Crew = Callable[[], tuple[int, float]]
"""How many workers compute prompts, and this gateway's share of those that answer."""
Key = tuple[str, str]


class Runner:
    """Batches of `stores` for the model that is served here, carried out by `app`. It begins with `start`."""

    def __init__(self, stores: Stores, model: str, app: ASGIApp, keyring: Keyring) -> None:
        self._stores = stores
        self._model = model
        self._app = app
        self._keyring = keyring
        self._pool = ThreadPoolExecutor(MAX_RUNNING, "batch")
        self._stop = threading.Event()
        self._wake = asyncio.Event()
        self._running: dict[Key, asyncio.Future[bool]] = {}
        self._over: set[Key] = set()
        self._later: dict[Key, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._crew: Crew = lambda: (1, 1)
        self._room = Room(lambda: int(SLOTS * self._crew()[1]))

    def start(self, crew: Crew) -> None:
        """Carry out what is there, and what will be."""
        self._crew = crew
        self._task = asyncio.create_task(self._run())

    def look(self) -> None:
        """There is a new one."""
        self._wake.set()

    async def stop(self) -> None:
        """Leave off; other gateways, or this one in its next life, go on."""
        self._stop.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, *self._running.values(), return_exceptions=True)
        self._pool.shutdown(wait=False)

    async def _run(self) -> None:
        swept = -SWEEP_S
        while True:
            self._wake.clear()
            try:
                now = time.monotonic()
                self._later = {key: until for key, until in self._later.items() if until > now}
                others = frozenset({*self._running, *self._later})
                waiting, self._over = await asyncio.to_thread(self._waiting, others, self._over)
                self._begin(key for key in waiting if key not in self._running and key not in self._later)
                if time.monotonic() - swept >= SWEEP_S:
                    swept = time.monotonic()
                    await asyncio.to_thread(self._sweep)
            except Exception as error:
                _log.error("gateway.batch_path: %s", error, exc_info=error)
            waking = asyncio.create_task(self._wake.wait())
            await asyncio.wait({waking}, timeout=LOOK_S)
            waking.cancel()

    def _waiting(self, others: frozenset[Key], known: set[Key]) -> tuple[list[Key], set[Key]]:
        """Batches but some others, that are not over, those that have waited longest first: another gateway may have
        them. And those that are over, of which many are `known`."""
        found, over = [], set()
        for tenant in tenants_of(self._stores.root):
            batches = self._stores.of(tenant)
            for name in batches.names():
                key = (tenant, name)
                if key in others:
                    continue
                if key in known or (batch := batches.find(name)) is None or batch.over:
                    over.add(key)
                elif batch.model == self._model or batches.is_to_end(batch):
                    found.append(key)
        return sorted(found, key=lambda key: key[1]), over

    def _begin(self, waiting: Iterable[Key]) -> None:
        """As many as may run, of tenants with few of them first."""
        left = list(waiting)
        while left and len(self._running) < MAX_RUNNING:
            of_tenant = Counter(tenant for tenant, _ in self._running)
            key = min(left, key=lambda one: (of_tenant[one[0]], one[1]))
            if of_tenant[key[0]] >= MAX_OF_TENANT:
                return
            left.remove(key)
            self._start(key)

    def _start(self, key: Key) -> None:
        tenant, name = key
        loop = asyncio.get_running_loop()
        inside = Inside(self._app, loop, lambda: self._keyring.named(tenant), self._room)
        computing, answering = self._crew()
        slots = max(1, int(SLOTS * answering))
        if (account := self._keyring.named(tenant)) is not None and account.tenant.max_concurrent is not None:
            slots = min(slots, max(1, int(account.tenant.max_concurrent * SHARE)))

        async def doing(index: Index, order: Iterable[Line], journal: Journal, tally: Tally) -> None:
            async with Gateways(lambda: [INSIDE], WINDOW_S, transport=inside) as gateways:
                await run(index, journal, order, gateways.send, slots, tally)

        work = CarryOut(self._stores.of(tenant), name, doing, max(1, min(computing, slots)), self._stop)
        future = self._running[key] = loop.run_in_executor(self._pool, work)
        future.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: Key, done: asyncio.Future[bool]) -> None:
        """It is over, another gateway has it, or something is wrong that may not be so later."""
        del self._running[key]
        error = None if done.cancelled() else done.exception()
        if error is not None:
            _log.error("batch %s cannot go on now: %s", key[1], error)
        if error is not None or not done.result():
            self._later[key] = time.monotonic() + LOOK_S
        self._wake.set()  # others may have waited for its place

    def _sweep(self) -> None:
        for tenant in tenants_of(self._stores.root):
            batches = self._stores.of(tenant)
            batches.files.sweep()
            for name in batches.names():
                batches.tidy(name)  # where a gateway has ended just before it
