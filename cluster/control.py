"""Control: how commands call the controller of a cluster. Imports nothing that computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from cluster.connection import DEFAULT_NAME, LaunchError

CONTROLLER = "controller"
"""Its name as an actor."""
POLL_S = 0.2
ANSWER_S = 10.0


class Control:
    """The controller behind `actor`, of the cluster `name`."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor = actor
        self._name = name

    @classmethod
    def of(cls, name: str = DEFAULT_NAME) -> Control:
        """The one of a cluster that runs. Raises LaunchError where there is none."""
        try:
            return cls(ray.get_actor(CONTROLLER, namespace=name), name)
        except ValueError:
            raise LaunchError(f"no Headwater cluster named {name!r} runs on this Ray cluster") from None

    def call(self, method: str, *arguments: Any, progress: Callable[[str], None] = lambda _: None) -> Any:
        """What a method comes to, however long it takes; `progress` is told what is under way. Raises LaunchError."""
        try:
            call = getattr(self.actor, method).remote(*arguments)
            while not ray.wait([call], timeout=POLL_S)[0]:
                progress(ray.get(self.actor.doing.remote(), timeout=ANSWER_S) or method)
            return ray.get(call)
        except RayTaskError as error:
            raise LaunchError(str(error.cause)) from None
        except RayActorError:
            raise LaunchError("the controller has ended meanwhile; see: headwater status") from None
        except RayError as error:
            raise LaunchError(f"the controller does not answer: {type(error).__name__}") from None

    def end(self, until: float | None = None, drain: bool = True) -> int:
        """End the cluster, by about `until` (monotonic), and the controller; returns how many requests were cut off.
        Raises LaunchError when draining failed, with the cluster ended all the same."""
        try:
            return int(self.call("down", drain, None if until is None else until - time.monotonic()))
        finally:
            ray.kill(self.actor)
            sweep(self._name)  # what was being started just then

    def abandon(self) -> None:
        """End the controller if it has no cluster, and makes none."""
        if self.call("idle"):
            ray.kill(self.actor)

    def alive(self) -> bool:
        """Whether it still runs; one that does not answer within `ANSWER_S` counts as running."""
        try:
            ray.get(self.actor.doing.remote(), timeout=ANSWER_S)
        except ActorUnavailableError:
            pass
        except RayActorError:
            return False
        except RayError:
            pass
        return True


def begin(detached: bool, name: str = DEFAULT_NAME) -> Control:
    """The controller of a cluster, which is made where there is none; a `detached` one outlives this process. Raises
    LaunchError where one runs already that is not to outlive its command."""
    from cluster.controller import CALLS, Controller  # with all that it starts

    options: dict[str, Any] = {"name": CONTROLLER, "namespace": name, "num_cpus": 0, "max_concurrency": CALLS}
    if detached:
        options |= {"lifetime": "detached", "max_restarts": -1, "get_if_exists": True}
    try:
        return Control(ray.remote(Controller).options(**options).remote(name, detached), name)
    except ValueError:
        raise LaunchError(f"a cluster named {name!r} runs here already") from None


def until_told(control: Control, told: Callable[[float], bool]) -> bool:
    """Wait until `told`, which waits for some seconds itself, comes true; False when the controller has ended."""
    looked = time.monotonic()
    while not told(POLL_S):
        if time.monotonic() - looked > ANSWER_S:
            looked = time.monotonic()
            if not control.alive():
                return False
    return True


def sweep(name: str) -> None:
    """End every actor of a cluster's namespace but the controller, whoever has made it."""
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == name and one["name"] != CONTROLLER:
            with suppress(ValueError):
                ray.kill(ray.get_actor(one["name"], namespace=name))
