"""Benchmarks without a cluster: workloads, client, checks, reports; the engine alone."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cluster.bench import tenants
from cluster.bench.alone import EngineAlone
from cluster.bench.batch_eval import BatchEval
from cluster.bench.cli import app
from cluster.bench.load import LoadError, Run, Target, Timing, send, send_beside, send_paused, single
from cluster.bench.multi_turn import LATER, MultiTurn
from cluster.bench.no_reuse_cost import NoReuseCost
from cluster.bench.rag import MIN_SPEEDUP, Rag
from cluster.bench.report import Check, Figures, Report, medians, ratio
from cluster.bench.shared_prefix import SharedPrefix
from cluster.bench.sides import NO_REUSE, REUSE, Side, do
from cluster.bench.workload import Words, Work, Workload
from cluster.config import ClusterConfig
from cluster.errors import UserError
from tests.cluster.conftest import settings
from tests.cluster.fake_completions import FIRST_ANSWER, fake_completions
from workers.config import WorkerConfig
from workers.engine.engine import Engine
from workers.engine.model import Model

VOCABULARY = 50_000
RAG = Rag(160, 128, 16, 256, 3, 24, 16, 1.2, 16, 1)
"""The defaults of `headwater bench rag`."""


def prompts(work: Work) -> list[list[int]]:
    assert all(len(chat) == 1 for chat in work.chats)
    return [chat[0] for chat in work.chats]


def drawn(workload: Workload, seed: int = 0) -> Work:
    return workload.work(Words(seed, VOCABULARY))


# Workloads


def test_the_same_seed_gives_both_sides_the_same_prompts() -> None:
    workload = SharedPrefix(20, 5, 4, 3, 2, 1)
    assert drawn(workload) == drawn(workload)
    assert drawn(workload, seed=1) != drawn(workload)


def test_shared_prefix_is_in_every_prompt_and_in_the_warm_up() -> None:
    work = drawn(SharedPrefix(20, 5, 4, 3, 2, 1))
    everyone = [*work.warm_up, *prompts(work)]
    assert len(work.warm_up) == 1
    assert len({tuple(prompt[:20]) for prompt in everyone}) == 1
    assert len({tuple(prompt[20:]) for prompt in everyone}) == 4
    assert {len(prompt) for prompt in everyone} == {25}
    assert work.requests == 4


def test_chats_share_the_system_prompt_only() -> None:
    work = drawn(MultiTurn(chats=3, turns=4, system=30, user=6, output=5, concurrency=2, rounds=1))
    assert [[len(part) for part in chat] for chat in work.chats] == [[36, 6, 6, 6]] * 3
    assert len({tuple(chat[0][:30]) for chat in work.chats}) == 1
    assert len({tuple(part[-6:]) for chat in work.chats for part in chat}) == 12
    assert (work.requests, work.warm_up) == (12, ())


def test_later_turns_are_counted_by_themselves() -> None:
    workload = MultiTurn(chats=2, turns=3, system=30, user=6, output=5, concurrency=2, rounds=1)
    times = [9.0, 1.0, 2.0, 8.0, 3.0, 4.0]
    figures = workload.figures(Run([Timing(time, time, 10, 5, 5) for time in times], 10.0))
    assert figures[LATER] == 2.5
    assert figures["median first token s"] == 3.5


def test_items_share_the_template_only() -> None:
    work = drawn(BatchEval(items=7, template=40, item=5, output=2, concurrency=4, rounds=1))
    assert len({tuple(prompt[:40]) for prompt in prompts(work)}) == 1
    assert len({tuple(prompt[40:]) for prompt in prompts(work)}) == 7
    assert work.warm_up == ()


def test_different_prompts_share_no_block() -> None:
    work = drawn(NoReuseCost(requests=9, prompt=40, output=2, concurrency=4, rounds=1))
    assert len({tuple(prompt[:4]) for prompt in [*work.warm_up, *prompts(work)]}) == 10


def documents(workload: Rag, prompt: list[int]) -> list[tuple[int, ...]]:
    """The documents of a prompt, as they stand in it."""
    size, begin = workload.document, workload.instruction
    assert len(prompt) == begin + workload.retrieved * size + workload.question
    return [tuple(prompt[at : at + size]) for at in range(begin, begin + workload.retrieved * size, size)]


def test_documents_stand_by_popularity() -> None:
    workload = Rag(400, 10, 8, 5, 3, 4, 2, 1.2, 4, 1)
    found = [documents(workload, prompt) for prompt in prompts(drawn(workload))]
    uses = Counter(one for some in found for one in some)
    assert len(uses) == 8
    assert all(len(set(some)) == 3 for some in found)
    by_rank = [one for one, _ in uses.most_common()]
    assert uses[by_rank[0]] > 3 * uses[by_rank[-1]]
    before = {(a, b) for some in found for at, a in enumerate(some) for b in some[at + 1 :]}
    assert not any((b, a) in before for a, b in before)


def test_uniform_documents_are_equally_popular() -> None:
    workload = Rag(2000, 1, 4, 5, 1, 1, 2, 0.0, 4, 1)
    uses = Counter(documents(workload, prompt)[0] for prompt in prompts(drawn(workload)))
    assert max(uses.values()) < 1.3 * min(uses.values())


def test_the_default_questions_repeat_enough_for_their_bound() -> None:
    """With an unlimited cache; otherwise the check could not hold whatever the code does."""
    seen: set[tuple[int, ...]] = set()
    total = new = 0
    for prompt in prompts(drawn(RAG)):
        ends = [RAG.instruction + RAG.document * count for count in range(RAG.retrieved + 1)]
        known = max((end for end in ends if tuple(prompt[:end]) in seen), default=0)
        seen.update(tuple(prompt[:end]) for end in ends)
        total += len(prompt)
        new += len(prompt) - known
    assert total / new > MIN_SPEEDUP * 1.1


# The client

USAGE = {"prompt_tokens": 1, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}


def event(data: dict[str, object]) -> bytes:
    """An answer of one event."""
    return f"data: {json.dumps(data)}\n\ndata: [DONE]\n\n".encode()


def test_a_turn_is_sent_with_everything_before_it() -> None:
    with fake_completions() as server:
        run = send(Target(server.url, "fake"), [[[1, 2], [3], [4]]], output=2, concurrency=1)
    answer = [FIRST_ANSWER, FIRST_ANSWER + 1]
    assert server.prompts == [[1, 2], [1, 2, *answer, 3], [1, 2, *answer, 3, *answer, 4]]
    assert [one.prompt_tokens for one in run.timings] == [2, 5, 8]
    assert [one.cached_tokens for one in run.timings] == [1, 2, 4]
    assert all(0 < one.first_token_s <= one.total_s <= run.seconds for one in run.timings)
    figures = run.figures()
    assert figures["output tokens/s"] == pytest.approx(6 / run.seconds)
    assert figures["cached share"] == pytest.approx(7 / 15)


def test_timings_come_chat_by_chat_whatever_ends_first() -> None:
    with fake_completions() as server:
        run = send(Target(server.url, "fake"), [[[number] * (number + 1)] for number in range(20)], 2, 5)
    assert [one.prompt_tokens for one in run.timings] == list(range(1, 21))
    assert server.most_busy <= 5


def test_the_warm_up_is_sent_and_not_measured() -> None:
    done = []
    with fake_completions() as server:
        work = Work(single([[1], [2]]), output=3, concurrency=1, warm_up=([7], [8]))
        run = do(Target(server.url, "fake"), work, done=lambda: done.append(1))
    assert server.prompts == [[7], [8], [1], [2]]
    assert len(run.timings) == 2
    assert len(done) == work.requests


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"short": True}, "2 tokens came instead of 3"),
        ({"error": b"all busy"}, "503: all busy"),
        ({"error": b"\n"}, "503: an empty"),
        ({"body": b"data: [DONE]\n\n"}, "not the events of a completion"),
        ({"body": b"data: {\n\ndata: [DONE]\n\n"}, "not the events of a completion .*JSONDecodeError"),
        ({"body": b"data: [1]\n\ndata: [DONE]\n\n"}, "not the events of a completion"),
        ({"body": b'data: {"choices": []}\n\ndata: [DONE]\n\n'}, "KeyError: 'usage'.*: data: {\"choices\": \\[\\]}"),
        ({"body": b'data: {"choices": [], "usage": null}\n\ndata: [DONE]\n\n'}, "TypeError"),
        ({"body": event({"usage": {"prompt_tokens": 1, "completion_tokens": 3}})}, "KeyError: 'prompt_tokens_details'"),
        ({"body": event({"usage": USAGE})}, "KeyError: 'choices'"),
        ({"body": event({"usage": USAGE, "choices": ["text"]})}, "AttributeError"),
        ({"body": b"\xff\n"}, "200: "),
    ],
)
def test_a_failed_request_fails_the_run(fault: dict[str, object], message: str) -> None:
    with fake_completions(**fault) as server:  # type: ignore[arg-type]
        with pytest.raises(LoadError, match=message) as raised:
            send(Target(server.url, "fake"), single([[1]]), output=3, concurrency=1)
        assert str(raised.value).startswith(f"{server.url}: ")


def test_pauses_stand_between_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    with fake_completions() as server:
        monkeypatch.setattr("cluster.bench.load.asyncio.sleep", sleep)
        timings = send_paused(Target(server.url, "fake"), [[1], [2, 2], [3]], 2, 20.0)
    assert pauses == [20.0, 20.0]
    assert server.prompts == [[1], [2, 2], [3]]
    assert [one.prompt_tokens for one in timings] == [1, 2, 1]


def test_a_load_beside_another_runs_as_long_as_the_measurement() -> None:
    with fake_completions() as server:
        quiet, loud = Target(server.url, "fake", "quiet"), Target(server.url, "fake", "loud")
        timings = send_beside(quiet, [[1], [1]], 2, 0.2, loud, lambda: [3], 2)
        assert len(timings) == 2
        first, last = (at for at, prompt in enumerate(server.prompts) if prompt == [1])
        assert [3] in server.prompts[:first]
        assert [3] in server.prompts[first:last]


def test_a_load_beside_another_that_fails_ends_the_measurement() -> None:
    with fake_completions() as server, fake_completions(short=True) as broken:
        quiet, loud = Target(server.url, "fake"), Target(broken.url, "fake")
        with pytest.raises(LoadError, match=f"{broken.url}: 1 tokens came instead of 2"):
            send_beside(quiet, [[1]] * 100, 2, 1.0, loud, lambda: [3], 2)


def test_who_cannot_be_reached_is_named() -> None:
    with fake_completions() as gone:
        loud = Target(gone.url, "fake")
    with fake_completions() as server, pytest.raises(LoadError, match=f"{gone.url}: ConnectError"):
        send_beside(Target(server.url, "fake"), [[1]] * 100, 2, 1.0, loud, lambda: [3], 2)


def test_both_sides_of_tenants_pause_and_only_first_tokens_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A throughput would count the pauses as work."""
    pauses: list[float] = []

    def sent(seconds: float) -> list[Timing]:
        return [Timing(seconds * number, 9.0, 4, 0, 2) for number in (1, 2, 6)]

    def alone(_target: Target, _prompts: list[list[int]], _output: int, pause_s: float) -> list[Timing]:
        pauses.append(pause_s)
        return sent(1.0)

    def beside(_target: Target, _prompts: list[list[int]], _output: int, pause_s: float, *_: object) -> list[Timing]:
        pauses.append(pause_s)
        return sent(1.4)

    @contextmanager
    def started(configs: dict[str, ClusterConfig]) -> Iterator[dict[str, Side]]:
        yield {name: Side(Target("http://nowhere", "fake"), VOCABULARY) for name in configs}

    monkeypatch.setattr(tenants, "send_paused", alone)
    monkeypatch.setattr(tenants, "send_beside", beside)
    monkeypatch.setattr(tenants, "started", started)
    report = tenants.run(settings(), tenants.Shape(3, 4, 2, 5, 20.0, 1))
    assert pauses == [20.0, 20.0]
    assert report.results == {
        tenants.ALONE: {FIRST: 2.0, "worst first token s": 6.0},
        tenants.BESIDE: {FIRST: pytest.approx(2.8), "worst first token s": pytest.approx(8.4)},
    }
    assert [(check.value, check.ok) for check in report.checks] == [(pytest.approx(1.4), True)]


