"""The command line as a user meets it, in processes of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import ray
from transformers import BertConfig
from typer.testing import CliRunner

from cluster.cli import app
from cluster.errors import UserError
from tests.cluster.checks import alive, post
from tests.cluster.conftest import free_port
from tests.cluster.otlp import Receiver, receiving
from tests.cluster.test_failures import Judge
from tests.telemetry import CALLER, SAMPLED, TRACE

HEADWATER = [str(Path(sys.executable).parent / "headwater")]


def run(*arguments: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HEADWATER, *arguments], capture_output=True, text=True, timeout=timeout, env={**os.environ, **environment}
    )


def fails_with(message: str, *arguments: str, **environment: str) -> None:
    """One clear line on standard error, nothing else, and a non-zero exit."""
    done = run(*arguments, **environment)
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert re.search(message, lines[0]), lines[0]


class Served:
    """A `headwater serve` process that is ready."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.port = free_port()
        self.process = subprocess.Popen(
            [*HEADWATER, "serve", "--port", str(self.port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment},
        )
        self.children: list[psutil.Process] = []
        self.greeting = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.greeting += line
            if "Ctrl-C" in line:
                break
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int) -> tuple[int, float]:
        """Send a signal; exit code and seconds until the process was gone."""
        start = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(20), time.monotonic() - start

    def left_over(self) -> list[psutil.Process]:
        return [one for one in self.children if alive(one)]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture(scope="module")
def served(tiny: Path, receiver: Receiver) -> Iterator[Served]:
    both = ("--prefill", "0", "--decode", "0", "--both", "1")
    model = ("--model", str(tiny), "--dtype", "float32", "--kv-memory", "64MiB")
    made = Served(*model, *both, **receiver.environment)
    yield made
    if made.process.poll() is None:
        made.stop(signal.SIGTERM)


