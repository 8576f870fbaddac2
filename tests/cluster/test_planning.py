"""What the planner is shown of a cluster, and that what it answers is done."""

import time
from dataclasses import replace

import pytest

from cluster.planner import Move, PlannerConfig, Seen
from cluster.planning import Change, Counts, Planning, observed
from cluster.simulate.status import stand_in
from transfer.messages import CacheStats, Speeds, WorkerSpec, WorkerStatus

SPECS = [WorkerSpec("p0", "prefill"), WorkerSpec("p1", "prefill"), WorkerSpec("d0", "decode"), WorkerSpec("b0", "both")]


def said(name: str, role: str, computed: int = 0, requests: int = 0, **more: object) -> WorkerStatus:
    speeds = Speeds(prompt_tokens_s=1000.0, gap_s=0.02, answers=5)
    cache = CacheStats(requests=requests, prompt_tokens=computed + 100, cached_tokens=100)
    return replace(stand_in(name, role, speeds, 1), cache=cache, **more)  # type: ignore[arg-type]


def test_workers_are_shown_as_they_are_and_counts_as_they_grow() -> None:
    counts = Counts()
    first = [said("p0", "prefill", 5000, 10, queued_tokens=700), said("d0", "decode", 900, 7, running=5)]
    shown = observed(SPECS, first, counts)
    assert (shown.prompt_tokens, shown.requests) == (0, 0)  # what was before nobody knows
    assert shown.workers == (
        Seen("p0", "prefill", True, 700, 1000.0, 0, 0.02),
        Seen("p1", "prefill", ready=False),
        Seen("d0", "decode", True, 0, 1000.0, 5, 0.02),
    )
    more = [said("p0", "prefill", 9000, 30), said("p1", "prefill", 300, 1), said("d0", "decode", 950, 40)]
    shown = observed(SPECS, more, counts)
    assert (shown.prompt_tokens, shown.requests) == (4300, 33)
    again = [said("p0", "prefill", 100, 2, incarnation=9), more[1], more[2], said("b0", "both", 10**6, 10**6)]
    shown = observed(SPECS, again, counts)
    assert (shown.prompt_tokens, shown.requests) == (100, 2)  # another life counts from nothing


def test_one_that_leaves_is_not_shown() -> None:
    specs = [replace(SPECS[0], leaving=True), *SPECS[1:]]
    assert [one.name for one in observed(specs, [said("p0", "prefill")], Counts()).workers] == ["p1", "d0"]


@pytest.mark.parametrize(("mode", "moves"), [("roles", True), ("off", False)])
def test_what_the_planner_wants_is_done(mode: str, moves: bool) -> None:
    """Three prefill workers idle, and the only decode worker is far too slow."""
    specs = [*(WorkerSpec(f"p{number}", "prefill") for number in range(3)), WorkerSpec("d0", "decode")]
    done: list[Change] = []
    looks = 0

    def look() -> tuple[list[WorkerSpec], list[WorkerStatus]]:
        nonlocal looks
        looks += 1
        answers = 30 + looks % 30
        speeds = Speeds(1000.0, gap_s=0.02 + 0.008 * answers, answers=answers)
        slow = replace(said("d0", "decode", requests=20 * looks, running=answers), speeds=speeds)
        return specs, [*(said(f"p{number}", "prefill", looks // 20, looks) for number in range(3)), slow]

    config = PlannerConfig(mode=mode, interval_s=0.01, token_gap_s=0.05, remove_after_s=0.1)  # type: ignore[arg-type]
    planning = Planning(config, look, done.append)
    planning.start()
    until = time.monotonic() + (5.0 if moves else 0.3)
    while not done and time.monotonic() < until:
        time.sleep(0.01)
    planning.stop()
    assert bool(done) == moves, planning.why
    assert all(isinstance(one, Move) and one.role == "decode" for one in done)
    assert bool(planning.why) == moves
