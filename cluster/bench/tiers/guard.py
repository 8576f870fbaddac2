"""The guard: first tokens over fetch speeds below and above that of computing, against loading always and never."""

from __future__ import annotations

from statistics import median

from cluster.bench.report import Check, Figures
from cluster.bench.tiers.engine import TieredEngine
from cluster.bench.tiers.shape import ALWAYS, NONE, TIERS, Bench, Outcome, Sizes
from cluster.bench.workload import Words

SPEEDS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Of loading, as multiples of that of computing."""
MAX_SLOWER = 1.05
OWN = 8
"""Tokens of a prompt behind those that are found."""
SETTLE = 3
"""Requests before those that count, of each speed: by then both speeds are known."""


def measure(bench: Bench) -> Outcome:
    """All three sides answer the same prompt, which the device has forgotten each time."""
    length = bench.shape.guarded + OWN
    prompt = Words(-1, bench.model.vocab_size)(length)
    device = 2 * bench.blocks(length)
    sides: dict[str, Figures] = {NONE: {}, TIERS: {}, ALWAYS: {}}
    checks: list[Check] = []
    with bench.engines(Sizes(length + 1, device)) as (never,):
        for speed in SPEEDS:
            block_s = bench.worker.block_size * _computing(bench, never, prompt) / length
            name = f"first token of {bench.shape.guarded}, loading at {speed:g} x: s"
            guarded = Sizes(length + 1, device, host=device, load_s=block_s / speed)
            always = Sizes(length + 1, device, host=device, load_s=block_s / speed, guard=False)
            with bench.engines(guarded, always) as engines:
                seconds = _in_turns([never, *engines], prompt, bench.shape.rounds, speed)
            for figures, value in zip(sides.values(), seconds, strict=True):
                figures[name] = value
            checks.append(check(speed, *seconds))
    return Outcome(sides, checks)


def check(speed: float, computed: float, guarded: float, loaded: float) -> Check:
    """The guard's time as a multiple of the better of the others."""
    name = f"guard against the better of always and never, loading at {speed:g} x"
    return Check(name, guarded / min(computed, loaded), "x", MAX_SLOWER, at_least=False)


def _computing(bench: Bench, engine: TieredEngine, prompt: list[int]) -> float:
    """The median first token of the last requests, when the meter claims a speed."""
    seconds: list[float] = []
    while len(seconds) < 2 * SETTLE or not bench.speeds.prompt_tokens_s:
        seconds.append(engine.ask(prompt).first_s)
        engine.forget()
    return median(seconds[-SETTLE:])


def _in_turns(engines: list[TieredEngine], prompt: list[int], rounds: int, speed: float) -> list[float]:
    """The median first token of each engine; the last one loads always. Where loading takes several times as long as
    computing, it does so once."""
    for engine in engines[1:]:
        for _ in range(1 + (SETTLE if speed >= 1 or engine is not engines[-1] else 1)):
            engine.ask(prompt)
            engine.forget()
    seconds: list[list[float]] = [[] for _ in engines]
    for number in range(rounds):
        for turn in range(len(engines)):
            place = (number + turn) % len(engines)
            if speed >= 1 or engines[place] is not engines[-1] or not seconds[place]:
                seconds[place].append(engines[place].ask(prompt).first_s)
                engines[place].forget()
    return [median(some) for some in seconds]
