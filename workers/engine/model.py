"""The model: transformers modules, loaded once, run over packed batches.

Model code is not ours. The registered attention function (workers/engine/attention) is the only thing that is
replaced, so every decoder-only architecture that uses transformers' attention interface works.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from transfer.layout import LayerGeometry
from workers.engine import attention
from workers.engine.attention import AttentionOptions, Backend, LayerAttention, ModelUnsupported
from workers.engine.batch import Batch
from workers.engine.linear import pack
from workers.kv.memory import DTYPES

READ_BYTES = 16 << 20


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is a device. Raises ValueError when CUDA is asked for and absent."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, but torch sees no CUDA device")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """`auto` is bfloat16 where the device multiplies it natively, otherwise float32."""
    if dtype != "auto":
        return dtype
    fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if fast else "float32"


def eos_tokens(path: Path, config: PreTrainedConfig) -> frozenset[int]:
    """Ids that end an answer, from generation_config.json where there is one, else from the model's config."""
    ids = config.get_text_config().eos_token_id
    if (path / "generation_config.json").exists():
        ids = GenerationConfig.from_pretrained(path).eos_token_id or ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def identity(path: Path) -> str:
    """What the weights are, for fingerprints: a digest (xxh3-128) of config.json and all of the weight files. A part of
    these would not do: a model that was trained on has the same names, sizes and often the same embeddings. Equal on
    every host that has the same files."""
    digest = xxhash.xxh3_128()
    for file in sorted([path / "config.json", *path.glob("*.safetensors")]):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb", buffering=0) as stream:
            while part := stream.read(READ_BYTES):
                digest.update(part)
    return digest.hexdigest()


def context_length(config: PreTrainedConfig) -> int:
    """Longest sequence that the model can be served with, in tokens.

    transformers chooses the frequencies of `longrope` and `dynamic` rotary embeddings by the largest position in the
    whole pass, so in a packed batch a long prompt would change a short one's tokens. Such models are served up to
    the length at which the frequencies would change.
    """
    text = config.get_text_config()
    limit = int(text.max_position_embeddings)
    rope = getattr(text, "rope_parameters", None) or {}
    for one in rope.values() if all(isinstance(value, dict) for value in rope.values()) else [rope]:
        if one.get("rope_type") in ("longrope", "dynamic"):
            original = one.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            limit = min(limit, int(original or limit))
    return limit


@dataclass(slots=True)
class _Probe:
    """Backend that records how each layer attends instead of attending."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)

    def prepare(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Record shapes; the result has the right shape and no meaning."""
        if layer in self.layers:
            raise ModelUnsupported(f"layer {layer} attends twice in one pass")
        geometry = LayerGeometry(key.shape[1], key.shape[2], value.shape[2])
        self.layers[layer] = LayerAttention(query.shape[1], geometry, options)
        return query.new_zeros((*query.shape[:2], value.shape[2]))


class Model:
    """Weights on a device. `attention` says how each layer attends, `layers` is the KV geometry of that, and `in_order`
    is whether layers attend in the order of their numbers. `hidden` `[T, size]` are the last hidden states of the last
    pass."""

    def __init__(self, path: Path, dtype: str = "auto", device: str = "auto") -> None:
        attention.register()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self.path = path
        self.device = resolve_device(device)
        self.dtype = resolve_dtype(dtype, self.device)
        self.config = AutoConfig.from_pretrained(path)
        self._module = AutoModelForCausalLM.from_pretrained(
            path, config=self.config, dtype=DTYPES[self.dtype], attn_implementation=attention.IMPLEMENTATION
        )
        self._module.to(self.device).eval()
        pack(self._module)
        self.hidden = torch.empty(0)
        self._module.base_model.register_forward_hook(self._keep_hidden)
        self.eos = eos_tokens(path, self.config)
        self.vocab_size = int(self.config.get_text_config().vocab_size)
        self.identity = identity(path)
        self.attention = self._probe()
        self.layers = tuple(one.geometry for one in self.attention)

    def forward(self, batch: Batch, backend: Backend) -> torch.Tensor:
        """Run a packed batch; logits `[len(batch.logit_rows), vocab]`, float32."""
        backend.prepare(batch)
        return self.compute(batch, backend)

    def synchronize(self) -> None:
        """Wait until the device has done everything that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def compute(self, batch: Batch, backend: Backend) -> torch.Tensor:
        """`forward` for a batch that the backend is prepared for."""
        with attention.using(backend):
            output = self._module(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=batch.logit_rows,
            )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def _keep_hidden(self, module: torch.nn.Module, inputs: object, output: Any) -> None:
        self.hidden = output[0][0]

    def _probe(self) -> tuple[LayerAttention, ...]:
        probe = _Probe()
        one = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        batch = Batch(one, one, one[0], [], one[0])
        try:
            self.forward(batch, probe)
        except Exception as error:  # model code that does not know packed batches fails in its own ways
            raise ModelUnsupported(f"{self.config.model_type}: a packed batch fails: {error}") from error
        expected = int(self.config.get_text_config().num_hidden_layers)
        if sorted(probe.layers) != list(range(expected)):
            raise ModelUnsupported(
                f"{self.config.model_type}: {len(probe.layers)} of {expected} layers use the attention interface"
            )
        # Some models put a window into the mask and do not tell the attention function.
        self.in_order = list(probe.layers) == sorted(probe.layers)
        told = {one.options.window for one in probe.layers.values()}
        untold = {window for window in attention.mask_windows() - told if window > 0}
        if any(window < context_length(self.config) for window in untold):
            raise ModelUnsupported(f"{self.config.model_type}: attention is limited to {min(untold)} tokens by a mask")
        return tuple(probe.layers[index] for index in range(expected))
