"""`headwater bench first-token`: what the cluster adds to the engine's own time to first token on an idle machine."""

from __future__ import annotations

import json
import random
import time
from http.client import HTTPConnection
from statistics import median

import torch

from cluster.bench.alone import EngineAlone
from cluster.bench.report import Check, Report
from cluster.bench.sides import running
from cluster.config import ClusterConfig
from cluster.models import resolve, served_name
from workers.engine.engine import Engine
from workers.engine.model import Model

MAX_ADDED_MS = 15.0


class _Client:
    """A plain HTTP client on one connection: what a client library spends on its own side is not the cluster's."""

    def __init__(self, port: int, model: str, prompt: list[int]) -> None:
        self._connection = HTTPConnection("127.0.0.1", port)
        wanted = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        self._body = json.dumps({**wanted, "stream": True, "return_token_ids": True}).encode()

    def first_token_s(self) -> float:
        """Seconds from sending the request to its first event; reads the stream to its end."""
        start = time.perf_counter()
        self._connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        first = answer.readline()
        taken = time.perf_counter() - start
        if answer.status != 200 or not first.startswith(b"data: {"):
            raise RuntimeError(f"{answer.status}: {first[:200]!r}")
        answer.read()
        return taken


def run(config: ClusterConfig, prompt_tokens: int, requests: int) -> Report:
    """Measure engine and cluster in turns, one request at a time, on a prompt that both have seen before."""
    with running({"first-token": config}) as clusters:
        cluster = clusters["first-token"]
        worker = cluster.worker_config()
        torch.set_num_threads(worker.threads or torch.get_num_threads())
        engine = EngineAlone(Engine(Model(resolve(config.model.name), worker.dtype, worker.device), worker))
        draw = random.Random(0)
        prompt = [draw.randrange(cluster.statuses()[0].vocab_size) for _ in range(prompt_tokens)]
        client = _Client(cluster.ports[0], served_name(config.model.name), prompt)
        alone, through = [], []
        for number in range(requests + 3):
            with_cluster, without = client.first_token_s(), engine.first_token_s(prompt)
            if number >= 3:  # the first ones open connections and fill caches
                through.append(with_cluster)
                alone.append(without)
    added = (median(through) - median(alone)) * 1000
    results = {
        "engine alone": {"median first token ms": median(alone) * 1000, "worst first token ms": max(alone) * 1000},
        "cluster": {"median first token ms": median(through) * 1000, "worst first token ms": max(through) * 1000},
    }
    checks = [Check("added by the cluster", added, "ms", MAX_ADDED_MS, at_least=False)]
    return Report(
        {"prompt": prompt_tokens, "requests": requests, "model": served_name(config.model.name)}, results, checks
    )
