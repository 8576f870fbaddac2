"""What only a GPU can show: FlashInfer against the plain path, the engine against transformers, graphs on and off."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from tests import model_zoo
from tests.workers.drive import answers, assert_idle, request
from tests.workers.test_attention import batch
from tests.workers.test_sampler import logits
from transfer.layout import KVLayout, LayerGeometry
from transfer.messages import Request, SamplingParams, unpack_tokens
from workers.config import WorkerConfig
from workers.engine.attention import AttentionOptions, LayerAttention
from workers.engine.attention.flashinfer_backend import FlashInferBackend
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.batch import Batch
from workers.engine.engine import Engine
from workers.engine.model import Model
from workers.engine.sampler import sample
from workers.kv.memory import KVMemory

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="needs FlashInfer: pip install 'headwater[cuda]'")

CUDA = torch.device("cuda")
HEADS, KV_HEADS, BLOCK = 6, 2, 16
TOLERANCE = 3e-2
"""Of attention outputs of about 1 in bfloat16, partial results included."""
CLOSE = 0.5
"""How far below the reference's best logit a chosen one may lie: both are bfloat16, but added up differently. On a CPU
it is 0.2 at most; logits have a standard deviation of 2.4."""


def on_gpu(work: Batch) -> Batch:
    return Batch(*(part.to(CUDA) for part in (work.input_ids, work.positions, work.slots)), work.spans, work.logit_rows)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("variant", ["plain", "window", "cap", "sinks"])
def test_flashinfer_attends_as_the_plain_path(variant: str, size: int, shared: bool) -> None:
    """Chunks and single rows, some of which share a beginning, over a pool of random blocks."""
    options = AttentionOptions(
        size**-0.5,
        window=20 if variant == "window" else None,
        softcap=5.0 if variant == "cap" else None,
        sinks=torch.linspace(-2, 2, HEADS, device=CUDA) if variant == "sinks" else None,
    )
    geometry = LayerGeometry(KV_HEADS, size, size)
    pool = KVMemory(KVLayout("test", "bfloat16", BLOCK, (geometry,), 128), CUDA)
    plain = TorchBackend(pool, compiled=False, shared=False)
    backend = FlashInferBackend(pool, [LayerAttention(HEADS, geometry, options)], shared)
    for seed in range(4):
        torch.manual_seed(seed)
        work = on_gpu(batch(np.random.default_rng(seed), BLOCK, 127))
        for part in (pool.keys[0], pool.values[0]):
            part.normal_()
        part = torch.randn(len(work.slots), HEADS + 2 * KV_HEADS, size, device=CUDA, dtype=torch.bfloat16)
        query, key, value = part.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        for one in (plain, backend):
            one.prepare(work)
        expected = plain.attend(0, query, key, value, options)
        found = backend.attend(0, query, key, value, options)
        assert (found - expected).abs().max().item() < TOLERANCE


# --- the engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A random model with heads that FlashInfer has kernels for; gemma2 has windows and soft caps."""
    path = Path(tmp_path_factory.mktemp("cuda") / request.param)
    config = model_zoo.CONFIGS[request.param]()
    config.update({"head_dim": 64, "hidden_size": 256, "query_pre_attn_scalar": 64})
    torch.manual_seed(1)
    tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return Model(path, "bfloat16", "cuda")


def made(model: Model, **changes: object) -> Engine:
    settings = {"dtype": "bfloat16", "device": "cuda", "kv_memory": 64 << 20, "step_tokens": 64, **changes}
    return Engine(model, WorkerConfig(**settings))  # type: ignore[arg-type]


def loads() -> list[Request]:
    """Sequences of which most share a beginning, at two levels, and which end one by one."""
    trunk = [(7 * i) % 500 for i in range(90)]
    branch = [[*trunk, *[number % 2] * 70, number] for number in range(6)]
    return [request(prompt, 8 + number) for number, prompt in enumerate([*branch, [9] * 20, list(range(150))])]


def assert_close(model: Model, prompt: list[int], answer: list[int]) -> None:
    """Every token of the answer is the reference's best, or as good as, given those before it."""
    reference = tf.AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.bfloat16, attn_implementation="eager"
    ).to(CUDA)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer]], device=CUDA)).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(-1, torch.tensor(answer, device=CUDA)[:, None])[:, 0]
    assert (logits.amax(dim=-1) - chosen).max().item() < CLOSE


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_tokens_are_the_reference_s_up_to_rounding(served: Model, shared: bool, graphs: bool) -> None:
    one = made(served, shared_attention=shared)
    assert one._graphs is not None
    if graphs:
        one.warm_up()
        assert one._graphs._graphs, "nothing was captured"
    for _ in range(2):  # cold and warm
        requests = loads()
        for each, answer in zip(requests, answers(one, requests), strict=True):
            assert_close(served, unpack_tokens(each.prompt).tolist(), answer)
        assert_idle(one)


def test_a_captured_pass_gives_the_logits_of_the_pass_itself(served: Model) -> None:
    """At every step of a load whose batches shrink from one padded size to the next."""
    one = made(served, max_running=8)
    one.warm_up()
    graphs = one._graphs
    assert graphs is not None
    assert graphs._graphs
    run, compared = graphs.forward, []

    def both(work: Batch) -> torch.Tensor:
        found = run(work).clone()
        contexts = graphs._eager.contexts(work)
        if graphs._fitting(work, contexts) is not None:
            expected = served.forward(work, graphs._eager)
            compared.append((found - expected).abs().max().item())
        return found

    graphs.forward = both  # type: ignore[method-assign]
    answers(one, loads())
    assert len(compared) > 8
    assert max(compared) < CLOSE


def test_sampling_on_the_device_is_sampling_on_the_host() -> None:
    rows = logits(rows=64)
    params = [SamplingParams(1, temperature=i % 3 / 2, top_k=i % 5 * 4, top_p=1 - i % 4 / 5, seed=i) for i in range(64)]
    assert sample(rows.to(CUDA), params, [3] * 64) == sample(rows, params, [3] * 64)
