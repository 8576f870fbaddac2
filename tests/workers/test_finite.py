"""What is not finite ends its own request, and is seen by no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workers.drive import answers, assert_idle, engine, finish, output, request, step
from workers.engine.engine import Engine
from workers.engine.model import Model

BLOCK = 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_one_request_only(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    one = engine(tiny)
    good, bad = request(range(20), 8), request(range(30), 8, temperature=temperature)
    (expected,) = answers(engine(tiny), [request(range(20), 8)])
    one.add(good)
    one.add(bad)
    deltas = step(one).deltas
    forward = tiny.forward
    monkeypatch.setattr(tiny, "forward", lambda *args: forward(*args).index_fill(0, torch.tensor([1]), torch.nan))
    now = step(one).deltas
    (error,) = [delta for delta in now if delta.error]
    assert (error.request_id, error.tokens, error.error) == (bad.request_id, (), "the model's logits are not finite")
    monkeypatch.undo()
    deltas += now
    finish(one, [good.request_id], deltas)
    assert output(deltas, good.request_id) == expected
    assert_idle(one)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_what_was_spoilt_is_not_reused(tiny: Model, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Whichever chunk of a prompt is not finite, the next request with that prompt computes it anew."""
    one = engine(tiny, step_tokens=2 * BLOCK)
    prompt = range(5 * BLOCK)
    (expected,) = answers(engine(tiny), [request(prompt, 4)])
    bad = request(prompt, 4)
    one.add(bad)
    for _ in range(chunk):
        assert not step(one).deltas
    with monkeypatch.context() as patched:
        patched.setattr(one._backend, "attend", _spoiling(one))
        (delta,) = step(one).deltas
    assert (delta.request_id, delta.error) == (bad.request_id, "the model's logits are not finite")
    assert_idle(one)
    assert answers(one, [request(prompt, 4)]) == [expected]


def _spoiling(one: Engine) -> Callable[..., torch.Tensor]:
    """Attention in which one key of the first layer, in the middle of the chunk, has become too large."""
    attend = one._backend.attend

    def spoilt(layer: int, query: torch.Tensor, key: torch.Tensor, *more: Any) -> torch.Tensor:
        if layer == 0:
            key = key.clone()
            key[len(key) // 2] = torch.nan
        return attend(layer, query, key, *more)

    return spoilt
