"""A workload: what both sides of a comparison do, made of random token ids, and what its figures have to show."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from cluster.bench.load import Chat, Run
from cluster.bench.report import Check, Figures


class Words:
    """Draws token ids. The same seed gives every side of a comparison the same prompts; other seeds share nothing."""

    def __init__(self, seed: int | str, vocabulary: int) -> None:
        self.random = random.Random(seed)
        self._vocabulary = vocabulary

    def __call__(self, count: int) -> list[int]:
        """The next `count` ids."""
        return [self.random.randrange(self._vocabulary) for _ in range(count)]

    def parts(self, number: int, count: int) -> list[list[int]]:
        """`number` parts of `count` ids each."""
        return [self(count) for _ in range(number)]


@dataclass(frozen=True, slots=True)
class Work:
    """What every side does in one round. `warm_up` is sent first, one after another, and is not measured."""

    chats: list[Chat]
    output: int
    concurrency: int
    warm_up: tuple[list[int], ...] = ()

    @property
    def requests(self) -> int:
        """Number of requests, those of the warm-up included."""
        return len(self.warm_up) + sum(len(chat) for chat in self.chats)


class Workload(ABC):
    """A kind of work and its sizes; its subclasses are frozen dataclasses of numbers."""

    __slots__ = ()

    rounds: int

    @abstractmethod
    def work(self, words: Words) -> Work:
        """One round's work."""

    @abstractmethod
    def checks(self, results: dict[str, Figures]) -> list[Check]:
        """What the figures of the sides have to show."""

    def figures(self, run: Run) -> Figures:
        """What is reported of a run."""
        return run.figures()
