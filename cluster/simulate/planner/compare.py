"""A day with a planner beside the same day with every fixed split of workers that could serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from math import ceil

import numpy as np

from cluster.bench.report import Check, Figures, Report
from cluster.errors import UserError
from cluster.planner import Add, PlannerConfig, Remove, Role
from cluster.simulate.planner.day import Day, Request
from cluster.simulate.planner.fleet import CHANGE_S, START_S
from cluster.simulate.planner.run import Outcome, play
from cluster.simulate.planner.worker import ALONE_S, ANSWER_S, PROMPT_TOKENS_S

ENOUGH = 0.95
"""The share of requests that are to meet both targets."""
MAX_SHARE = 0.8
"""The planner's worker-hours are to be no more than this share of those of the best fixed split."""
TOO_MUCH = 1.1
"""A split that has so many times what it can do to do, in some twenty-fourth of the day, cannot serve."""
TARGETS = PlannerConfig(mode="scale", first_token_s=5.0, token_gap_s=0.05, max_workers=128)
START: dict[Role, int] = {"prefill": 2, "decode": 2}
"""The planner's workers at first."""


def compare(day: Day) -> Report:
    """Play a day with the planner, which may start and stop workers; with fixed splits of more and more workers until
    one meets the targets; and with a planner that may only change roles, of fewer and fewer workers until they do not.
    Raises UserError where no number of workers could meet the targets."""
    requests = day.requests()
    _check_possible(day, requests)
    results = {"planner": _figures(play(requests, START, TARGETS, day.seed))}
    least = least_workers(requests, day.seconds)
    for total in count(sum(least)):
        splits = [(total - decode, decode) for decode in range(least[1], total - least[0] + 1)]
        sides = {f"{prefill}+{decode}": _fixed(requests, prefill, decode) for prefill, decode in splits}
        results |= sides
        if any(side["met"] >= ENOUGH for side in sides.values()):
            break
    for workers in range(total, 1, -1):
        results[f"roles {workers}"] = side = _roles(requests, workers, day.seed)
        if side["met"] < ENOUGH:
            break
    model = {"prompt_tokens_s": PROMPT_TOKENS_S, "alone_s": ALONE_S, "answer_s": ANSWER_S}
    times = {"start_s": START_S, "change_s": CHANGE_S}
    config = asdict(day) | {"drawn": len(requests)} | model | times | TARGETS.model_dump()
    return Report(config, results, checks(results))


def least_workers(requests: Sequence[Request], seconds: float) -> tuple[int, int]:
    """How many prefill and decode workers there are at least in a fixed split that could serve: with fewer, some
    twenty-fourth of the day has far more to do than they can within the targets."""
    edges = np.linspace(0, seconds, 25)
    arrivals = [one.arrival for one in requests]
    answer_tokens_s = (TARGETS.token_gap_s - ALONE_S) / ANSWER_S / TARGETS.token_gap_s
    needed = []
    for tokens, speed in (
        ([one.prompt for one in requests], PROMPT_TOKENS_S),
        ([one.answer for one in requests], answer_tokens_s),
    ):
        most = np.histogram(arrivals, edges, weights=tokens)[0].max() / (seconds / 24)
        needed.append(max(1, ceil(most / speed / TOO_MUCH)))
    return needed[0], needed[1]


def checks(results: dict[str, Figures]) -> list[Check]:
    """That the planner meets the targets, with how many worker-hours, and that nobody loses a request."""
    planner = results["planner"]
    fixed = [side["worker_hours"] for name, side in results.items() if "+" in name and side["met"] >= ENOUGH]
    return [
        Check("requests within both targets", planner["met"], "", ENOUGH, True),
        Check(
            "worker-hours, share of the best fixed split", planner["worker_hours"] / min(fixed), "", MAX_SHARE, False
        ),
        Check("requests lost, all sides", sum(side["lost"] for side in results.values()), "", 0, False),
    ]


def _check_possible(day: Day, requests: Sequence[Request]) -> None:
    alone = np.array([one.prompt for one in requests]) / PROMPT_TOKENS_S
    share = float((alone <= TARGETS.first_token_s).mean())
    if share < ENOUGH:
        met = f"{share:.0%} of prompts are computed within {TARGETS.first_token_s:g} s even alone"
        raise UserError(f"--prompt {day.prompt}: only {met}, {ENOUGH:.0%} are needed")


def _fixed(requests: Sequence[Request], prefill: int, decode: int) -> Figures:
    return _figures(play(requests, {"prefill": prefill, "decode": decode}))


def _roles(requests: Sequence[Request], workers: int, seed: int) -> Figures:
    split: dict[Role, int] = {"prefill": workers - workers // 2, "decode": workers // 2}
    return _figures(play(requests, split, TARGETS.model_copy(update={"mode": "roles"}), seed))


def _figures(outcome: Outcome) -> Figures:
    """Quantiles are of the requests that were not lost."""
    first, gap = (np.nanpercentile(values, 95) for values in (outcome.first_s, outcome.gap_s))
    changes = [change for _, change in outcome.changes]
    started, stopped = (sum(isinstance(change, kind) for change in changes) for kind in (Add, Remove))
    return {
        "met": outcome.met(TARGETS.first_token_s, TARGETS.token_gap_s),
        "worker_hours": outcome.worker_hours,
        "first_p95_s": float(first),
        "gap_p95_s": float(gap),
        "lost": float(outcome.lost),
        "moved": float(len(changes) - started - stopped),
        "started": float(started),
        "stopped": float(stopped),
    }
