"""A cluster that outlives its commands, on real processes: it grows, shrinks, changes and loses parts, and answers."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray.exceptions import RayError

from cluster.connection import LaunchError
from cluster.control import Control, begin
from tests import model_zoo
from tests.cluster.chaos import MODEL, Case, Faults, Load, assert_at_rest, cases, process_of, statuses, stuck
from tests.cluster.conftest import CONTROLLED, settings
from transfer.messages import WorkerStatus


@pytest.fixture(scope="module")
def known(tiny: Path) -> list[Case]:
    return cases(tiny, 8, 120)


@pytest.fixture
def faults(control: Control) -> Iterator[Faults]:
    made = Faults(control, CONTROLLED, 1)
    yield made
    assert_at_rest(made)


@pytest.fixture
def load(control: Control, known: list[Case], faults: Faults) -> Iterator[Load]:
    """Twelve clients; all that they ask must be answered rightly."""
    urls = faults.report().urls
    with Load(lambda: urls, known, 12) as made:
        made.more(12)
        yield made
        made.more(24)
    assert set(made.ends) == {"right"}, [one for one in made.streams if one.end != "right"][:5]


def names(faults: Faults, role: str) -> list[str]:
    return sorted(one.name for one in faults.report().actors if one.role == role)


@pytest.mark.long
def test_workers_come_change_and_go_under_load_without_a_failed_request(
    load: Load, faults: Faults, control: Control
) -> None:
    control.call("set_role", "prefill-2", "decode")
    assert names(faults, "decode") == ["decode-0", "decode-1", "decode-2", "prefill-2"]
    load.more(24)
    control.call("drain", ["decode-0"])
    load.more(24)
    control.call("set_role", "prefill-2", "prefill")
    load.more(24)
    control.call("scale", {"prefill": 2, "decode": 3})
    assert [names(faults, role) for role in ("prefill", "decode")] == [
        ["prefill-0", "prefill-1"],
        ["decode-0", "decode-1", "decode-2"],
    ]
    load.more(24)
    control.call("scale", {"prefill": 3})
    assert names(faults, "prefill") == ["prefill-0", "prefill-1", "prefill-2"]


@pytest.mark.long
def test_a_controller_that_is_killed_goes_on_where_it_was(load: Load, faults: Faults, control: Control) -> None:
    before = {one.name: one.starts for one in faults.report().actors}
    process = process_of(control.actor)
    pids = {one.name: one.pid for one in statuses(faults)}
    process.kill()
    load.more(24)
    report = faults.report()
    assert process_of(control.actor).pid != process.pid
    assert {one.name for one in report.actors} == set(before)
    assert {one.name: one.pid for one in statuses(faults)} == pids  # nobody was started again
    faults.kill("decode-0")
    until = time.monotonic() + 60
    while {one.name: one.pid for one in statuses_or_none(faults)}.get("decode-0") in (None, pids["decode-0"]):
        assert time.monotonic() < until
        time.sleep(0.2)


def statuses_or_none(faults: Faults) -> list[WorkerStatus]:
    try:
        return statuses(faults)
    except (ValueError, RayError):  # one has died, or begins
        return []


@pytest.mark.long
def test_an_engine_that_stands_still_is_replaced_and_its_requests_go_on(load: Load, faults: Faults) -> None:
    ray.get(faults.actor("decode-1").__ray_call__.remote(stuck, 3600.0), timeout=30)
    begun = time.monotonic()
    while next(one for one in faults.report().actors if one.name == "decode-1").state == "up":
        assert time.monotonic() - begun < 10, "not noticed"
        time.sleep(0.05)
    while next(one for one in faults.report().actors if one.name == "decode-1").state != "up":
        assert time.monotonic() - begun < 60, "not replaced"
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rolling_restart_fails_no_request(load: Load, faults: Faults, control: Control) -> None:
    before = {one.name: one.incarnation for one in statuses(faults)}
    control.call("restart")
    after = {one.name: one.incarnation for one in statuses(faults)}
    assert before.keys() == after.keys()
    assert all(after[name] > before[name] for name in before)


@pytest.mark.parametrize(
    ("method", "arguments", "says"),
    [
        ("scale", [{"prefill": 0}], "prefill: 0, but prefill and decode workers only work together"),
        ("scale", [{"prefill": 0, "decode": 0}], "prefill, decode and both: 0, but then nobody would answer"),
        ("scale", [{"gateway": 0}], "gateways: 0, but then nobody would listen"),
        ("drain", [["decode-9"]], "'decode-9' is no worker of this cluster; there are prefill-0, prefill-1, "),
        (
            "drain",
            [["decode-0", "decode-1", "decode-2"]],
            "without decode-0, decode-1, decode-2 there would be no decode worker",
        ),
        ("set_role", ["nobody", "decode"], "'nobody' is no worker"),
    ],
)
def test_what_cannot_be_is_refused_by_name(control: Control, method: str, arguments: list[object], says: str) -> None:
    with pytest.raises(LaunchError, match=f"^{says}"):
        control.call(method, *arguments)


def test_what_the_ray_cluster_lacks_is_said(control: Control, tiny: Path) -> None:
    other = begin(detached=True, name="test-lacking")
    config = settings(**{"model.name": str(tiny), "prefill.resources": {"GPU": 2, "wing": 0.5}})
    with pytest.raises(LaunchError) as caught:
        other.call("deploy", config, tiny, 0.0)
    assert "GPU: 2 wanted (1 x prefill.resources 2), 0 in the Ray cluster" in str(caught.value)
    assert "wing: 0.5 wanted (1 x prefill.resources 0.5), 0 in the Ray cluster" in str(caught.value)
    assert other.call("idle")
    other.end(drain=False)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_stream_whose_decode_worker_is_killed_has_a_gap_and_the_same_text(control: Control, tiny: Path) -> None:
    """After 5, 50 and 200 tokens, three times each."""
    faults, gaps = Faults(control, CONTROLLED, 2), []
    prompt, answer = model_zoo.clear_prompt(tiny, 40, 400, seed=3)
    for tokens in (5, 50, 200) * 3:
        assert_at_rest(faults)
        gaps.append((tokens, killed_after(faults, prompt, answer, tokens)))
    worst = sorted(gap for _, gap in gaps)
    sys.stdout.write(f"gaps: median {worst[len(worst) // 2]:.2f} s, worst {worst[-1]:.2f} s: {gaps}\n")


def killed_after(faults: Faults, prompt: list[int], answer: list[int], tokens: int) -> float:
    """The longest pause of a stream whose decode worker is killed after so many tokens."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": len(answer), "temperature": 0, "ignore_eos": True}
    ids: list[int] = []
    gap, last, killed = 0.0, 0.0, False
    wanted = body | {"stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{faults.report().urls[0]}/v1/completions", json=wanted, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            gap, last = max(gap, time.monotonic() - last if last else 0.0), time.monotonic()
            ids += json.loads(line[6:])["choices"][0]["token_ids"]
            if len(ids) >= tokens and not killed:
                killed = True
                busy = [one.name for one in statuses(faults) if one.role == "decode" and one.running]
                assert busy, "the answer was complete already"
                faults.kill(busy[0])
    assert ids == answer
    return gap
