"""Room that an engine keeps for prompts which peers compute, beside the prompts that it computes itself."""

from tests.workers.drive import assert_idle, engine, request, step
from workers.engine.model import Model


def test_no_more_prompts_are_taken_over_than_may_run(tiny: Model) -> None:
    decode = engine(tiny, max_running=2)
    for number in range(6):
        decode.reserve(request(range(number, number + 20)))
    for _ in range(3):
        reserved = [one.request_id for one in step(decode).reserved]
        assert len(reserved) == decode.running == 2
        assert step(decode).reserved == []
        for request_id in reserved:
            decode.abort(request_id)
    assert_idle(decode)


def test_reservations_have_their_places_in_the_running_set(tiny: Model) -> None:
    decode = engine(tiny, max_running=3)
    for number in range(2):
        decode.reserve(request(range(number, number + 20)))
    first, second = (one.request_id for one in step(decode).reserved)
    for number in range(3):
        decode.add(request(range(100 + number, 120 + number)))
    step(decode)
    assert (decode.running, decode.waiting) == (3, 2)
    assert decode.recompute(first, ()) == []
    step(decode)
    assert (decode.running, decode.waiting) == (3, 2)  # the place that it had is for one of four now
    decode.abort(second)
    step(decode)
    assert (decode.running, decode.waiting) == (3, 1)


def test_reservations_do_not_wait_for_prompts_that_come_later(tiny: Model) -> None:
    decode = engine(tiny)
    decode.reserve(request(range(40)))
    decode.add(request(range(1, 22)))
    assert step(decode).reserved


def test_prompts_that_come_later_do_not_take_every_block_before_a_reservation(tiny: Model) -> None:
    block_bytes = engine(tiny).memory.layout.block_bytes
    decode = engine(tiny, kv_memory=16 * block_bytes, max_model_len=256, max_overtaken=4, prefix_cache=False)
    for number in range(4):
        decode.add(request(range(number, number + 40), max_tokens=11 + 7 * (number % 4)))
    step(decode)
    decode.reserve(request(range(200), max_tokens=2))
    served = False
    for number in range(300):
        if decode.waiting < 5:
            decode.add(request(range(number, number + 40), max_tokens=11 + 7 * (number % 4)))
        served = served or bool(step(decode).reserved)
    assert served


def test_a_queue_at_its_bound_is_full(tiny: Model) -> None:
    one = engine(tiny, max_waiting=3, max_running=1)
    for _ in range(2):
        one.add(request(range(10)))
    assert not one.full
    one.reserve(request(range(10)))
    assert one.full
    assert (one.waiting, one.running) == (3, 0)
    step(one)
    assert not one.full
    assert (one.waiting, one.running) == (2, 1)  # a reservation waits behind what is queued
