"""Outlines: looks at the caches of a worker that serves. They must not slow it, however many people look."""

from __future__ import annotations

import asyncio
import time

from transfer.outline import Outline
from workers.front import Front
from workers.kv.outline import Walk, outline

WALK_S = 0.005
"""How long a walk may keep the engine's thread from its next step."""
REST_S = 0.1
"""How long nobody walks after a walk."""
MAX_LOOKING = 16
"""Looks at a time: of more the last would come when nobody waits for it any more."""


class Outlines:
    """One walk at a time. Made in the thread of the event loop."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._turn = asyncio.Lock()
        self._looking = 0
        self._walked_at = 0.0

    async def look(self, path: tuple[bytes, ...], salts: bytes | None, most: int) -> Outline:
        """The `most` largest runs behind `path`, of trees whose salts begin with `salts`, or of all. Raises ValueError
        where too many look."""
        if self._looking >= MAX_LOOKING:
            raise ValueError(f"{self._looking} look at this worker's cache already")
        self._looking += 1
        try:
            async with self._turn:
                await asyncio.sleep(self._walked_at + REST_S - time.monotonic())
                walk: Walk = await self._front.on_engine(lambda engine: Walk(engine.cache, path, salts, WALK_S))
                self._walked_at = time.monotonic()
            return await asyncio.to_thread(outline, walk, most)
        finally:
            self._looking -= 1
