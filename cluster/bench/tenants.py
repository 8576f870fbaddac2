"""`headwater bench tenants`: how long a quiet tenant waits beside one that sends ten times as much."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial

from rich.console import Console

from cluster.bench.load import Run, send, send_beside, single
from cluster.bench.report import Report, medians, ratio
from cluster.bench.sides import started
from cluster.bench.workload import Words
from cluster.config import ClusterConfig
from cluster.models import served_name

ALONE, BESIDE = "alone", "beside a loud tenant"
MAX_SLOWDOWN = 1.5


@dataclass(frozen=True, slots=True)
class Shape:
    """The quiet tenant sends `requests` prompts of `prompt` tokens one by one, `pause` seconds after each answer, and
    the loud one keeps `loud` under way; answers have `output` tokens, and all prompts are different. With too short a
    pause the quiet tenant wants more than half of the machine, and is not quiet."""

    requests: int
    prompt: int
    output: int
    loud: int
    pause: float
    rounds: int


def run(config: ClusterConfig, shape: Shape) -> Report:
    """Measure the quiet tenant alone and beside the loud one, in turns, on one cluster."""
    runs: dict[str, list[Run]] = {ALONE: [], BESIDE: []}
    with Console(stderr=True).status("measuring"), started({"tenants": config}) as sides:
        side = sides["tenants"]
        quiet, loud = replace(side.target, user="quiet"), replace(side.target, user="loud")
        for number in range(shape.rounds):
            words = Words(number, side.vocabulary)
            first, second = (single(words.parts(shape.requests, shape.prompt)) for _ in range(2))
            runs[ALONE].append(send(quiet, first, shape.output, concurrency=1))
            noise = partial(words, shape.prompt)
            runs[BESIDE].append(send_beside(quiet, second, shape.output, shape.pause, loud, noise, shape.loud))
    results = {name: medians([one.figures() for one in some]) for name, some in runs.items()}
    sizes = {**asdict(shape), "model": served_name(config.model.name)}
    name = "the quiet tenant's median first token, beside the loud one against alone"
    checks = ratio(name, results, "median first token s", (BESIDE, ALONE), MAX_SLOWDOWN, at_least=False)
    return Report(sizes, results, checks)
