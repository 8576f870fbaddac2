"""`headwater bench tiers`: what it measures and what it makes of the figures."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.bench.cli import app
from cluster.bench.report import Figures
from cluster.bench.tiers import guard, hits
from cluster.bench.tiers.engine import TieredEngine
from cluster.bench.tiers.parts import Part
from cluster.bench.tiers.run import run
from cluster.bench.tiers.shape import ALWAYS, DISK, HOST, NONE, TIERS, Bench, Shape, Sizes
from cluster.errors import UserError
from tests.cluster.conftest import settings
from workers.config import TiersConfig, WorkerConfig
from workers.engine.model import Model

SHAPE = Shape(
    prompt=64,
    guarded=96,
    streams=2,
    demoted=100_000,
    conversations=4,
    turns=2,
    first=32,
    question=8,
    output=10,
    requests=2,
    different=40,
    rounds=1,
)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return Model(tiny, "float32", "cpu")


@contextmanager
def engine(model: Model, path: Path, sizes: Sizes) -> Iterator[TieredEngine]:
    with Bench(model, WorkerConfig(), TiersConfig(), path, SHAPE).engines(sizes) as (one,):
        yield one


def test_everything_is_measured(tiny: Path, tmp_path: Path) -> None:
    threads, frozen = set(threading.enumerate()), gc.get_freeze_count()
    config = settings(model__name=str(tiny), worker__threads=1, tiers__guard=False, tiers__disk_path=str(tmp_path))
    report = run(config, SHAPE)
    assert list(report.results) == [NONE, HOST, DISK, TIERS, ALWAYS]
    loaded = {
        side: (report.results[side][hits.FROM_HOST], report.results[side][hits.FROM_DISK]) for side in (HOST, DISK)
    }
    assert loaded == {HOST: (4, 0), DISK: (0, 4)}
    cached = {side: report.results[side]["their cached tokens"] for side in (NONE, TIERS)}
    # In the second turn the first one's 50 tokens, answer included, are found: three blocks.
    assert cached[TIERS] >= SHAPE.conversations * 48 > cached[NONE]
    assert report.results[TIERS]["demoted: MB"] == pytest.approx(0.1, rel=0.5)
    assert len(report.results[ALWAYS]) == len(guard.SPEEDS)
    assert len(report.checks) == 2 + len(guard.SPEEDS) + 1 + 1 + 1
    assert set(threading.enumerate()) <= threads
    assert (list(tmp_path.iterdir()), gc.get_freeze_count()) == ([], frozen)


def test_parts_by_themselves(tiny: Path) -> None:
    report = run(settings(model__name=str(tiny), worker__threads=1), SHAPE, (Part.ROUNDS, Part.OVERHEAD))
    assert list(report.results) == [NONE, TIERS]
    assert len(report.checks) == 2


def test_nothing_is_left_when_it_fails(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def fail(directory: Path) -> None:
        written.extend(directory.rglob("*.kv"))
        raise UserError("in the middle")

    monkeypatch.setattr(hits, "drop_pages", fail)
    threads, frozen = set(threading.enumerate()), gc.get_freeze_count()
    config = settings(model__name=str(tiny), worker__threads=1, tiers__disk_path=str(tmp_path))
    with pytest.raises(UserError, match="in the middle"):
        run(config, SHAPE, (Part.HITS,))
    assert len(written) == 4
    assert set(threading.enumerate()) <= threads
    assert (list(tmp_path.iterdir()), gc.get_freeze_count()) == ([], frozen)


def test_sizes_that_do_not_fit(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_model_len: 5009 is more than"):
        run(settings(model__name=str(tiny), worker__threads=1), replace(SHAPE, prompt=5000), (Part.HITS,))
    with pytest.raises(UserError, match=r"tiers.disk_path: .*/none is not a directory"):
        run(settings(model__name=str(tiny), tiers__disk_path=str(tmp_path / "none")), SHAPE)


def test_a_slowed_load_takes_as_long_and_brings_the_same(model: Model, tmp_path: Path) -> None:
    prompt = list(range(1, 82))
    answers = []
    for load_s in (0.0, 0.02):
        with engine(model, tmp_path, Sizes(100, 12, host=12, guard=False, load_s=load_s)) as one:
            computed = one.serve([prompt], output=6, concurrency=1)[0]
            one.forget()
            one.ask(prompt)  # the first load's speed is not known yet, and it may be given up
            one.forget()
            begun = time.perf_counter()
            loaded = one.serve([prompt], output=6, concurrency=1)[0]
            assert time.perf_counter() - begun >= 5 * load_s
            assert (computed.cached, loaded.cached) == (0, 80)
            answers += [computed.tokens, loaded.tokens]
    assert answers == [answers[0]] * 4


def test_only_so_many_run_at_a_time(model: Model, tmp_path: Path) -> None:
    prompts = [[number + 1] * 20 for number in range(5)]
    with engine(model, tmp_path, Sizes(40, 12)) as one:
        most = 0
        step = one.step

        def counted() -> list:  # type: ignore[type-arg]
            nonlocal most
            most = max(most, one.engine.running + one.engine.waiting)
            return step()

        one.step = counted  # type: ignore[method-assign]
        answers = one.serve(prompts, output=3, concurrency=2)
    assert [len(answer.tokens) for answer in answers] == [3] * 5
    assert most == 2


@pytest.mark.parametrize(
    ("computed", "guarded", "always", "ok"), [(1.0, 1.05, 10.0, True), (1.0, 1.06, 10.0, False), (1.0, 0.2, 0.1, False)]
)
def test_the_guard_is_held_against_the_better_side(computed: float, guarded: float, always: float, ok: bool) -> None:
    assert guard.check(0.1, computed, guarded, always).ok is ok


def test_hits_that_miss_their_bounds() -> None:
    name = "first token of 64: s"
    results: dict[str, Figures] = {NONE: {name: 1.0}, HOST: {name: 0.25}, DISK: {name: 0.45}}
    assert all(check.ok for check in hits.checks_of(results, 64))
    for side in (HOST, DISK):
        worse = {**results, side: {name: results[side][name] + 0.01}}
        assert [check.ok for check in hits.checks_of(worse, 64)].count(False) == 1


def test_the_command_refuses_what_is_no_size() -> None:
    done = CliRunner().invoke(app, ["tiers", "--demoted", "much"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "'much' is not a size" in done.output
