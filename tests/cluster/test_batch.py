"""`headwater batch` in processes of its own, on real clusters."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.batch_cli import SOME_FAILED
from cluster.batch_progress import progress_of
from cluster.cli import app
from cluster.errors import UserError
from cluster.launch import Cluster
from router.batch.lines import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from router.batch.tally import Tally
from tests.cluster.checks import assert_balance, post
from tests.cluster.test_cli import HEADWATER

GREEDY = {"model": "tiny-llama", "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**GREEDY, "max_tokens": 6, "messages": [{"role": "user", "content": "template"}]},
    COMPLETIONS: {**GREEDY, "max_tokens": 6, "prompt": "template ", "ignore_eos": True},
    RESPONSES: {**GREEDY, "max_output_tokens": 6, "input": "template"},
    EMBEDDINGS: {"model": "tiny-llama", "input": "template"},
}


def body_of(url: str, number: int) -> dict[str, Any]:
    """Prompts of two templates, with a number at their end."""
    body = json.loads(json.dumps(BODIES[url]).replace("template", f"{'ab'[number % 2] * 40} {number}"))
    assert isinstance(body, dict)
    return body


def written(path: Path, count: int, *more: str) -> Path:
    lines = [
        json.dumps({"custom_id": f"{url} {number}", "method": "POST", "url": url, "body": body_of(url, number)})
        for number in range(count)
        for url in BODIES
    ]
    path.write_text("\n".join([*more, *lines]) + "\n")
    return path


def answer_of(body: dict[str, Any]) -> Any:
    """What the model said."""
    return [body.get("output"), body.get("data"), body.get("choices")]


def without_ids(answer: Any) -> Any:
    text = json.dumps(answer)
    return json.loads(text, object_hook=lambda one: {name: value for name, value in one.items() if name != "id"})


def alike(one: Any, other: Any) -> bool:
    """Numbers of an embedding may differ in their last digits: it depends on the other rows of a step."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return abs(one - other) < 1e-4 if isinstance(one, float) and isinstance(other, float) else bool(one == other)


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in output.read_bytes().splitlines()]


def test_a_killed_batch_goes_on_and_every_line_has_one_row(tiny_pair: Cluster, tmp_path: Path) -> None:
    path, output = written(tmp_path / "in.jsonl", 25, "null", "{"), tmp_path / "out.jsonl"
    command = [*HEADWATER, "batch", str(path), "-o", str(output), "--url", f"{tiny_pair.url}/v1", "--concurrency", "4"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < 20:
        assert time.monotonic() < until
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    first.kill()
    first.communicate()
    killed_at = output.read_bytes()
    assert killed_at.count(b"\n") < 80
    output.write_bytes(killed_at + b'{"id": "batch_r')  # as if it had died while it wrote

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == SOME_FAILED, done.stderr
    rows = rows_of(output)
    assert f"100 rows succeeded, 2 failed ({killed_at.count(chr(10).encode())} were there before)" in done.stderr
    assert output.read_bytes().startswith(killed_at)
    expected = [f"{url} {number}" for url in BODIES for number in range(25)]
    assert sorted(str(row["custom_id"]) for row in rows) == sorted(["None", "None", *expected])
    assert sorted(row["error"]["line"] for row in rows if row["error"]) == [1, 2]
    found = {row["custom_id"]: row["response"] for row in rows}
    for url in BODIES:
        direct = post(f"{tiny_pair.url}{url}", body_of(url, 7)).json()
        assert alike(without_ids(answer_of(found[f"{url} 7"]["body"])), without_ids(answer_of(direct)))
        assert found[f"{url} 7"]["request_id"]
    assert found[f"{RESPONSES} 7"]["body"]["store"] is False
    assert_balance(tiny_pair)


@pytest.mark.long
def test_a_cluster_for_one_batch(tiny: Path, tmp_path: Path) -> None:
    path, output = written(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    command = [*HEADWATER, "batch", str(path), "-o", str(output), "--standalone", "--model", str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "12 rows succeeded, 0 failed; " in done.stderr
    assert len(rows_of(output)) == 12


def stopped(*arguments: str) -> str:
    """Why the command did not begin."""
    done = CliRunner().invoke(app, ["batch", *arguments])
    assert isinstance(done.exception, UserError), done
    return str(done.exception)


def test_inputs_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "out.jsonl"):
        Path(name).touch()
    assert stopped("no/*.jsonl", "-o", "out.jsonl") == "no/*.jsonl: no such file"
    assert stopped(".", "-o", "out.jsonl") == ".: is no file that can be read twice, such as a pipe or a directory"
    assert stopped("out.jsonl", "-o", "./out.jsonl") == "out.jsonl: is both input and output"
    assert stopped("a.jsonl", "-o", "o", "--url", "http://h", "--standalone").startswith("--url and --standalone excl")
    assert stopped("a.jsonl", "-o", "o", "--model", "m").startswith("--config and --model are for --standalone")
    done = CliRunner().invoke(app, ["batch", "*.jsonl", "-o", "out.jsonl", "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 0, "the output is none of the inputs, and those have no lines"
    assert "0 rows succeeded" in done.stderr


def test_progress_is_one_line() -> None:
    tally = Tally(total=4000, before=1000, failed_before=1)
    tally.begun = time.monotonic() - 60
    body = {"usage": {"input_tokens": 100, "output_tokens": 20, "input_tokens_details": {"cached_tokens": 80}}}
    for _ in range(1000):
        tally.add({"response": {"status_code": 200, "body": body}, "error": None})
    assert progress_of(tally) == "2,000/4,000 rows, 1 failed, 2,000 tokens/s, 80% cached, 0:02:00 left"


def test_ctrl_c_says_how_to_go_on(tiny_pair: Cluster, tmp_path: Path) -> None:
    path, output = written(tmp_path / "in.jsonl", 400), tmp_path / "out.jsonl"
    command = [*HEADWATER, "batch", str(path), "-o", str(output), "--url", tiny_pair.url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not output.exists() or not output.read_bytes():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode not in (0, SOME_FAILED)
    assert "rows: the same command goes on from here" in said
    assert_balance(tiny_pair)
