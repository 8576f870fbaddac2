"""Calls between actors by name, every one with a deadline and one of three ends: a result, dead, or too late."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Protocol

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from transfer.messages import Place

_DEAD = (RayActorError, ActorUnschedulableError, OutOfMemoryError, RuntimeEnvSetupError)
"""How Ray says that an actor's process is gone or never came to be."""


class PeerError(Exception):
    """A call to another actor failed; the message names actor and method."""


class PeerDead(PeerError):
    """The actor does not exist or its process has ended: nothing it owed or was doing will still happen."""


class PeerTimeout(PeerError):
    """No answer before the deadline; the call may still take effect."""


class Directory(Protocol):
    """How one actor calls another."""

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        """Call `method` of the actor `name`, waiting `timeout` seconds at most. Raises PeerError."""


def node_address() -> str:
    """The numeric address of this machine in the Ray cluster."""
    return str(ray.util.get_node_ip_address())


def here() -> Place:
    """Where this process runs. Only in an actor."""
    node = ray.get_runtime_context().get_node_id()
    return Place(socket.gethostname(), len(os.sched_getaffinity(0)), node, node_address())


class RayDirectory:
    """Named actors in a Ray namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._handles: dict[str, Any] = {}

    async def call(self, name: str, method: str, *args: Any, timeout: float) -> Any:
        """See `Directory`."""
        try:
            return await asyncio.wait_for(self._call(name, method, args), timeout)
        except RayTaskError as error:
            raise PeerError(f"{name}.{method}: {error.cause!r}") from error
        except (asyncio.TimeoutError, GetTimeoutError):
            raise PeerTimeout(f"{name}.{method}: no answer within {timeout:.1f} s") from None
        except ActorUnavailableError as error:
            # The network failed, not the actor: it may still be at work.
            raise PeerTimeout(f"{name}.{method}: {error}") from error
        except (*_DEAD, ValueError) as error:
            raise PeerDead(f"{name}.{method}: {type(error).__name__}") from error
        except RayError as error:
            raise PeerError(f"{name}.{method}: {error}") from error

    async def _call(self, name: str, method: str, args: tuple[Any, ...]) -> Any:
        handle = self._handles.get(name)
        if handle is None:
            handle = await self._look_up(name)
        try:
            return await getattr(handle, method).remote(*args)
        except _DEAD:
            # The name may belong to a new life of the actor by now, which has every right to be asked.
            self._handles.pop(name, None)
            again = await self._look_up(name)
            if again == handle:
                self._handles.pop(name, None)
                raise
            return await getattr(again, method).remote(*args)

    async def _look_up(self, name: str) -> Any:
        self._handles[name] = handle = await asyncio.to_thread(ray.get_actor, name, self._namespace)
        return handle
