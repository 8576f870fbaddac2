"""`headwater bench peers`: command lines, what is read of the peers' output, notes, the picture; programs in their
places."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.bench.cli import app
from cluster.bench.load import LoadError, send, single
from cluster.bench.peers.chart import check_png, draw, margin
from cluster.bench.peers.llama_cpp import LlamaCpp, PeerError, batched_speed, bench_speed
from cluster.bench.peers.run import Bench, Step, run
from cluster.bench.peers.shape import FIRST, HEADWATER, LLAMA, TOKENS, TRANSFORMERS, Shape, with_ratios
from cluster.bench.report import Check, Report
from cluster.errors import UserError
from tests.cluster import fake_completions
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
    with pytest.raises(PeerError, match="llama-batched-bench printed no result: main: failed"):
        batched_speed("main: failed\n")


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    bad = program(tmp_path / "bad", "echo loading >&2; echo error: no such model >&2; exit 3")
    llama = LlamaCpp(Path("m.gguf"), bad, bad, bad, 2)
    with pytest.raises(PeerError, match="bad failed: error: no such model"):
        llama.prefill(64)
    with pytest.raises(PeerError, match="did not start: error: no such model"), llama.serving(1, 64):
        pass


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


def test_a_peer_that_fails_is_a_check_that_is_missed(
    tiny: Path, llama: LlamaCpp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> dict[str, float]:
        raise PeerError("it fell over")

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
    assert report["notes"] == ["llama.cpp, llama-batched-bench, left out: --llama-batched-bench was not given"]
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
