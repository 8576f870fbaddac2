"""One simulation: a day's requests over workers that a planner moves, starts and stops, or that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.planner import Add, Move, Observation, Planner, PlannerConfig, Remove, Role
from cluster.simulate.loop import Loop
from cluster.simulate.planner.day import Request
from cluster.simulate.planner.fleet import Fleet
from cluster.simulate.planner.worker import Worker


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a day: of each request the seconds to its first token and between two tokens of its answer, in
    order of arrival and nan where it was lost; worker-hours; what the planner changed, and when."""

    first_s: np.ndarray
    gap_s: np.ndarray
    worker_hours: float
    changes: tuple[tuple[float, Move | Add | Remove], ...]

    def met(self, first_token_s: float, token_gap_s: float) -> float:
        """The share of requests within both targets."""
        return float(((self.first_s <= first_token_s) & (self.gap_s <= token_gap_s)).mean())

    @property
    def lost(self) -> int:
        """Requests without a whole answer."""
        return int(np.isnan(self.gap_s).sum())


def play(
    requests: Sequence[Request], workers: dict[Role, int], planner: PlannerConfig | None = None, seed: int = 0
) -> Outcome:
    """Play requests over so many workers, which stay as they are where there is no planner."""
    return _Simulation(requests, workers, planner, seed).run()


class _Simulation:
    def __init__(
        self, requests: Sequence[Request], workers: dict[Role, int], config: PlannerConfig | None, seed: int
    ) -> None:
        self._requests = requests
        self._loop = Loop()
        self._fleet = Fleet(workers, self._loop, seed)
        self._first = np.full(len(requests), np.nan)
        self._gap = np.full(len(requests), np.nan)
        self._began = [0.0] * len(requests)
        self._came: list[int] = []  # prompt tokens of the requests since the last observation
        self._changes: list[tuple[float, Move | Add | Remove]] = []
        if config is not None:
            self._loop.at(0.0, self._observe, Planner(config), config.interval_s)

    def run(self) -> Outcome:
        self._loop.at(self._requests[0].arrival, self._arrive, 0)
        self._loop.run()
        return Outcome(self._first, self._gap, self._fleet.worker_s / 3600, tuple(self._changes))

    def _observe(self, planner: Planner, interval_s: float) -> None:
        seen = Observation(self._fleet.seen(), sum(self._came), len(self._came))
        self._came.clear()
        change = planner.plan(seen, self._loop.now).change
        if change is not None:
            self._changes.append((self._loop.now, change))
            self._fleet.change(change)
        if self._loop.now < self._requests[-1].arrival:
            self._loop.after(interval_s, self._observe, planner, interval_s)

    def _arrive(self, number: int) -> None:
        now = self._loop.now
        if number + 1 < len(self._requests):
            self._loop.at(self._requests[number + 1].arrival, self._arrive, number + 1)
        tokens = self._requests[number].prompt
        self._came.append(tokens)
        if able := self._fleet.able("prefill"):
            worker = min(able, key=lambda one: one.wait(now))
            self._loop.at(worker.compute(tokens, now), self._computed, number, worker)

    def _computed(self, number: int, prefill: Worker) -> None:
        if prefill.gone:
            return
        now = self._loop.now
        prefill.prompts -= 1
        self._first[number] = now - self._requests[number].arrival
        if able := self._fleet.able("decode"):
            worker = min(able, key=lambda one: one.running)
            self._began[number] = now
            worker.generate(number, self._requests[number].answer, now)
            self._expect_end(worker)
        self._fleet.finished(prefill)

    def _expect_end(self, worker: Worker) -> None:
        if worker.running:
            self._loop.at(worker.next_end, self._ended, worker, worker.version)

    def _ended(self, worker: Worker, version: int) -> None:
        if worker.gone or version != worker.version:  # the batch has changed since
            return
        number = worker.end_first(self._loop.now)
        self._gap[number] = (self._loop.now - self._began[number]) / self._requests[number].answer
        self._expect_end(worker)
        self._fleet.finished(worker)