# Checks and reports


def sides(figure: str, reuse: float, without: float, **more: float) -> dict[str, Figures]:
    return {REUSE: {figure: reuse, **more}, NO_REUSE: {figure: without}}


TOKENS, FIRST = "output tokens/s", "median first token s"


@pytest.mark.parametrize(
    ("workload", "results", "ok"),
    [
        (MultiTurn(1, 2, 1, 1, 1, 1, 1), sides(LATER, 0.24, 1.0), True),
        (MultiTurn(1, 2, 1, 1, 1, 1, 1), sides(LATER, 0.26, 1.0), False),
        (BatchEval(1, 1, 1, 1, 1, 1), sides("total s", 27.0, 100.0), True),
        (BatchEval(1, 1, 1, 1, 1, 1), sides("total s", 29.0, 100.0), False),
        (RAG, sides(TOKENS, 28.0, 10.0), True),
        (RAG, sides(TOKENS, 27.0, 10.0), False),
        (NoReuseCost(1, 1, 1, 1, 1), sides(TOKENS, 98.5, 100.0), True),
        (NoReuseCost(1, 1, 1, 1, 1), sides(TOKENS, 97.5, 100.0), False),
    ],
)
def test_bounds(workload: Workload, results: dict[str, Figures], ok: bool) -> None:
    checks = workload.checks(results)
    assert [check.ok for check in checks] == [ok]
    assert workload.checks({REUSE: results[REUSE]}) == []


