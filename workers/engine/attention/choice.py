"""Which attention backend a worker runs: decided once, at its start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch

from workers.config import StartError, WorkerConfig
from workers.engine.attention import LayerAttention
from workers.engine.attention.flashinfer_backend import FlashInferBackend, unsupported
from workers.engine.attention.sliced import SlicedBackend, of_one_slice
from workers.engine.attention.torch_backend import TorchBackend
from workers.engine.batch import Batch, Span
from workers.kv.memory import KVMemory

_log = logging.getLogger(__name__)
_INSTEAD = "; set worker.attention to torch for the plain path, which is slow on a GPU"


def choose(
    config: WorkerConfig, memory: KVMemory, layers: Sequence[LayerAttention]
) -> TorchBackend | FlashInferBackend | SlicedBackend:
    """FlashInfer on CUDA and PyTorch elsewhere, unless `worker.attention` says otherwise; one for each slice of the KV
    heads that the pool holds. Raises StartError."""
    wanted = config.attention
    if wanted == "auto":
        wanted = "flashinfer" if memory.flat.is_cuda else "torch"
    if wanted == "flashinfer" and not memory.flat.is_cuda:
        raise StartError(
            "attention: flashinfer runs on CUDA only; set worker.attention to auto or worker.device to cuda"
        )
    count, workspace = memory.layout.shard.count, None
    if count == 1:
        return _backend(config, wanted, memory, layers)
    backends: list[TorchBackend | FlashInferBackend] = []
    for index, part in enumerate(memory.slices):
        backends.append(made := _backend(config, wanted, part, of_one_slice(layers, index, count), workspace))
        workspace = made.workspace if isinstance(made, FlashInferBackend) else None
    return SlicedBackend(backends)


def _backend(
    config: WorkerConfig,
    wanted: str,
    memory: KVMemory,
    layers: Sequence[LayerAttention],
    workspace: torch.Tensor | None = None,
) -> TorchBackend | FlashInferBackend:
    if wanted == "torch":
        return TorchBackend(memory, config.compiled_attention, config.shared_attention)
    return _flashinfer(memory, layers, config.shared_attention, workspace)


def _flashinfer(
    memory: KVMemory, layers: Sequence[LayerAttention], shared: bool, workspace: torch.Tensor | None
) -> FlashInferBackend:
    if find_spec("flashinfer") is None:
        raise StartError(f"attention: FlashInfer is not installed: pip install 'headwater[cuda]'{_INSTEAD}")
    if (reason := unsupported(layers, memory.layout.dtype)) is not None:
        raise StartError(f"attention: FlashInfer cannot serve this model: {reason}{_INSTEAD}")
    try:
        backend = FlashInferBackend(memory, layers, shared, workspace)
        # A plan loads the kernels, for which FlashInfer may have to compile them first.
        one = torch.zeros((1, 1), dtype=torch.int64, device=memory.flat.device)
        spare = np.array([memory.layout.num_blocks - 1])
        backend.prepare(Batch(one, one, one[0], [Span(0, 1, 0, spare)], one[0]))
    except Exception as error:  # a compiler that is missing, a driver that is too old, a device that it does not know
        _log.exception("FlashInfer failed")
        raise StartError(f"attention: FlashInfer does not work here: {error}{_INSTEAD}") from error
    return backend
