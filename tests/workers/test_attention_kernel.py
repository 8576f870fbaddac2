"""The compiled attention kernels against softmax spelled out in float64."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.attention import kernel
from workers.engine.attention.contexts import TILE, gather


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(1, 70))
def test_pieces_cover_every_token_once_and_are_equal(lengths: list[int], pieces: int) -> None:
    slots = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    made = gather(np.arange(len(lengths))[:, None], slots, pieces)
    segments, of_piece, of_context = made.segments.tolist(), made.of_piece.tolist(), made.of_context.tolist()
    assert of_piece[0] == of_context[0] == 0
    assert of_piece[-1] == of_context[-1] == len(segments)
    assert len(of_piece) == pieces + 1
    for context, part in enumerate(slots):
        mine = segments[of_context[context] : of_context[context + 1]]
        assert [at for one, begin, end in mine for at in range(begin, end)] == part.tolist()
        assert all(one == context and begin < end for one, begin, end in mine)
    tiles = [
        sum(-(-(end - begin) // TILE) for _, begin, end in segments[first:last])
        for first, last in itertools.pairwise(of_piece)
    ]
    assert max(tiles) - min(tiles) <= 1


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query [n, heads, size]` over some slots → output and log-sum-exp."""
    group = query.shape[1] // keys.shape[1]
    k, v = (part[slots].double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("nhd,thd->nht", query.double(), k)
    return torch.einsum("nht,thd->nhd", torch.softmax(scores, -1), v), torch.logsumexp(scores, -1)


def check(
    seed: int, dtype: torch.dtype, group: int, size: int, kv_heads: int, rows: int, lengths: list[int], pieces: int
) -> None:
    """Contexts at random places of a pool that is otherwise not a number; then half of it again, as other keys."""
    draw, _ = np.random.default_rng(seed), torch.manual_seed(seed)
    total = sum(lengths)
    keys, values = (torch.full((2 * total, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2))
    slots = draw.permutation(2 * total)[:total]
    for part in (keys, values):
        part[slots] = torch.randn(total, kv_heads, size).to(dtype)
    each = np.split(slots, np.cumsum(lengths)[:-1])
    query = torch.randn(rows * len(lengths) + 1, group * kv_heads, size) * size**-0.5 * 3
    order = draw.permutation(rows * len(lengths)).reshape(len(lengths), rows)
    output, lse = torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf)
    kernel.attend(query, keys, values, gather(order, each, pieces), output, lse)
    assert not output[-1].any()  # a row that nobody asked for
    again = [one[: (len(one) + 1) // 2] for one in each]
    both, both_lse = output.clone(), lse.clone()
    kernel.attend(query, keys, values, gather(order, again, pieces), both, both_lse)
    for context, seen, more in zip(order, each, again, strict=True):
        for found, sums, where in ((output, lse, seen), (both, both_lse, np.concatenate([seen, more]))):
            expected, expected_lse = reference(query[context], keys, values, where)
            torch.testing.assert_close(found[context].double(), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(sums[context].double(), expected_lse, atol=1e-5, rtol=1e-5)


SEEDS, THREADS, PIECES = st.integers(0, 1000), st.sampled_from([1, 2]), st.integers(1, 5)
TYPES, LENGTHS = st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 200)


@settings(max_examples=25, deadline=None)
@given(
    SEEDS, TYPES, THREADS, st.integers(1, 8), st.integers(16, 128), st.integers(1, 4), st.integers(2, 24),
    st.lists(LENGTHS, min_size=1, max_size=2), PIECES,
)  # fmt: skip
def test_a_context_of_several_rows(
    seed: int, dtype: torch.dtype, threads: int, group: int, size: int, kv_heads: int, rows: int, lengths: list[int],
    pieces: int,
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    check(seed, dtype, group, size, kv_heads, rows, lengths, pieces)


@settings(max_examples=20, deadline=None)
@given(
    SEEDS, TYPES, THREADS, st.integers(1, 4),
    st.lists(LENGTHS, min_size=1, max_size=6), PIECES,
)  # fmt: skip
def test_contexts_of_single_rows(
    seed: int, dtype: torch.dtype, threads: int, kv_heads: int, lengths: list[int],
    pieces: int,
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    check(seed, dtype, 3, 16, kv_heads, 1, lengths, pieces)


def test_products_of_any_number_of_vectors() -> None:
    """Rows that fill one to nine vectors of scores, and sizes that fill one to nine of values."""
    for seed in range(1, 10):
        check(seed, torch.float32, group=8, size=16 * seed, kv_heads=1, rows=2 * seed, lengths=[65], pieces=1)


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [1, 8])
def test_what_is_spoilt_shows_in_the_result(what: str, number: float, rows: int) -> None:
    """Whoever looks at the logits would otherwise take a plausible token for a right one."""
    torch.manual_seed(0)
    keys, values, query = torch.randn(70, 1, 16), torch.randn(70, 1, 16), torch.rand(rows, 3, 16)
    {"query": query, "key": keys, "value": values}[what][0, 0] = number
    output, lse = torch.zeros_like(query), torch.full((rows, 3), -torch.inf)
    kernel.attend(query, keys, values, gather(np.arange(rows)[None], [np.arange(70)], 2), output, lse)
    spoilt = ~torch.isfinite(output).all(-1)
    assert spoilt[0, 0] if what == "query" else spoilt.all()


ROUNDS = 100


def attend_while_others_allocate() -> None:
    """Raises AssertionError when memory that the kernel still reads is given to others meanwhile."""
    torch.set_num_threads(2)
    rows, tokens, size = 16, 512, 64
    keys, values, query = torch.randn(tokens, 3, size), torch.randn(tokens, 3, size), torch.randn(rows, 9, size) / 8
    context, done = gather(np.arange(rows)[None], [np.arange(tokens)], 2), threading.Event()

    def once() -> torch.Tensor:
        output, lse = torch.zeros_like(query), torch.full((rows, 9), -torch.inf)
        kernel.attend(query, keys, values, context, output, lse)
        return output

    def allocate() -> None:
        while not done.is_set():
            np.full(size * rows * 3, np.nan, np.float32)  # as large as the queries of a KV head

    expected = once()
    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for _ in range(ROUNDS):
            torch.testing.assert_close(once(), expected, rtol=0, atol=1e-5)
    finally:
        done.set()
        thread.join()


def test_what_the_kernel_reads_stays_its_own() -> None:
    """In a process where all threads share one arena, so that what one of them frees goes to any other."""
    code = "from tests.workers.test_attention_kernel import attend_while_others_allocate as run; run()"
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