def test_bounds_of_the_shared_prefix() -> None:
    workload = SharedPrefix(1, 1, 1, 1, 1, 1)
    good = {TOKENS: 42.0, FIRST: 0.1, "cached share": 0.91}
    results = {REUSE: good, NO_REUSE: {TOKENS: 10.0, FIRST: 1.0, "cached share": 0.0}}
    assert [check.ok for check in workload.checks(results)] == [True, True, True]
    assert [check.ok for check in workload.checks({REUSE: good})] == [True]
    results = {REUSE: {TOKENS: 40.0, FIRST: 0.13, "cached share": 0.89}, NO_REUSE: results[NO_REUSE]}
    assert [check.ok for check in workload.checks(results)] == [False, False, False]


def test_a_report_says_what_it_has() -> None:
    checks = [Check("speed", 2.0, "x", 1.5, at_least=True), Check("time", 2.0, "s", 1.5, at_least=False)]
    report = Report({"requests": 3}, {"a": {"one": 1.0, "two": 2.0}, "b": {"two": 12345.6}}, checks)
    assert report.rows == [("one", ["1", "-"]), ("two", ["2", "1.235e+04"])]
    assert not report.ok
    assert report.as_dict().keys() == {"config", "machine", "results", "checks"}
    assert report.as_dict()["checks"] == [
        {"name": "speed", "value": 2.0, "unit": "x", "bound": ">= 1.5", "ok": True},
        {"name": "time", "value": 2.0, "unit": "s", "bound": "<= 1.5", "ok": False},
    ]
    assert Report({}, report.results, checks[:1]).ok
    assert Report({}, report.results, [], ["left out"]).as_dict()["notes"] == ["left out"]


