"""Sampling is a pure function of logits, parameters, seed and position."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transfer.messages import SamplingParams
from workers.engine import sampler
from workers.engine.sampler import _draw, sample, uniform

VOCABULARY = 50


def logits(seed: int = 0, rows: int = 1, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


def draws(row: torch.Tensor, count: int, **params: float) -> list[int]:
    """One row sampled at `count` positions."""
    one = SamplingParams(1, **params)  # type: ignore[arg-type]
    return sample(row.expand(count, -1), [one] * count, list(range(count)))


def test_the_generator_never_changes() -> None:
    """Resuming on another worker or after an upgrade depends on it."""
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(0, 1) == 0.5023796042735054
    assert uniform(1, 0) == 0.3035680343067586
    assert uniform(2**64 + 1, 7) == uniform(1, 7)
    assert uniform(-1, 7) == uniform(2**64 - 1, 7)


def test_the_generator_is_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(5, i) for i in range(4000)], [uniform(i, 5) for i in range(4000)]):
        assert 0 <= min(numbers) <= max(numbers) < 1
        counts = torch.histc(torch.tensor(numbers), 20, 0, 1)
        assert float(((counts - 200) ** 2 / 200).sum()) < 50  # 19 degrees of freedom: one in 10 000
        pairs = torch.tensor(numbers).double()
        assert abs(float(torch.corrcoef(torch.stack([pairs[1:], pairs[:-1]]))[0, 1])) < 0.06


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5},
        {"top_k": 5},
        {"top_p": 0.6},
        {"temperature": 1.3, "top_k": 10, "top_p": 0.8},
    ],
    ids=str,
)
def test_the_distribution_is_the_one_asked_for(params: dict[str, float]) -> None:
    row, count = logits(scale=1.0), 6000
    expected = torch.softmax(row[0].double() / params.get("temperature", 1.0), -1)
    if top_k := int(params.get("top_k", 0)):
        expected[expected < expected.topk(top_k).values[-1]] = 0
        expected /= expected.sum()
    order = expected.argsort(descending=True)
    below = expected[order].cumsum(0) - expected[order] < params.get("top_p", 1.0)
    expected[order[~below]] = 0
    expected = expected / expected.sum() * count
    seen = torch.bincount(torch.tensor(draws(row, count, seed=1, **params)), minlength=VOCABULARY).double()
    assert (seen[expected == 0] == 0).all()
    likely = expected > 0
    statistic = float(((seen[likely] - expected[likely]) ** 2 / expected[likely]).sum())
    freedom = int(likely.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 5


def test_temperature_zero_is_greedy_whatever_else_is_asked() -> None:
    rows = logits(rows=8)
    params = [SamplingParams(1, temperature=0, seed=i, top_k=i, top_p=0.1 + i / 10) for i in range(8)]
    assert sample(rows, params, [0] * 8) == rows.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-300])
def test_a_tiny_temperature_is_finite_and_takes_the_best(temperature: float) -> None:
    row = logits() * 1000
    assert draws(row, 50, temperature=temperature) == [int(row.argmax())] * 50


def test_a_huge_temperature_reaches_every_token() -> None:
    assert set(draws(logits(), 2000, temperature=1e6)) == set(range(VOCABULARY))


def test_top_k_one_and_a_tiny_top_p_take_the_best() -> None:
    row = logits()
    assert set(draws(row, 50, top_k=1)) == set(draws(row, 50, top_p=1e-9)) == {int(row.argmax())}


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    assert draws(logits(), 200, top_k=VOCABULARY) == draws(logits(), 200, top_k=10**6) == draws(logits(), 200)


def test_a_token_without_probability_is_never_drawn() -> None:
    row = torch.full((1, VOCABULARY), -torch.inf)
    row[0, 7], row[0, 3] = 1.0, 1.0
    assert set(draws(row, 300)) == {3, 7}
    # Rounding can bring a number just below one up to it.
    assert _draw(row.expand(2, -1), [SamplingParams(1)] * 2, [0.0, 1.0]).tolist() == [3, 7]


@pytest.mark.parametrize("at_once", [1, 64])
def test_a_row_does_not_depend_on_the_batch_around_it(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "ROWS_ON_CPU", at_once)
    draw = random.Random(0)
    rows = logits(rows=16)
    params = [
        SamplingParams(
            1, draw.choice([0.0, 0.5, 1.0, 2.0]), draw.choice([0.3, 1.0]), draw.choice([0, 4]), draw.randint(0, 99)
        )
        for _ in range(16)
    ]
    positions = [draw.randint(0, 1000) for _ in range(16)]
    alone = [sample(rows[i : i + 1], params[i : i + 1], positions[i : i + 1])[0] for i in range(16)]
    order = draw.sample(range(16), 16)
    shuffled = sample(rows[order], [params[i] for i in order], [positions[i] for i in order])
    assert sample(rows, params, positions) == alone
    assert shuffled == [alone[i] for i in order]


def test_noise_between_near_equal_tokens_does_not_move_the_result() -> None:
    row = logits(scale=0.01)
    noise = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(9)) * 1e-6
    same = sum(a == b for a, b in zip(draws(row, 1000), draws(row + noise, 1000), strict=True))
    assert same >= 998


def one_row(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """What `sample` does for one row, as plainly as can be."""
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()).double() / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled[scaled < scaled.sort(descending=True).values[params.top_k - 1]] = -torch.inf
    weights = torch.softmax(scaled, dim=-1)
    if params.top_p < 1.0:
        ordered, index = torch.sort(weights, descending=True, stable=True)
        weights[index[torch.cumsum(ordered, dim=-1) - ordered >= params.top_p]] = 0.0
    cumulative = torch.cumsum(weights, dim=-1)
    above = (cumulative > number * float(cumulative[-1])).nonzero()
    return int(above[0]) if len(above) else int(weights.nonzero()[-1])


PARAMS = st.builds(
    SamplingParams,
    st.just(1),
    temperature=st.one_of(st.just(0.0), st.floats(1e-3, 3.0)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    top_k=st.one_of(st.just(0), st.integers(0, 400)),
    seed=st.integers(0, 2**64 - 1),
)


@given(
    params=st.lists(PARAMS, min_size=1, max_size=8),
    vocabulary=st.integers(1, 300),
    scale=st.sampled_from([0.01, 1.0, 20.0]),
    rounded=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rows_together_are_rows_alone_to_the_last_bit(
    params: list[SamplingParams], vocabulary: int, scale: float, rounded: bool, seed: int
) -> None:
    rows = torch.randn(len(params), vocabulary, generator=torch.Generator().manual_seed(seed)) * scale
    if rounded:  # equal logits, as half precision makes them
        rows = rows.to(torch.bfloat16).float()
    expected = [one_row(row, one, uniform(one.seed, 7)) for row, one in zip(rows, params, strict=True)]
    for at_once in (1, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "ROWS_ON_CPU", at_once)
            assert sample(rows, params, [7] * len(params)) == expected


def test_greedy_rows_alone_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine.sampler._draw", None)
    assert sample(logits(rows=3), [SamplingParams(1, temperature=0)] * 3, [0] * 3) == logits(rows=3).argmax(-1).tolist()


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, VOCABULARY), [], []) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_gives_no_token_and_spoils_no_other(temperature: float, value: float) -> None:
    rows = logits(rows=3)
    params = [SamplingParams(1, temperature=temperature, top_p=0.9, top_k=5, seed=3)] * 3
    before = sample(rows, params, [1, 2, 3])
    rows[1, 4] = value
    assert sample(rows, params, [1, 2, 3]) == [before[0], sampler.NO_TOKEN, before[2]]
