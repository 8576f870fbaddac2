"""Stored responses stay within their bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.gateway.store import RECORD_BYTES, ResponseStore

Put = st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 900), st.floats(0, 5))


@settings(max_examples=100, deadline=None)
@given(st.lists(Put, max_size=40))
def test_the_newest_are_kept_within_number_bytes_and_age(puts: list[tuple[str, int, float]]) -> None:
    now = 0.0
    store = ResponseStore(3, 2 * RECORD_BYTES + 1000, 10.0, lambda: now)
    put_at: dict[str, tuple[float, int]] = {}
    for name, size, pause in puts:
        now += pause
        store.put(name, b"x" * (size // 2), b"y" * (size - size // 2))
        put_at.pop(name, None)
        put_at[name] = (now, size)
        left, count, held = [], 0, 0
        for one, (at, length) in reversed(put_at.items()):  # the newest first
            count, held = count + 1, held + length + RECORD_BYTES
            if count > 3 or held > 2 * RECORD_BYTES + 1000 or now - at > 10:
                break
            left.append(one)
        put_at = {one: put_at[one] for one in left[::-1]}  # what was dropped does not come back
        assert [one for one in "abcdefgh" if store.get(one)] == sorted(left)
        assert len(store) == len(left)
        assert store.size == sum(put_at[one][1] + RECORD_BYTES for one in left)


def test_what_is_larger_than_all_memory_drops_no_others() -> None:
    store = ResponseStore(10, 4096, 10.0, lambda: 0.0)
    store.put("a", b"a", b"[]")
    store.put("b", b"b" * 4096, b"[]")
    assert store.get("b") is None
    assert store.get("a") is not None


def test_dropping() -> None:
    store = ResponseStore(10, 4096, 10.0, lambda: 0.0)
    store.put("a", b"a", b"[]")
    assert store.drop("a")
    assert not store.drop("a")
    assert (len(store), store.size, store.get("a")) == (0, 0, None)


def test_age_alone_drops() -> None:
    now = 0.0
    store = ResponseStore(10, 4096, 10.0, lambda: now)
    store.put("a", b"a", b"[]")
    now = 10.0
    assert store.get("a") is not None
    now = 10.1
    assert store.get("a") is None
    assert (len(store), store.size) == (0, 0)


def test_no_memory_at_all() -> None:
    store = ResponseStore(0, 4096, 10.0, lambda: 0.0)
    store.put("a", b"a", b"[]")
    assert store.get("a") is None
