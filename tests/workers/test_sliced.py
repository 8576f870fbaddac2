"""A pool of several slices of the KV heads: attention, and the engine's tokens, are those of a pool in one piece."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import model_zoo
from tests.workers import fake_flashinfer
from tests.workers.drive import HandOff, answers, assert_idle, engine, request
from tests.workers.test_attention import batch, memory
from transfer.layout import Shard
from workers.config import WorkerConfig
from workers.engine.attention import AttentionOptions, LayerAttention
from workers.engine.attention.choice import choose
from workers.engine.attention.flashinfer_backend import FlashInferBackend
from workers.engine.attention.sliced import SlicedBackend, of_one_slice
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.model import Model
from workers.kv.memory import KVMemory

SINKS = torch.linspace(-3, 3, 8)
OPTIONS = {
    "plain": AttentionOptions(0.3),
    "window and cap": AttentionOptions(0.3, window=20, softcap=2.0),
    "sinks": AttentionOptions(0.3, sinks=SINKS),
    "window and sinks": AttentionOptions(0.3, window=40, sinks=SINKS),
}
BLOCK, BLOCKS, HEADS, KV_HEADS, SIZE = 16, 128, 8, 4, 16


def sliced(pool: KVMemory, count: int) -> KVMemory:
    """A pool with the same content in so many slices."""
    layout = dataclasses.replace(pool.layout, shard=Shard(0, count, count))
    made = KVMemory(layout, torch.device("cpu"))
    for mine, parts in (
        (pool.keys, [one.keys for one in made.slices]),
        (pool.values, [one.values for one in made.slices]),
    ):
        for layer, part in enumerate(mine):
            for its, heads in zip(parts, part.chunk(count, dim=1), strict=True):
                its[layer].copy_(heads)
    return made


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("backend", ["torch", "compiled", "flashinfer"])
def test_it_attends_as_one_backend_over_all_heads(
    options: AttentionOptions, count: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and single rows, some of which share a beginning; several steps, of which each writes what later ones
    read."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module)  # type: ignore[arg-type]
    monkeypatch.setattr("workers.engine.attention.flashinfer_backend.WORKSPACE_BYTES", 16)
    pool = memory(KV_HEADS, SIZE, BLOCK, "float32", blocks=BLOCKS)
    layers = [LayerAttention(HEADS, pool.layout.layers[0], options)]

    def over(part: KVMemory, its: list[LayerAttention]) -> TorchBackend | FlashInferBackend:
        if backend == "flashinfer":
            return FlashInferBackend(part, its, True)
        return TorchBackend(part, compiled=backend == "compiled", shared=True)

    torch.manual_seed(0)
    for part in (*pool.keys, *pool.values):
        part.copy_(torch.randn(part.shape))
    parts = sliced(pool, count)
    whole = over(pool, layers)
    cut = SlicedBackend([over(one, of_one_slice(layers, at, count)) for at, one in enumerate(parts.slices)])
    for seed in range(3):
        work = batch(np.random.default_rng(seed), BLOCK, BLOCKS - 1)
        rows = len(work.slots)
        query, key, value = (torch.randn(rows, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        whole.prepare(work)
        cut.prepare(work)
        expected, found = (one.attend(0, query, key, value, options) for one in (whole, cut))
        assert torch.allclose(expected, found, rtol=0, atol=1e-5), (expected - found).abs().max()
        for mine, its in zip(
            (*pool.keys, *pool.values),
            zip(*([*one.keys, *one.values] for one in parts.slices), strict=True),
            strict=True,
        ):
            assert torch.equal(mine, torch.cat(its, dim=1))
    assert cut.reuse == whole.reuse


def test_one_slice_has_an_ordinary_backend_and_several_have_one_each(tiny: Model) -> None:
    pool = memory(2, 16, 16, "float32")
    assert isinstance(choose(WorkerConfig(), pool, tiny.attention), TorchBackend)
    assert isinstance(choose(WorkerConfig(), sliced(pool, 2), tiny.attention), SlicedBackend)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss"])
def test_tokens_do_not_depend_on_slices(zoo: Callable[[str], Path], arch: str) -> None:
    """Cold and warm, chunked and at once, with prompts that begin alike in whole blocks and within one."""
    path = zoo(arch)
    drawn = [model_zoo.clear_prompt(path, length, 16, seed=length) for length in (5, 40, 150)]
    one = engine(path, Shard(0, 2, 2), step_tokens=64)
    prompts = [prompt for prompt, _ in drawn]
    for prompt, expected in drawn:
        assert answers(one, [request(prompt, 16)]) == [expected]
    assert answers(one, [request(prompt, 16) for prompt in prompts]) == [expected for _, expected in drawn]
    plain = engine(one.model)
    others = [[*prompts[2][:length], 7] for length in (96, 100, 149)]  # copied from within a block, too
    wanted = answers(plain, [request(prompt, 16) for prompt in others])
    assert answers(one, [request(prompt, 16) for prompt in others]) == wanted
    assert_idle(one)


def test_a_prompt_is_handed_over_in_slices(tiny: Model, zoo: Callable[[str], Path]) -> None:
    prompt, expected = model_zoo.clear_prompt(zoo("llama"), 150, 16, seed=3)
    prefill, decode = engine(tiny, Shard(0, 2, 2), step_tokens=64), engine(tiny, Shard(0, 2, 2), step_tokens=64)
    assert HandOff(prefill, decode, request(prompt, 16)).run() == expected


def test_heads_that_cannot_be_cut_are_refused(tiny: Model) -> None:
    with pytest.raises(ValueError, match="layers: 2 KV heads of layer 0 are not 3 equal slices"):
        engine(tiny, Shard(0, 3, 3))
