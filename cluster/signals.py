"""SIGINT and SIGTERM, which mean the same to every command: stop, and leave nothing behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

_BOTH = (signal.SIGINT, signal.SIGTERM)


def on_signals(handler: Any) -> None:
    """Let both do this from now on."""
    for one in _BOTH:
        signal.signal(one, handler)


def interruptible() -> None:
    """Let both raise KeyboardInterrupt, so that what is open is closed. Ray installs handlers of its own when it
    starts: call this again then."""
    on_signals(_interrupt)


def run(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, for a command that is `interruptible`. Both cancel the work, and KeyboardInterrupt is raised when
    it has closed what it had open: at any point of the loop, it would tear that apart."""
    stopped = False

    async def cancellable() -> None:
        nonlocal stopped
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        for one in _BOTH:
            loop.add_signal_handler(one, stop)
        try:
            await asyncio.wait({task})
        finally:
            for one in _BOTH:
                loop.remove_signal_handler(one)
            interruptible()
        if not stopped:
            task.result()

    asyncio.run(cancellable())
    if stopped:
        raise KeyboardInterrupt


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
