"""The requests of a day: many in the afternoon and few at night, long prompts in the morning, long answers at night."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PEAK_TO_TROUGH = 5.0
BUSIEST, LONG_PROMPTS, LONG_ANSWERS = 14 / 24, 9 / 24, 20 / 24
"""When in a day most requests come, and when prompts and answers are longest."""
MIX = 0.5
"""Prompts and answers are by so much longer and shorter than on average."""
SIGMA = 0.6
"""Of the lognormal distribution of their lengths."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it comes, its prompt's tokens that no cache has, and the tokens of its answer."""

    arrival: float
    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Day:
    """What is drawn: a day of `hours`, and over the day on average so many requests a second with so many tokens."""

    hours: float = 24.0
    requests_s: float = 4.0
    prompt: int = 4000
    answer: int = 400
    seed: int = 0

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.hours * 3600

    def requests(self) -> list[Request]:
        """All requests in order of arrival: a Poisson process whose rate follows the hour, by thinning."""
        random = np.random.default_rng(self.seed)
        swing = (PEAK_TO_TROUGH - 1) / (PEAK_TO_TROUGH + 1)
        most = self.requests_s * (1 + swing)
        times = np.sort(random.uniform(0, self.seconds, random.poisson(most * self.seconds)))
        times = times[random.uniform(0, 1 + swing, len(times)) < self._curve(times, BUSIEST, swing)]
        prompts = self._lengths(random, self.prompt * self._curve(times, LONG_PROMPTS, MIX))
        answers = self._lengths(random, self.answer * self._curve(times, LONG_ANSWERS, MIX))
        return [Request(*request) for request in zip(times.tolist(), prompts.tolist(), answers.tolist(), strict=True)]

    def _curve(self, times: np.ndarray, top: float, swing: float) -> np.ndarray:
        return 1 + swing * np.cos(2 * np.pi * (times / self.seconds - top))

    def _lengths(self, random: np.random.Generator, means: np.ndarray) -> np.ndarray:
        factors = random.lognormal(-(SIGMA**2) / 2, SIGMA, len(means))
        return np.maximum(1, np.rint(means * factors)).astype(int)
