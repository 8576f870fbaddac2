"""Who is prefill and who decode: soon more, late less, within bounds, and nobody moves while the load stays."""

from dataclasses import dataclass, field, replace
from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.planner import (
    ADD_AFTER,
    MAX_PATIENCE,
    ROLES,
    Add,
    Move,
    Observation,
    Plan,
    Planner,
    PlannerConfig,
    Remove,
    Role,
    Seen,
)
from cluster.sizing import Gap, Gaps, prefill_workers

SPEED = 1000.0
LINE = Gap(0.02, 0.001)
PROMPT = 500


def config(mode: str = "scale", **settings: float) -> PlannerConfig:
    times = {"first_token_s": 2.0, "token_gap_s": 0.05, "interval_s": 10.0, "remove_after_s": 100.0, "hold_s": 200.0}
    return PlannerConfig.model_validate({"mode": mode, **times, **settings})


@dataclass
class Cluster:
    """Workers that do at once what the planner wants, under a load: queues grow by what cannot be computed, and
    batches are as large as makes their gaps right. Who is added or moved is not ready for `slow` observations."""

    planner: Planner
    names: dict[str, Role]
    slow: int = 0
    now: float = 0.0
    queued: float = 0.0
    noise: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))
    changes: list[tuple[float, Move | Add | Remove]] = field(default_factory=list)
    busy: dict[str, int] = field(default_factory=dict)
    started: int = 0

    def have(self, role: Role) -> int:
        return sum(one == role for one in self.names.values())

    def ready(self, role: Role) -> list[str]:
        return [name for name, one in self.names.items() if one == role and not self.busy.get(name)]

    def observe(self, prompt_tokens_s: float, answer_tokens_s: float, seconds: float = 10.0) -> Plan:
        self.now += seconds
        prompt_tokens_s, answer_tokens_s = (self.varied(load) for load in (prompt_tokens_s, answer_tokens_s))
        arrived = round(prompt_tokens_s * seconds)
        able = len(self.ready("prefill")) * SPEED * seconds
        self.queued = max(0.0, self.queued + arrived - able)
        observation = Observation(
            tuple(self.seen(name, answer_tokens_s) for name in self.names), arrived, arrived // PROMPT
        )
        plan = self.planner.plan(observation, self.now)
        self.busy = {name: left - 1 for name, left in self.busy.items() if left}
        self.do(plan.change)
        return plan

    def run(self, prompt_tokens_s: float, answer_tokens_s: float, observations: int) -> list[Plan]:
        return [self.observe(prompt_tokens_s, answer_tokens_s) for _ in range(observations)]

    def seen(self, name: str, answer_tokens_s: float) -> Seen:
        role = self.names[name]
        if self.busy.get(name):
            return Seen(name, role, ready=False)
        if role == "prefill":
            return Seen(name, role, True, round(self.queued / len(self.ready(role))), SPEED)
        # So many answers that their tokens come as fast as the load wants them: running = load × gap(running).
        load = min(answer_tokens_s / len(self.ready(role)), 0.9 / LINE.answer_s)
        running = round(load * LINE.alone_s / (1 - load * LINE.answer_s))
        return Seen(name, role, True, 0, 0.0, running, self.varied(LINE.alone_s + LINE.answer_s * running))

    def varied(self, value: float) -> float:
        return value * self.random.uniform(1 - self.noise, 1 + self.noise)

    def do(self, change: Move | Add | Remove | None) -> None:
        if change is None:
            return
        self.changes.append((self.now, change))
        if isinstance(change, Remove):
            del self.names[change.worker]
            return
        name = change.worker if isinstance(change, Move) else f"new{self.started}"
        self.started += isinstance(change, Add)
        self.names[name] = change.role
        if self.slow:
            self.busy[name] = self.slow


