"""Block tables in the form that FlashInfer takes: requests with rows of the query and pages of the pool, flattened."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workers.engine.attention.sharing import SharedContext
from workers.engine.batch import Span


@dataclass(frozen=True, slots=True)
class Pages:
    """All int32. Request `i` has the query rows `[row_ends[i], row_ends[i + 1])` and sees the blocks
    `indices[block_ends[i] : block_ends[i + 1]]`, of the last of them `last_tokens[i]` tokens."""

    row_ends: np.ndarray
    block_ends: np.ndarray
    indices: np.ndarray
    last_tokens: np.ndarray


@dataclass(frozen=True, slots=True)
class Level:
    """Shared contexts without a row in common, for all rows of a batch: row `i` is at place `places[i]` of the query
    `query[order]`, whose requests `pages` describes, and has something to merge if `merged[i]`."""

    order: np.ndarray
    places: np.ndarray
    merged: np.ndarray
    pages: Pages


def window_blocks(spans: list[Span], window: int, block_size: int) -> dict[int, int]:
    """Leading blocks that no row of a span sees when each sees `window` tokens, itself included; by first row."""
    return {span.row: max(0, span.start + 1 - window) // block_size for span in spans}


def own_pages(spans: list[Span], skipped: dict[int, int], block_size: int) -> Pages:
    """Each span is a request that sees its own table up to its last row, without the first `skipped` blocks."""
    stops = [span.start + span.count for span in spans]
    tables = [
        span.blocks[skipped.get(span.row, 0) : -(-stop // block_size)] for span, stop in zip(spans, stops, strict=True)
    ]
    last = [(stop - 1) % block_size + 1 for stop in stops]
    return _pages([span.count for span in spans], tables, last)


def level(contexts: list[SharedContext], rows: int, groups: int, spare: int, block_size: int) -> Level:
    """One request for each of `contexts`, then empty ones up to `groups`, then one for all rows of the batch's `rows`
    that are in none of them. The number of requests, and that every row is in one of them, are what a captured graph
    cannot change; so the last one reads a token of the block `spare`, and its result is not merged."""
    merged = np.zeros(rows, dtype=bool)
    for one in contexts:
        merged[one.rows] = True
    order = np.concatenate([*(one.rows for one in contexts), np.flatnonzero(~merged)])
    places = np.empty(rows, dtype=np.int64)
    places[order] = np.arange(rows)
    empty = groups - len(contexts)
    counts = [*(len(one.rows) for one in contexts), *[0] * empty, rows - int(merged.sum())]
    tables = [*(one.blocks for one in contexts), *[np.empty(0, dtype=np.int64)] * empty, np.array([spare])]
    last = [*[block_size] * len(contexts), *[0] * empty, 1]
    return Level(order, places, merged, _pages(counts, tables, last))


def _pages(counts: list[int], tables: list[np.ndarray], last_tokens: list[int]) -> Pages:
    row_ends = np.cumsum([0, *counts], dtype=np.int32)
    block_ends = np.cumsum([0, *map(len, tables)], dtype=np.int32)
    return Pages(row_ends, block_ends, np.concatenate(tables).astype(np.int32), np.array(last_tokens, dtype=np.int32))
