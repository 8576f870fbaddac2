"""Planning: shows the planner what the workers say of themselves, and has done what it answers. A thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from ray.exceptions import RayError

from cluster.connection import LaunchError
from cluster.planner import OTHER, Add, Move, Observation, Planner, PlannerConfig, Remove, Role, Seen
from transfer.messages import WorkerSpec, WorkerStatus

_log = logging.getLogger(__name__)
Change = Move | Add | Remove


@dataclass(slots=True)
class Counts:
    """What the workers have counted, each in its life, at the last look."""

    _before: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def since(self, statuses: Iterable[WorkerStatus]) -> tuple[int, int]:
        """Prompt tokens that no cache of a prefill worker had, and requests, since the last look. Every answer is a
        request of a decode worker, whoever computed its prompt; what waits for one is only known where it waits."""
        now, tokens = {}, 0
        requests = dict.fromkeys(OTHER, 0)
        for one in statuses:
            key = (one.name, one.incarnation)
            now[key] = counted = (one.cache.prompt_tokens - one.cache.cached_tokens, one.cache.requests)
            before = self._before.get(key, (0, 0) if self._before else counted)
            if one.role == "prefill":
                tokens += counted[0] - before[0]
            requests[cast(Role, one.role)] += counted[1] - before[1]
        self._before = now
        return tokens, max(requests.values())


def observed(specs: Sequence[WorkerSpec], statuses: Iterable[WorkerStatus], counts: Counts) -> Observation:
    """What the planner is shown: all workers with one role that are to stay; those that say nothing are not ready."""
    said = {one.name: one for one in statuses if one.role in OTHER}
    seen = [_seen(spec, said.get(spec.name)) for spec in specs if spec.role in OTHER and not spec.leaving]
    return Observation(tuple(seen), *counts.since(said.values()))


def _seen(spec: WorkerSpec, status: WorkerStatus | None) -> Seen:
    role = cast(Role, spec.role)
    if status is None:
        return Seen(spec.name, role, ready=False)
    speeds = status.speeds
    answers = speeds.answers if status.running else 0
    return Seen(spec.name, role, True, status.queued_tokens, speeds.prompt_tokens_s, answers, speeds.gap_s)


class Planning:
    """From `start` to `stop`. `look` tells who there should be and what those say that answer; `change` carries out."""

    def __init__(
        self,
        config: PlannerConfig,
        look: Callable[[], tuple[Sequence[WorkerSpec], list[WorkerStatus]]],
        change: Callable[[Change], None],
    ) -> None:
        self.why = ""
        self._config = config
        self._planner = Planner(config)
        self._counts = Counts()
        self._look = look
        self._change = change
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planning", daemon=True)

    def start(self) -> None:
        """Begin, unless the planner is off."""
        if self._config.mode != "off":
            self._thread.start()

    def stop(self) -> None:
        """Plan nothing more. What is being carried out goes on."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._config.interval_s):
            try:
                self._plan()
            except (LaunchError, RayError) as error:
                _log.warning("planner: %s", " ".join(str(error).split())[:300])
            except Exception:
                _log.exception("planner")

    def _plan(self) -> None:
        plan = self._planner.plan(observed(*self._look(), self._counts), time.monotonic())
        self.why = plan.why
        if plan.change is not None and not self._stopping.is_set():
            _log.warning("planner: %s: %s", plan.change, plan.why)
            self._change(plan.change)
