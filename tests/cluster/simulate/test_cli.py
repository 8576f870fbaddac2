"""`headwater simulate` as a user meets it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.bench.report import Report
from cluster.cli import app
from cluster.errors import UserError
from cluster.simulate.chart import draw, picture
from cluster.simulate.compare import checks, chosen
from cluster.simulate.policies import NAMES
from cluster.simulate.trace import BLOCK_TOKENS, Request
from tests.cluster.simulate.conftest import chats

Write = Callable[..., Path]
HEADWATER = str(Path(sys.executable).parent / "headwater")
FIGURES = ["hit_rate", "mean", "p50", "p90", "p99", "imbalance"]


def lines(trace: list[Request]) -> list[dict[str, object]]:
    return [
        {
            "timestamp": round(one.arrival * 1000),
            "input_length": len(one.blocks) * BLOCK_TOKENS,
            "output_length": one.output,
            "hash_ids": list(one.blocks),
        }
        for one in trace
    ]


@pytest.fixture
def trace(write: Write) -> str:
    return str(write(*lines(chats(10, 6, seed=1))))


def test_all_policies_as_json_and_as_a_picture(trace: str, tmp_path: Path) -> None:
    png = tmp_path / "plot.png"
    flags = ["--workers", "4", "--speed", "2", "--rate", "4000", "--tune", "--json", "--png", str(png)]
    done = subprocess.run(
        [HEADWATER, "simulate", "--trace", trace, *flags], capture_output=True, text=True, env=os.environ, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress bar where nobody watches
    whole = json.loads(done.stdout)
    assert set(whole) == {"config", "machine", "results", "checks", "notes"}
    assert list(whole["results"]) == NAMES
    assert all(list(figures) == FIGURES for figures in whole["results"].values())
    assert [one["name"] for one in whole["checks"]] == [
        "mean time, times that of exact knowledge",
        "hit rate, times that of exact knowledge",
        "mean time, times that of the best peer",
    ]
    assert [note.split(":")[0] for note in whole["notes"]] == ["headwater", "chwbl", "sglang", "dynamo", "lmetric"]
    assert (whole["config"]["workers"], whole["config"]["staleness_s"], whole["config"]["requests"]) == (4, 0.25, 60)
    assert png.read_bytes().startswith(b"\x89PNG")


def run(*arguments: str) -> str:
    """What the command prints, when it ends well."""
    done = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_a_table_of_the_policies_asked_for(trace: str) -> None:
    """It fits into a terminal of 80 columns, and says which flags are not the default ones."""
    asked = ["--policy", "lmetric", "--policy", "round-robin", "--policy", "lmetric"]
    title, empty, heading, *rows = run("--trace", trace, "--speed", "2", "--workers", "16", *asked).splitlines()
    assert title == "trace.jsonl, 60 requests, --speed 2"
    assert not empty
    assert heading.split() == ["hit", "rate", "mean", "s", "p50", "s", "p90", "s", "p99", "s", "imbalance"]
    assert [row.split()[0] for row in rows] == ["lmetric", "round-robin"]
    assert all(re.fullmatch(r"[a-z-]+( +\d+\.\d+){6}", row) for row in rows)
    assert {len(line) for line in (heading, *rows)} == {79}


def test_all_of_a_long_table_fits_into_80_columns(trace: str) -> None:
    flags = ["--workers 4", "--rate 4000", "--loss 0.1", "--fetch-bandwidth 10GB/s", "--kv-bytes-per-token 131072"]
    whole = run("--trace", trace, *" ".join(flags).split(), "--decode", "--tune")
    assert max(map(len, whole.splitlines())) <= 80
    title = " ".join(whole.split("\n\n")[0].split())
    assert title == ", ".join(["trace.jsonl, 60 requests", *flags, "--decode", "--tune"])


def test_assert_fails_where_nothing_was_checked(trace: str) -> None:
    assert CliRunner().invoke(app, ["simulate", "--trace", trace, "--policy", "chwbl", "--assert"]).exit_code == 1


def test_copies_between_workers(trace: str) -> None:
    flags = ["--fetch-bandwidth", "10GB/s", "--kv-bytes-per-token", "131072", "--policy", "oracle", "--json"]
    config = json.loads(run("--trace", trace, *flags))["config"]
    assert config["block_copy_s"] == pytest.approx(0.0067, abs=2e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "best"], "--policy best: must be one of headwater, round-robin"),
        (["--speed", "0"], "--speed 0: must be from 0.001 to 1000000"),
        (["--speed", "inf"], "--speed inf: must be from 0.001 to 1000000"),
        (["--rate", "nan"], "--rate nan: must be from 1 to 1000000000"),
        (["--rate", "-5"], "--rate -5: must be"),
        (["--loss", "1.5"], "--loss 1.5: must be from 0 to 0.99"),
        (["--workers", "0"], "--workers 0: must be from 1 to 4096"),
        (["--workers", "4000", "--routers", "97"], "--workers 4000 and --routers 97: must be 4096 or fewer together"),
        (["--capacity", "60000"], "--capacity 60000: must be 50000 or less with the policy headwater"),
        (["--staleness", "nan"], "--staleness nan: must be from 0"),
        (["--slow-worker", "0"], "--slow-worker 0: must be from 0.01 to 1"),
        (["--cut-off-at", "5", "--routers", "1"], "--cut-off-at 5: needs 2 --routers or more"),
        (["--fetch-bandwidth", "10GB/s"], "belong together"),
        (["--kv-bytes-per-token", "7"], "belong together"),
        (["--fetch-bandwidth", "fast", "--kv-bytes-per-token", "7"], "--fetch-bandwidth fast: must be a size a second"),
        (["--fetch-bandwidth", "-1GB/s", "--kv-bytes-per-token", "7"], "--fetch-bandwidth -1GB/s"),
        (["--png", "/nowhere/plot.png"], "--png /nowhere/plot.png: no such directory"),
    ],
)
def test_bad_flags_are_named(trace: str, flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        CliRunner().invoke(app, ["simulate", "--trace", trace, *flags], catch_exceptions=False)


def test_a_bad_trace_is_one_line_and_exit_code_1(write: Write) -> None:
    done = subprocess.run(
        [HEADWATER, "simulate", "--trace", str(write({"timestamp": 0}))], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert re.search(r"^error: --trace \S+trace.jsonl, line 1: input_length: missing: must be a whole number", line)


def test_checks_compare_with_exact_knowledge_and_the_best_peer() -> None:
    def side(mean: float, hit_rate: float) -> dict[str, float]:
        return {"mean": mean, "hit_rate": hit_rate}

    others = {"chwbl": side(3, 0.3), "sglang": side(3, 0.3), "lmetric": side(2, 0.3)}
    good = {"headwater": side(1.0, 0.3), "oracle": side(0.99, 0.305), "dynamo": side(1.2, 0.2), **others}
    assert [one.ok for one in checks(good)] == [True, True, True]
    bad = {"headwater": side(1.1, 0.29), "oracle": side(1.0, 0.31), "dynamo": side(1.2, 0.2), **others}
    assert [one.ok for one in checks(bad)] == [False, False, False]
    assert [one.name for one in checks({"headwater": side(1, 1), "round-robin": side(2, 0)})] == []
    assert checks({"oracle": side(1, 1)}) == []
    assert checks({"headwater": side(1.0, 0.3), **others}) == []  # the best may be one that was not played


def test_all_policies_are_chosen_where_none_is() -> None:
    assert chosen(None) == NAMES
    assert chosen(["oracle", "chwbl", "oracle"]) == ["oracle", "chwbl"]


def test_labels_of_a_picture_are_within_it_and_apart() -> None:
    def side(p90: float, hit_rate: float) -> dict[str, float]:
        return {"p90": p90, "hit_rate": hit_rate}

    close = {
        name: side(10.0, 0.3 - number / 100) for number, name in enumerate(["round-robin", "two-choices", "chwbl"])
    }
    figure = picture({"headwater": side(1.0, 0.3001), "oracle": side(1.0, 0.3), "dynamo": side(5.0, 0.0), **close})
    (panel,) = figure.axes
    labels = [text for text in panel.texts if text.get_text()]
    assert [text.get_text() for text in labels] == [
        "headwater, oracle",
        "dynamo",
        "round-robin",
        "two-choices",
        "chwbl",
    ]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in labels]
    inside = panel.get_window_extent()
    for number, box in enumerate(boxes):
        assert inside.x0 <= box.x0 <= box.x1 <= inside.x1
        assert inside.y0 <= box.y0 <= box.y1 <= inside.y1
        assert not any(box.overlaps(other) for other in boxes[:number])


def test_a_picture_of_one_policy(tmp_path: Path) -> None:
    draw(Report({}, {"chwbl": {"p90": 1.0, "hit_rate": 0.2}}, []), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
