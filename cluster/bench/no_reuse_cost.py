"""`headwater bench no-reuse-cost`: what the prefix cache costs where it can bring nothing."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.bench.load import single
from cluster.bench.report import Check, Figures, ratio
from cluster.bench.sides import NO_REUSE, REUSE
from cluster.bench.workload import Words, Work, Workload

MIN_THROUGHPUT_SHARE = 0.98


@dataclass(frozen=True, slots=True)
class NoReuseCost(Workload):
    """`requests` prompts of `prompt` tokens, all different, in every one of `rounds` rounds."""

    requests: int
    prompt: int
    output: int
    concurrency: int
    rounds: int

    def work(self, words: Words) -> Work:
        """The prompts, behind one that opens connections."""
        first, *prompts = words.parts(self.requests + 1, self.prompt)
        return Work(single(prompts), self.output, self.concurrency, (first,))

    def checks(self, results: dict[str, Figures]) -> list[Check]:
        """Throughput, as the medians of the rounds."""
        name = "throughput with the cache against without"
        return ratio(name, results, "output tokens/s", (REUSE, NO_REUSE), MIN_THROUGHPUT_SHARE, at_least=True)
