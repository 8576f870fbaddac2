"""First tokens behind what host memory or only the disk has, against computing all of it."""

from __future__ import annotations

from collections import defaultdict

from cluster.bench.report import Check, Figures, medians, ratio
from cluster.bench.tiers.engine import TieredEngine, drop_pages
from cluster.bench.tiers.shape import DISK, HOST, NONE, Bench, Outcome, Sizes
from cluster.bench.workload import Words

MAX_HOST, MAX_DISK = 0.25, 0.45
OWN = 8
"""Tokens of a prompt behind those that are found."""
SETTLE = 2
"""Rounds before those that count: first passes and first loads are slower, and at first nothing is only on disk."""
FROM_HOST, FROM_DISK = "blocks from host memory", "blocks from disk"


def measure(bench: Bench) -> Outcome:
    """Each round computes a new prompt on an engine without tiers; has it computed, and loaded again from host memory,
    on one with tiers; and loads there the prompt before, which host memory has lost since then."""
    shape, length = bench.shape, bench.shape.prompt + OWN
    blocks = bench.blocks(length)
    total = SETTLE + shape.rounds
    plain = Sizes(length + 1, 2 * blocks)
    tiered = Sizes(length + 1, 2 * blocks, host=blocks + blocks // 2, disk=total * blocks, guard=bench.tiers.guard)
    rounds: dict[str, list[Figures]] = defaultdict(list)
    with bench.engines(plain, tiered) as (without, engine):
        prompts = [Words(number, bench.model.vocab_size)(length) for number in range(total)]
        for number, prompt in enumerate(prompts):
            computed = {_first(shape.prompt): without.ask(prompt).first_s}
            without.forget()
            engine.ask(prompt)
            host = _hit(engine, prompt, shape.prompt)
            drop_pages(bench.path)
            disk = _hit(engine, prompts[max(0, number - 1)], shape.prompt)
            if number >= SETTLE:
                for side, figures in ((NONE, computed), (HOST, host), (DISK, disk)):
                    rounds[side].append(figures)
    results = {side: medians(some) for side, some in rounds.items()}
    return Outcome(results, checks_of(results, shape.prompt))


def checks_of(results: dict[str, Figures], tokens: int) -> list[Check]:
    """What the figures have to show."""
    name = f"first token of {tokens} against computing"
    checks: list[Check] = ratio(f"{name}, host hit", results, _first(tokens), (HOST, NONE), MAX_HOST, at_least=False)
    return checks + ratio(f"{name}, disk hit", results, _first(tokens), (DISK, NONE), MAX_DISK, at_least=False)


def _hit(engine: TieredEngine, prompt: list[int], tokens: int) -> Figures:
    """A first token while the device has nothing cached, and where what was found came from."""
    engine.forget()
    before = engine.tier_stats
    seconds = engine.ask(prompt).first_s
    engine.forget()
    after = engine.tier_stats
    read = after.read_blocks - before.read_blocks
    copied = after.loaded_blocks - before.loaded_blocks - read
    return {_first(tokens): seconds, FROM_HOST: copied, FROM_DISK: read}


def _first(tokens: int) -> str:
    return f"first token of {tokens}: s"
