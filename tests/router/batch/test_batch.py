"""Batches without a cluster: lines, index, order, journal and engine."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.batch import index as index_module
from router.batch import lines as lines_module
from router.batch.errors import BatchError
from router.batch.index import Index
from router.batch.journal import Journal
from router.batch.lines import CHAT, COMPLETIONS, RESPONSES, URLS, BadLine, Item, parse, prefix_key
from router.batch.run import run
from router.batch.send import Answer
from router.batch.tally import Tally


def line(custom_id: Any, prompt: str = "", **more: Any) -> bytes:
    body = {"model": "m", "prompt": prompt}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body} | more).encode()


FLAT = Path(__file__).with_name("flat.py")
MAX_GROWN_MB = 19

BAD = {
    b'{"custom_id": "a"': "not valid JSON",
    b"null": "must be a JSON object, got null",
    b"[1]": r"must be a JSON object, got \[1\]",
    b"": "is blank",
    b"  \r": "is blank",
    b"\xef\xbb\xbf" + line("bom"): "byte order mark",
    b"\xff" + line("utf8"): "not valid UTF-8",
    b"[" * 100_000: "not valid JSON",
    b'{"custom_id": "\\ud800"}': "custom_id: contains a lone surrogate",
    line("", url=CHAT): "custom_id: .*must be a string that is not empty",
    line(7): "custom_id: must be a string that is not empty, got 7",
    line("url", url="/v1/images"): 'url: must be one of .*got "/v1/images"',
    line("method", method="GET"): "method: must be 'POST', got \"GET\"",
    line("body", body=[]): r"body: must be an object, got \[\]",
    line("more", priority=3): '"priority": only custom_id, method, url, body',
    line("stream", body={"stream": True}): "body.stream: not in a batch, got true",
    line("background", url=RESPONSES, body={"background": True}): "body.background: not in a batch",
}


@pytest.mark.parametrize(("bad", "why"), BAD.items(), ids=[why[:30] for why in BAD.values()])
def test_a_line_that_is_no_request_says_why(bad: bytes, why: str) -> None:
    with pytest.raises(BadLine, match=why) as caught:
        parse(bad)
    known = json.loads(bad)["custom_id"] if b'"body": ' in bad and bad[:1] == b"{" else None
    assert caught.value.custom_id == (known if isinstance(known, str) and known else None)


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps).map(str.encode)
)
def test_any_line_is_a_request_or_a_bad_line(data: bytes) -> None:
    with pytest.raises(BadLine):
        parse(data)


def test_what_is_sent_has_the_lowest_priority_and_leaves_no_response_behind() -> None:
    assert json.loads(Item("a", COMPLETIONS, {"model": "m"}).sent) == {"model": "m", "priority": -100}
    assert json.loads(Item("a", RESPONSES, {"input": "x"}).sent) == {"input": "x", "priority": -100, "store": False}
    own = {"input": "x", "priority": 0, "store": True}
    assert json.loads(Item("a", RESPONSES, own).sent) == own


# Order


def written(path: Path, lines: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(one + b"\n" for one in lines))
    return path


def ids(index: Index, grouped: bool = True, lanes: int = 1) -> list[str]:
    return [parse(index.read(one)).custom_id for one in index.order(grouped, lanes)]


def test_shared_prefixes_meet_whatever_their_lengths(tmp_path: Path) -> None:
    """Templates that share a beginning with one another, in random order."""
    draw = random.Random(1)

    def text(count: int) -> str:
        return "".join(draw.choices("abcdef ", k=count))

    common = text(1000)
    templates = [text(150), text(700), common + text(400), common + text(400), text(30_000)]
    items = [(number, template + text(100)) for number, template in enumerate(templates) for _ in range(40)]
    draw.shuffle(items)
    lines = [line(f"{template}-{place}", prompt) for place, (template, prompt) in enumerate(items)]
    with Index([written(tmp_path / "in.jsonl", lines)]) as index:
        order = [int(one.split("-")[0]) for one in ids(index)]
        plain = [int(one.split("-")[0]) for one in ids(index, grouped=False)]
    assert plain == [template for template, _ in items]
    changes = [one for one, other in pairwise(order) if one != other]
    assert len(changes) == len(templates) - 1, order
    assert abs(order.index(2) - order.index(3)) == 40, "templates that share a beginning are neighbours"


@pytest.mark.parametrize("url", URLS)
def test_what_comes_before_the_prompt_counts_and_its_form_does_not(url: str) -> None:
    field = {CHAT: "messages", COMPLETIONS: "prompt"}.get(url, "input")
    same = {"role": "system", "content": "x" * 100}
    one = prefix_key(Item("a", url, {"model": "m", field: [same, {"role": "user", "content": "1"}], "seed": 1}))
    other = prefix_key(Item("b", url, {field: [dict(reversed(same.items())), {"content": "2"}], "model": "m"}))
    assert one
    assert one == other
    assert one != prefix_key(Item("a", url, {"model": "m", "cache_salt": "s", field: [same]}))


@pytest.mark.parametrize("lanes", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_lanes_are_equal_parts_of_the_order_taken_in_turn(count: int, lanes: int, tmp_path: Path) -> None:
    draw = random.Random(count)
    lines = [line(f"{place}", f"{draw.randrange(3)}" * 100) for place in range(count)]
    with Index([written(tmp_path / "in.jsonl", lines)]) as index:
        order, spread = ids(index), ids(index, lanes=lanes)
    parts = [order[count * lane // lanes : count * (lane + 1) // lanes] for lane in range(lanes)]
    assert spread == [one for some in zip_longest(*parts) for one in some if one is not None]
    assert len(spread) == count


def test_duplicate_ids_are_refused_with_both_lines(tmp_path: Path) -> None:
    one = written(tmp_path / "1.jsonl", [line("a"), line("b"), b"null", line("c")])
    other = written(tmp_path / "2.jsonl", [line("d"), line("b"), line("c", url="/v1/wrong"), line("c"), b"null"])
    with pytest.raises(BatchError) as caught:
        Index([one, other])
    assert str(caught.value) == f"{other}:2: custom_id: 'b' is used in {one}:2 already; 1 more are used more than once"


def test_an_input_that_changes_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", [line("a"), line("b")])
    with Index([path]) as index:
        order = index.order(True, 1)
        index.read(next(order))
        written(path, [line("x"), line("y")])
        with pytest.raises(BatchError, match="was changed while the batch ran"):
            index.read(next(order))


def test_a_line_that_is_too_long_is_one_bad_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, and wherever it ends."""
    limit = len(line("a", "x" * 50))
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", limit)
    monkeypatch.setattr(index_module, "MAX_LINE_BYTES", limit)
    long = [line(f"long-{more}", "x" * (limit + more)) for more in range(-60, 3 * limit, 7)]
    path = written(tmp_path / "in.jsonl", [line("a", "x" * 50), *long, line("z", "x" * 50)])
    for end in (b"", b"\n"):
        path.write_bytes(path.read_bytes().rstrip(b"\n") + end)
        with Index([path]) as index:
            first, *bad, last = map(index.read, index.order(False, 1))
            assert index.total == len(long) + 2
        assert (parse(first).custom_id, parse(last).custom_id) == ("a", "z")
        for one in bad:
            with pytest.raises(BadLine, match="the line has more than"):
                parse(one)


