"""`headwater bench first-token`: what the cluster adds to the engine's own time to first token on an idle machine."""

from __future__ import annotations

import asyncio
import random
import time
from statistics import median

import torch
from openai import AsyncOpenAI

from cluster.bench.load import one
from cluster.bench.report import Check, Report
from cluster.bench.shared_prefix import WORD_IDS
from cluster.config import ClusterConfig
from cluster.launch import Cluster, connect, disconnect
from cluster.models import resolve
from transfer.messages import Request, SamplingParams, pack_tokens
from workers.engine.engine import Engine
from workers.engine.model import Model, describe

MAX_ADDED_MS = 15.0


class _EngineAlone:
    """The same engine in this process, driven step by step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._count = 0

    def first_token_s(self, prompt: list[int]) -> float:
        """Seconds from adding the prompt to its first token."""
        self._count += 1
        request = Request(str(self._count), pack_tokens(prompt), SamplingParams(1, temperature=0), "", 0.0)
        start = time.perf_counter()
        self._engine.add(request)
        while not self._engine.step().deltas:
            pass
        return time.perf_counter() - start


def run(config: ClusterConfig, prompt_tokens: int, requests: int) -> Report:
    """Measure engine and cluster in turns, one request at a time, on a prompt that both have seen before."""
    model = resolve(config.model.name)
    connect(None)
    gateway = config.gateway.model_copy(update={"port": 0})
    cluster = Cluster(config.model_copy(update={"gateway": gateway}), model, "bench-first-token")
    try:
        cluster.start()
        worker = cluster.worker_config()
        torch.set_num_threads(worker.threads or torch.get_num_threads())
        engine = _EngineAlone(Engine(Model(model, worker.dtype, worker.device), worker))
        draw = random.Random(0)
        prompt = [draw.randrange(*WORD_IDS) for _ in range(prompt_tokens)]
        alone, through = asyncio.run(_measure(cluster, describe(model), engine, prompt, requests))
    finally:
        cluster.stop()
        disconnect()
    added = (median(through) - median(alone)) * 1000
    results = {
        "engine alone": {"median first token ms": median(alone) * 1000, "worst first token ms": max(alone) * 1000},
        "cluster": {"median first token ms": median(through) * 1000, "worst first token ms": max(through) * 1000},
    }
    checks = [Check("added by the cluster", added, "ms", MAX_ADDED_MS, at_least=False)]
    return Report({"prompt": prompt_tokens, "requests": requests, "model": describe(model)}, results, checks)


async def _measure(
    cluster: Cluster, model: str, engine: _EngineAlone, prompt: list[int], requests: int
) -> tuple[list[float], list[float]]:
    alone, through = [], []
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        for number in range(requests + 3):
            timing = await one(client, model, prompt, output=2)
            own = engine.first_token_s(prompt)
            if number >= 3:  # the first ones open connections and fill caches
                through.append(timing.first_token_s)
                alone.append(own)
    return alone, through
