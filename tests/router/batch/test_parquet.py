"""Parquet inputs: rows are the same requests as lines would be, and memory is that of some rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from router.batch.errors import BatchError
from router.batch.lines import CHAT, COMPLETIONS
from router.batch.parquet import as_lines

HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hi\u2028\nthere"}], "seed": 1}
OTHER = {"model": "m", "messages": [{"role": "user", "content": "Ho", "name": None}], "stop": ["a", "b"]}
FLAT = """
import sys
from pathlib import Path
import pyarrow.parquet
from router.batch.parquet import as_lines
def peak_mb():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
before = peak_mb()
with as_lines(Path(sys.argv[1])) as file:
    count = sum(1 for _ in open(f"/dev/fd/{file.fileno()}", "rb"))
print(count, peak_mb() - before)
"""


def written(path: Path, columns: dict[str, Any], **more: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **more)
    return path


def lines(path: Path) -> list[Any]:
    """Read from the beginning, by a path, as the index does."""
    with as_lines(path) as file:
        return [json.loads(one) for one in Path(f"/dev/fd/{file.fileno()}").read_bytes().splitlines()]


def test_rows_are_lines_whatever_the_type_of_bodies(tmp_path: Path) -> None:
    """What is null in a struct is not there: all rows of a column have the fields of all."""
    ids, urls = ["a", "b"], [CHAT, CHAT]
    other = {**OTHER, "messages": [{"role": "user", "content": "Ho"}]}
    expected = [
        {"custom_id": name, "method": "POST", "url": CHAT, "body": body}
        for name, body in zip(ids, (HELLO, other), strict=True)
    ]
    text = [json.dumps(HELLO, indent=2), json.dumps(other, ensure_ascii=False)]
    for bodies in (text, [HELLO, OTHER], pyarrow.array(text, pyarrow.large_string())):
        columns = {"custom_id": ids, "url": urls, "body": bodies}
        assert lines(written(tmp_path / "1.parquet", columns, row_group_size=1)) == expected
        assert lines(written(tmp_path / "2.parquet", {**columns, "method": ["POST", None]})) == expected


def test_rows_that_are_no_requests_are_lines_that_are_none(tmp_path: Path) -> None:
    columns = {"custom_id": ["a", None], "url": [COMPLETIONS, None], "body": ["{", None]}
    found = lines(written(tmp_path / "in.parquet", columns))
    assert [(one["custom_id"], one["body"]) for one in found] == [("a", "{"), (None, None)]


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"custom_id": ["a"], "url": ["u"]}, "has no column 'body': a batch has custom_id, method, url, body"),
        ({"custom_id": [1], "url": ["u"], "body": ["{}"]}, "column 'custom_id': must be a string, got int64"),
        (
            {"custom_id": ["a"], "url": ["u"], "body": [[1]]},
            "column 'body': must be a struct, or a string of JSON, got",
        ),
        ({"custom_id": ["a"], "url": ["u"], "body": ["{}"], "x": [1]}, "column 'x': only custom_id, method, url, body"),
        ({"custom_id": ["a"], "url": ["u"], "body": [{"x": b"y"}]}, "row 1: body: .*bytes"),
    ],
)
def test_columns_that_are_not_those_of_a_batch_are_named(columns: dict[str, Any], why: str, tmp_path: Path) -> None:
    path = written(tmp_path / "in.parquet", columns)
    with pytest.raises(BatchError, match=f"^{path}: {why}"):
        as_lines(path)


def test_what_is_no_parquet_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(b"{}\n")
    with pytest.raises(BatchError, match=f"^{path}: cannot be read as Parquet: "):
        as_lines(path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BatchError, match=r"Parquet needs pyarrow: pip install 'headwater\[parquet\]'"):
        as_lines(path)


def test_memory_does_not_grow_with_the_rows_of_a_group(tmp_path: Path) -> None:
    """120 MB of bodies, in one row group."""
    count = 12_000
    bodies = [json.dumps({"model": "m", "prompt": f"{number:010}" * 1000}) for number in range(count)]
    columns = {"custom_id": [str(number) for number in range(count)], "url": [COMPLETIONS] * count, "body": bodies}
    path = written(tmp_path / "in.parquet", columns, row_group_size=count, use_dictionary=False)
    done = subprocess.run([sys.executable, "-c", FLAT, str(path)], capture_output=True, text=True, timeout=60)
    rows, grown_mb = map(int, done.stdout.split())
    assert rows == count
    assert grown_mb < 110
