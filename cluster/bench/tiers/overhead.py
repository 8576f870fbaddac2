"""What tiers cost where nothing is ever found: throughput of different prompts with and without them."""

from __future__ import annotations

import time
from statistics import median

from cluster.bench.report import Check, Figures
from cluster.bench.tiers.shape import NONE, TIERS, Bench, Outcome, Sizes
from cluster.bench.workload import Words

MIN_SHARE = 0.97
OUTPUT, CONCURRENCY = 32, 8
HOST_ROUNDS, DISK_ROUNDS = 2, 3
"""Host memory and disk hold the prompts of so many rounds, so that both are full most of the time."""
SHARE = "of the throughput without"


def measure(bench: Bench) -> Outcome:
    """Rounds in turns, in the order of which the sides change places; what goes down is waited for, and counts."""
    shape, length = bench.shape, bench.shape.different + OUTPUT
    each = shape.requests * bench.blocks(length)
    plain = Sizes(length, each)
    tiered = Sizes(length, each, host=HOST_ROUNDS * each, disk=DISK_ROUNDS * each, guard=bench.tiers.guard)
    rounds: dict[str, list[float]] = {NONE: [], TIERS: []}
    with bench.engines(plain, tiered) as engines:
        sides = dict(zip(rounds, engines, strict=True))
        for number in range(-1, shape.rounds):
            prompts = Words(number, bench.model.vocab_size).parts(shape.requests, shape.different)
            for name in list(sides) if number % 2 else reversed(sides):
                begun = time.perf_counter()
                sides[name].serve(prompts, OUTPUT, CONCURRENCY)
                sides[name].rest()
                if number >= 0:
                    rounds[name].append(shape.requests * OUTPUT / (time.perf_counter() - begun))
    name = "different prompts: output tokens/s"
    results: dict[str, Figures] = {side: {name: median(some)} for side, some in rounds.items()}
    share = median(mine / other for mine, other in zip(rounds[TIERS], rounds[NONE], strict=True))
    results[TIERS][SHARE] = share
    return Outcome(results, [Check(f"different prompts: {SHARE}", share, "x", MIN_SHARE, at_least=True)])
