"""Reading traces: what is played, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.errors import UserError
from cluster.simulate.trace import BLOCK_TOKENS, read, spread

Write = Callable[..., Path]


def line(timestamp: float = 0, blocks: int = 2, **other: object) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": blocks * BLOCK_TOKENS - 100,
        "output_length": 5,
        "hash_ids": list(range(blocks)),
        **other,
    }


def test_equal_stamps_are_spread_up_to_the_next() -> None:
    assert spread([0, 0, 0, 3, 9, 9]) == [0, 1, 2, 3, 9, 12]  # the last way is as long as that before it
    assert spread([5, 5]) == [5, 5]


def test_a_trace_is_played_at_a_speed_with_spread_or_raw_timestamps(write: Write) -> None:
    file = write(line(1000), line(1000), line(4000))
    assert [one.arrival for one in read(file, 2)] == [0, 0.75, 1.5]
    assert [one.arrival for one in read(file, 2, raw_timestamps=True)] == [0, 0, 1.5]
    first = read(file)[0]
    assert (first.number, first.tokens, first.output) == (0, 924, 5)


def test_requests_come_in_order_of_time_and_blank_lines_are_no_requests(write: Write) -> None:
    file = write(line(2000, 3), b"", line(1000, 1), b"  ")
    assert [len(one.blocks) for one in read(file)] == [1, 3]


def test_a_number_names_a_whole_prefix(write: Write) -> None:
    """Even where a trace's ids name blocks only."""
    file = write(line(hash_ids=[7, 8]), line(hash_ids=[7, 9]), line(hash_ids=[6, 8]), line(hash_ids=[7, 8]))
    one, two, three, four = (request.blocks for request in read(file))
    assert one == four
    assert one[0] == two[0]
    assert len({*one, *two, *three}) == 5


def test_a_prompt_has_512_tokens_a_block_that_tell_blocks_apart(write: Write) -> None:
    (one,) = read(write(line(blocks=3)))
    tokens = memoryview(one.prompt).cast("i").tolist()
    assert [tokens[start : start + BLOCK_TOKENS] for start in range(0, len(tokens), BLOCK_TOKENS)] == [
        [block] * BLOCK_TOKENS for block in one.blocks
    ]


def test_a_last_block_that_is_not_full_may_be_left_out(write: Write) -> None:
    assert [len(one.blocks) for one in read(write(line(hash_ids=[0]), line(input_length=10, hash_ids=[])))] == [1, 0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", r"line 2: not a JSON object: \{"),
        (b"\xff\xfe", "line 2: not a JSON object"),
        (b"[" * 100_000, "line 2: not a JSON object"),
        (b"1" * 5000, "line 2: not a JSON object"),
        ([1, 2], r"line 2: not a JSON object: \[1, 2\]"),
        (None, "line 2: not a JSON object: null"),
        ({}, "line 2: timestamp: missing"),
        (line(timestamp=-1), "line 2: timestamp: -1: must be milliseconds"),
        (line(timestamp=math.nan), "line 2: timestamp: NaN"),
        (line(timestamp=math.inf), "line 2: timestamp: Infinity"),
        (line(timestamp=10**400), "line 2: timestamp: 1000000"),
        (line(timestamp="0"), 'line 2: timestamp: "0"'),
        (line(timestamp=True), "line 2: timestamp: true"),
        (line(input_length=0), "line 2: input_length: 0: must be a whole number from 1"),
        (line(input_length=9.5), "line 2: input_length: 9.5"),
        (line(input_length=10**12), "line 2: input_length: 1000000000000"),
        (line(output_length=-3), "line 2: output_length: -3"),
        (line(output_length=None), "line 2: output_length: null"),
        (line(hash_ids="abc"), 'line 2: hash_ids: "abc": must be a list'),
        (line(hash_ids=[0, "x"]), "line 2: hash_ids:"),
        (line(hash_ids=[0, True]), "line 2: hash_ids:"),
        (line(hash_ids=[0, -1]), "line 2: hash_ids:"),
        (line(hash_ids=[0, 1, 2]), "line 2: hash_ids: 3 of them: must be 2, one for each 512 tokens of input_"),
        (line(blocks=3, hash_ids=[0]), "line 2: hash_ids: 1 of them: must be 3"),
    ],
)
def test_a_malformed_line_is_named_with_its_number_field_and_value(write: Write, bad: object, message: str) -> None:
    file = write(line(), bad)
    with pytest.raises(UserError, match=message) as caught:
        read(file)
    assert len(str(caught.value)) < 400
    assert str(caught.value).startswith(f"--trace {file}")


def test_a_trace_that_is_not_there_or_empty_is_named(tmp_path: Path, write: Write) -> None:
    with pytest.raises(UserError, match=r"nothing.jsonl: No such file"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match="Is a directory"):
        read(tmp_path)
    with pytest.raises(UserError, match="no request in it"):
        read(write(b""))
