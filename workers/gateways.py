"""Gateways: where a worker's tokens go, and how it notices that one is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from transfer.directory import Directory, PeerDead, PeerError
from transfer.messages import Delta

_log = logging.getLogger(__name__)
TIMEOUT_S = 5.0
RETRY_S = 0.1


class Gateways:
    """Those that have requests on a worker. `gone` is awaited with the name of one that has ended."""

    def __init__(self, directory: Directory, gone: Callable[[str], Awaitable[None]]) -> None:
        self._directory = directory
        self._gone = gone
        self._processes: dict[str, int] = {}

    async def deliver(self, gateway: str, deltas: list[Delta], until: float) -> None:
        """Bring tokens to a gateway, again and again while their requests may live: they say where they belong, so
        that bringing them twice does no harm."""
        while time.monotonic() < until:
            try:
                await self._directory.call(gateway, "deliver", deltas, timeout=TIMEOUT_S)
                return
            except PeerDead:
                await self._ended(gateway)
                return
            except PeerError as error:
                _log.warning("%s", error)
                await asyncio.sleep(RETRY_S)

    def only(self, names: set[str]) -> None:
        """No others have requests here any more."""
        self._processes = {name: process for name, process in self._processes.items() if name in names}

    async def check(self, gateway: str) -> None:
        """Whether it still lives, and is the one whose requests these are."""
        try:
            process = await self._directory.call(gateway, "ping", timeout=TIMEOUT_S)
            if self._processes.setdefault(gateway, process) != process:  # another life under the same name
                await self._ended(gateway)
        except PeerDead:
            await self._ended(gateway)
        except PeerError as error:
            _log.warning("%s", error)

    async def _ended(self, gateway: str) -> None:
        self._processes.pop(gateway, None)
        await self._gone(gateway)
