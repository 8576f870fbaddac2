"""What the engine finds again: how much of a prompt, in which cases, and that nothing depends on it but time."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.drive import answers, assert_idle, engine, finish, request
from transfer.messages import CacheStats, Delta, Request
from workers.engine.engine import Engine
from workers.engine.model import Model

BLOCK = 16


def cached_tokens(one: Engine, each: Request) -> int:
    """What a request says it found."""
    one.add(each)
    deltas: list[Delta] = []
    finish(one, [each.request_id], deltas)
    (found,) = {delta.cached_tokens for delta in deltas}
    return found


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK])
def test_a_prompt_again_is_found_but_for_its_last_token(tiny: Model, length: int) -> None:
    one = engine(tiny)
    assert cached_tokens(one, request(range(length))) == 0
    assert cached_tokens(one, request(range(length))) == length - 1


def test_prompts_that_differ_in_one_token_share_what_comes_before_it(tiny: Model) -> None:
    one = engine(tiny)
    prompt = list(range(64))
    cached_tokens(one, request(prompt, 1))
    for position in range(64):
        other = list(prompt)
        other[position] += 256
        assert cached_tokens(one, request(other, 1)) == position


def test_generated_tokens_are_reusable(tiny: Model) -> None:
    one = engine(tiny)
    prompt = list(range(100))
    (answer,) = answers(one, [request(prompt, 50)])
    follow_up = prompt + answer + [3] * 20
    assert cached_tokens(one, request(follow_up)) == 149


def test_salts_share_nothing(tiny: Model) -> None:
    one = engine(tiny)
    assert cached_tokens(one, request(range(50), salt=b"a")) == 0
    assert cached_tokens(one, request(range(50), salt=b"b")) == 0
    assert cached_tokens(one, request(range(50), salt=b"a")) == 49


def test_a_shared_beginning_is_read_once_and_changes_nothing(tiny: Model) -> None:
    """Sequences that share a long context, some of it only in part, in one batch; also while prompts are computed."""
    draw = random.Random(2)
    system = [draw.randrange(512) for _ in range(200)]
    prompts = [system[:cut] + [draw.randrange(512) for _ in range(tail)] for cut in (80, 200) for tail in (1, 9, 40)]
    alone = [answers(engine(tiny), [request(prompt, 12)])[0] for prompt in prompts]
    one = engine(tiny, step_tokens=64)
    answers(one, [request(system, 1)])
    for _ in range(2):
        assert answers(one, [request(prompt, 12) for prompt in prompts]) == alone


def test_a_turn_whose_text_was_split_otherwise_finds_what_is_equal(tiny: Model) -> None:
    """A client sends an answer back as text, which may come to other ids than those that were generated."""
    prompt = list(range(100))
    (answer,) = answers(one := engine(tiny), [request(prompt, 40)])
    for position in (0, 1, 15, 16, 30):
        turn = prompt + answer[:position] + [answer[position] ^ 1] + answer[position + 1 :] + [5, 6, 7]
        expected = answers(engine(tiny, prefix_cache=False), [request(turn, 10)])
        one.cache.clear()
        answers(one, [request(prompt, 40)])
        one.cache.stats = CacheStats()
        assert answers(one, [request(turn, 10)]) == expected
        assert one.cache.stats.cached_tokens == 100 + position


def test_a_pool_nearly_full_of_one_prefix_with_preemptions(tiny: Model) -> None:
    """What a queued request would find changes until it runs: 200 requests over blocks for about three of them."""
    draw = random.Random(4)
    prefix = [draw.randrange(512) for _ in range(90)]
    prompts = [prefix + [draw.randrange(512) for _ in range(draw.randrange(1, 24))] for _ in range(20)]
    expected = answers(engine(tiny, prefix_cache=False), [request(prompt, 10) for prompt in prompts])
    block_bytes = engine(tiny).memory.layout.block_bytes
    one = engine(tiny, kv_memory=10 * block_bytes, max_model_len=128, max_waiting=200)
    order = [number for number in range(20) for _ in range(10)]
    draw.shuffle(order)
    got = answers(one, [request(prompts[number], 10) for number in order])
    assert got == [expected[number] for number in order]
    stats = one.cache.stats
    assert stats.requests == 200
    assert stats.preemptions > 20
    assert stats.evicted_blocks > 20
    assert_idle(one)


# --- logits -------------------------------------------------------------------------------------------------------


class Logits:
    """An engine whose logits are kept: one row for each token that a request got."""

    def __init__(self, model: Model, **config: object) -> None:
        self.engine = engine(model, **config)
        self._forward = model.forward

    def of(self, requests: list[Request]) -> list[torch.Tensor]:
        """All at once; `[tokens, vocab]` of each."""
        for each in requests:
            self.engine.add(each)
        rows: dict[str, list[torch.Tensor]] = {each.request_id: [] for each in requests}
        while self.engine.has_work:
            works = self.engine.plan().works
            ends = [(one.sequence.id, one.sequence.computed + one.count == one.sequence.length) for one in works]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self.engine.model, "forward", self._keep)
                self.engine.run(works)
            for (request_id, is_token), row in zip(ends, self._last, strict=True):
                if is_token:
                    rows[request_id].append(row)
        return [torch.stack(rows[each.request_id]) for each in requests]

    def _keep(self, *inputs: Any) -> torch.Tensor:
        self._last = self._forward(*inputs)
        return self._last


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(("compiled", "shared"), [(True, True), (True, False), (False, True), (False, False)])
def test_warm_and_cold_rows_of_one_batch_have_equal_logits(
    zoo: Callable[[str], Path], arch: str, compiled: bool, shared: bool
) -> None:
    draw = random.Random(5)
    prefix = [draw.randrange(512) for _ in range(150)]
    warm = [prefix[:cut] + [draw.randrange(512) for _ in range(9)] for cut in (70, 150, 150)]
    cold = [[draw.randrange(512) for _ in range(length)] for length in (3, 40, 130)]
    model = Model(zoo(arch), "float32", "cpu")
    prompts = [prompt for pair in zip(warm, cold, strict=True) for prompt in pair]
    alone = [Logits(model, prefix_cache=False, compiled_attention=False).of([request(one, 6)])[0] for one in prompts]
    mixed = Logits(model, step_tokens=64, compiled_attention=compiled, shared_attention=shared)
    mixed.of([request(prefix, 1)])
    together = mixed.of([request(one, 6) for one in prompts])
    assert mixed.engine.cache.stats.cached_tokens >= 70 + 2 * 150
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4)
