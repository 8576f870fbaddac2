"""The Ray cluster: join or start it, and leave it. Here is nothing that computes or serves, so that a command that only
asks, or fails, does not wait for torch."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

import psutil
import ray

from cluster.errors import UserError

DEFAULT_NAME = "headwater"
OBJECT_STORE_BYTES = 100 * 2**20
"""Requests and tokens travel inline; the object store stays almost empty."""
CONNECT_TIMEOUT_S = 5.0
STOP_S = 4.0
"""Bound of everything that follows when requests have had their time: the gateways, workers, Ray and its processes."""
KILL_S = 0.5
"""How long killed processes may take to vanish."""


class LaunchError(UserError):
    """The cluster could not start; one line that says why."""


def connect(address: str | None, logs: bool = True) -> None:
    """Join the Ray cluster at `address`, or start one here, and print what its processes log. Raises LaunchError when
    it cannot be reached."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"namespace": DEFAULT_NAME, "logging_level": "error", "log_to_driver": logs}
    options["runtime_env"] = {"worker_process_setup_hook": "cluster.process.setup"}
    if address is None:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        _check_reachable(address)
        options["address"] = address
    try:
        ray.init(**options)
    except SystemExit:  # Ray's own handler of SIGTERM, which it installs before it has started
        raise KeyboardInterrupt from None
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = address or "local"
        raise LaunchError(f"Ray cluster {where} cannot be reached: {' '.join(str(error).split())[:300]}") from None


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes to reach an address where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise LaunchError(f"Ray cluster {address} cannot be reached: {error}") from None


def disconnect(until: float | None = None) -> None:
    """Leave Ray. A local cluster ends with every process that it started here; what is still there at about `until`
    (monotonic; default: `STOP_S` from now) is killed."""
    until = time.monotonic() + STOP_S if until is None else until
    processes = psutil.Process().children(recursive=True)
    ray.shutdown()  # has bounds of its own: a second for each of Ray's processes
    _, alive = psutil.wait_procs(processes, timeout=share(until))
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=KILL_S)


def share(until: float) -> float:
    """What one of several steps may take that must all be over at `until`: half of what is left."""
    return max(0.0, until - time.monotonic()) / 2
