"""Clusters that `headwater serve` runs on this machine: a small file each, by which `headwater status` finds them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cluster.models import cache_dir

AUTH_MODE = "RAY_AUTH_MODE"
"""How Ray is told whether a cluster wants a token. Ray sets it for a cluster that it starts, but not for an address."""


def _directory() -> Path:
    return cache_dir() / "running"


@contextmanager
def announced(address: str) -> Iterator[None]:
    """Let `latest` find the Ray cluster at `address` while this process is in the block."""
    file = _directory() / str(os.getpid())
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{address}\n{os.environ.get(AUTH_MODE, '')}")
    except OSError:  # a cache nobody can write to costs only the convenience
        pass
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def latest() -> str | None:
    """Address of the Ray cluster behind the newest `headwater serve` that is alive; files of dead ones are removed. To
    be called before Ray is imported: it sets how to authenticate there."""
    files = sorted(_directory().glob("[0-9]*"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        if psutil.pid_exists(int(file.name)):
            address, mode = file.read_text().split("\n")
            if mode:
                os.environ.setdefault(AUTH_MODE, mode)
            return address
        file.unlink(missing_ok=True)
    return None
