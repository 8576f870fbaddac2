"""Clusters that `headwater serve` runs on this machine: a small file each, by which `headwater status` finds them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from workers.paths import cache_dir

AUTH_MODE = "RAY_AUTH_MODE"
"""How Ray is told whether a cluster wants a token. Ray sets it for a cluster that it starts, but not for an address."""
CLOCK_STEP_S = 60.0
"""How far the start time of a process may seem to move when the machine's clock is corrected."""


def _directory() -> Path:
    return cache_dir() / "running"


@contextmanager
def announced(address: str) -> Iterator[None]:
    """Let `latest` find the Ray cluster at `address` while this process is in the block."""
    file = _directory() / str(os.getpid())
    born = psutil.Process().create_time()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"new-{file.name}")
        unfinished.write_text(f"{address}\n{os.environ.get(AUTH_MODE, '')}\n{born}")
        unfinished.rename(file)
    except OSError:  # a cache nobody can write to costs only the convenience
        pass
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def latest() -> str | None:
    """Address of the Ray cluster behind the newest `headwater serve` that is alive; files of dead ones are removed. To
    be called before Ray is imported: it sets how to authenticate there."""
    for file in sorted(_directory().glob("[0-9]*"), key=_age):
        try:
            address, mode, born = file.read_text().split("\n")
            if abs(psutil.Process(int(file.name)).create_time() - float(born)) > CLOCK_STEP_S:
                continue  # another process has this id now, or the clock was changed
        except psutil.NoSuchProcess:
            file.unlink(missing_ok=True)
        except (OSError, ValueError, psutil.Error):  # it has ended just now, or another version wrote it
            continue
        else:
            if mode:
                os.environ.setdefault(AUTH_MODE, mode)
            return address
    return None


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:
        return 0.0