# The engine


async def echo(item: Item) -> Answer:
    await asyncio.sleep(0)
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    if item.body["prompt"] == "wrong":
        return Answer(400, "r", {"error": {"message": "no"}}, {"code": "failed", "message": "no"})
    return Answer(200, "r", {"text": item.body["prompt"], "usage": usage}, None)


def carry_out(
    inputs: list[Path], output: Path, send: Callable[[Item], Awaitable[Answer]] = echo, concurrency: int = 4
) -> Tally:
    """As `headwater batch` does."""
    with Index(inputs) as index, Journal(output) as journal:
        tally = Tally(index.total)
        there = list(journal.written())
        tally.before, tally.failed_before = index.mark(one.of for one in there), sum(one.failed for one in there)
        asyncio.run(run(index, journal, index.order(True, 2), send, concurrency, tally))
    return tally


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in output.read_text().splitlines()]


def test_every_line_has_a_row_and_status_error_and_count_agree(tmp_path: Path) -> None:
    good = [line(f"id-{number}", f"text {number}") for number in range(20)]
    bad = list(BAD)
    path = written(tmp_path / "in.jsonl", [*good[:7], *bad, *good[7:], line("refused", "wrong")])
    tally = carry_out([path], tmp_path / "out.jsonl")
    made = rows(tmp_path / "out.jsonl")
    assert len(made) == tally.total == tally.done == 21 + len(bad)
    for row in made:
        assert list(row) == ["id", "custom_id", "response", "error"]
        succeeded = row["response"] is not None and row["response"]["status_code"] == 200
        assert succeeded == (row["error"] is None)
    by_id = {row["custom_id"]: row for row in made if row["custom_id"]}
    assert [by_id[f"id-{number}"]["response"]["body"]["text"] for number in range(20)] == [
        f"text {number}" for number in range(20)
    ]
    assert by_id["refused"]["response"]["status_code"] == 400
    broken = [row["error"] for row in made if row["response"] is None]
    assert sorted(one["line"] for one in broken) == list(range(8, 8 + len(bad)))
    assert all(one["message"].startswith(f"{path}:{one['line']}: ") and one["input"] == str(path) for one in broken)
    assert tally.failed == len(bad) + 1
    assert (tally.prompt_tokens, tally.cached_tokens, tally.output_tokens) == (80, 60, 40)
    assert len({row["id"] for row in made}) == len(made)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], bytes]:
    """Two inputs with lines that are no requests, and the output of a batch over them."""
    directory = tmp_path_factory.mktemp("whole")
    first = written(directory / "1.jsonl", [line("a", "wrong"), b"null", line("b", "\u2028é")])
    second = written(directory / "2.jsonl", [b"", line("c"), line("d", url="/v1/wrong"), line("e\0\n")])
    carry_out([first, second], directory / "out.jsonl", concurrency=1)
    return [first, second], (directory / "out.jsonl").read_bytes()


