"""`headwater bench tier-quality`: what it measures and what it makes of answers."""

from pathlib import Path

import pytest

from cluster.bench.tier_quality import EQUAL, LARGEST, Answer, Shape, checks_of, compared, run
from cluster.errors import UserError
from tests.cluster.conftest import settings
from transfer.messages import TokenLogprobs

SHAPE = Shape(prompts=4, prompt=80, output=8, rounds=2)


def test_every_format_is_measured_and_exact_changes_nothing(tiny: Path) -> None:
    """With this repository's text for prompts."""
    report = run(settings(model__name=str(tiny), worker__threads=1), SHAPE)
    assert report.ok, report.checks
    assert list(report.results) == ["exact", "int8", "fp8"]
    for form, figures in report.results.items():
        assert (figures[LARGEST] == 0) == (form == "exact")
        assert 0 <= figures[EQUAL] <= 1
        assert (figures["bytes of a block, share of exact"] == 1) == (form == "exact")
        assert 0 < figures["saving 1 GB of KV: s"] < 1000
        assert 0 < figures["loading it: s"] < 1000
    differences = [figures["log-probability, difference: mean"] for figures in report.results.values()]
    assert differences == sorted(differences)


def test_too_little_text_is_one_line(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "text.md").write_text("word " * 25)
    with pytest.raises(UserError, match=r"--text: .*text.md has 1 pieces of 81 tokens, 4 prompts"):
        run(settings(model__name=str(tiny)), SHAPE, tmp_path / "text.md")
    with pytest.raises(UserError, match="--prompt: 8 tokens are less than a block, 16 tokens"):
        run(settings(model__name=str(tiny)), Shape(1, 8, 1, 1))


def told(*tokens: int, logprob: float = -1.0, top: tuple[tuple[int, float], ...] = ()) -> Answer:
    return [TokenLogprobs(token, logprob, top) for token in tokens]


def test_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    reference = [told(1, 2, 3, 4), told(5, 6, 7, 8)]
    other = [*told(1, logprob=-1.5), *told(9, logprob=-0.5, top=((9, -0.5), (2, -3.0))), *told(3, 4, logprob=-9.0)]
    figures = compared(reference, [other, told(5, 6, 7, 8)])
    assert figures[EQUAL] == 5 / 8
    assert figures["answers that are equal, share"] == 1 / 2
    assert figures[LARGEST] == 2.0
    assert figures["log-probability, difference: mean"] == pytest.approx((0.5 + 2.0) / 6)
    unlikely = told(9, logprob=-0.5, top=((9, -0.5), (8, -4.0)))
    assert compared([told(1)], [unlikely])[LARGEST] == 3.0


@pytest.mark.parametrize(("figure", "value"), [(EQUAL, 0.999), (LARGEST, 1e-9)])
def test_anything_that_exact_changes_is_missed(figure: str, value: float) -> None:
    results = {"exact": {EQUAL: 1.0, LARGEST: 0.0}}
    assert all(check.ok for check in checks_of(results))
    results["exact"][figure] = value
    assert [check.ok for check in checks_of(results)].count(False) == 1
