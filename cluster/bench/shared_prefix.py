"""`headwater bench shared-prefix`: many requests behind one long prefix, with and without prefix reuse."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.bench.load import single
from cluster.bench.report import Check, Figures, ratio
from cluster.bench.sides import NO_REUSE, REUSE
from cluster.bench.workload import Words, Work, Workload

MIN_SPEEDUP = 4.1
MAX_FIRST_TOKEN_SHARE = 0.12
MIN_CACHED_SHARE = 0.90
"""What has been published for this kind of cache: 4.1 times the throughput, first token -88 %, 92 % cached."""


@dataclass(frozen=True, slots=True)
class SharedPrefix(Workload):
    """`requests` prompts of `prefix` shared + `query` own tokens, `output` tokens each."""

    prefix: int
    query: int
    output: int
    requests: int
    concurrency: int
    rounds: int

    def work(self, words: Words) -> Work:
        """The prompts to measure, behind one that brings the prefix into the cache."""
        prefix = words(self.prefix)
        first, *rest = [prefix + own for own in words.parts(self.requests + 1, self.query)]
        return Work(single(rest), self.output, self.concurrency, (first,))

    def checks(self, results: dict[str, Figures]) -> list[Check]:
        """Throughput, first token and cached share."""
        sides = (REUSE, NO_REUSE)
        share, first = "cached share of prompt tokens", "median first token against no reuse"
        return [
            Check(share, results[REUSE]["cached share"], "", MIN_CACHED_SHARE, at_least=True),
            *ratio("throughput against no reuse", results, "output tokens/s", sides, MIN_SPEEDUP, at_least=True),
            *ratio(first, results, "median first token s", sides, MAX_FIRST_TOKEN_SHARE, at_least=False),
        ]
