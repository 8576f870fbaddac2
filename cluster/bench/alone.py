"""The engine alone, in this process: no Ray, no gateway, no transfer. Driven step by step."""

from __future__ import annotations

import itertools
import time

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
        room = self._engine.max_model_len
        ids = [self._add(prompt, room - len(prompt)) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < len(ids):
            begun |= self._step()
        seconds = []
        for number in range(SETTLE_STEPS + steps):
            start = time.perf_counter()
            if len(self._step()) < len(ids):
                raise ValueError(f"an answer reached the longest sequence of {room} tokens after {number} steps")
            seconds.append(time.perf_counter() - start)
        for request_id in ids:
            self._engine.abort(request_id)
        return seconds[SETTLE_STEPS:]

    def _add(self, prompt: list[int], output: int) -> str:
        sampling = SamplingParams(output, temperature=0, ignore_eos=True)
        request = Request(str(next(self._ids)), pack_tokens(prompt), sampling, "", 0.0)
        self._engine.add(request)
        return request.request_id

    def _step(self) -> set[str]:
        """Run one step; the requests that got a token."""
        return {delta.request_id for delta in self._engine.run(self._engine.plan().works).deltas}
