"""A pair of workers beside one worker with both roles, on the same work in turns; and the channel by itself."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import ray
from rich.console import Console

from cluster.bench.load import Target, Timing, send, send_into, single
from cluster.bench.report import Check, Figures, Report, ratio
from cluster.bench.sides import running
from cluster.bench.transfer import channel
from cluster.bench.transfer.channel import CHANNEL, MBYTES_S, PACED_MS, RAW, UNCHECKED
from cluster.bench.workload import Words
from cluster.config import BothConfig, ClusterConfig, DecodeConfig, PrefillConfig
from cluster.launch import Cluster
from cluster.models import served_name
from router.view import DECODE, PREFILL
from transfer.layout import KVLayout

PAIR, HANDING, BOTH_ROLES, PINNED = "pair", "pair that computes nothing on D", "both roles", "pair, a core each"
MIN_BANDWIDTH, MIN_HIDDEN, MAX_FIRST, MAX_SLOWER, MAX_GAP, MAX_CHECKS = 0.85, 0.9, 1.05, 1.05, 1.5, 0.03
MAX_WORST = 1.2
"""Of one cell; a few requests on a small machine differ by that much."""
SECOND_GAPS, SECOND_S = 1.5, 0.02
"""The second token of a handed-off answer comes within so many usual gaps and so many seconds more."""
LENGTHS, SHARES = (16, 64, 256, 1024, 4096), (0.0, 0.5, 0.9, 1.0)
TURN = (1000, 60)
"""Tokens of a chat's first prompt, and of what the second turn adds."""
LEAD_S = 5.0
"""How long streams run before a long prompt comes to disturb them."""
STREAM_PROMPT, STREAM_OUTPUT = 20, 600
FIRST, SECOND, GAP, HIDDEN = "median first token s", "median second token s", "median gap s", "hidden share"
SECOND_TURN = "second turn: blocks sent by P"
QUIET, DISTURBED = "p99 gap s, quiet", "p99 gap s, beside a prefill"


@dataclass(frozen=True, slots=True)
class Shape:
    """`prompt` tokens are handed over `rounds` times; in the grid, prompts of `lengths` tokens of which `shares` are
    cached are answered `rounds` times; both with `output` tokens. `streams` answers are disturbed by a prompt of `long`
    tokens."""

    prompt: int
    output: int
    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    streams: int
    long: int
    rounds: int


