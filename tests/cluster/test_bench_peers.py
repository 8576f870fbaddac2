"""`headwater bench peers`: command lines, what is read of the peers' output, notes, the picture; programs in their
places."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from cluster.bench.cli import app
from cluster.bench.load import LoadError, send, single
from cluster.bench.peers.chart import check_png, draw, margin
from cluster.bench.peers.generate_batch import Transformers
from cluster.bench.peers.llama_cpp import LlamaCpp, batched_speed, bench_speed
from cluster.bench.peers.program import PeerError
from cluster.bench.peers.program import run as run_program
from cluster.bench.peers.run import Bench, Step, run, topology, with_roles
from cluster.bench.peers.shape import FIRST, HEADWATER, LLAMA, TOKENS, TRANSFORMERS, Shape, with_ratios
from cluster.bench.report import Check, Report
from cluster.config import ClusterConfig, load
from cluster.errors import UserError
from tests.cluster import fake_completions
from tests.cluster.checks import alive
from tests.cluster.conftest import settings

SHAPE = Shape(2000, 200, 250, 64, 16, 32, 16, 2048, 16, 64, 1)
BENCH_OUTPUT = '[\n {"n_prompt": 2048, "n_gen": 0, "avg_ts": 459.5, "stddev_ts": 1.0}\n]\n'
BATCHED_OUTPUT = '\nload: done\n{"n_kv_max": 3072, "pl": 16, "speed_pp": 400.0, "speed_tg": 129.25}\n\n'


def program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def llama(tmp_path: Path) -> LlamaCpp:
    """Programs that print what llama.cpp's would, and a server that answers with made-up tokens."""
    gguf = tmp_path / "tiny.gguf"
    gguf.touch()
    (tmp_path / "bench.json").write_text(BENCH_OUTPUT)
    (tmp_path / "batched.jsonl").write_text(BATCHED_OUTPUT)
    return LlamaCpp(
        gguf,
        program(tmp_path / "server", f'exec {sys.executable} {fake_completions.__file__} "$@"'),
        program(tmp_path / "bench", f"cat {tmp_path}/bench.json"),
        program(tmp_path / "batched", f"cat {tmp_path}/batched.jsonl"),
        2,
    )


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_slots_get_their_context_each() -> None:
    command = LlamaCpp(Path("m.gguf"), "llama-server", None, None, 2).server_command(8123, 16, 315)
    assert command[0] == "llama-server"
    assert (flag(command, "-np"), flag(command, "-c"), flag(command, "--port")) == ("16", "5040", "8123")
    assert (flag(command, "-t"), flag(command, "-tb"), flag(command, "-m")) == ("2", "2", "m.gguf")


def test_the_shared_prompt_fits_both_layouts() -> None:
    llama = LlamaCpp(Path("m.gguf"), None, None, "llama-batched-bench", 2)
    one, each = (llama.batched_command(2048, 16, 64, unified) for unified in (True, False))
    assert int(flag(one, "-c")) >= 2048 + 16 * 64
    assert int(flag(each, "-c")) >= 16 * (2048 + 64)
    assert "-pps" in one
    assert "-pps" in each


def test_bench_commands_measure_one_thing_each() -> None:
    llama = LlamaCpp(Path("m.gguf"), None, "llama-bench", None, 2)
    prefill, decode = llama.prefill_command(2048), llama.decode_command(2048, 64)
    assert (flag(prefill, "-p"), flag(prefill, "-n")) == ("2048", "0")
    assert (flag(decode, "-p"), flag(decode, "-n"), flag(decode, "-d")) == ("0", "64", "2048")


def test_speeds_are_read(llama: LlamaCpp) -> None:
    assert (llama.prefill(64), llama.decode(64, 8)) == (459.5, 459.5)
    assert llama.batched_decode(64, 4, 8) == 129.25


def test_output_without_a_result_is_an_error() -> None:
    for output in ("", "[]", "{}", "main: failed"):
        with pytest.raises(PeerError, match="llama-bench printed no result"):
            bench_speed(output)
    for output in (
        "main: failed\n",
        "{\nmain: failed\n",
        '{"pl": 16}\nmain: failed\n',
        '{"speed_tg": null}\nmain: failed',
    ):
        with pytest.raises(PeerError, match="llama-batched-bench printed no result: main: failed"):
            batched_speed(output)


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    bad = program(tmp_path / "bad", "echo loading >&2; echo error: no such model >&2; exit 3")
    llama = LlamaCpp(Path("m.gguf"), bad, bad, bad, 2)
    with pytest.raises(PeerError, match="bad failed: error: no such model"):
        llama.prefill(64)
    with pytest.raises(PeerError, match="did not start: error: no such model"), llama.serving(1, 64):
        pass


def test_a_program_that_is_killed_or_none_says_so(tmp_path: Path) -> None:
    killed = program(tmp_path / "killed", "echo loading >&2; kill -9 $$")
    with pytest.raises(PeerError, match="killed was ended by SIGKILL: loading"):
        run_program([killed])
    (tmp_path / "none").write_bytes(b"\x7fELF")
    (tmp_path / "none").chmod(0o755)
    none = str(tmp_path / "none")
    with pytest.raises(PeerError, match="none cannot be run: "):
        run_program([none])
    with pytest.raises(PeerError, match="cannot be run: "), LlamaCpp(Path("m"), none, None, None, 2).serving(1, 64):
        pass


