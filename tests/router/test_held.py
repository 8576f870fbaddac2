"""What a router remembers of the prefixes that a worker holds, beside a plain model."""

from hypothesis import given
from hypothesis import strategies as st

from router.held import Held


def chain(path: tuple[int, ...]) -> list[bytes]:
    """Keys of a prefix tree: each names the whole path to it."""
    return [bytes(path[: depth + 1]) for depth in range(len(path))]


paths = st.lists(st.integers(0, 2), max_size=6).map(tuple)


@given(st.lists(st.tuples(paths, st.booleans()), max_size=60), st.integers(1, 20), paths)
def test_what_is_held_is_closed_under_prefix(
    steps: list[tuple[tuple[int, ...], bool]], limit: int, asked: tuple
) -> None:
    held, used, kept = Held(limit), {}, set()
    there: set[bytes] = set()
    for time, (path, now) in enumerate(steps):
        held.add(chain(path), now)
        for depth, key in enumerate(chain(path)):
            used[key] = (time, -depth)
        kept = set(sorted(used, key=used.__getitem__)[-limit:])
        there = (there | set(chain(path)) if now else there) & kept
        used = {key: used[key] for key in kept}
    assert all(key[:-1] in kept for key in kept if len(key) > 1)
    expected = next((depth for depth, key in enumerate(chain(asked)) if key not in kept), len(asked))
    assert held.match(chain(asked)) == expected
    expected = next((depth for depth, key in enumerate(chain(asked)) if key not in there), len(asked))
    assert held.match(chain(asked), there=True) == expected


def test_a_chain_is_cut_where_the_worker_turned_out_to_end() -> None:
    held = Held(100)
    held.add(chain((1, 2, 3, 4)), there=True)
    held.cut(chain((1, 2, 3, 4)), 2)
    assert held.match(chain((1, 2, 3, 4))) == 2
    other = chain((1, 2, 3, 5))
    held.add(other, there=True)
    held.cut(chain((1, 2)), 0)
    assert held.match(other) == 0
    held.add(chain((1, 2, 3)), there=True)
    assert held.match(chain((1, 2, 3, 4))) == 3
    held.add(chain((1, 2, 3, 4)), there=False)
    held.forget_soon(chain((1, 2, 3, 4)))
    assert held.match(chain((1, 2, 3, 4))) == 3
    held.clear()
    assert held.match(chain((1, 2, 3, 4))) == 0
