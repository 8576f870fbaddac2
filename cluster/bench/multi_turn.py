"""`headwater bench multi-turn`: chats that grow turn by turn, with and without prefix reuse."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from cluster.bench.load import Run
from cluster.bench.report import Check, Figures, ratio
from cluster.bench.sides import NO_REUSE, REUSE
from cluster.bench.workload import Words, Work, Workload

MAX_FIRST_TOKEN_SHARE = 0.25
LATER = "median first token from turn two s"


@dataclass(frozen=True, slots=True)
class MultiTurn(Workload):
    """`chats` chats of `turns` turns behind one system prompt of `system` tokens, `concurrency` chats at a time. A
    turn is `user` new tokens and an answer of `output` tokens, which is part of the next turn's prompt."""

    chats: int
    turns: int
    system: int
    user: int
    output: int
    concurrency: int
    rounds: int

    def work(self, words: Words) -> Work:
        """The chats. Nothing is warmed up: the first turns bring the system prompt into the cache."""
        system = words(self.system)
        chats = [words.parts(self.turns, self.user) for _ in range(self.chats)]
        return Work([[system + first, *rest] for first, *rest in chats], self.output, self.concurrency)

    def figures(self, run: Run) -> Figures:
        """A run's figures, and the median first token of all turns but each chat's first."""
        later = [one.first_token_s for number, one in enumerate(run.timings) if number % self.turns]
        return {**run.figures(), LATER: median(later)}

    def checks(self, results: dict[str, Figures]) -> list[Check]:
        """The first token of the later turns."""
        name = "median first token from turn two against no reuse"
        return ratio(name, results, LATER, (REUSE, NO_REUSE), MAX_FIRST_TOKEN_SHARE, at_least=False)