def test_serve_prints_lines_that_work_when_pasted(served: Served) -> None:
    assert f"http://127.0.0.1:{served.port}" in served.greeting
    curl = re.search(r"curl .*?(?=\n\n)", served.greeting, re.S)
    python = re.search(r"\S*python\S* -c .*", served.greeting)
    assert curl
    assert python
    answer = subprocess.run(["bash", "-c", curl.group()], capture_output=True, text=True, timeout=60)
    assert json.loads(answer.stdout)["choices"][0]["finish_reason"] in ("length", "stop")
    done = subprocess.run(["bash", "-c", python.group()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_one_worker_with_both_roles_answers_as_the_reference_does(served: Served, tiny: Path) -> None:
    judge, prompts = Judge(tiny), [[number] * 40 + list(range(number, number + 60)) for number in range(4)]
    for prompt in [*prompts, *prompts]:  # cold and warm
        wanted = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = post(f"http://127.0.0.1:{served.port}/v1/completions", {**wanted, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        ids = answer.json()["choices"][0]["token_ids"]
        assert len(ids) == 12
        assert judge.right(prompt, ids)


def test_status_as_json(served: Served) -> None:
    done = run("status", "--json")
    assert done.returncode == 0, done.stderr
    workers = json.loads(done.stdout)["workers"]
    assert [(one["name"], one["role"], one["state"]) for one in workers] == [("both-0", "both", "ready")]
    for one in workers:
        assert {"node", "pid", "model", "running", "waiting", "hit_rate"} <= one.keys()
        assert {"total", "free", "cached", "pinned", "quarantined"} <= one["blocks"].keys()
        assert psutil.pid_exists(one["pid"])


@pytest.mark.long
def test_status_as_a_table(served: Served) -> None:
    done = run("status")
    assert "both-0" in done.stdout
    assert "quarantined" in done.stdout


@pytest.mark.parametrize("host", ["1MiB", "0"])
def test_a_lossy_format_is_warned_of_once(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are tiers."""
    monkeypatch.setenv("HEADWATER__TIERS__FORMAT", "int8")
    done = CliRunner().invoke(app, ["serve", "--model", "/nowhere", "--tiers-host", host])
    assert isinstance(done.exception, UserError)
    assert done.stderr.count("warning: tiers.format is int8: answers") == (host != "0")


def test_a_batch_finds_the_gateways(served: Served, tmp_path: Path) -> None:
    body = {"model": "tiny-llama", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    done = run("batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    assert done.returncode == 0, done.stderr
    assert re.match(r"1 rows succeeded, 0 failed; 3 prompt tokens \(\d+% cached\), 2 output tokens", done.stderr)
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert (row["custom_id"], row["response"]["status_code"], row["error"]) == ("one", 200, None)


def test_a_taken_port_is_named(served: Served) -> None:
    fails_with(rf"gateway.port: .*{served.port}: Address already in use", "serve", "--port", str(served.port))


def processes() -> dict[str, int]:
    return {one["name"]: one["pid"] for one in json.loads(run("status", "--json").stdout)["workers"]}


@pytest.mark.long
def test_who_dies_is_started_again_under_its_name_and_port(served: Served) -> None:
    wanted = {"model": "tiny-llama", "prompt": [1, 2, 3], "max_tokens": 3, "ignore_eos": True}
    url = f"http://127.0.0.1:{served.port}/v1/completions"
    before = processes()["both-0"]
    gateways = [one for one in served.children if "Gateway" in " ".join(one.cmdline())]
    assert len(gateways) == 1
    for victim in (psutil.Process(before), *gateways):
        victim.kill()
        victim.wait(10)
    until = time.monotonic() + 60
    while True:
        with suppress(httpx.HTTPError):
            if httpx.post(url, json=wanted, timeout=5).status_code == 200:
                break
        assert time.monotonic() < until, "nobody answers"
        time.sleep(0.2)
    after = processes()["both-0"]
    assert after != before
    served.children = psutil.Process(served.process.pid).children(recursive=True)
    assert psutil.Process(after) in served.children


def test_sigterm_lets_a_stream_end_and_leaves_no_process(served: Served, receiver: Receiver) -> None:
    """And its trace is complete. Last of the tests that share this server."""
    wanted = {"model": "tiny-llama", "prompt": [1, 2, 3], "max_tokens": 300, "ignore_eos": True, "stream": True}
    traced = {"traceparent": SAMPLED}
    url = f"http://127.0.0.1:{served.port}/v1/completions"
    with httpx.stream("POST", url, json=wanted, headers=traced, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        start = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert served.process.wait(10) == 0
    assert time.monotonic() - start < 10
    assert served.left_over() == []
    assert {(one.trace, one.service) for one in receiver.spans} == {(TRACE, "headwater")}
    found = {one.name: one for one in receiver.spans}
    assert {name: one.instance for name, one in found.items()} == {
        "text_completion tiny-llama": "gateway-0",
        "attempt": "gateway-0",
        "route": "gateway-0",
        "queue": "both-0",
        "prefill": "both-0",
        "decode": "both-0",
    }
    above = {one.span: name for name, one in found.items()} | {CALLER: "caller"}
    parents = {name: above[one.parent] for name, one in found.items()}
    assert parents.pop("text_completion tiny-llama") == "caller"
    assert parents.pop("attempt") == "text_completion tiny-llama"
    assert set(parents.values()) == {"attempt"}


@pytest.mark.long
def test_ctrl_c_stops_everything_in_time(tiny: Path) -> None:
    served = Served("--model", str(tiny), "--kv-memory", "64MiB")
    code, seconds = served.stop(signal.SIGINT)
    assert code == 0
    assert seconds < 10
    assert served.left_over() == []


@pytest.mark.long
def test_a_stopped_benchmark_leaves_no_process(tiny: Path) -> None:
    sizes = ("--prefix", "64", "--query", "8", "--requests", "5000", "--concurrency", "1")
    bench = subprocess.Popen(
        [*HEADWATER, "bench", "shared-prefix", "--model", str(tiny), *sizes],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "HEADWATER__WORKER__KV_MEMORY": "32MiB"},
        text=True,
    )
    try:
        children = children_with(bench, "ray::Gateway")
        start = time.monotonic()
        bench.send_signal(signal.SIGTERM)
        output, _ = bench.communicate(timeout=20)
    finally:
        bench.kill()
    assert bench.returncode == 130, output
    assert "SIGTERM received" not in output  # Ray's own account of a crash
    assert time.monotonic() - start < 10
    assert [one for one in children if alive(one)] == []


def children_with(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """All processes below this one, when there is one of this name."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        found = psutil.Process(process.pid).children(recursive=True)
        with suppress(psutil.Error):
            if any(one.cmdline()[:1] == [name] for one in found):
                return found
        time.sleep(0.1)
    raise AssertionError(f"no {name}")


def test_start_up_errors_are_one_line(tiny: Path, tmp_path: Path) -> None:
    port = ("--port", str(free_port()))
    fails_with("no-such-model", "serve", "--model", "no-such-model", *port)
    BertConfig(architectures=["BertModel"]).save_pretrained(tmp_path / "bert")
    fails_with("bert", "serve", "--model", str(tmp_path / "bert"), *port)
    fails_with("worker.block_siz.*block_size", "serve", *port, HEADWATER__WORKER__BLOCK_SIZ="8")
    fails_with("decode.replicas is 0", "serve", "--decode", "0", *port)
    fails_with("worker.kv_memory: .*'lots'", "serve", "--kv-memory", "lots", *port)
    fails_with("worker.dtype", "serve", "--dtype", "int4", *port)
    fails_with("nowhere.yaml", "serve", "--config", str(tmp_path / "nowhere.yaml"), *port)


@pytest.mark.long
@pytest.mark.parametrize("running", [False, True])
def test_errors_of_workers_are_one_line(local_ray: None, tiny: Path, running: bool) -> None:
    """On a Ray cluster that `serve` starts, and on one that runs."""
    one = ("--port", str(free_port()), "--model", str(tiny), "--prefill", "0", "--decode", "0", "--both", "1")
    address = ("--address", ray.get_runtime_context().gcs_address) if running else ()
    fails_with(r"kv_memory: .*needs \d+ blocks, \d+ bytes", "serve", "--kv-memory", "64KiB", *address, *one)


def test_an_unreachable_ray_cluster_is_named(tiny: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    fails_with(address, "serve", "--model", str(tiny), "--address", address, "--port", str(free_port()))
