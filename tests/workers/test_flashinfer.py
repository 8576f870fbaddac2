"""The FlashInfer backend and the graphs around it, on the CPU: over what FlashInfer promises, spelled out in PyTorch.

What this cannot show is that FlashInfer keeps its promises; tests/workers/test_cuda.py is for that.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import model_zoo
from tests.workers import fake_flashinfer
from tests.workers.drive import answers, assert_idle, engine, request
from tests.workers.test_attention import batch, memory
from transfer.layout import LayerGeometry
from workers.config import StartError, WorkerConfig
from workers.engine import graphs
from workers.engine.attention import AttentionOptions, LayerAttention
from workers.engine.attention.choice import choose
from workers.engine.attention.flashinfer_backend import FlashInferBackend, unsupported
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.engine import Engine
from workers.engine.graphs import batch_sizes
from workers.engine.model import Model
from workers.kv.pool import CACHED

OPTIONS = {
    "plain": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, window=20),
    "window of a token": AttentionOptions(0.3, window=1),
    "cap": AttentionOptions(0.3, softcap=2.0),
    "sinks": AttentionOptions(0.3, sinks=torch.linspace(-3, 3, 4)),
    "window and sinks": AttentionOptions(0.3, window=40, sinks=torch.linspace(-3, 3, 4)),
}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer, as far as it is needed."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module)  # type: ignore[arg-type]
    monkeypatch.setattr("workers.engine.attention.flashinfer_backend.WORKSPACE_BYTES", 16)


def layer(options: AttentionOptions, key: int = 64, value: int = 64) -> LayerAttention:
    return LayerAttention(4, LayerGeometry(2, key, value), options)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_it_attends_as_the_torch_backend(options: AttentionOptions, shared: bool) -> None:
    """Chunks and single rows, some of which share a beginning; several steps with one backend."""
    pool = memory(2, 64, 16, "float32", blocks=128)
    backend = FlashInferBackend(pool, [layer(options)], shared)
    plain = TorchBackend(pool, compiled=False, shared=False)
    merges = 0
    for seed in range(6):
        torch.manual_seed(seed)
        work = batch(np.random.default_rng(seed), 16, 127)
        used = [block * 16 + at for span in work.spans for block in span.blocks for at in range(16)]
        for part in (pool.keys[0], pool.values[0]):
            part[used] = torch.randn(len(used), 2, 64)
        rows = len(work.slots)
        query, key, value = torch.randn(rows, 4, 64) * 2, torch.randn(rows, 2, 64), torch.randn(rows, 2, 64)
        plain.prepare(work)
        backend.prepare(work)
        merges += len(backend._levels)
        expected = plain.attend(0, query, key, value, options)
        assert (pool.keys[0][work.slots] == key).all()
        pool.keys[0][work.slots] = torch.nan
        found = backend.attend(0, query, key, value, options)
        assert torch.allclose(found, expected, atol=1e-5)
        assert (pool.keys[0][work.slots] == key).all()
    assert (merges > 0) == shared


# --- the engine ---------------------------------------------------------------------------------------------------


def recorded(function: Callable[[], torch.Tensor], pool: Any) -> tuple[Callable[[], None], torch.Tensor, Any]:
    """A graph of which only the tensors are fixed."""
    output = function()

    @torch.inference_mode()
    def replay() -> None:
        output.copy_(function())

    return replay, output, pool


@pytest.fixture
def on_device(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are made as on CUDA."""

    def chosen(config: WorkerConfig, pool: Any, layers: Any) -> FlashInferBackend:
        return FlashInferBackend(pool, layers, config.shared_attention)

    monkeypatch.setattr("workers.engine.engine.choose", chosen)
    monkeypatch.setattr("workers.engine.engine.spare_blocks", lambda _: 1)
    monkeypatch.setattr(graphs, "record", recorded)


