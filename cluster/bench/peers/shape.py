"""What is compared with the peers: the sizes, the names of the figures and the bounds."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.bench.engine import Shape as EngineShape
from cluster.bench.no_reuse_cost import NoReuseCost
from cluster.bench.peers.llama_cpp import REPETITIONS
from cluster.bench.report import Check, Figures, ratio
from cluster.bench.shared_prefix import SharedPrefix

HEADWATER, LLAMA, TRANSFORMERS = "headwater", "llama.cpp", "transformers"
TOKENS, FIRST = "output tokens/s", "median first token s"


@dataclass(frozen=True, slots=True)
class Shape:
    """`requests` prompts of `prefix` shared + `query` own tokens; `different` prompts of `prompt` tokens each;
    answers of `output` tokens, `concurrency` requests at a time; `steps` decode steps of the engine alone behind
    `context` tokens, of one stream and of `streams` that share them."""

    prefix: int
    query: int
    prompt: int
    output: int
    requests: int
    different: int
    concurrency: int
    context: int
    streams: int
    steps: int
    rounds: int

    @property
    def shared(self) -> SharedPrefix:
        """The serving work with a shared prefix, one round."""
        return SharedPrefix(self.prefix, self.query, self.output, self.requests, self.concurrency, 1)

    @property
    def unshared(self) -> NoReuseCost:
        """The serving work of prompts that are all different, one round."""
        return NoReuseCost(self.different, self.prompt, self.output, self.concurrency, 1)

    @property
    def engine(self) -> EngineShape:
        """The work of engines alone, as often as llama-bench repeats it."""
        return EngineShape(self.context, self.streams, self.steps, REPETITIONS)

    def of_shared(self, figure: str) -> str:
        """Name of a figure of the shared work."""
        return f"{self.requests} behind a prefix: {figure}"

    def of_unshared(self, figure: str) -> str:
        """Name of a figure of the work with different prompts."""
        return f"{self.different} different: {figure}"

    def checks(self, results: dict[str, Figures]) -> list[Check]:
        """What is checked of the figures that are there."""
        llama, transformers = (HEADWATER, LLAMA), (HEADWATER, TRANSFORMERS)
        bounds = [
            (self.of_shared(TOKENS), llama, 3.0, True),
            (self.of_shared(FIRST), llama, 0.25, False),
            (self.engine.decode(self.streams, "tokens/s"), llama, 1.8, True),
            (self.engine.decode(1, "tokens/s"), llama, 0.5, True),
            (self.engine.prefill, llama, 1.5, True),
            (self.of_unshared(TOKENS), llama, 1.6, True),
            (self.of_shared(TOKENS), transformers, 15.0, True),
        ]
        checks: list[Check] = []
        for figure, sides, bound, at_least in bounds:
            checks += ratio(f"{figure}, against {sides[1]}", results, figure, sides, bound, at_least)
        return checks


def with_ratios(results: dict[str, Figures]) -> dict[str, Figures]:
    """The sides that have figures, each peer followed by Headwater's as multiples of its own."""
    mine = results[HEADWATER]
    table = {HEADWATER: mine}
    for peer in (LLAMA, TRANSFORMERS):
        if theirs := results.get(peer):
            table[peer] = theirs
            table[f"{HEADWATER} / {peer}"] = {
                name: mine[name] / value for name, value in theirs.items() if name in mine
            }
    return table
