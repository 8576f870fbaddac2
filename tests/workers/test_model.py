"""What the engine learns from a model before it serves, and how it says that it cannot."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests import model_zoo
from tests.workers.drive import answers, engine, request
from transfer.layout import LayerGeometry
from workers.config import StartError, WorkerConfig, parse_bytes
from workers.engine.engine import plan_memory
from workers.engine.model import (
    Model,
    ModelUnsupported,
    context_length,
    eos_tokens,
    identity,
    resolve_device,
    resolve_dtype,
)

ROPE = {"rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **ROPE}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **ROPE}


def llama(**changes: Any) -> tf.LlamaConfig:
    return tf.LlamaConfig(**model_zoo.COMMON | changes)


def save(config: Any, path: Path) -> Path:
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


# --- geometry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("llama", [LayerGeometry(2, 16, 16)] * 3),
        ("gemma3_text", [LayerGeometry(2, 16, 16)] * 4),
        ("deepseek_v3", [LayerGeometry(4, 24, 20)] * 3),  # latent attention, expanded
    ],
)
def test_every_layer_is_measured(zoo: Callable[[str], Path], arch: str, expected: list[LayerGeometry]) -> None:
    assert list(Model(zoo(arch), "float32", "cpu").layers) == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            lambda: tf.Lfm2Config(**model_zoo.COMMON | {"layer_types": ["conv", "full_attention", "conv"]}),
            "lfm2: 1 of 3",
        ),
        (
            lambda: tf.MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, state_size=4),
            "mamba: 0 of 2 layers",
        ),
    ],
    ids=["hybrid", "state space"],
)
def test_layers_that_keep_other_state_are_unsupported(tmp_path: Path, config: Callable[[], Any], says: str) -> None:
    with pytest.raises(ModelUnsupported, match=says):
        Model(save(config(), tmp_path), "float32", "cpu")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            lambda: tf.PhimoeConfig(**model_zoo.COMMON | {"num_local_experts": 4, "sliding_window": 24}),
            "phimoe: attention is limited to 24 tokens by a mask",
        ),
        (
            lambda: tf.Llama4TextConfig(
                **model_zoo.COMMON, attention_chunk_size=32, num_local_experts=4, intermediate_size_mlp=96
            ),
            "llama4_text: attention is limited to 32 tokens by a mask",
        ),
        (lambda: tf.DogeConfig(**model_zoo.COMMON), "DogeAttention attends by a mask of its own"),
        (lambda: tf.DiffLlamaConfig(**model_zoo.COMMON), "attends twice"),
    ],
    ids=["window only in the mask", "chunks", "its own mask", "two attentions a layer"],
)
def test_attention_that_would_come_out_wrong_is_unsupported(
    tmp_path: Path, config: Callable[[], Any], says: str
) -> None:
    with pytest.raises(ModelUnsupported, match=says):
        Model(save(config(), tmp_path), "float32", "cpu")


def test_a_window_that_never_bites_is_fine(tmp_path: Path) -> None:
    window = {"num_local_experts": 4, "sliding_window": model_zoo.CONTEXT}
    model = Model(save(tf.PhimoeConfig(**model_zoo.COMMON | window), tmp_path), "float32", "cpu")
    assert context_length(model.config) == model_zoo.CONTEXT


# --- context ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (lambda: llama(max_position_embeddings=4096), 4096),
        (lambda: llama(max_position_embeddings=4096, rope_parameters={"rope_type": "default", **ROPE}), 4096),
        (lambda: llama(max_position_embeddings=4096, rope_parameters=dict(DYNAMIC)), 4096),
        (
            lambda: llama(
                max_position_embeddings=8192,
                rope_parameters={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 1024,
                    **ROPE,
                },
            ),
            8192,
        ),
        (
            lambda: tf.Phi3Config(
                **model_zoo.COMMON | {"max_position_embeddings": 8192},
                original_max_position_embeddings=1024,
                rope_parameters=dict(LONG),
            ),
            1024,
        ),
        (
            lambda: llama(
                max_position_embeddings=8192, rope_parameters={**LONG, "original_max_position_embeddings": 2048}
            ),
            2048,
        ),
        (
            lambda: tf.Gemma3TextConfig(
                max_position_embeddings=8192,
                rope_parameters={
                    "full_attention": {**DYNAMIC, "original_max_position_embeddings": 512},
                    "sliding_attention": {"rope_type": "default", **ROPE},
                },
            ),
            512,
        ),
    ],
    ids=["plain", "default", "dynamic", "llama3", "longrope outside", "longrope inside", "dynamic in one layer type"],
)
def test_the_context_ends_where_the_frequencies_would_change(config: Callable[[], Any], length: int) -> None:
    assert context_length(config()) == length


@pytest.mark.parametrize(
    "config",
    [
        llama(max_position_embeddings=128, rope_parameters=dict(DYNAMIC)),
        tf.Phi3Config(
            **model_zoo.COMMON | {"max_position_embeddings": 512},
            original_max_position_embeddings=128,
            rope_parameters=dict(LONG),
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_a_long_prompt_in_the_batch_does_not_change_a_short_one(tmp_path: Path, config: Any) -> None:
    """Such models choose their frequencies by the longest position in a pass."""
    torch.manual_seed(1)
    path = save(config, tmp_path)
    drawn = [model_zoo.clear_prompt(path, length, 20, seed=length, gap=1e-4) for length in (10, 100)]
    one = engine(path)
    assert one.max_model_len == 128
    assert answers(one, [request(prompt, 20) for prompt, _ in drawn]) == [ids for _, ids in drawn]


# --- memory -------------------------------------------------------------------------------------------------------


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(dtype="float32", device="cpu", **settings)


def test_the_pool_is_as_large_as_its_memory_allows(tiny: Model) -> None:
    block = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, size, bytes
    layout, length = plan_memory(tiny, config(kv_memory=200 * block + 5))
    assert (layout.num_blocks, layout.block_bytes, length) == (200, block, 2048)
    assert layout.total_bytes <= 200 * block + 5
    layout, length = plan_memory(tiny, config(kv_memory=7 * block, max_model_len=100))
    assert (layout.num_blocks, length) == (7, 100)


def test_too_little_memory_for_one_request_says_how_much_is_needed(tiny: Model) -> None:
    with pytest.raises(StartError) as error:
        plan_memory(tiny, config(kv_memory="1MiB"))
    needed = 128 * 16 * 3 * 2 * 2 * 16 * 4
    assert "kv_memory" in str(error.value)
    assert "max_model_len" in str(error.value)
    assert "2048 tokens" in str(error.value)
    assert str(needed) in str(error.value)
    assert plan_memory(tiny, config(kv_memory=needed))[0].num_blocks == 128
    with pytest.raises(StartError):
        plan_memory(tiny, config(kv_memory=needed - 1))


def test_more_context_than_the_model_has(tiny: Model) -> None:
    assert plan_memory(tiny, config(max_model_len=2048))[1] == 2048
    with pytest.raises(StartError, match=re.escape("max_model_len: 2049 is more than the model's context of 2048")):
        plan_memory(tiny, config(max_model_len=2049))


# --- identity, stop tokens, device --------------------------------------------------------------------------------


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = save(llama(), tmp_path / "one")
    torch.manual_seed(2)
    other = save(llama(), tmp_path / "other")
    torch.manual_seed(1)
    again = save(llama(), tmp_path / "again")
    assert identity(one) == identity(again)
    assert identity(one) != identity(other)
    trained = save(llama(), tmp_path / "trained")
    file = trained / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert identity(trained) not in (identity(one), identity(other))
    (again / "config.json").write_text((again / "config.json").read_text().replace("10000.0", "20000.0"))
    assert identity(one) != identity(again)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(5, None, {5}), ([5, 6], None, {5, 6}), (5, [7, 8], {7, 8}), (None, 7, {7}), (None, None, set())],
)
def test_stop_tokens(tmp_path: Path, in_config: Any, in_generation: Any, expected: set[int]) -> None:
    if in_generation is not None:
        tf.GenerationConfig(eos_token_id=in_generation).save_pretrained(tmp_path)
    assert eos_tokens(tmp_path, llama(eos_token_id=in_config)) == expected


def test_devices_and_types() -> None:
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("float16", cpu) == "float16"
    assert resolve_dtype("auto", cpu) in ("float32", "bfloat16")
    assert resolve_dtype("auto", torch.device("cuda")) == "bfloat16"
    if not torch.cuda.is_available():
        assert resolve_device("auto") == cpu
        with pytest.raises(ValueError, match="cuda was asked for"):
            resolve_device("cuda")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 2**30), ("512MiB", 2**29), ("1.5 gib", 3 * 2**29), ("2GB", 2 * 10**9), ("100", 100), (7, 7)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size
    assert WorkerConfig(kv_memory=text).kv_memory == size


@pytest.mark.parametrize("text", ["", "GiB", "1XiB", "one", "1 2", "1e999 GiB", "nan", "-", "1GiB2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 1GiB"):
        parse_bytes(text)
