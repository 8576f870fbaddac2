"""Conversations that come back again and again to a device that holds only two of them."""

from __future__ import annotations

import time

from cluster.bench.report import Figures, ratio
from cluster.bench.tiers.engine import TieredEngine
from cluster.bench.tiers.shape import NONE, TIERS, Bench, Outcome, Sizes
from cluster.bench.workload import Words

MAX_SHARE = 0.5
HELD = 2
"""Conversations that the device holds, and that are under way at a time."""


def measure(bench: Bench) -> Outcome:
    """Each side has its own conversations, with the answers that it gave. They take turns by rounds, each of which has
    every conversation once, in random order; what goes down is waited for, and counts."""
    shape = bench.shape
    length = shape.first + shape.turns * (shape.question + shape.output)
    blocks = bench.blocks(length)
    device, everything = HELD * blocks, shape.conversations * blocks
    plain, tiered = Sizes(length, device), Sizes(length, device, everything // 2, everything, bench.tiers.guard)
    words = Words(0, bench.model.vocab_size)
    beginnings = words.parts(shape.conversations, shape.first)
    seconds, cached = {NONE: 0.0, TIERS: 0.0}, {NONE: 0, TIERS: 0}
    with bench.engines(plain, tiered) as engines:
        for engine in engines:
            engine.serve(words.parts(HELD, shape.first), 1, HELD)  # the first passes are slower
            engine.forget()
        sides = {name: (one, [list(some) for some in beginnings]) for name, one in zip(seconds, engines, strict=True)}
        for number in range(shape.turns):
            order = words.random.sample(range(shape.conversations), shape.conversations)
            questions = words.parts(shape.conversations, shape.question)
            for name in list(sides) if number % 2 else reversed(sides):
                engine, chats = sides[name]
                for chat, question in zip(chats, questions, strict=True):
                    chat += question
                took, found = _round(engine, chats, order, shape.output)
                seconds[name] += took
                cached[name] += found
    total = f"{shape.conversations} conversations of {shape.turns} rounds: s"
    results: dict[str, Figures] = {
        name: {total: seconds[name], "their cached tokens": cached[name]} for name in seconds
    }
    checks = ratio(total.removesuffix(": s"), results, total, (TIERS, NONE), MAX_SHARE, at_least=False)
    return Outcome(results, checks)


def _round(engine: TieredEngine, chats: list[list[int]], order: list[int], output: int) -> tuple[float, int]:
    """One turn of every conversation: seconds, and how many of the prompts' tokens were cached."""
    begun = time.perf_counter()
    answers = engine.serve([chats[number] for number in order], output, HELD)
    engine.rest()
    seconds = time.perf_counter() - begun
    for number, answer in zip(order, answers, strict=True):
        chats[number] += answer.tokens
    return seconds, sum(answer.cached for answer in answers)
