"""Dispatches that a worker has not reported yet, beside a plain model."""

from hypothesis import given
from hypothesis import strategies as st

from router.pending import Pending

ROUTERS = ("a", "b")
STEP = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(ROUTERS), st.integers(1, 8), st.integers(1, 100), st.integers(1, 9)),
    st.tuples(st.just("drop"), st.sampled_from(ROUTERS), st.integers(1, 8)),
    st.tuples(st.just("arrived"), st.sampled_from(ROUTERS), st.integers(0, 8)),
    st.tuples(st.just("expire"), st.integers(0, 9)),
    st.tuples(st.just("clear")),
)


@given(st.lists(STEP, max_size=40))
def test_what_is_pending_is_what_was_sent_and_is_neither_reported_nor_over(steps: list[tuple]) -> None:
    pending = Pending()
    open_: dict[tuple[str, int], tuple[int, int]] = {}
    reported = dict.fromkeys(ROUTERS, 0)
    for kind, *values in steps:
        getattr(pending, kind)(*values)
        if kind == "add":
            router, number, tokens, until = values
            if number > reported[router]:
                open_.setdefault((router, number), (tokens, until))
        elif kind == "drop":
            open_.pop((values[0], values[1]), None)
        elif kind == "arrived":
            reported[values[0]] = max(values[1], reported[values[0]])
            open_ = {one: what for one, what in open_.items() if one[1] > reported[one[0]]}
        elif kind == "expire":
            open_ = {one: what for one, what in open_.items() if what[1] > values[0]}
        else:
            open_, reported = {}, dict.fromkeys(ROUTERS, 0)
        assert pending.count == len(open_)
        assert pending.tokens == sum(tokens for tokens, _ in open_.values())