@pytest.mark.long
def test_generate_batch_computes_in_another_process(tiny: Path) -> None:
    """This one has threads of its own that compute, which would take OpenMP's helpers from it."""
    prompts, before = [[1, 2, 3], [1, 2, 4, 5]], set(threading.enumerate())
    allocated = torch.get_num_threads()
    assert Transformers(64).output_tokens_per_s(tiny, "float32", "cpu", allocated + 1, prompts, 3) > 0
    assert torch.get_num_threads() == allocated
    assert set(threading.enumerate()) <= before


@pytest.mark.long
@pytest.mark.long
def test_generate_batch_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"^generate_batch failed: .*Error: .*config\.json"):
        Transformers(64).output_tokens_per_s(tmp_path, "float32", "cpu", 1, [[1]], 2)


@pytest.mark.long
def test_generate_batch_is_not_left_behind(tiny: Path) -> None:
    """Whether who asked is interrupted, or killed and cannot do anything any more."""
    for number in (signal.SIGINT, signal.SIGKILL):
        asks = subprocess.Popen([sys.executable, "-c", ASK_FOR_MUCH, str(tiny)], stderr=subprocess.DEVNULL)
        computing = first_child(asks.pid)
        asks.send_signal(number)
        assert asks.wait(10) == -number
        until = time.monotonic() + 60
        while alive(computing):
            assert time.monotonic() < until
            time.sleep(0.05)


ASK_FOR_MUCH = """
import sys
from cluster.bench.peers.generate_batch import Transformers
Transformers(64).output_tokens_per_s(sys.argv[1], "float32", "cpu", 1, [[1, 2, 3]], 1900)
"""


