"""Gaps between the tokens of running answers, quiet and while much goes down."""

from __future__ import annotations

import os
import time
from statistics import median

import numpy as np

from cluster.bench.report import Check
from cluster.bench.tiers.engine import TieredEngine
from cluster.bench.tiers.shape import TIERS, Bench, Outcome, Sizes
from cluster.bench.workload import Words
from cluster.errors import UserError

MAX_GROWTH = 1.2
PROMPT = 64
"""Tokens of each answer's prompt."""
SETTLE_STEPS, MAX_STEPS = 8, 400
"""Steps of new answers that do not count, and after which they are begun anew: their context grows."""
MIN_STEPS = 16
ROUNDS = 2
"""Each takes hundreds of steps."""
SPARE = 1.25
"""Host memory and disk hold so many times what goes down in a round; later rounds push earlier ones out."""


def measure(bench: Bench) -> Outcome:
    """Rounds of new prefixes that become cached at once and go down to host memory and disk, each beside new answers;
    then as many steps of new answers with nothing else. What the system has still to write is waited for in between."""
    shape = bench.shape
    length = shape.prompt
    prefixes = max(1, round(shape.demoted / (bench.blocks(length) * bench.block_bytes)))
    cached = prefixes * bench.blocks(length)
    longest = max(length, PROMPT + SETTLE_STEPS + MAX_STEPS) + bench.worker.block_size
    device = cached + shape.streams * bench.blocks(longest)
    below = int(SPARE * cached) + 1
    quiet: list[float] = []
    demoting: list[float] = []
    times: list[float] = []
    with bench.engines(Sizes(longest, device, host=below, disk=below)) as (engine,):
        engine.engine.memory.flat.random_()  # zeros that were never written would be copied faster
        for number in range(ROUNDS):
            words = Words(number, bench.model.vocab_size)
            prompts = words.parts(shape.streams, PROMPT)
            gaps, seconds = _demoting(engine, prompts, words.parts(prefixes, length))
            alone = _quiet(engine, words.parts(shape.streams, PROMPT), len(gaps))
            demoting += gaps
            quiet += alone
            times.append(seconds)
    name = f"p99 gap of {shape.streams} answers"
    before, beside = (float(np.percentile(gaps, 99)) * 1000 for gaps in (quiet, demoting))
    results = {
        f"{name}, quiet: ms": before,
        f"{name}, demoting: ms": beside,
        "median gap, quiet: ms": median(quiet) * 1000,
        "median gap, demoting: ms": median(demoting) * 1000,
        "gaps while demoting": len(demoting),
        "demoted: MB": cached * bench.block_bytes / 1e6,
        "demotion: s": median(times),
    }
    return Outcome(
        {TIERS: results}, [Check(f"{name}, demoting against quiet", beside / before, "x", MAX_GROWTH, False)]
    )


def _demoting(engine: TieredEngine, prompts: list[list[int]], prefixes: list[list[int]]) -> tuple[list[float], float]:
    """Seconds of each step until all is down, and of all of it."""
    engine.forget()
    os.sync()
    before = engine.tier_stats
    ids = _answers(engine, prompts)
    for prefix in prefixes:
        engine.bring(prefix)
    gaps: list[float] = []
    begun = time.perf_counter()
    while not engine.at_rest or len(gaps) < MIN_STEPS:
        if len(gaps) % MAX_STEPS == MAX_STEPS - 1:
            engine.end(ids)
            ids = _answers(engine, prompts)
        gaps.append(_step_s(engine))
    seconds = time.perf_counter() - begun
    engine.end(ids)
    if engine.tier_stats.skipped > before.skipped:
        raise UserError("not everything went down")
    return gaps, seconds


def _quiet(engine: TieredEngine, prompts: list[list[int]], steps: int) -> list[float]:
    engine.forget()
    os.sync()
    gaps: list[float] = []
    while len(gaps) < steps:
        ids = _answers(engine, prompts)
        gaps += [_step_s(engine) for _ in range(min(steps - len(gaps), MAX_STEPS - 1))]
        engine.end(ids)
    return gaps


def _answers(engine: TieredEngine, prompts: list[list[int]]) -> list[str]:
    ids = engine.begin(prompts)
    for _ in range(SETTLE_STEPS):
        engine.step()
    return ids


def _step_s(engine: TieredEngine) -> float:
    begun = time.perf_counter()
    engine.step()
    return time.perf_counter() - begun