def of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The line that a row is of."""
    error = row["error"] or {}
    return row["custom_id"], *((error["input"], error["line"]) if row["custom_id"] is None else ())


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.long)])
def test_a_batch_goes_on_from_a_cut_at_any_byte(step: int, whole: tuple[list[Path], bytes], tmp_path: Path) -> None:
    """Every line once, and what was there is kept."""
    inputs, data = whole
    expected = sorted(map(of, map(json.loads, data.splitlines())), key=repr)
    assert len(expected) == 7
    ends = [end for end in range(1, len(data) + 1) if b"\n" in data[end - 1 : end + 1]]
    for cut in sorted({*range(0, len(data) + 1, step), *ends}):
        output = tmp_path / "out.jsonl"
        output.write_bytes(data[:cut])
        tally = carry_out(inputs, output)
        made = output.read_bytes()
        kept = data[: data.rfind(b"\n", 0, cut) + 1]
        assert made.startswith(kept), cut
        assert sorted(map(of, map(json.loads, made.splitlines())), key=repr) == expected, cut
        assert (tally.before, tally.done, tally.failed) == (kept.count(b"\n"), 7, 4), cut


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (b"my notes\n", "out:1: is no row of a batch"),
        (b"my notes", "out:1: is no row of a batch"),
        (b'{"custom_id": "a"}\n', "out:1: is no row of a batch"),
        (b'{"id": "batch_req_1", "custom_id": "z", "response": null, "error": {}}\n', "row 1 .* 'z', which is not in"),
        (b'{"id": "batch_req_1", "custom_id": null, "response": null, "error": {"input": "in", "line": 1}}\n', "in:1"),
    ],
)
def test_a_file_of_somebody_else_is_left_as_it_is(there: bytes, why: str, tmp_path: Path) -> None:
    path, output = written(tmp_path / "in", [line("a")]), tmp_path / "out"
    output.write_bytes(there)
    with pytest.raises(BatchError, match=why):
        carry_out([path], output)
    assert output.read_bytes() == there


def test_one_batch_at_a_time_writes_to_an_output(tmp_path: Path) -> None:
    path, output = written(tmp_path / "in", [line("a")]), tmp_path / "out"
    with Journal(output), pytest.raises(BatchError, match="another batch writes to it"):
        carry_out([path], output)
    assert carry_out([path], output).done == 1


def test_no_more_requests_than_allowed_are_under_way_and_the_first_error_ends_all(tmp_path: Path) -> None:
    path = written(tmp_path / "in", [line(f"{number}") for number in range(100)])
    running = most = 0

    async def send(item: Item) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        if item.custom_id == "30":
            raise BatchError("the key is refused")
        return await echo(item)

    with pytest.raises(BatchError, match="the key is refused"):
        carry_out([path], tmp_path / "out", send, concurrency=7)
    assert most == 7
    assert 45 < len(rows(tmp_path / "out")) < 75


@pytest.mark.parametrize(("count", "sent"), [(200_000, 0.2), pytest.param(1_000_000, 1, marks=pytest.mark.long)])
def test_memory_does_not_grow_with_the_lines(count: int, sent: float, tmp_path: Path) -> None:
    """In a process of its own, whose peak is nobody else's. Ten times as many lines take a few megabytes more, up to
    the bounds of SQLite's cache and sorter."""
    command = [sys.executable, str(FLAT), str(tmp_path), str(count), str(sent)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert told["lines"] == count
    assert told["grown_mb"] < MAX_GROWN_MB, told