def first_child(pid: int) -> psutil.Process:
    """The process that this one has started, when it has begun."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for one in psutil.Process(pid).children():
            if "cluster.bench.peers.generate_batch" in one.cmdline():
                return one
        time.sleep(0.05)
    raise AssertionError("no process was started")


def test_a_server_is_started_and_stopped(llama: LlamaCpp) -> None:
    with llama.serving(2, 64) as target:
        run = send(target, single([[1, 2, 3]]), output=4, concurrency=1)
        assert run.timings[0].output_tokens == 4
    with pytest.raises(LoadError, match="ConnectError"):
        send(target, single([[1, 2, 3]]), output=4, concurrency=1)


def test_what_is_missing_is_named(tiny: Path, tmp_path: Path, llama: LlamaCpp) -> None:
    nobody = LlamaCpp(tmp_path / "none.gguf", None, "no-such-program", llama.batched_bench, 2)
    bench = Bench(settings(model__name=str(tiny)), SHAPE, nobody, transformers=None)
    assert {step.name: step.missing for step in bench.steps()} == {
        "serving": None,
        "server with one slot": "--llama-server was not given",
        "server with 16 slots": "--llama-server was not given",
        "engine": None,
        "llama-bench": "--llama-bench no-such-program: no such program",
        "llama-batched-bench": f"--gguf {tmp_path}/none.gguf: no such file",
        "generate_batch": "--transformers was not given",
    }


@pytest.mark.parametrize("failure", [PeerError("it fell over"), LoadError("it fell over")])
def test_a_peer_that_fails_is_a_check_that_is_missed(
    tiny: Path, llama: LlamaCpp, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(_: int) -> dict[str, float]:
        raise failure

    mine = results(1.01)[HEADWATER]
    steps = [Step(HEADWATER, "serving", None, lambda _: mine), Step(LLAMA, "llama-bench", None, fail)]
    steps.append(Step(TRANSFORMERS, "generate_batch", "--transformers was not given", fail))
    monkeypatch.setattr(Bench, "steps", lambda _: steps)
    report = run(settings(model__name=str(tiny)), SHAPE, llama, transformers=None)
    assert [(check.name, check.ok) for check in report.checks] == [("llama.cpp, llama-bench, ended well", False)]
    assert report.notes == [
        "llama.cpp, llama-bench, left out: it fell over",
        "transformers, generate_batch, left out: --transformers was not given",
    ]


def test_the_report_says_what_was_measured(tiny: Path, llama: LlamaCpp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "steps", lambda _: [Step(HEADWATER, "serving", None, lambda _: {"a": 1.0})])
    config = settings(model__name=str(tiny), decode__replicas=2)
    about = run(config, SHAPE, llama, Transformers(64)).config
    assert (about["workers"], about["transformers_batch"]) == ("1 prefill + 2 decode", 64)
    about = run(with_roles(settings(model__name=str(tiny))), SHAPE, llama, transformers=None).config
    assert about["workers"] == "1 both"
    assert "transformers_batch" not in about


def test_one_worker_does_both_where_nobody_says_otherwise(tmp_path: Path) -> None:
    def workers(file: str, **environ: str) -> str:
        (tmp_path / "cluster.yaml").write_text(file)
        return topology(with_roles(load(tmp_path / "cluster.yaml", {}, environ)))

    assert workers("") == "1 both"
    assert workers("worker: {kv_memory: 32MiB}") == "1 both"
    assert workers("", HEADWATER__WORKER__KV_MEMORY="32MiB") == "1 both"
    assert workers("prefill: {replicas: 2}") == "2 prefill + 1 decode"
    assert workers("", HEADWATER__PREFILL__REPLICAS="3") == "3 prefill + 1 decode"
    assert workers("both: {replicas: 1}") == "1 prefill + 1 decode + 1 both"


def test_what_the_flags_ask_for_is_measured(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Transformers | None]] = []

    def run(config: ClusterConfig, _shape: Shape, _llama: LlamaCpp, transformers: Transformers | None) -> Report:
        asked.append((topology(config), transformers))
        return Report({}, {HEADWATER: {}}, [])

    monkeypatch.setattr("cluster.bench.peers.run.run", run)
    monkeypatch.setenv("HEADWATER__DECODE__REPLICAS", "2")
    CliRunner().invoke(app, ["peers", f"--model={tiny}"], catch_exceptions=False)
    monkeypatch.delenv("HEADWATER__DECODE__REPLICAS")
    CliRunner().invoke(app, ["peers", f"--model={tiny}", "--transformers"], catch_exceptions=False)
    assert asked == [("1 prefill + 2 decode", None), ("1 both", Transformers(256))]


def results(better: float) -> dict[str, dict[str, float]]:
    """Figures that keep every bound `better` times over."""
    names = (SHAPE.of_unshared(TOKENS), SHAPE.engine.prefill, SHAPE.engine.decode(1, "tokens/s"))
    streams, first = SHAPE.engine.decode(16, "tokens/s"), SHAPE.of_shared(FIRST)
    mine = dict(zip(names, (160.0, 150.0, 50.0), strict=True)) | {SHAPE.of_shared(TOKENS): 300.0, streams: 180.0}
    llama = {**dict.fromkeys(mine, 100.0), first: 4.0}
    mine = {name: value * better for name, value in mine.items()} | {first: 1.0 / better}
    return {HEADWATER: mine, LLAMA: llama, TRANSFORMERS: {SHAPE.of_shared(TOKENS): 20.0}}


def test_bounds() -> None:
    assert [check.ok for check in SHAPE.checks(results(1.01))] == [True] * 7
    assert [check.ok for check in SHAPE.checks(results(0.99))] == [False] * 7
    assert SHAPE.checks({HEADWATER: results(1.0)[HEADWATER]}) == []


def test_ratios_stand_beside_their_peer() -> None:
    table = with_ratios(results(1.0))
    assert list(table) == [HEADWATER, LLAMA, "headwater / llama.cpp", TRANSFORMERS, "headwater / transformers"]
    assert table["headwater / llama.cpp"][SHAPE.of_shared(TOKENS)] == 3.0
    assert table["headwater / transformers"] == {SHAPE.of_shared(TOKENS): 15.0}
    assert list(with_ratios({HEADWATER: {}})) == [HEADWATER]


def test_the_picture(tmp_path: Path) -> None:
    table = with_ratios(results(0.99))
    file = tmp_path / "peers.png"
    check_png(file)
    draw(Report({"model": "tiny"}, table, SHAPE.checks(results(0.99))), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    draw(Report({"model": "tiny"}, {HEADWATER: table[HEADWATER]}, []), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such directory"):
        check_png(tmp_path / "nowhere" / "peers.png")
    monkeypatch.setattr("cluster.bench.peers.chart.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'headwater\[bench\]'"):
        check_png(tmp_path / "peers.png")


def test_margins_grow_with_what_is_better() -> None:
    assert margin(Check("", 3.0, "x", 1.5, at_least=True)) == 2.0
    assert margin(Check("", 0.5, "x", 0.25, at_least=False)) == 0.5


@pytest.mark.long
def test_peers(tiny: Path, tmp_path: Path, llama: LlamaCpp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER__WORKER__KV_MEMORY", "32MiB")
    sizes = {"prefix": 64, "query": 8, "prompt": 24, "output": 4, "requests": 3, "different": 3, "concurrency": 2}
    sizes |= {"context": 128, "streams": 3, "steps": 3}
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    arguments += [f"--llama-server={llama.server}", f"--llama-bench={llama.bench}", f"--gguf={llama.gguf}"]
    arguments += [
        "--transformers",
        "--transformers-batch=64",
        f"--png={tmp_path}/peers.png",
        "--json",
        f"--model={tiny}",
        "--dtype=float32",
    ]
    done = CliRunner().invoke(app, ["peers", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert list(report["results"]) == [
        "headwater",
        "llama.cpp",
        "headwater / llama.cpp",
        "transformers",
        "headwater / transformers",
    ]
    assert len(report["checks"]) == 6
    assert (report["config"]["workers"], report["config"]["transformers_batch"]) == ("1 both", 64)
    assert report["notes"] == ["llama.cpp, llama-batched-bench, left out: --llama-batched-bench was not given"]
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