def test_nothing_checked_is_not_everything_kept() -> None:
    assert not Report({}, {"a": {"one": 1.0}}, []).ok


def test_ratios_need_both_sides() -> None:
    results = {"a": {"one": 3.0}, "b": {"one": 2.0, "two": 1.0}, "c": {"one": 0.0}}
    assert [check.value for check in ratio("", results, "one", ("a", "b"), 1, True)] == [1.5]
    assert ratio("", results, "two", ("a", "b"), 1, True) == []
    assert ratio("", results, "one", ("a", "c"), 1, True) == []
    assert ratio("", results, "one", ("a", "nobody"), 1, True) == []


def test_medians_are_taken_figure_by_figure() -> None:
    assert medians([{"a": 1.0, "b": 9.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0, "b": 4.0}]) == {"a": 3.0, "b": 4.0}


# The engine alone


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Engine:
    config = WorkerConfig(dtype="float32", device="cpu", kv_memory=32 << 20, max_model_len=256)
    return Engine(Model(tiny, "float32", "cpu"), config)


def test_decode_steps_are_timed_one_by_one(alone: Engine) -> None:
    engine = EngineAlone(alone)
    prefix = Words(0, 500)(64)
    assert engine.first_token_s(prefix) > 0
    steps = engine.decode_steps_s([[*prefix, number] for number in range(4)], 5)
    assert len(steps) == 5
    assert all(step > 0 for step in steps)
    assert not alone.has_work
    assert alone.cache.counts()["private"] == 0


