"""A thread that owns some state."""

import threading
import time

import pytest

from workers.loop import Loop


def test_calls_run_in_order_in_the_thread_and_wake_it() -> None:
    turns: list[str] = []
    loop = Loop("test", lambda: turns.append(threading.current_thread().name))  # sleeps until somebody calls
    loop.start()
    seen: list[int] = []
    futures = [loop.call(lambda i=i: seen.append(i) or threading.current_thread().name) for i in range(20)]
    assert {future.result(5) for future in futures} == {"test"}
    assert seen == list(range(20))
    loop.stop(5)
    assert set(turns) == {"test"}
    assert len(turns) <= 21


def test_turns_go_on_as_long_as_they_ask_to() -> None:
    left = [5]
    done = threading.Event()

    def turn() -> float | None:
        left[0] -= 1
        if left[0]:
            return 0 if left[0] % 2 else 0.001
        done.set()
        return None

    loop = Loop("test", turn)
    loop.start()
    loop.call(lambda: None)
    assert done.wait(5)
    time.sleep(0.05)
    assert left == [0]
    loop.stop(5)


def test_errors_reach_the_caller_or_the_log_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    fail = [True]

    def turn() -> None:
        if fail.pop() if fail else False:
            raise RuntimeError("turn broke")

    loop = Loop("test", turn)
    loop.start()
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 / 0).result(5)
    assert loop.call(lambda: 7).result(5) == 7
    loop.stop(5)
    assert "turn broke" in caplog.text


def test_a_call_that_nobody_waits_for_any_more_runs_and_harms_nobody() -> None:
    loop = Loop("test", lambda: None)
    entered, leave = threading.Event(), threading.Event()
    loop.call(lambda: entered.set() or leave.wait(5))
    loop.start()
    assert entered.wait(5)
    seen: list[int] = []
    cancelled = [loop.call(lambda: seen.append(1)), loop.call(lambda: 1 / 0)]
    assert all(future.cancel() for future in cancelled)
    leave.set()
    assert loop.call(lambda: 7).result(5) == 7
    assert seen == [1]
    loop.stop(5)


def test_stop_runs_what_is_queued_and_ends_the_thread() -> None:
    loop = Loop("test", lambda: 0)
    loop.start()
    seen: list[int] = []
    for i in range(5):
        loop.call(lambda i=i: seen.append(i))
    loop.stop(5)
    assert seen == [0, 1, 2, 3, 4]
    assert "test" not in {thread.name for thread in threading.enumerate()}
