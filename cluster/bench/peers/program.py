"""Programs that peers are run as. One that fails is a PeerError, and none outlives its call."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

RUN_TIMEOUT_S = 1800.0


class PeerError(Exception):
    """A peer failed; the message is one line."""


def run(command: list[str], name: str = "", given: str = "") -> str:
    """What a program prints when it is given `given` on its standard input. `name` is for messages; default: that of
    the program. Raises PeerError. However the call ends, the program has ended."""
    name = name or Path(command[0]).name
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, errors="replace", timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{name} took over {RUN_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise PeerError(f"{name} cannot be run: {error.strerror}") from None
    said = last_line(done.stderr or done.stdout)
    if done.returncode < 0:
        raise PeerError(f"{name} was ended by {signal.Signals(-done.returncode).name}: {said}")
    if done.returncode > 0:
        raise PeerError(f"{name} failed: {said}")
    return done.stdout


def last_line(text: str) -> str:
    """The last line of what a program has said, for a message."""
    lines = text.strip().splitlines()
    return lines[-1].strip()[:300] if lines else "it said nothing"
