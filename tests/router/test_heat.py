"""Which prefixes are hot, and which workers their prompts went to."""

import math

import pytest

from router.heat import Heat

A, B, C = b"a", b"b", b"c"


def test_a_rate_is_what_arrives_a_second_and_decays() -> None:
    heat = Heat(8, half_life_s=10.0)
    for second in range(100):
        heat.add([A], 500, "w", float(second))
    assert heat.rate(A, 99.0) == pytest.approx(500, rel=0.05)
    assert heat.rate(A, 109.0) == pytest.approx(heat.rate(A, 99.0) / 2)
    assert heat.rate(B, 99.0) == 0


def test_the_anchor_is_the_shallowest_key_that_is_not_hot_or_the_deepest() -> None:
    heat = Heat(8, half_life_s=10.0)
    per_second = 10 / math.log(2)
    heat.add([A], int(100 * per_second), "w", 0.0)
    heat.add([B], int(60 * per_second), "w", 0.0)
    assert heat.anchor([A, B, C], 50, 0.0)[0] == 2
    assert heat.anchor([A, B, C], 80, 0.0)[0] == 1
    assert heat.anchor([A, B, C], 120, 0.0)[0] == 0
    assert heat.anchor([A, B], 50, 0.0) == (1, pytest.approx(60, rel=0.02))
    assert heat.anchor([], 50, 0.0) == (-1, 0.0)


def test_shares_decay_with_the_rate_they_are_part_of() -> None:
    heat = Heat(8, half_life_s=10.0)
    heat.add([A], 100, "v", 0.0)
    heat.add([A], 100, "w", 10.0)
    assert heat.shares(A, 10.0) == pytest.approx({"v": 50, "w": 100})
    assert heat.shares(A, 20.0) == pytest.approx({"v": 25, "w": 50})
    assert sum(heat.shares(A, 20.0).values()) * math.log(2) / 10 == pytest.approx(heat.rate(A, 20.0))


def test_only_the_hottest_keys_are_kept() -> None:
    heat = Heat(4, half_life_s=10.0)
    for number in range(1000):
        heat.add([A], 1000, "w", number / 100)
        heat.add([number.to_bytes(8, "little")], 1, "w", number / 100)
        assert len(heat._entries) <= 8
    assert heat.rate(A, 10.0) > 10_000
