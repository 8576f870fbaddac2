"""The engine alone, in this process: no Ray, no gateway, no transfer. Driven step by step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from transfer.guide import Guide
from transfer.messages import Request, SamplingParams, pack_tokens
from workers.engine.engine import Engine

SETTLE_STEPS = 2
"""Steps after the prompts that are not measured: the first ones compile and touch memory."""


class EngineAlone:
    """Times steps of an engine, each of which ends when its tokens are on the host. One measurement at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds from adding the prompt to its only token; prompt and blocks stay in the cache."""
        start = time.perf_counter()
        self._add(prompt, 1)
        while not self._step():
            pass
        return time.perf_counter() - start

    def decode_steps_s(self, prompts: list[list[int]], steps: int) -> list[float]:
        """Seconds of each of `steps` steps in which every prompt's answer grows by a token.

        Raises ValueError when prompts and steps do not fit the longest sequence.
        """
        ids = self.begin(prompts)
        seconds = [self.step_s(ids) for _ in range(SETTLE_STEPS + steps)]
        self.end(ids)
        return seconds[SETTLE_STEPS:]

    def begin(self, prompts: list[list[int]], guide: Callable[[], Guide | None] = lambda: None) -> list[str]:
        """Compute prompts up to the first token of each; the ids of their answers, each of which follows a `guide`."""
        room = self._engine.max_model_len
        ids = [self._add(prompt, room - len(prompt), guide()) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < len(ids):
            begun |= self._step()
        return ids

    def step_s(self, ids: list[str]) -> float:
        """Seconds of a step in which all these answers grow by a token. Raises ValueError when one is over."""
        start = time.perf_counter()
        if len(self._step()) < len(ids):
            raise ValueError(f"an answer is over: the longest sequence has {self._engine.max_model_len} tokens")
        return time.perf_counter() - start

    def end(self, ids: list[str]) -> None:
        """Drop these answers."""
        for request_id in ids:
            self._engine.abort(request_id)

    def _add(self, prompt: list[int], output: int, guide: Guide | None = None) -> str:
        sampling = SamplingParams(output, temperature=0, ignore_eos=True)
        request = Request(str(next(self._ids)), pack_tokens(prompt), sampling, "", 0.0)
        self._engine.add(request, guide=guide)
        return request.request_id

    def _step(self) -> set[str]:
        """Run one step; the requests that got a token."""
        return {delta.request_id for delta in self._engine.run(self._engine.plan().works).deltas}
