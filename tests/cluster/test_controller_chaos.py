"""A cluster under load that loses, gains and changes parts: no wrong token, nothing hangs, nothing leaks."""

import random
import sys
import time
from pathlib import Path

import pytest

from cluster.control import Control
from tests.cluster.chaos import Case, Faults, Load, Stream, assert_at_rest, cases
from tests.cluster.conftest import CONTROLLED

CLIENTS = 40
PAUSE_S = (1.0, 4.0)
"""Between two faults."""
KILL_S = 1.0
"""How long after the end of its gateway a stream may still be cut."""


@pytest.fixture(scope="module")
def known(tiny: Path) -> list[Case]:
    return cases(tiny, 6, 160)


def test_under_all_faults_no_token_is_wrong_and_nothing_is_lost(
    control: Control, known: list[Case], capsys: pytest.CaptureFixture[str]
) -> None:
    check(control, known, 20.0, 1, capsys)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, 3])
def test_the_same_for_ten_minutes(
    control: Control, known: list[Case], seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    check(control, known, 600.0, seed, capsys)


def check(control: Control, known: list[Case], seconds: float, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    faults, draw = Faults(control, CONTROLLED, seed), random.Random(seed)
    urls = faults.report().urls
    with Load(lambda: urls, known, CLIENTS) as load:
        load.more(CLIENTS)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            faults.strike()
            time.sleep(draw.uniform(*PAUSE_S))
    assert_at_rest(faults)
    faults.restore()
    with Load(lambda: urls, known, 1) as after:
        after.more(1)
    assert set(after.ends) == {"right"}
    with capsys.disabled():
        said = f"{len(faults.log)} faults, {len(load.streams)} streams: {dict(load.ends)}; longest gaps {gaps(load)}"
        sys.stdout.write(f"\n{said}\n")
    cut = [one for one in load.streams if one.end == "cut" and not lost_its_gateway(one, faults, urls)]
    bad = cut + [one for one in load.streams if one.end not in ("right", "cut")]
    assert not [one for one in bad if one.end in ("wrong", "truncated")], bad[:5]
    assert len(bad) <= 0.01 * len(load.streams), (len(bad), bad[:5], faults.log)


def lost_its_gateway(one: Stream, faults: Faults, urls: list[str]) -> bool:
    """Whether the stream's gateway was killed while it ran."""
    name = f"gateway-{urls.index(one.url)}"
    return any(
        (kind, whom) == ("kill_gateway", name) and one.begun <= at <= one.over + KILL_S for at, kind, whom in faults.log
    )


def gaps(load: Load) -> str:
    """The longest pauses within a stream: of the median stream, and of the worst."""
    found = sorted(one.gap for one in load.streams if one.end == "right")
    return f"median {found[len(found) // 2]:.2f} s, worst {found[-1]:.2f} s"