class _Side:
    """One cluster, and the words of its own that make its prompts unlike all others."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.target = Target(cluster.url, served_name(cluster.config.model.name))
        self.vocabulary = cluster.statuses()[0].vocab_size

    def ask(self, prompt: list[int], output: int) -> Timing:
        """One request."""
        return send(self.target, single([prompt]), output, concurrency=1).timings[0]

    def sent(self) -> tuple[int, int]:
        """Bytes that prefill workers have sent, and those of them that computing hid."""
        stats = [one.transfer for one in self.cluster.statuses() if one.role == PREFILL]
        return sum(one.sent_bytes for one in stats), sum(one.hidden_bytes for one in stats)


def run(config: ClusterConfig, shape: Shape) -> Report:
    """Measure everything; each comparison's sides in turns."""
    console = Console(stderr=True, highlight=False)
    handing = config.model_copy(update={"router": config.router.model_copy(update={"local_tokens": 0})})
    configs = {PAIR: _roles(config, 1, 0), HANDING: _roles(handing, 1, 0), BOTH_ROLES: _roles(config, 0, 1)}
    results: dict[str, Figures] = {name: {} for name in (PAIR, HANDING, BOTH_ROLES)}
    with running(configs) as clusters:
        sides = {name: _Side(one) for name, one in clusters.items()}
        layout = _layout(clusters[PAIR])
        console.print("hand-overs")
        _hand_overs(sides, shape, results)
        console.print("second turn of a chat")
        results[HANDING][SECOND_TURN] = _second_turn(sides[HANDING], shape) / layout.block_bytes
        for length, share in product(shape.lengths, shape.shares):
            console.print(f"{length} tokens, {share:.0%} cached")
            _cell(sides, length, share, shape, results)
        console.print("streams beside a prefill")
        results[BOTH_ROLES] |= _streams(sides[BOTH_ROLES], shape)
        pinned = _streams(sides[PAIR], shape) if _pin(clusters[PAIR]) else {}
    if pinned:
        results[PINNED] = pinned
    console.print("channel")
    results |= channel.measure(layout, -(-shape.prompt // layout.block_size), max(9, shape.rounds))
    checks = checks_of(results, shape, layout.block_size)
    notes = (
        [] if pinned else ["streams beside a prefill, left out: there are not two cores, or the answers end too soon"]
    )
    return Report({**asdict(shape), "model": served_name(config.model.name)}, results, checks, notes)


def _roles(config: ClusterConfig, pairs: int, both: int) -> ClusterConfig:
    roles = {"prefill": PrefillConfig(replicas=pairs), "decode": DecodeConfig(replicas=pairs)}
    return config.model_copy(update={**roles, "both": BothConfig(replicas=both)})


def _layout(cluster: Cluster) -> KVLayout:
    name = cluster.config.workers[0][0]
    return KVLayout.from_tuple(ray.get(cluster.worker(name).describe.remote(), timeout=10).layout)


def _hand_overs(sides: dict[str, _Side], shape: Shape, results: dict[str, Figures]) -> None:
    """Prompts that nobody has seen, on an idle machine."""
    timings: dict[str, list[Timing]] = {PAIR: [], BOTH_ROLES: []}
    before = sides[PAIR].sent()
    for number in range(shape.rounds + 1):
        words = Words(number, sides[PAIR].vocabulary)
        prompt = words(shape.prompt)
        for name, some in timings.items():
            timing = sides[name].ask(prompt, shape.output)
            if number:
                some.append(timing)
            else:  # the first ones open connections
                before = sides[PAIR].sent()
    for name, some in timings.items():
        results[name][FIRST] = median(one.first_token_s for one in some)
        results[name][SECOND] = median(one.gaps[0] for one in some)
        results[name][GAP] = median(gap for one in some for gap in one.gaps[1:])
    sent, hidden = (now - then for now, then in zip(sides[PAIR].sent(), before, strict=True))
    results[PAIR][HIDDEN] = hidden / sent


def _second_turn(side: _Side, shape: Shape) -> int:
    """Bytes that a prefill worker sends in the second turn of a chat."""
    first, more = TURN
    words = Words(1000, side.vocabulary)
    prompt = words(first)
    answer = side.ask(prompt, shape.output).answer
    before, _ = side.sent()
    side.ask([*prompt, *answer, *words(more)], shape.output)
    return side.sent()[0] - before


def _cell(sides: dict[str, _Side], length: int, share: float, shape: Shape, results: dict[str, Figures]) -> None:
    """Prompts of one length, of which a share is what an earlier answer has left in the caches."""
    seconds: dict[str, list[float]] = {PAIR: [], BOTH_ROLES: []}
    for number in range(shape.rounds):
        words = Words(hash((length, share, number)), sides[PAIR].vocabulary)
        cached = round(length * share)
        prompt = words(length)
        names = list(seconds) if number % 2 else list(reversed(seconds))
        for name in names:
            if cached:
                sides[name].ask(prompt[:cached], 1 + shape.output)
            seconds[name].append(sides[name].ask(prompt, shape.output).total_s)
    for name, some in seconds.items():
        results[name][_cell_name(length, share)] = median(some)


def _cell_name(length: int, share: float) -> str:
    return f"{length} tokens, {share:.0%} cached: s"


def _streams(side: _Side, shape: Shape) -> Figures:
    """Gaps between the tokens of running answers, before and while a long prompt is computed; none where the answers
    have ended before it comes."""
    words = Words(2000, side.vocabulary)
    prompts = words.parts(shape.streams, STREAM_PROMPT)
    streams, last, sent = send_into(side.target, prompts, STREAM_OUTPUT, LEAD_S, words(shape.long))
    quiet, disturbed = gaps(streams, sent, last.at[0])
    if not quiet or not disturbed:
        return {}
    return {QUIET: float(np.percentile(quiet, 99)), DISTURBED: float(np.percentile(disturbed, 99))}


def gaps(streams: list[Timing], sent: float, computed: float) -> tuple[list[float], list[float]]:
    """Those between tokens while all streams run and nothing else, and those that touch the time from `sent` to
    `computed`, on the clock of the timings."""
    begun = max(one.at[0] for one in streams)
    quiet, disturbed = [], []
    for one in streams:
        for earlier, later in pairwise(one.at):
            if begun <= earlier and later < sent:
                quiet.append(later - earlier)
            elif later > sent and earlier < computed:
                disturbed.append(later - earlier)
    return quiet, disturbed


def _pin(cluster: Cluster) -> bool:
    """Give prefill and decode worker a core each; False where there are not two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return False
    for status in cluster.statuses():
        for thread in Path(f"/proc/{status.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[status.role == DECODE]})
    return True


def checks_of(results: dict[str, Figures], shape: Shape, block_size: int) -> list[Check]:
    """What the figures have to show."""
    pair, both = results[PAIR], results[BOTH_ROLES]
    second = pair[SECOND] - SECOND_GAPS * pair[GAP]
    new_blocks = -(-TURN[1] // block_size) + 1
    slower = [pair[name] / both[name] for name in (_cell_name(*cell) for cell in product(shape.lengths, shape.shares))]
    checks = ratio("bandwidth against NIXL alone", results, MBYTES_S, (CHANNEL, RAW), MIN_BANDWIDTH, at_least=True)
    checks.append(
        Check("bytes on their way before the prompt is computed", pair[HIDDEN], "", MIN_HIDDEN, at_least=True)
    )
    checks += ratio("first token against both roles", results, FIRST, (PAIR, BOTH_ROLES), MAX_FIRST, at_least=False)
    checks.append(Check(f"second token beyond {SECOND_GAPS} gaps", second, "s", SECOND_S, at_least=False))
    sent = results[HANDING][SECOND_TURN]
    checks.append(Check("second turn: blocks sent by P", sent, "blocks", new_blocks, at_least=False))
    checks.append(Check("grid: time against both roles, mean", geometric_mean(slower), "x", MAX_SLOWER, at_least=False))
    checks.append(Check("grid: time against both roles, worst", max(slower), "x", MAX_WORST, at_least=False))
    if PINNED in results:
        grown = results[PINNED][DISTURBED] / results[PINNED][QUIET]
        checks.append(Check("p99 gap beside a prefill, a core each", grown, "x", MAX_GAP, at_least=False))
    cost = results[CHANNEL][PACED_MS] / results[UNCHECKED][PACED_MS] - 1
    checks.append(Check("what checks add to a transfer behind computation", cost, "", MAX_CHECKS, at_least=False))
    return checks
