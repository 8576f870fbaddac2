"""An engine with tiers in this process, driven as a worker drives it: no Ray, no gateway, no transfer."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.errors import UserError
from transfer.messages import Delta, Request, SamplingParams, TierStats, pack_tokens
from workers.config import TiersConfig, WorkerConfig
from workers.engine.engine import Engine
from workers.engine.model import Model
from workers.kv.records import Records
from workers.kv.tier_io import TierIO
from workers.speeds import SpeedMeter

IDLE_S = 0.01
"""A worker that can compute nothing looks again after so long, or when its tiers wake it."""
REST_S = 120.0
"""Until what goes down has to be down."""
STOP_S = 10.0


@dataclass(slots=True)
class Answer:
    """One answer, and what of its prompt was cached; `first_s` is the time to its first token."""

    begun: float
    first_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0


class SlowRecords(Records):
    """The same bytes as in others; to bring back a block takes `block_s` seconds at least."""

    def __init__(self, records: Records, block_s: float) -> None:
        vars(self).update(vars(records))
        self._block_s = block_s

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy, and sleep for the rest of the time."""
        until = time.perf_counter() + len(blocks) * self._block_s
        super().load(slots, blocks)
        time.sleep(max(0.0, until - time.perf_counter()))


class TieredEngine:
    """One engine, without tiers where `tiers` has no host memory. One thread uses it."""

    def __init__(
        self, name: str, model: Model, worker: WorkerConfig, tiers: TiersConfig, speeds: SpeedMeter, load_s: float
    ) -> None:
        self.engine = Engine(model, worker)
        self.engine.warm_up()
        self._speeds = speeds
        self._ids = itertools.count()
        self._woken = threading.Event()
        self._io: TierIO | None = None
        if tiers.host:
            self._io = self.engine.attach(name, tiers, None, self._woken.set)
            if load_s:
                self._io.records = SlowRecords(self._io.records, load_s)

    def close(self) -> None:
        """End the threads and give the directory back."""
        if self._io is not None:
            self._io.stop(STOP_S)

    @property
    def tier_stats(self) -> TierStats:
        """A copy of what the tiers have counted."""
        assert self.engine.cache.tiers is not None
        return self.engine.cache.tiers.status().stats

    def ask(self, prompt: list[int]) -> Answer:
        """The first token after a prompt."""
        return self.serve([prompt], output=1, concurrency=1)[0]

    def serve(self, prompts: list[list[int]], output: int, concurrency: int) -> list[Answer]:
        """Answers of `output` tokens each, so many at a time, begun in the order of the prompts."""
        answers: list[Answer] = []
        waiting = iter(prompts)
        running: dict[str, Answer] = {}
        while True:
            for prompt in itertools.islice(waiting, concurrency - len(running)):
                answers.append(Answer(time.perf_counter()))
                running[self._add(prompt, output)] = answers[-1]
            if not running:
                return answers
            for delta in self.step():
                _note(running[delta.request_id], delta)
                if delta.finish_reason:
                    del running[delta.request_id]

    def begin(self, prompts: list[list[int]]) -> list[str]:
        """Answers that run until `end`, or to the longest sequence; each has its first token."""
        room = self.engine.max_model_len
        ids = [self._add(prompt, room - len(prompt)) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < len(ids):
            begun.update(delta.request_id for delta in self.step())
        return ids

    def end(self, ids: list[str]) -> None:
        """Drop these answers."""
        for request_id in ids:
            self.engine.abort(request_id)

    def step(self) -> list[Delta]:
        """What a step brings; nothing where something has to be loaded first."""
        plan = self.engine.plan()
        if not plan.works:
            self._woken.wait(IDLE_S)
            self._woken.clear()
            return []
        begun = time.perf_counter()
        result = self.engine.run(plan.works)
        self._speeds.step(plan.works, time.perf_counter() - begun)
        if self.engine.cache.tiers is not None:
            self.engine.cache.tiers.speeds.prompt_tokens_s = self._speeds.prompt_tokens_s
        return result.deltas

    def bring(self, prompt: list[int]) -> None:
        """Have a prompt's blocks in the cache, whatever is in them, as if a peer had sent them."""
        request = self._request(prompt, 1)
        reserved = self.engine.borrow(request)
        if reserved is None:
            raise UserError("the pool has no room for what is to go down")
        self.engine.borrowed(request.request_id, len(reserved.blocks))

    @property
    def at_rest(self) -> bool:
        """Whether nothing goes up or down."""
        tiers = self.engine.cache.tiers
        return tiers is None or not (tiers.busy or tiers.status().under_way)

    def rest(self) -> None:
        """Wait until nothing goes up or down. Raises UserError when that takes too long."""
        until = time.monotonic() + REST_S
        while not self.at_rest:
            if time.monotonic() > until:
                raise UserError(f"what goes down is not down after {REST_S:.0f} s")
            self.engine.plan()
            self._woken.wait(IDLE_S)
            self._woken.clear()

    def forget(self) -> None:
        """Let the device have nothing cached, and all of it be below."""
        self.rest()
        self.engine.cache.clear()

    def _add(self, prompt: list[int], output: int) -> str:
        request = self._request(prompt, output)
        try:
            self.engine.add(request)
        except ValueError as error:
            raise UserError(str(error)) from None
        return request.request_id

    def _request(self, prompt: list[int], output: int) -> Request:
        sampling = SamplingParams(output, temperature=0, ignore_eos=True)
        return Request(str(next(self._ids)), pack_tokens(prompt), sampling, "", 0.0)


def _note(answer: Answer, delta: Delta) -> None:
    if delta.error is not None:
        raise UserError(f"engine: {delta.error}")
    if not answer.tokens:
        answer.first_s, answer.cached = time.perf_counter() - answer.begun, delta.cached_tokens
    answer.tokens.extend(delta.tokens)


def drop_pages(directory: Path) -> None:
    """Let the system's page cache have nothing of the files below a directory, so that they are read from the disk."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
