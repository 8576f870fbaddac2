"""`headwater bench batch-eval`: an evaluation whose items share one long template, with and without prefix reuse."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.bench.load import single
from cluster.bench.report import Check, Figures, ratio
from cluster.bench.sides import NO_REUSE, REUSE
from cluster.bench.workload import Words, Work, Workload

MAX_TIME_SHARE = 0.28


@dataclass(frozen=True, slots=True)
class BatchEval(Workload):
    """`items` prompts of a shared `template` and an `item` of its own, with short answers of `output` tokens."""

    items: int
    template: int
    item: int
    output: int
    concurrency: int
    rounds: int

    def work(self, words: Words) -> Work:
        """All items. Nothing is warmed up: computing the template for the first time is part of an evaluation."""
        template = words(self.template)
        prompts = [template + own for own in words.parts(self.items, self.item)]
        return Work(single(prompts), self.output, self.concurrency)

    def checks(self, results: dict[str, Figures]) -> list[Check]:
        """The time that the whole evaluation takes."""
        name = "total time against no reuse"
        return ratio(name, results, "total s", (REUSE, NO_REUSE), MAX_TIME_SHARE, at_least=False)
