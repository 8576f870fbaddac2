"""Loop: a thread that owns some state. Others reach the state only by asking the thread to run a function."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Loop:
    """Runs `turn` again and again. It returns how long, in seconds, the thread may sleep unless somebody calls:
    0 for not at all, None for as long as nobody calls."""

    def __init__(self, name: str, turn: Callable[[], float | None]) -> None:
        self._turn = turn
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to run."""
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function in the thread, between two turns; calls run in order. It runs even when the future is
        cancelled: whoever wanted a block freed and then stopped waiting still wants it freed."""
        future: Future[T] = Future()

        def run() -> None:
            wanted = future.set_running_or_notify_cancel()
            try:
                result = function()
            except BaseException as error:
                if wanted:
                    future.set_exception(error)
            else:
                if wanted:
                    future.set_result(result)

        self._calls.put(run)
        return future

    def stop(self, timeout: float) -> None:
        """End the thread after the calls that are queued."""
        self._calls.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        wait: float | None = None
        while self._handle_calls(wait):
            try:
                wait = self._turn()
            except Exception:
                # `turn` handles what it expects; anything else must not end the thread silently.
                _log.exception("%s: turn failed", self._thread.name)
                wait = 0.1

    def _handle_calls(self, wait: float | None) -> bool:
        """Run what is queued, waiting up to `wait` seconds for a first call; False to stop."""
        try:
            item: Any = self._calls.get(timeout=wait) if wait != 0 else self._calls.get_nowait()
            while item is not None:
                item()
                item = self._calls.get_nowait()
            return False
        except queue.Empty:
            return True
