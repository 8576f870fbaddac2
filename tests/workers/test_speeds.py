"""What a worker measures of itself."""

from typing import cast

import pytest

from transfer.messages import TransferStats
from workers.scheduler import Work
from workers.speeds import MIN_MEASURED, SpeedMeter


def step(meter: SpeedMeter, tokens: int, seconds: float) -> None:
    meter.step([Work(cast("object", None), tokens)], seconds)  # type: ignore[arg-type]


def test_a_speed_is_claimed_after_some_tokens_and_long_steps_count_more() -> None:
    meter = SpeedMeter()
    step(meter, 512, 5.12)  # the first one is slow
    assert meter.prompt_tokens_s == 0
    for _ in range(MIN_MEASURED // 512 + 20):
        step(meter, 512, 0.512)
        step(meter, 64, 0.32)
        step(meter, 1, 1.0)  # an answer's token says nothing of prompts
    assert meter.prompt_tokens_s == pytest.approx(576 / 0.832, rel=0.15)
    assert meter.now(TransferStats()).prompt_tokens_s == meter.prompt_tokens_s


def test_how_long_a_full_step_takes_is_known_from_the_first_step_on() -> None:
    meter = SpeedMeter()
    assert meter.step_s(512) == 0
    step(meter, 4, 0.02)
    assert meter.step_s(512) == pytest.approx(512 * 0.005)
    step(meter, MIN_MEASURED, MIN_MEASURED / 1000)
    assert meter.step_s(512) == pytest.approx(0.512)