def test_too_many_steps_are_refused(alone: Engine) -> None:
    with pytest.raises(ValueError, match="longest sequence has 256 tokens"):
        EngineAlone(alone).decode_steps_s([Words(1, 500)(250)], 10)
    assert not alone.has_work


# The command line

Invoke = Callable[..., dict[str, object]]


@pytest.fixture
def invoke(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run `headwater bench` in this process; the object that it prints."""
    monkeypatch.setenv("HEADWATER__WORKER__KV_MEMORY", "32MiB")

    def run(command: str, *flags: object) -> dict[str, object]:
        arguments = [command, "--model", str(tiny), "--json", *map(str, flags)]
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return run


def test_engine(invoke: Invoke) -> None:
    report = invoke("engine", "--context", 128, "--streams", 4, "--steps", 3, "--rounds", 1, "--dtype", "float32")
    results = report["results"]
    assert isinstance(results, dict)
    assert results.keys() == {"engine", "shared attention off"}
    assert results["engine"].keys() == {
        "prefill of 128: tokens/s",
        "decode of 1 at 128: ms a step",
        "decode of 1 at 128: tokens/s",
        "decode of 4 at 128: ms a step",
        "decode of 4 at 128: tokens/s",
    }
    assert all(value > 0 for value in results["engine"].values())
    assert len(report["checks"]) == 1  # type: ignore[arg-type]


def test_sizes_that_do_not_fit_are_one_line(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="a context of 2040 and 64 steps are over 2048 tokens"):
        invoke("engine", "--context", 2040)
    monkeypatch.setenv("HEADWATER__WORKER__KV_MEMORY", "64KiB")
    with pytest.raises(UserError, match=r"kv_memory: .*needs \d+ blocks"):
        invoke("engine", "--context", 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_one_line(invoke: Invoke) -> None:
    with pytest.raises(UserError, match=r"^device: cuda was asked for, but torch sees no CUDA device$"):
        invoke("engine", "--device", "cuda")


COMPARISONS: dict[str, list[object]] = {
    "multi-turn": ["--chats", 2, "--turns", 3, "--system", 64, "--user", 8, "--output", 8, "--concurrency", 2],
    "batch-eval": ["--items", 4, "--template", 64, "--item", 8, "--output", 2],
    "rag": [
        "--requests",
        4,
        "--instruction",
        32,
        "--documents",
        3,
        "--document",
        32,
        "--retrieved",
        2,
        "--question",
        8,
    ],
    "no-reuse-cost": ["--requests", 3, "--prompt", 48, "--output", 2, "--rounds", 2, "--kv-memory", "16MiB"],
}


@pytest.mark.long
@pytest.mark.parametrize("command", COMPARISONS)
def test_comparisons(invoke: Invoke, command: str) -> None:
    report = invoke(command, *COMPARISONS[command], "--dtype", "float32")
    results = report["results"]
    assert isinstance(results, dict)
    assert results.keys() == {REUSE, NO_REUSE}
    assert results[NO_REUSE]["cached share"] == 0
    assert (results[REUSE]["cached share"] == 0) == (command == "no-reuse-cost")
    assert len(report["checks"]) == 1  # type: ignore[arg-type]
