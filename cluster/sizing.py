"""How many workers a load needs: prefill workers by Erlang's formula, decode workers by how steps grow with answers."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt

LATE = 0.05
"""The share of requests that may wait longer than the target."""
DEVIATIONS = 1.65
"""As many standard deviations of the number of answers are provided for: 95 % of a normal distribution."""
LEAST_WAIT = 0.1
"""The share of the first token's target that is left for waiting, however long prompts take by themselves."""
KEEP = 0.99
"""What a pair of answers and gap weighs one observation later."""
SPREAD = 0.1
"""Numbers of answers that differ by less than this share of their mean say nothing about how gaps grow."""


def prefill_workers(tokens_s: float, worker_tokens_s: float, prompt_tokens: float, target_s: float, most: int) -> int:
    """The fewest workers, up to `most`, behind one queue of `tokens_s` prompt tokens a second with which 95 % of all
    prompts of `prompt_tokens` each are computed within the target. Times are taken as exponential (M/M/c; A. K. Erlang,
    1917), which is longer than those of most prompts."""
    load = tokens_s / worker_tokens_s
    prompt_s = prompt_tokens / worker_tokens_s
    wait_s = max(target_s - prompt_s, LEAST_WAIT * target_s)
    blocked = 1.0  # Erlang B
    for workers in range(1, most):
        blocked = load * blocked / (workers + load * blocked)
        if workers <= load:
            continue
        waits = blocked / (1 - load / workers * (1 - blocked))  # Erlang C
        if waits * exp(-(workers - load) * wait_s / prompt_s) <= LATE:
            return workers
    return most


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds between two tokens of an answer: those of a step that has none, and more for each answer that runs."""

    alone_s: float
    answer_s: float

    def answers(self, target_s: float) -> float:
        """How many answers may run on a worker within the target; less than 1: it cannot be met."""
        return (target_s - self.alone_s) / self.answer_s

    def workers(self, tokens_s: float, target_s: float) -> float:
        """How many workers, not rounded, generate so many tokens a second within the target, in 95 % of the time."""
        running = tokens_s * target_s
        return (running + DEVIATIONS * sqrt(running)) / self.answers(target_s)


class Rates:
    """What comes in and goes out in a second: means of about the last `count` observations."""

    def __init__(self, count: int) -> None:
        self.prompt_tokens = self.requests = self.answer_tokens = 0.0
        self._most = count
        self._count = 0

    def add(self, prompt_tokens: float, requests: float, answer_tokens: float) -> None:
        """One more observation."""
        self._count = min(self._count + 1, self._most)
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / self._count
        self.requests += (requests - self.requests) / self._count
        self.answer_tokens += (answer_tokens - self.answer_tokens) / self._count


class Gaps:
    """The line through pairs of answers running and seconds between tokens, the newest of which count most."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, running: float, gap_s: float) -> None:
        """A worker was seen with so many answers."""
        self._weight += 1
        self._x += running
        self._y += gap_s
        self._xx += running * running
        self._xy += running * gap_s

    def forget(self) -> None:
        """An observation is over."""
        self._weight *= KEEP
        self._x *= KEEP
        self._y *= KEEP
        self._xx *= KEEP
        self._xy *= KEEP

    @property
    def line(self) -> Gap | None:
        """None while answers were too few or too much alike, or gaps do not grow with them."""
        if not self._weight:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance <= (SPREAD * x) ** 2:
            return None
        slope = (self._xy / self._weight - x * y) / variance
        if slope <= 0:
            return None
        alone = y - slope * x
        return Gap(alone, slope) if alone > 0 else Gap(0.0, y / x)
