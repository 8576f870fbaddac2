"""Which sequences share which context, and block tables as FlashInfer takes them: arrays in, arrays out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.attention.paging import level, own_pages, window_blocks
from workers.engine.attention.sharing import SHARED_MIN_TOKENS, depth, shared_blocks, shared_contexts
from workers.engine.batch import Span

BLOCK = 16
LEAST = SHARED_MIN_TOKENS // BLOCK


def spans(*tables: list[int], count: int = 1) -> list[Span]:
    """Sequences whose rows, `count` of them, are all in the last block of their table."""
    return [
        Span(row * count, count, (len(table) - 1) * BLOCK, np.array(table, dtype=np.int64))
        for row, table in enumerate(tables)
    ]


def test_nothing_is_shared_by_one_or_by_strangers() -> None:
    assert shared_contexts(spans([1, 2, 3, 4, 5, 6]), BLOCK) == []
    assert shared_contexts(spans([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]), BLOCK) == []
    assert depth([]) == 0


def test_a_short_context_is_not_worth_it_and_a_long_one_is() -> None:
    trunk = list(range(LEAST))
    assert shared_contexts(spans([*trunk[1:], 20], [*trunk[1:], 21]), BLOCK) == []
    (one,) = shared_contexts(spans([*trunk, 20], [*trunk, 21]), BLOCK)
    assert (one.blocks.tolist(), one.rows.tolist(), one.level) == (trunk, [0, 1], 0)


def test_only_whole_blocks_before_all_rows_are_shared() -> None:
    """Equal tables: the block that the rows are in is not context to all of them."""
    table = list(range(LEAST + 1))
    (one,) = shared_contexts(spans(table, table, count=3), BLOCK)
    assert (one.begin, one.end, one.rows.tolist()) == (0, LEAST, list(range(6)))


def test_levels_count_what_is_shared_before() -> None:
    trunk, branch = list(range(10)), list(range(20, 20 + LEAST))
    work = spans([*trunk, *branch, 50], [*trunk, *branch, 51], [*trunk, 52], [60, 61])
    top, below = shared_contexts(work, BLOCK)
    assert (top.blocks.tolist(), top.rows.tolist(), top.level) == (trunk, [0, 1, 2], 0)
    assert (below.blocks.tolist(), below.rows.tolist(), below.level) == (branch, [0, 1], 1)
    assert depth([top, below]) == 2
    assert shared_blocks([top, below]) == {0: 10 + LEAST, 1: 10 + LEAST, 2: 10}


TREES = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, BLOCK - 1)),
    min_size=1,
    max_size=8,
)


@given(TREES)
def test_every_row_sees_every_token_once(drawn: list[tuple[list[int], int, int]]) -> None:
    """A path of branches, each `LEAST` blocks long, names a table; shared and own parts together are that table."""
    names: dict[tuple[int, ...], int] = {}
    work, row = [], 0
    for number, (path, count, extra) in enumerate(drawn):
        table = [
            names.setdefault((*path[: step + 1], block), len(names))
            for step in range(len(path))
            for block in range(LEAST)
        ]
        start = len(table) * BLOCK + extra
        table += [1000 + 2 * number, 1001 + 2 * number]
        work.append(Span(row, count, start, np.array(table)))
        row += count
    contexts = shared_contexts(work, BLOCK)
    own = own_pages(work, shared_blocks(contexts), BLOCK)
    seen: list[list[int]] = [[] for _ in range(row)]
    for number in range(depth(contexts)):
        here = [one for one in contexts if one.level == number]
        made = level(here, row, len(here) + 2, 999, BLOCK)
        assert made.pages.row_ends[-1] == row
        assert (made.order[made.places] == np.arange(row)).all()
        assert len(made.pages.last_tokens) == len(here) + 3
        for request in range(len(here) + 3):
            rows = made.order[made.pages.row_ends[request] : made.pages.row_ends[request + 1]]
            blocks = made.pages.indices[made.pages.block_ends[request] : made.pages.block_ends[request + 1]]
            if request == len(here) + 2:
                assert blocks.tolist() == [999]
                assert not made.merged[rows].any()
            else:
                assert made.merged[rows].all()
                assert len(rows) == 0 or made.pages.last_tokens[request] == BLOCK
                for one in rows:
                    seen[one].extend(blocks.tolist())
    for request, span in enumerate(work):
        stop = span.start + span.count
        blocks = own.indices[own.block_ends[request] : own.block_ends[request + 1]].tolist()
        assert own.row_ends[request : request + 2].tolist() == [span.row, span.row + span.count]
        assert (len(blocks) - 1) * BLOCK + own.last_tokens[request] >= span.count
        for one in range(span.row, span.row + span.count):
            assert [*seen[one], *blocks] == span.blocks[: -(-stop // BLOCK)].tolist()
        assert (stop - 1) % BLOCK + 1 == own.last_tokens[request]


def test_a_window_leaves_out_the_blocks_that_no_row_sees() -> None:
    work = [Span(0, 1, 100, np.arange(7)), Span(1, 5, 40, np.arange(10, 13)), Span(6, 1, 3, np.arange(20, 21))]
    skipped = window_blocks(work, 24, BLOCK)
    assert skipped == {0: 77 // BLOCK, 1: 17 // BLOCK, 6: 0}
    own = own_pages(work, skipped, BLOCK)
    assert own.indices.tolist() == [4, 5, 6, 11, 12, 20]
    assert own.last_tokens.tolist() == [5, 13, 4]