def cluster(prefill: int, decode: int, settings: PlannerConfig, slow: int = 0, prompt_tokens_s: float = 300) -> Cluster:
    names: dict[str, Role] = {f"p{number}": "prefill" for number in range(prefill)}
    made = Cluster(Planner(settings), names | {f"d{number}": "decode" for number in range(decode)}, slow)
    # Batches of several sizes, from which the planner learns how gaps grow.
    for load in (100, 200, 300, 400):
        made.observe(prompt_tokens_s, load * decode)
    made.changes.clear()
    return made


# The configuration


@pytest.mark.parametrize("key", ["first_token_s", "token_gap_s", "interval_s"])
@pytest.mark.parametrize("value", [0, -1, nan, inf])
def test_targets_that_cannot_be_are_named(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        config(**{key: value})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_workers": 5, "max_workers": 4}, "min_workers is 5 and max_workers 4"),
        ({"min_workers": 1}, "min_workers"),
        ({"hold_s": -1}, "hold_s"),
        ({"remove_after_s": -1}, "remove_after_s"),
        ({"workers": 3}, "workers"),
        ({"mode": "auto"}, "mode"),
    ],
)
def test_other_settings_that_cannot_be_are_named(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PlannerConfig.model_validate(settings)


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert PlannerConfig().mode == "off"
    made = Cluster(Planner(PlannerConfig()), {"p0": "prefill", "d0": "decode"})
    plans = made.run(5000, 5000, 50)
    assert {(plan.change, plan.prefill, plan.decode, plan.why) for plan in plans} == {
        (None, 1, 1, "planner.mode is off")
    }


# How many workers


def test_prefill_workers_are_those_of_erlangs_formula() -> None:
    """From tables: with a load of 2, of 3 servers 44.4 % wait, of 4 17.4 %, of 5 5.97 %, of 6 1.8 %."""
    assert prefill_workers(2000, SPEED, 1000, 1.0 + 1e-9, 100) == 5  # waits of 0.1 s: 0.0597 × exp(-3 × 0.1) = 0.044
    assert prefill_workers(2000, SPEED, 1000, 2.0, 100) == 4  # 0.174 × exp(-2 × 1) = 0.024; 3: 0.444 × exp(-1) = 0.16
    assert prefill_workers(2000, SPEED, 1000, 5.0, 100) == 3  # 0.444 × exp(-4) = 0.008
    assert prefill_workers(10, SPEED, 10, 2.0, 100) == 1
    assert prefill_workers(1e9, SPEED, 1000, 2.0, 100) == 100


@given(st.floats(1, 50_000), st.floats(10, 10_000), st.floats(0.1, 60))
def test_more_load_needs_no_fewer_prefill_workers_and_more_than_it_keeps_busy(
    tokens_s: float, prompt: float, target_s: float
) -> None:
    workers = prefill_workers(tokens_s, SPEED, prompt, target_s, 1000)
    assert workers > tokens_s / SPEED
    assert prefill_workers(1.3 * tokens_s, SPEED, prompt, target_s, 1000) >= workers
    assert prefill_workers(tokens_s, SPEED, prompt, 2 * target_s, 1000) <= workers


def test_decode_workers_follow_the_line() -> None:
    assert LINE.answers(0.05) == pytest.approx(30)
    # 2,000 tokens a second within 0.05 s are 100 answers, and 16.5 more in one case of twenty.
    assert LINE.workers(2000, 0.05) == pytest.approx(116.5 / 30)


def test_the_line_is_found_in_measurements_and_newest_count_most() -> None:
    draw, gaps = Random(1), Gaps()
    for alone_s in (0.5, 0.02):
        for _ in range(800):
            running = draw.randrange(1, 40)
            gaps.add(running, (alone_s + 0.001 * running) * draw.gauss(1, 0.05))
            gaps.forget()
    line = gaps.line
    assert line is not None
    assert line.alone_s == pytest.approx(0.02, rel=0.2)
    assert line.answer_s == pytest.approx(0.001, rel=0.2)


def test_no_line_through_answers_that_are_alike_or_gaps_that_do_not_grow() -> None:
    alike, falling = Gaps(), Gaps()
    for number in range(100):
        alike.add(20 + number % 2, 0.03 + 0.01 * (number % 2))
        falling.add(number, 0.1 - 0.0005 * number)
    assert Gaps().line is None
    assert alike.line is None
    assert falling.line is None


def test_gaps_never_cost_less_than_nothing_alone() -> None:
    gaps = Gaps()
    for running in range(1, 20):
        gaps.add(running, 0.001 * running**2)
    line = gaps.line
    assert line is not None
    assert line.alone_s == 0.0
    assert line.answer_s > 0


# What is done


def test_a_role_that_is_short_gets_a_worker_soon_but_not_for_one_observation() -> None:
    made = cluster(2, 2, config())
    made.queued = 50_000
    assert made.observe(300, 400).prefill > 2
    made.queued = 0
    made.run(300, 400, 4)
    assert made.changes == []
    plans = made.run(3500, 400, 12)
    adds = [plan for plan in plans if plan.change == Add("prefill")]
    assert len(adds) >= 2
    first = plans.index(adds[0])
    assert [plan.prefill > 2 for plan in plans[: first + 1]].count(True) == ADD_AFTER
    assert adds[0].why.startswith("one more prefill worker; prefill needs 5, has 2: 1050 prompt tokens/s and")


def test_decode_grows_with_the_answers() -> None:
    made = cluster(1, 1, config())
    plans = made.run(100, 2000, 80)
    assert made.have("decode") == plans[-1].decode >= 4
    assert made.have("prefill") == 1


def test_a_worker_is_given_up_late_and_one_after_another() -> None:
    made = cluster(3, 1, config())
    made.run(100, 300, 60)
    removed = [(when, change) for when, change in made.changes if isinstance(change, Remove)]
    assert len(removed) == len(made.changes) == 2
    assert (made.have("prefill"), made.have("decode")) == (1, 1)
    assert removed[0][0] >= 100
    assert removed[1][0] - removed[0][0] >= 100


def test_nobody_is_given_up_without_room() -> None:
    """Two workers would do for what there is, but not for 15 % more."""
    made = cluster(3, 1, config(first_token_s=4.0), prompt_tokens_s=1520)
    plans = made.run(1520, 300, 60)
    assert {plan.prefill for plan in plans[-30:]} == {2}
    assert made.changes == []
    made.run(1150, 300, 60)
    assert [type(change) for _, change in made.changes] == [Remove]


def test_roles_move_and_no_worker_starts_or_stops() -> None:
    made = cluster(3, 3, config("roles"))
    made.run(4200, 300, 60)
    assert (made.have("prefill"), made.have("decode")) == (5, 1)
    assert {type(change) for _, change in made.changes} == {Move}
    plans = made.run(300, 2400, 120)
    assert (made.have("prefill"), made.have("decode")) == (1, 5)
    assert "needs" in plans[-1].why


def test_scale_takes_a_spare_worker_of_the_other_role_rather_than_a_new_one() -> None:
    made = cluster(3, 3, config(min_workers=6))
    made.run(300, 300, 20)
    assert made.changes == []
    plan = next(plan for plan in made.run(3000, 300, 20) if plan.change)
    assert plan.change == Move("d0", "prefill")
    assert plan.why.startswith("d0 becomes prefill; prefill needs 4, has 3: ")


def test_a_worker_with_little_to_finish_is_taken() -> None:
    made = Planner(config())
    idle = Seen("p2", "prefill", True, 10, SPEED)
    workers = (
        Seen("p1", "prefill", True, 90, SPEED),
        idle,
        Seen("p3", "prefill", True, 40, SPEED),
        Seen("d1", "decode"),
    )
    changes = [made.plan(Observation(workers, 1000, 2), 10.0 * number).change for number in range(13)]
    assert [change for change in changes if change] == [Remove("p2")] * len([change for change in changes if change])
    assert changes[-1] == Remove("p2")


def test_a_worker_that_was_moved_stays_for_the_hold_time() -> None:
    made = cluster(1, 3, config("roles", remove_after_s=0, hold_s=1000))
    made.run(2000, 100, 20)
    moves = [change for _, change in made.changes]
    assert moves == [Move("d0", "prefill"), Move("d1", "prefill")]
    made.queued = 0
    made.run(10, 1800, 200)
    (moved_at, _), _, (first_at, first), (second_at, second) = made.changes
    assert (first, second) == (Move("p0", "decode"), Move("d0", "decode"))
    assert first_at < moved_at + 1000 <= second_at


def test_at_most_max_workers_and_at_least_min_workers() -> None:
    made = cluster(2, 2, config(max_workers=6, min_workers=4))
    plans = made.run(9000, 9000, 100)
    assert len(made.names) == 6
    assert plans[-1].prefill > made.have("prefill")
    assert plans[-1].change is None
    assert plans[-1].why.startswith("max_workers is 6, no ")
    made.queued = 0
    made.run(1, 1, 300)
    assert len(made.names) == 4
    few = cluster(1, 1, config(min_workers=4))
    few.run(1, 1, 10)
    assert len(few.names) == 4


@pytest.mark.parametrize("mode", ["roles", "scale"])
@pytest.mark.parametrize("prompt_tokens_s", [100, 9000])
def test_a_role_that_nobody_has_gets_a_worker_even_from_one_that_has_too_few(mode: str, prompt_tokens_s: float) -> None:
    made = Cluster(Planner(config(mode, max_workers=2)), {"p0": "prefill", "p1": "prefill"})
    made.run(prompt_tokens_s, 0, 4)
    assert (made.have("prefill"), made.have("decode")) == (1, 1)


def test_the_last_ready_worker_of_a_role_stays_while_others_start() -> None:
    planner = Planner(config(remove_after_s=0))
    workers = (
        Seen("p1", "prefill", True, 0, SPEED),
        Seen("p2", "prefill", ready=False),
        Seen("p3", "prefill", ready=False),
        Seen("d1", "decode"),
    )
    for number in range(100):
        assert planner.plan(Observation(workers, 10, 1), 10.0 * number).change is None


def test_what_starts_counts_as_there() -> None:
    """While workers start, the queue grows; still no more of them are started than the load needs."""
    quick, slow = (cluster(1, 1, config(), slow=number) for number in (0, 6))
    for made in (quick, slow):
        made.run(4000, 100, 200)
    assert quick.have("prefill") == slow.have("prefill")
    assert sum(isinstance(change, Add) for _, change in slow.changes) <= quick.have("prefill") + 1


def test_what_cannot_be_met_starts_nobody_and_is_said() -> None:
    made = cluster(1, 2, config(token_gap_s=0.02))
    plans = made.run(100, 500, 50)
    assert made.changes == []
    assert "one takes 0.02 s alone" in plans[-1].why


def test_what_is_not_known_yet_changes_nobody_unless_answers_are_late() -> None:
    workers = (
        Seen("p1", "prefill"),
        Seen("d1", "decode", True, 0, 0.0, 20, 0.04),
        Seen("d2", "decode", True, 0, 0.0, 20, 0.04),
    )
    planner = Planner(config())
    plans = [planner.plan(Observation(workers, 9000, 2), 10.0 * number) for number in range(50)]
    assert {plan.change for plan in plans} == {None}
    assert "speed not known yet" in plans[-1].why
    assert "growth with answers not known yet" in plans[-1].why
    late = tuple(replace(one, gap_s=0.06 if one.running else 0.0) for one in workers)
    changes = [planner.plan(Observation(late, 9000, 2), 1000.0 + 10 * number).change for number in range(3)]
    assert Add("decode") in changes


def test_an_ordinary_queue_counts_for_nothing_and_neither_do_tokens_of_nobody() -> None:
    workers = (Seen("p1", "prefill", True, 900, SPEED), Seen("p2", "prefill", True, 900, SPEED), Seen("d1", "decode"))
    for observation in (Observation(workers, 3000, 6), Observation(workers, 3000, 0)):
        planner = Planner(config("roles"))
        plans = [planner.plan(observation, 10.0 * number) for number in range(30)]
        assert plans[-1].prefill == (1 if observation.requests else 2)
        assert {plan.change for plan in plans} == {None}


def test_a_clock_that_stands_still_or_goes_back_is_no_load() -> None:
    made = cluster(2, 2, config())
    for seconds in (0.0, -5.0):
        assert made.observe(10**9, 100, seconds).why == "load is measured from now on"
    made.queued = 0
    made.run(300, 300, 5)
    assert made.changes == []


def test_a_role_that_regrets_waits_longer_before_it_gives_up_the_next() -> None:
    made = cluster(2, 1, config())
    for _ in range(12):
        made.run(100, 300, 40)
        made.queued = 0
        made.run(1400, 300, 6)
    times = [when for when, change in made.changes if isinstance(change, Remove)]
    assert 0 < len(times) < 6  # of twelve; one worker would do for 400 s each time
    made.run(100, 300, 10 * MAX_PATIENCE + 10)
    assert made.have("prefill") == 1


# Properties

loads = st.tuples(st.floats(1, 8000), st.floats(1, 4000))


@given(loads, st.integers(1, 8), st.integers(1, 8), st.sampled_from(["roles", "scale"]), st.integers(0, 8))
def test_a_load_that_stays_the_same_moves_nobody_in_the_end(
    load: tuple[float, float], prefill: int, decode: int, mode: str, slow: int
) -> None:
    made = cluster(prefill, decode, config(mode, max_workers=20), slow)
    made.run(*load, 400)
    made.changes.clear()
    plans = made.run(*load, 300)
    assert made.changes == []
    if mode == "scale" and len(made.names) < 20:
        assert made.have("prefill") >= plans[-1].prefill
        assert made.have("decode") >= plans[-1].decode


@given(loads, st.integers(0, 10**6), st.sampled_from(["roles", "scale"]))
def test_nor_does_a_load_that_varies_about_the_same(load: tuple[float, float], seed: int, mode: str) -> None:
    made = cluster(3, 3, config(mode, max_workers=20), slow=4)
    made.noise, made.random = 0.2, Random(seed)
    made.run(*load, 400)
    made.changes.clear()
    made.run(*load, 360)
    assert len(made.changes) <= 4  # in an hour


workers = st.lists(
    st.builds(
        Seen,
        name=st.integers(0, 30).map("w{}".format),
        role=st.sampled_from(ROLES),
        ready=st.booleans(),
        queued_tokens=st.integers(0, 100_000),
        prompt_tokens_s=st.sampled_from([0.0, 1.0, 5000.0]),
        running=st.integers(0, 200),
        gap_s=st.sampled_from([0.0, 0.01, 0.04, 2.0]),
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)
observations = st.lists(
    st.tuples(workers, st.integers(0, 10**6), st.integers(0, 1000), st.floats(0, 600)), min_size=1, max_size=30
)


@given(observations, st.sampled_from(["off", "roles", "scale"]), st.sampled_from([0.0, 50.0]))
def test_whatever_is_seen_it_keeps_to_its_bounds(
    seen: list[tuple[list[Seen], int, int, float]], mode: str, late: float
) -> None:
    planner, now = Planner(config(mode, min_workers=3, max_workers=6, remove_after_s=late)), 0.0
    moved: dict[str, float] = {}
    for there, tokens, requests, seconds in seen:
        now += seconds
        plan = planner.plan(Observation(tuple(there), tokens, requests), now)
        assert plan.why
        change = plan.change
        if isinstance(change, Add):
            assert mode == "scale"
            assert len(there) < 6
        elif change is not None:
            assert mode == "scale" or (mode == "roles" and isinstance(change, Move))
            (worker,) = (one for one in there if one.name == change.worker)
            assert worker.ready
            assert now - moved.get(worker.name, -inf) >= 200
            assert sum(one.ready and one.role == worker.role for one in there) >= 2
            assert isinstance(change, Move) or len(there) > 3
            if isinstance(change, Move):
                assert change.role != worker.role
                moved[worker.name] = now
