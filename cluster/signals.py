"""SIGINT and SIGTERM, which mean the same to every command: stop, and leave nothing behind."""

from __future__ import annotations

import signal
from typing import Any


def on_signals(handler: Any) -> None:
    """Let both do this from now on."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, handler)


def interruptible() -> None:
    """Let both raise KeyboardInterrupt, so that what is open is closed. Ray installs handlers of its own when it
    starts: call this again then."""
    on_signals(_interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
