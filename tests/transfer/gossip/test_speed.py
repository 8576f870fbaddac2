"""Figures of the largest view: 1,000 workers of 6,250 keys each, and prompts of 8,000 tokens."""

import os
import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest

from transfer.gossip.ladder import checkpoints
from transfer.gossip.table import SummaryTable
from transfer.prefix import PrefixChain, root_key

pytestmark = pytest.mark.long

KEYS = 6250
DEPTH = len(checkpoints(500, 16))


def median_us(call: Callable[[int], object], times: int = 300) -> float:
    taken = []
    for number in range(times):
        start = time.perf_counter()
        call(number)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken)) * 1e6


def drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 2**63, count, dtype=np.uint64)


@pytest.mark.parametrize(("rows", "bound_us"), [(100, 60), (1000, 700)])
def test_a_view_is_small_and_a_prompt_is_found_fast(rows: int, bound_us: int) -> None:
    """Also where all have a part of it, so that no branch of the search can be foreseen."""
    rng = np.random.default_rng(1)
    prompts = [drawn(rng, DEPTH) for _ in range(1000)]
    before = psutil.Process().memory_info().rss
    table = SummaryTable(KEYS)
    for _ in range(rows):
        held = [prompts[i][: rng.integers(1, DEPTH + 1)] for i in rng.choice(len(prompts), 150, replace=False)]
        keys = np.unique(np.concatenate(held))
        keys = np.concatenate([keys, drawn(rng, KEYS - len(keys))])
        table.add(table.new_row(), keys, np.zeros(len(keys), np.uint8))
    assert psutil.Process().memory_info().rss - before < 250_000 * max(rows, 100)
    shared = [np.concatenate([prompts[0][:16], drawn(rng, DEPTH - 16)]) for _ in range(300)]
    for row in range(rows):
        table.remove(row, table.items(row)[0][:16])
        table.add(row, prompts[0][:16], np.zeros(16, np.uint8))
    unknown = [drawn(rng, DEPTH) for _ in range(300)]
    for some in (prompts, shared, unknown):
        assert median_us(lambda number, some=some: table.depths(some[number])) < bound_us  # type: ignore[misc]
    assert all(table.depths(keys).min() >= 16 for keys in shared)


def test_keys_of_a_prompt_of_8000_tokens_take_400_us() -> None:
    tokens, root = os.urandom(8000 * 4), root_key("model")
    fastest = min(median_us(lambda _: PrefixChain.of(root, tokens, 16), 20) for _ in range(10))
    assert fastest < 400