def replays(one: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Size and levels of all graphs that are replayed from now on."""
    assert one._graphs is not None
    seen = []
    for name, graph in one._graphs._graphs.items():

        def run(*arguments: Any, name: tuple[int, int] = name, original: Any = graph.run) -> torch.Tensor:
            seen.append(name)
            return original(*arguments)

        monkeypatch.setattr(graph, "run", run)
    return seen


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("captured", [True, False])
def test_tokens_are_the_reference_s(zoo: Callable[[str], Path], arch: str, captured: bool) -> None:
    model = Model(zoo(arch), "float32", "cpu")
    drawn = [model_zoo.clear_prompt(zoo(arch), length, 12, seed=length) for length in (1, 16, 40, 90)]
    one = engine(model, step_tokens=32, max_running=6)
    if captured:
        one.warm_up()
    for _ in range(2):
        assert answers(one, [request(prompt, 12) for prompt, _ in drawn]) == [ids for _, ids in drawn]
        assert_idle(one)


@pytest.mark.usefixtures("on_device")
def test_graphs_change_nothing_for_sequences_that_share(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trunk, branches and a third level below, and one that shares nothing; they end one by one."""
    trunk = [(7 * i) % 500 for i in range(90)]
    branches = [[*trunk, *([number] * 80)] for number in (3, 4)]
    prompts = [[*branches[number % 2], *[10 + number // 4] * 70, number] for number in range(8)] + [[9] * 20]
    plain = engine(tiny, shared_attention=False)
    requests = [request(prompt, 6 + number) for number, prompt in enumerate(prompts)]
    expected = [answers(plain, [one])[0] for one in requests]
    one = engine(tiny, max_running=9)
    one.warm_up()
    seen = replays(one, monkeypatch)
    for _ in range(2):
        assert answers(one, [request(prompt, 6 + i) for i, prompt in enumerate(prompts)]) == expected
    assert {(9, 2), (8, 2), (4, 2), (1, 0)} <= set(seen)
    assert_idle(one)


@pytest.mark.usefixtures("on_device")
def test_padding_writes_to_the_spare_block_only(tiny: Model) -> None:
    """What larger batches have left in a graph's tensors does not reach the blocks that they have left in the cache."""
    one = engine(tiny, max_running=8)
    one.warm_up()
    spare = one.memory.layout.num_blocks - 1
    assert one.cache.pool.total == spare
    prompts = [[number] * 20 for number in range(8)]
    answers(one, [request(prompt, 6) for prompt in prompts])
    parts = [part.view(torch.int32) for part in (*one.memory.keys, *one.memory.values)]
    cached = torch.from_numpy(np.append(np.repeat(one.cache.pool.owners() == CACHED, 16), [False] * 16))
    before = [part[cached] for part in parts]
    answers(one, [request([90 + number] * 20, 6) for number in range(5)])
    assert all(torch.equal(part[cached], kept) for part, kept in zip(parts, before, strict=True))


@pytest.mark.usefixtures("on_device")
def test_a_model_that_cannot_be_captured_is_served_without(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(function: Any, pool: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "record", failing)
    one = engine(tiny)
    with caplog.at_level(logging.WARNING):
        one.warm_up()
    assert [each.getMessage() for each in caplog.records] == [
        "no CUDA graphs for decoding, every kernel is launched by itself: "
        "operation not permitted when stream is capturing"
    ]
    assert answers(one, [request(range(40))]) == answers(engine(tiny), [request(range(40))])


@pytest.mark.parametrize(
    ("largest", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_padded_batch_sizes(largest: int, expected: list[int]) -> None:
    assert batch_sizes(largest) == expected


# --- the choice ---------------------------------------------------------------------------------------------------


def test_what_flashinfer_has_no_kernels_for() -> None:
    plain = OPTIONS["plain"]
    assert unsupported([layer(plain), layer(plain, 128, 128)], "bfloat16") is None
    assert "not in float32 (worker.dtype)" in str(unsupported([layer(plain)], "float32"))
    assert "layer 1 have 80 elements" in str(unsupported([layer(plain), layer(plain, 80, 80)], "float16"))
    assert "192 elements a head and values 128" in str(unsupported([layer(plain, 192, 128)], "float16"))


def test_torch_is_chosen_on_a_cpu_and_flashinfer_refused(tiny: Model) -> None:
    pool = memory(2, 16, 16, "float32")
    for wanted in ("auto", "torch"):
        assert isinstance(choose(WorkerConfig(attention=wanted), pool, tiny.attention), TorchBackend)
    with pytest.raises(StartError, match=r"attention: flashinfer runs on CUDA only; set worker\.attention to auto"):
        engine(tiny, attention="flashinfer")


class OnCuda:
    """A pool that says it is on a GPU."""

    def __init__(self, dtype: str) -> None:
        self.layout = memory(2, 64, 16, dtype).layout
        self.flat = torch.empty(0)
        self.flat.__class__ = type("Tensor", (torch.Tensor,), {"is_cuda": True})


@pytest.mark.parametrize(("installed", "says"), [(False, r"pip install 'headwater\[cuda\]'"), (True, "float32")])
def test_a_gpu_without_what_it_needs_is_a_start_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, installed: bool, says: str
) -> None:
    monkeypatch.setattr("workers.engine.attention.choice.find_spec", lambda _: object() if installed else None)
    with pytest.raises(StartError, match=f"^attention: .*{says}.*set worker.attention to torch"):
        choose(WorkerConfig(), OnCuda("float32"), [layer(OPTIONS["plain"])])  # type: ignore[arg-type]


@pytest.mark.usefixtures("library")
def test_a_flashinfer_that_fails_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: Any, **__: Any) -> None:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr("workers.engine.attention.choice.find_spec", lambda _: object())
    monkeypatch.setattr("workers.engine.attention.choice.FlashInferBackend", plan)
    with pytest.raises(StartError, match=r"does not work here: Could not find nvcc; set worker\.attention to torch"):
        choose(WorkerConfig(), OnCuda("bfloat16"), [layer(OPTIONS["plain"])])  # type: ignore[arg-type]
