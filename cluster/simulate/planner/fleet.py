"""The workers of a simulation: how they start, change their roles, stop, and what a planner sees of them."""

from __future__ import annotations

from random import Random

from cluster.planner import Add, Move, Remove, Role, Seen
from cluster.simulate.loop import Loop
from cluster.simulate.planner.worker import PROMPT_TOKENS_S, Worker

START_S = 60.0
"""From the wish for a worker until it takes requests."""
CHANGE_S = 5.0
"""From the end of what a worker had in one role until it takes requests in the other."""
ERROR = 0.05
"""The standard deviation of speeds and gaps as they are measured, as a share of them."""


class Fleet:
    """All workers that there are, at first those given, which are ready."""

    def __init__(self, workers: dict[Role, int], loop: Loop, seed: int) -> None:
        self._loop = loop
        self._random = Random(f"errors {seed}")
        self._workers: list[Worker] = []
        self._started = 0
        self._ended_s = 0.0
        for role, count in workers.items():
            for _ in range(count):
                self._new(role, ready=True)

    @property
    def worker_s(self) -> float:
        """Seconds of all workers from the wish for them until their end or now."""
        return self._ended_s + sum(self._loop.now - one.since for one in self._workers)

    def able(self, role: Role) -> list[Worker]:
        """Those that take what a role does."""
        return [one for one in self._workers if one.ready and one.role == role]

    def change(self, change: Move | Add | Remove) -> None:
        """Do what a planner wants. Whoever is to change or to stop takes nothing more and finishes what it has."""
        if isinstance(change, Add):
            self._loop.after(START_S, self._ready, self._new(change.role, ready=False))
            return
        worker = next(one for one in self._workers if one.name == change.worker)
        worker.ready = False
        worker.leaving = True
        worker.next_role = change.role if isinstance(change, Move) else None
        self.finished(worker)

    def finished(self, worker: Worker) -> None:
        """A worker has finished something; if it was the last thing, and it is to change or to stop, now it does."""
        if not worker.leaving or not worker.idle:
            return
        worker.leaving = False
        if worker.next_role is not None:
            worker.role, worker.next_role = worker.next_role, None
            self._loop.after(CHANGE_S, self._ready, worker)
        else:
            worker.gone = True
            self._workers.remove(worker)
            self._ended_s += self._loop.now - worker.since

    def seen(self) -> tuple[Seen, ...]:
        """All but those that are to stop, with errors of measurement."""
        return tuple(self._see(one) for one in self._workers if one.next_role or not one.leaving)

    def _see(self, worker: Worker) -> Seen:
        return Seen(
            worker.name,
            worker.next_role or worker.role,
            worker.ready,
            round(worker.wait(self._loop.now) * PROMPT_TOKENS_S),
            self._measured(PROMPT_TOKENS_S if worker.role == "prefill" else 0.0),
            worker.running,
            self._measured(worker.gap_s if worker.running else 0.0),
        )

    def _measured(self, value: float) -> float:
        return value * max(0.1, self._random.gauss(1.0, ERROR))

    def _new(self, role: Role, ready: bool) -> Worker:
        worker = Worker(f"w{self._started}", role, ready, self._loop.now)
        self._started += 1
        self._workers.append(worker)
        return worker

    def _ready(self, worker: Worker) -> None:
        worker.ready = True
