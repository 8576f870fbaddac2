"""Account: what a worker says of itself when it is asked."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

import psutil

from transfer.messages import TransferStats, WorkerStatus
from workers.engine.engine import Engine
from workers.speeds import SpeedMeter


@dataclass(frozen=True, slots=True)
class Account:
    """Of the worker `name` in this life, which serves a model under this name; `metrics` is where they are served."""

    name: str
    model: str
    incarnation: int
    engine: Engine
    transfers: TransferStats
    speeds: SpeedMeter
    metrics: str

    def status(self, role: str, state: str, queued_tokens: int) -> WorkerStatus:
        """How it is now."""
        engine, cache = self.engine, self.engine.cache
        return WorkerStatus(
            name=self.name,
            role=role,
            node=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            model=self.model,
            incarnation=self.incarnation,
            running=engine.running,
            waiting=engine.waiting,
            queued_tokens=queued_tokens,
            prefix_cache=cache.reuse,
            blocks=cache.counts(),
            fragmentation=cache.pool.fragmentation(),
            cache=replace(cache.stats),
            transfer=replace(self.transfers),
            speeds=self.speeds.now(self.transfers, cache.tiers),
            tiers=cache.tiers.status() if cache.tiers else None,
            token_bytes=engine.memory.layout.whole.token_bytes,
            resident_bytes=psutil.Process().memory_info().rss,
            block_size=cache.block_size,
            max_model_len=engine.max_model_len,
            vocab_size=engine.model.vocab_size,
            fingerprint=engine.memory.layout.fingerprint,
            metrics=self.metrics,
        )
