"""`headwater bench rag`: questions over shared documents, with and without prefix reuse.

The cache reuses beginnings only. A prompt is instruction, documents, question; a document is found again only where
the same ones precede it. So their order matters. Here it is that of a fixed rank, as from a retriever that sorts by a
score of the document itself: popular documents come first. With an order that differs from question to question,
little beyond the instruction and the first document would be found.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from cluster.bench.load import single
from cluster.bench.report import Check, Figures, ratio
from cluster.bench.sides import NO_REUSE, REUSE
from cluster.bench.workload import Words, Work, Workload

MIN_SPEEDUP = 2.8


@dataclass(frozen=True, slots=True)
class Rag(Workload):
    """`requests` prompts of an `instruction`, `retrieved` of `documents` documents of `document` tokens each, and a
    `question` of its own. The document of rank r is drawn with a weight of 1 / r ** `zipf`."""

    requests: int
    instruction: int
    documents: int
    document: int
    retrieved: int
    question: int
    output: int
    zipf: float
    concurrency: int
    rounds: int

    def work(self, words: Words) -> Work:
        """The prompts. Nothing is warmed up: a combination of documents is computed when it first comes."""
        instruction, documents = words(self.instruction), words.parts(self.documents, self.document)
        prompts = []
        for _ in range(self.requests):
            found = [token for rank in self._retrieve(words.random) for token in documents[rank]]
            prompts.append(instruction + found + words(self.question))
        return Work(single(prompts), self.output, self.concurrency)

    def checks(self, results: dict[str, Figures]) -> list[Check]:
        """Throughput; all answers are equally long."""
        name = "throughput against no reuse"
        return ratio(name, results, "output tokens/s", (REUSE, NO_REUSE), MIN_SPEEDUP, at_least=True)

    def _retrieve(self, random: Random) -> list[int]:
        """Positions of one question's documents, all different, the most popular first."""
        ranks = range(self.documents)
        weights = [1 / (rank + 1) ** self.zipf for rank in ranks]
        chosen: set[int] = set()
        while len(chosen) < self.retrieved:
            chosen.update(random.choices(ranks, weights))
        return sorted(chosen)
