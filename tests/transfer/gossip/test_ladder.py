"""The ladder is one for all prompts, and as dense as it says."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from transfer.gossip.ladder import between, checkpoints

sizes = st.sampled_from([1, 3, 16, 48, 64, 512, 2048])


def test_blocks_of_16_tokens() -> None:
    tokens = checkpoints(5000, 16) * 16
    steps = [(int(at), int(step)) for at, step in zip(tokens[1:], tokens[1:] - tokens[:-1], strict=True)]
    assert tokens[0] == 64
    assert {step for at, step in steps if at <= 1024} == {64}
    assert {step for at, step in steps if 1024 < at <= 8192} == {256}
    assert {step for at, step in steps if 8192 < at <= 32768} == {512}
    assert {step for at, step in steps if at > 32768} == {1024}
    assert len(checkpoints(500, 16)) == 43


def test_blocks_of_512_tokens() -> None:
    assert checkpoints(70, 512).tolist() == [*range(1, 65), 66, 68, 70]


def test_a_prompt_without_checkpoint() -> None:
    assert checkpoints(0, 16).tolist() == checkpoints(3, 16).tolist() == []


@given(sizes, st.integers(0, 9000), st.integers(0, 9000))
def test_a_longer_prompt_has_the_checkpoints_of_a_shorter_one(size: int, one: int, other: int) -> None:
    low, high = sorted((one, other))
    whole = checkpoints(high, size).tolist()
    assert [depth for depth in whole if depth <= low] == checkpoints(low, size).tolist()
    assert [depth for depth in whole if depth > low] == list(between(low, high, size))
    assert sorted(set(whole)) == whole


def test_the_result_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        checkpoints(500, 16)[0] = 1
