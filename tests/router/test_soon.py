"""What workers are believed to hold before they say so."""

from router.soon import Soon

KEYS = (b"1", b"2", b"3", b"4")


def test_the_deepest_key_counts_and_what_is_there_apart_from_what_is_coming() -> None:
    soon = Soon()
    soon.add("v", KEYS[:3], False, 10.0)
    soon.add("w", KEYS[:2], True, 10.0)
    soon.add("w", KEYS, False, 10.0)
    assert soon.depths(KEYS) == {"v": (3, 0), "w": (4, 2)}
    assert soon.depths(KEYS[:1]) == {"v": (1, 0), "w": (1, 1)}
    assert soon.depths((b"5",)) == {}


def test_beliefs_end_when_nobody_renews_them() -> None:
    soon = Soon()
    soon.add("w", KEYS[:2], True, 10.0)
    soon.add("w", KEYS[:1], False, 20.0)
    soon.add("w", KEYS[:1], False, 15.0)
    soon.expire(10.0)
    assert soon.depths(KEYS) == {"w": (1, 1)}
    soon.expire(20.0)
    assert soon.depths(KEYS) == {}
    assert not soon._keys
    assert not soon._ends


def test_what_was_not_computed_is_forgotten_but_not_what_was_there_before() -> None:
    soon = Soon()
    soon.add("w", KEYS[:2], True, 10.0)
    soon.add("w", KEYS, False, 10.0)
    soon.forget_soon("w", KEYS)
    assert soon.depths(KEYS) == {"w": (2, 2)}
    soon.forget("w", KEYS[1:])
    assert soon.depths(KEYS) == {"w": (1, 1)}
    soon.forget_worker("w")
    assert not soon._keys


def test_a_belief_that_lasts_long_keeps_no_others_alive_and_renewals_take_no_room() -> None:
    soon = Soon()
    soon.add("slow", KEYS[:1], False, 1000.0)
    for number in range(500):
        soon.add("w", KEYS[1:2], True, 2.0 + number / 100)
    assert len(soon._ends) == 2
    soon.expire(7.0)
    assert soon.depths(KEYS) == {"slow": (1, 0)}


def test_beliefs_that_are_dropped_and_held_again_take_no_room_for_ever() -> None:
    soon = Soon()
    for number in range(2000):
        now = number * 0.05
        soon.expire(now)
        if number % 4 == 0:
            soon.forget("w", KEYS[:2])
        soon.add("w", KEYS[:2], True, now + 2.0)
        assert len(soon._ends) <= 2 * (2.0 / 0.05 / 4 + 2)
    assert soon.depths(KEYS) == {"w": (2, 2)}
