"""Traces for the simulator's tests: the public one, which does not come with the code, and small ones made here."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from cluster.simulate.trace import BLOCK_TOKENS, Request

CONVERSATION = "mooncake_conversation.jsonl"


@pytest.fixture(scope="session")
def conversation() -> Path:
    """The Mooncake conversation trace, from the directory HEADWATER_TRACES or from shared/traces by the checkout."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "traces"
    file = Path(os.environ.get("HEADWATER_TRACES", beside)) / CONVERSATION
    if not file.is_file():
        pytest.skip(f"{file} is not there; HEADWATER_TRACES names the directory that has it")
    return file


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write lines to a trace file; dictionaries become JSON."""

    def made(*lines: object) -> Path:
        file = tmp_path / "trace.jsonl"
        parts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        file.write_bytes(b"\n".join(parts) + b"\n")
        return file

    return made


def request(number: int, arrival: float, *blocks: int, output: int = 0) -> Request:
    """A request whose prompt is these blocks, each full."""
    return Request(number, arrival, len(blocks) * BLOCK_TOKENS, output, blocks)


def chats(count: int, turns: int, seed: int, rate: float = 4.0, beginning: int = 1) -> list[Request]:
    """Chats that grow by one to six blocks a turn, `rate` turns a second in all; the first blocks are everybody's."""
    draw = Random(seed)
    fresh = iter(range(beginning, 10**6))
    histories = [list(range(beginning)) for _ in range(count)]
    order = [chat for chat in range(count) for _ in range(turns)]
    draw.shuffle(order)
    made = []
    arrival = 0.0
    for number, chat in enumerate(order):
        histories[chat] += [next(fresh) for _ in range(draw.randint(1, 6))]
        made.append(request(number, arrival, *histories[chat], output=draw.randint(1, 400)))
        arrival += draw.expovariate(rate)
    return made


def talks(seconds: float, rate: float, seed: int) -> list[Request]:
    """People who come and go, `rate` requests a second from 5 s on, when the nodes have met: each says one to six
    things, seconds apart, of which the first is long. The first block is everybody's."""
    draw = Random(seed)
    fresh = iter(range(1, 10**6))
    turns: list[tuple[float, list[int]]] = []
    begin = 5.0 - 30.0
    while begin < seconds:
        begin += draw.expovariate(rate / 3.5)
        history, at = [0, *(next(fresh) for _ in range(draw.randint(2, 20)))], begin
        for _ in range(draw.randint(1, 6)):
            turns.append((at, list(history)))
            history += [next(fresh) for _ in range(draw.randint(1, 4))]
            at += 3.0 + draw.expovariate(1 / 6)
    turns = sorted(turn for turn in turns if 5.0 <= turn[0] < seconds)
    return [request(number, at, *blocks) for number, (at, blocks) in enumerate(turns)]
