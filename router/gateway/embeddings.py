"""Embeddings: the mean of a prompt's last hidden states, of length one. Of any model; how much they say depends on
what it was trained for."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from router.gateway import accounts, tracing
from router.gateway.dispatch import Prompt
from router.gateway.jobs import Job, check_allowed, check_length, check_priority
from router.gateway.schemas.embeddings import EmbeddingRequest
from router.gateway.service import Service
from router.gateway.usage import Usage
from transfer.messages import SamplingParams, pack_tokens
from transfer.prefix import PrefixChain, root_key


async def embed(service: Service, request: EmbeddingRequest) -> dict[str, Any]:
    """The response object. Raises ApiError for what cannot be embedded."""
    service.check_model(request.model)
    service.admit(request.tenant)
    jobs = _jobs(service, request, await service.tokenized(request.input, "input"))
    tracing.asked("embeddings", request.model, jobs)
    vectors = [b""] * len(jobs)
    usage = Usage(jobs)
    async for piece in service.pieces(jobs):
        vectors[piece.index] = piece.embedding or vectors[piece.index]
    shown = [_shown(vector, request.encoding_format == "base64") for vector in vectors]
    return {
        "object": "list",
        "model": request.model,
        "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(shown)],
        "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
    }


def _jobs(service: Service, request: EmbeddingRequest, prompts: list[list[int]]) -> list[Job]:
    limits = service.limits
    check_priority(request.priority, limits)
    check_allowed("timeout", request.timeout or 0, limits.request_timeout_s, "gateway.request_timeout_s")
    account = accounts.current.get()
    salt = account.salt((request.cache_salt or "").encode())
    # All of a prompt has to be computed: nobody looks for a cache.
    chain = PrefixChain(root_key(limits.fingerprint, tenant=salt), (), limits.block_size)
    made = []
    for index, tokens in enumerate(prompts):
        check_length(len(tokens), "input", limits.max_model_len)
        packed = pack_tokens(tokens)
        prompt = Prompt(
            packed,
            chain,
            priority=request.priority or 0,
            tenant=account.name or request.tenant,
            weight=account.tenant.weight,
            salt=salt,
            timeout_s=request.timeout,
            embed=True,
        )
        made.append(Job(index, index, True, prompt, SamplingParams(1, temperature=0), [], empty=True))
    return made


def _shown(vector: bytes, as_base64: bool) -> str | list[float]:
    values = np.frombuffer(vector, dtype="<f4").astype(np.float64)
    values = (values / max(float(np.linalg.norm(values)), 1e-12)).astype("<f4")
    return base64.b64encode(values.tobytes()).decode() if as_base64 else values.tolist()
