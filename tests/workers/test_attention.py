"""Attention over a paged pool, in every combination of speed-ups, against softmax spelled out in float64."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.drive import answers, engine, request
from transfer.layout import KVLayout, LayerGeometry
from workers.engine.attention import AttentionOptions
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.batch import Batch, Span
from workers.engine.model import Model
from workers.kv.memory import KVMemory

VARIANTS = list(itertools.product((True, False), repeat=2))


def memory(kv_heads: int, size: int, block_size: int, dtype: str, blocks: int = 64) -> KVMemory:
    """A pool of NaN: what nobody wrote must not be read."""
    layout = KVLayout("test", dtype, block_size, (LayerGeometry(kv_heads, size, size),), blocks)
    made = KVMemory(layout, torch.device("cpu"))
    made.keys[0].fill_(torch.nan)
    made.values[0].fill_(torch.nan)
    return made


def batch(draw: np.random.Generator, block_size: int, blocks: int) -> Batch:
    """Sequences of which some share the beginning, at one or two depths; each decodes or computes a chunk."""
    free = draw.permutation(blocks).tolist()
    trunk = [free.pop() for _ in range(128 // block_size)]
    branch = [*trunk[: len(trunk) - 1], *(free.pop() for _ in range(2))]
    spans, row = [], 0
    for number in range(6):
        head = ([], trunk, trunk, branch, branch, [])[number]
        start = len(head) * block_size + int(draw.integers(0, 2 * block_size))
        count = int(draw.choice([1, 1, 5])) if number else 1
        needed = -(-(start + count) // block_size)
        table = np.array([*head, *(free.pop() for _ in range(needed - len(head)))], dtype=np.int64)
        spans.append(Span(row, count, start, table))
        row += count
    slots = [span.blocks[at // block_size] * block_size + at % block_size for span in spans for at in positions(span)]
    none = torch.zeros(1, dtype=torch.int64)
    return Batch(none, none, torch.from_numpy(np.array(slots)), spans, none)


def positions(span: Span) -> range:
    return range(span.start, span.start + span.count)


def reference(pool: KVMemory, span: Span, row: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
    """One row of one span, `[heads, size]`."""
    size = pool.layout.block_size
    slots = [int(span.blocks[at // size]) * size + at % size for at in range(span.start + row + 1)]
    group = query.shape[0] // pool.keys[0].shape[1]
    keys, values = (part[0][slots].double().repeat_interleave(group, 1) for part in (pool.keys, pool.values))
    weights = torch.softmax(torch.einsum("hd,thd->ht", query.double(), keys) * scaling, dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("kv_heads", "group", "size", "block_size"), [(2, 3, 16, 16), (1, 4, 24, 8), (3, 1, 64, 32)])
def test_every_variant_equals_softmax(dtype: str, kv_heads: int, group: int, size: int, block_size: int) -> None:
    for seed in range(4):
        draw = np.random.default_rng(seed)
        torch.manual_seed(seed)
        pool = memory(kv_heads, size, block_size, dtype, blocks=128)
        work = batch(draw, block_size, 128)
        rows = len(work.slots)
        written = [b * block_size + i for span in work.spans for b in span.blocks[:-1] for i in range(block_size)]
        tails = [
            int(span.blocks[-1]) * block_size + i
            for span in work.spans
            for i in range((span.start + span.count - 1) % block_size + 1)
        ]
        for part in (pool.keys[0], pool.values[0]):
            part[written + tails] = torch.randn(len(written + tails), kv_heads, size).to(part.dtype)
        query = 4 * torch.randn(rows, kv_heads * group, size).to(pool.keys[0].dtype)
        key, value = pool.keys[0][work.slots].clone(), pool.values[0][work.slots].clone()
        expected = torch.cat(
            [
                reference(pool, span, row, query[span.row + row], 0.3)[None]
                for span in work.spans
                for row in range(span.count)
            ]
        )
        limit = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}[dtype]
        for compiled, shared in VARIANTS:
            backend = TorchBackend(pool, compiled, shared)
            backend.prepare(work)
            found = backend.attend(0, query, key, value, AttentionOptions(scaling=0.3))
            assert found.dtype == query.dtype
            worst = (found.double() - expected).abs().max().item()
            assert worst < limit, f"compiled={compiled} shared={shared} seed={seed}: off by {worst}"


def test_contexts_are_shared_at_every_depth_of_the_tree() -> None:
    """Fifteen sequences behind one prefix, one that shares only its first block, and pairs further down."""
    pool = memory(1, 16, 16, "float32", blocks=512)
    plain, compiled = (TorchBackend(pool, compiled, shared=True) for compiled in (False, True))
    trunk, pair = np.arange(128), np.arange(200, 206)
    tables = [np.concatenate([trunk, [300 + number]]) for number in range(13)]
    tables += [np.concatenate([trunk, pair, [320 + number]]) for number in range(2)]
    tables.append(np.concatenate([trunk[:1], np.arange(400, 500)]))
    spans = [Span(row, 1, len(table) * 16 - 1, table) for row, table in enumerate(tables)]
    none = torch.zeros(1, dtype=torch.int64)
    for backend in (plain, compiled):
        backend.prepare(Batch(none, none, none, spans, none))
    found = [(one.rows, one.slots) for one in plain._shared]
    assert found == [(slice(0, 15), slice(0, 2048)), (slice(13, 15), slice(3200, 3296))]
    assert not plain._gathered
    own, *shared = compiled._gathered
    assert own.rows.tolist() == [[row] for row in range(16)]
    assert len(own.slots) == 16 * 15 + 101 * 16
    assert [one.rows.tolist() for one in shared] == [[list(range(15))], [[13, 14]]]
    assert [one.slots.tolist() for one in shared] == [list(range(2048)), list(range(3200, 3296))]
    assert not compiled._shared


@pytest.mark.parametrize("counts", [(192, 192), (64, 1), (200, 70, 1, 1), (129, 128)])
def test_long_chunks_behind_a_shared_context(counts: tuple[int, ...]) -> None:
    """Threads that merged into one row at a time would make some results wrong, and not the same ones each time."""
    torch.manual_seed(0)
    pool = memory(2, 16, 16, "float32", blocks=256)
    for part in (pool.keys[0], pool.values[0]):
        part.normal_()
    trunk, spans, row = list(range(8)), [], 0
    for number, count in enumerate(counts):
        own = [20 + 40 * number + block for block in range(-(-count // 16))]
        spans.append(Span(row, count, 128, np.array([*trunk, *own])))
        row += count
    slots = torch.tensor([int(one.blocks[at // 16]) * 16 + at % 16 for one in spans for at in positions(one)])
    none = torch.zeros(1, dtype=torch.int64)
    work = Batch(none, none, slots, spans, none)
    query, key, value = torch.randn(row, 6, 16), pool.keys[0][slots].clone(), pool.values[0][slots].clone()
    plain, compiled = TorchBackend(pool, False, False), TorchBackend(pool, True, True)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for backend in (plain, compiled):
            backend.prepare(work)
        expected = plain.attend(0, query, key, value, AttentionOptions(scaling=0.25))
        assert compiled._gathered
        for one in compiled._gathered:
            assert len(one.rows.unique()) == one.rows.numel()
        for _ in range(50):
            found = compiled.attend(0, query, key, value, AttentionOptions(scaling=0.25))
            assert (found - expected).abs().max() < 1e-5
    finally:
        torch.set_num_threads(before)


def test_scores_of_any_size_stay_finite() -> None:
    pool = memory(1, 16, 16, "float32")
    table = np.arange(4)
    pool.keys[0][:64] = torch.linspace(-300, 300, 64)[:, None, None]
    pool.values[0][:64] = torch.arange(64.0)[:, None, None]
    work = Batch(torch.zeros(1), torch.zeros(1), torch.tensor([63]), [Span(0, 1, 63, table)], torch.zeros(1))
    for sign, expected in ((1.0, 63.0), (-1.0, 0.0)):
        for compiled, _ in VARIANTS:
            backend = TorchBackend(pool, compiled, shared=True)
            backend.prepare(work)
            query = torch.full((1, 1, 16), sign)
            key, value = pool.keys[0][63:64].clone(), pool.values[0][63:64].clone()
            found = backend.attend(0, query, key, value, AttentionOptions(scaling=1.0))
            assert torch.allclose(found, torch.tensor(expected))


@pytest.mark.parametrize(
    ("compiled", "shared", "threads"),
    [(True, True, 1), (True, False, 1), (False, True, 1), (False, False, 1), (True, True, 4), (True, False, 4)],
)
def test_answers_do_not_depend_on_the_speed_ups(zoo, compiled: bool, shared: bool, threads: int) -> None:  # type: ignore[no-untyped-def]
    """Long common beginnings, cold and warm, alone and together."""
    model = Model(Path(zoo("llama")), "float32", "cpu")
    common = [(7 * i) % 500 for i in range(100)]
    prompts = [[*common[: 20 * n], n, 2 * n, 3 * n] for n in range(6)]
    plain = engine(model, compiled_attention=False, shared_attention=False, prefix_cache=False)
    expected = [answers(plain, [request(prompt, max_tokens=12)])[0] for prompt in prompts]
    one = engine(model, compiled_attention=compiled, shared_attention=shared)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(2):
            assert answers(one, [request(prompt, max_tokens=12) for prompt in prompts]) == expected
    finally:
        torch.set_num_threads(before)
