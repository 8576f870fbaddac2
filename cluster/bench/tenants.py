"""`headwater bench tenants`: how long a quiet tenant waits beside one that sends ten times as much."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median

from rich.console import Console

from cluster.bench.load import Timing, send_beside, send_paused
from cluster.bench.report import Figures, Report, medians, ratio
from cluster.bench.sides import started
from cluster.bench.workload import Words
from cluster.config import ClusterConfig
from cluster.models import served_name

ALONE, BESIDE = "alone", "beside a loud tenant"
MAX_SLOWDOWN = 1.5
MEDIAN = "median first token s"


@dataclass(frozen=True, slots=True)
class Shape:
    """The quiet tenant sends `requests` prompts of `prompt` tokens one by one, with `pause` seconds between an answer
    and the next prompt, and the loud one keeps `loud` under way; answers have `output` tokens, and all prompts are
    different. With too short a pause the quiet tenant wants more than half of the machine, and is not quiet."""

    requests: int
    prompt: int
    output: int
    loud: int
    pause: float
    rounds: int


def run(config: ClusterConfig, shape: Shape) -> Report:
    """Measure the quiet tenant alone and beside the loud one, in turns, on one cluster."""
    rounds: dict[str, list[Figures]] = {ALONE: [], BESIDE: []}
    with Console(stderr=True).status("measuring"), started({"tenants": config}) as sides:
        side = sides["tenants"]
        quiet, loud = replace(side.target, user="quiet"), replace(side.target, user="loud")
        for number in range(shape.rounds):
            words = Words(number, side.vocabulary)
            first, second = (words.parts(shape.requests, shape.prompt) for _ in range(2))
            alone = send_paused(quiet, first, shape.output, shape.pause)
            noise = partial(words, shape.prompt)
            beside = send_beside(quiet, second, shape.output, shape.pause, loud, noise, shape.loud)
            rounds[ALONE].append(_figures(alone))
            rounds[BESIDE].append(_figures(beside))
    results = {name: medians(some) for name, some in rounds.items()}
    sizes = {**asdict(shape), "model": served_name(config.model.name)}
    name = "the quiet tenant's median first token, beside the loud one against alone"
    checks = ratio(name, results, MEDIAN, (BESIDE, ALONE), MAX_SLOWDOWN, at_least=False)
    return Report(sizes, results, checks)


def _figures(timings: list[Timing]) -> Figures:
    """First-token times only: pauses are most of the time, so that a throughput would say little."""
    times = [one.first_token_s for one in timings]
    return {MEDIAN: median(times), "worst first token s": max(times)}
