"""When an actor needs another life: no process, no answer, no step; and how long after the one before."""

import random

import pytest

from cluster import lives
from cluster.lives import GOOD_S, MAX_PAUSE_S, PAUSE_S, SILENT_S, START_S, STUCK_S, UNKNOWN_STUCK_S, Life, State
from transfer.messages import Pulse

IDLE = Pulse()


def beat(life: Life, now: float, until: float, pulse: Pulse = IDLE, every_s: float = 0.5) -> float:
    """Let it answer for a while."""
    while now < until:
        now += every_s
        life.heard(pulse, now)
        assert life.hopeless(now) is None
    return now


def test_who_answers_and_has_nothing_to_do_lives_for_ever() -> None:
    beat(Life(0.0), 0.0, 10_000.0, every_s=5.0)


def test_an_engine_with_work_that_makes_no_step_is_stuck() -> None:
    life = Life(0.0)
    now = beat(life, 0.0, STUCK_S, Pulse(5, busy=True, step_s=0.5))
    life.heard(Pulse(5, busy=True, step_s=0.5), now + 1)
    assert life.hopeless(now + 1) == "no step of its engine for 8 s"


def test_an_engine_that_makes_steps_or_rests_between_them_is_not() -> None:
    life, now = Life(0.0), 0.0
    for step in range(100):
        now += STUCK_S - 1
        life.heard(Pulse(step, busy=True, step_s=0.5), now)
        assert life.hopeless(now) is None
    for busy in (True, False, True, False):
        now += STUCK_S - 1
        life.heard(Pulse(100, busy=busy, step_s=0.5), now)
        assert life.hopeless(now) is None


@pytest.mark.parametrize(("step_s", "patience"), [(0.1, STUCK_S), (10.0, 40.0), (0.0, UNKNOWN_STUCK_S)])
def test_long_steps_have_more_time(step_s: float, patience: float) -> None:
    life = Life(0.0)
    now = beat(life, 0.0, patience, Pulse(1, busy=True, step_s=step_s))
    life.heard(Pulse(1, busy=True, step_s=step_s), now + 1)
    assert life.hopeless(now + 1) is not None


def test_who_does_not_answer_is_dead_but_not_after_a_short_stop() -> None:
    life = Life(0.0)
    assert life.hopeless(SILENT_S - 1) is None
    life.heard(Pulse(), SILENT_S - 1)
    assert life.hopeless(2 * SILENT_S - 2) is None
    assert life.hopeless(2 * SILENT_S) == "no answer for 16 s"


def test_who_was_not_watched_was_not_silent() -> None:
    life = Life(0.0)
    life.heard(Pulse(3, busy=True, step_s=0.1), 1.0)
    life.not_watched(100.0)
    assert life.hopeless(102.0) is None
    life.heard(Pulse(3, busy=True, step_s=0.1), 102.0)
    assert life.hopeless(102.0) is None
    assert life.hopeless(102.0 + SILENT_S) is not None


def test_lives_that_end_soon_follow_one_another_more_and_more_slowly() -> None:
    life, now, pauses = Life(0.0), 0.0, []
    for _ in range(9):
        life.ended("died", now)
        life.ended("died", now)  # told twice
        began = now
        while not life.due(now):
            now += 0.25
        pauses.append(now - began)
        life.starting(now)
        assert life.state is State.STARTING
        assert not life.due(now + 1000)
        now += 3
        life.started(now)
    assert pauses == [PAUSE_S * 2**number for number in range(6)] + [MAX_PAUSE_S] * 3
    now = beat(life, now, now + GOOD_S)
    life.ended("died", now)
    assert life.due(now + PAUSE_S)


def test_a_start_that_never_ends_is_given_up() -> None:
    life = Life(0.0)
    life.ended("died", 0.0)
    life.starting(1.0)
    assert life.hopeless(START_S) is None
    assert life.hopeless(START_S + 2) == "not ready after 600 s"
    life.ended("not ready", START_S + 2)
    assert life.state is State.DOWN


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_it_is_up_or_will_be(seed: int) -> None:
    rng, life, now = random.Random(seed), Life(0.0), 0.0
    for _ in range(2000):
        now += rng.random() * 5
        what = rng.random()
        if life.state is State.UP and what < 0.6:
            life.heard(Pulse(rng.randrange(3), rng.random() < 0.5, 0.1), now)
        elif what < 0.7 or life.hopeless(now):
            life.ended("died", now)
        if life.due(now):
            life.starting(now)
        elif life.state is State.STARTING and what > 0.8:
            life.started(now)
    life.ended("died", now)
    assert life.due(now + lives.MAX_PAUSE_S)
