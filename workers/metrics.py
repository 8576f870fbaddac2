"""The worker's metrics; cluster/telemetry.py exports them. Most are figures that it keeps anyhow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from transfer.messages import TierStatus, TransferStats
from transfer.telemetry import SECONDS, Histogram
from workers.engine.engine import Engine
from workers.scheduler import Work

_meter = metrics.get_meter("headwater.worker")
step_times = Histogram(
    "headwater_engine_step_seconds", "of a step that computes: prefill, with prompts in it, or decode", SECONDS
)
queue_times = _meter.create_histogram(
    "headwater_queue_time",
    unit="s",
    description="until a prompt begins to be computed, or, as a reservation, until a decode worker has room for it",
    explicit_bucket_boundaries_advisory=SECONDS,
)
transfer_times = _meter.create_histogram(
    "headwater_transfer_duration",
    unit="s",
    description="from when a decode worker has room until it has a prompt's KV; exposed: behind its computation",
    explicit_bucket_boundaries_advisory=SECONDS,
)
Figures = dict[str, float]
TIER_STATES = ("host_blocks", "host_cached", "disk_cached", "under_way", "read_only")


class Metrics:
    """Those of the worker of this name."""

    def __init__(self, worker: str, engine: Engine, transfers: TransferStats) -> None:
        self._worker = worker
        self._prefill = step_times.of(worker=worker, kind="prefill")
        self._decode = step_times.of(worker=worker, kind="decode")
        self._observe_cache(engine)
        self._observe_transfers(transfers)
        self._observe_tiers(lambda: engine.cache.tiers.status() if engine.cache.tiers else None)

    def step(self, works: list[Work], seconds: float) -> None:
        """A step has been computed. Prompts come last in it."""
        if works:
            (self._prefill if works[-1].count > 1 else self._decode).record(seconds)

    def queued(self, kind: str, seconds: float) -> None:
        """A prompt begins after so long, or has got its reservation."""
        queue_times.record(seconds, {"worker": self._worker, "kind": kind})

    def transferred(self, total_s: float, exposed_s: float) -> None:
        """A prompt's KV has arrived at its decode worker."""
        for kind, seconds in (("total", total_s), ("exposed", exposed_s)):
            transfer_times.record(seconds, {"worker": self._worker, "kind": kind})

    def _observe_cache(self, engine: Engine) -> None:
        cache, kind = engine.cache, "kind"
        self._gauge("worker_blocks", "KV blocks by state", "state", lambda: dict(cache.counts()))
        self._gauge(
            "worker_requests",
            "requests by state",
            "state",
            lambda: {"running": engine.running, "waiting": engine.waiting},
        )
        looked_for = {"requests": "requests", "tokens": "prompt_tokens", "blocks": "prompt_blocks"}
        found = {"requests": "request_hits", "tokens": "cached_tokens", "blocks": "cached_blocks"}
        evicted = {"room": "evicted_blocks", "cleared": "cleared_blocks"}
        self._counter("cache_queries", "what prompts were made of", kind, lambda: _fields(cache.stats, looked_for))
        self._counter("cache_hits", "of these, what was cached", kind, lambda: _fields(cache.stats, found))
        self._counter("cache_evicted_blocks", "by reason", "reason", lambda: _fields(cache.stats, evicted))
        self._counter(
            "new_prompt_tokens",
            "prompt tokens whose KV was computed or received",
            "",
            lambda: {"": cache.stats.new_tokens},
        )
        self._counter("preemptions", "answers that had to wait", "", lambda: {"": cache.stats.preemptions})
        self._counter(
            "shared_context_tokens",
            "context of several sequences of a step: read once for all, and so spared",
            kind,
            lambda: dict(asdict(engine.reuse)),
        )

    def _observe_transfers(self, stats: TransferStats) -> None:
        sent = {"sent": "sent_bytes", "hidden": "hidden_bytes", "received": "received_bytes"}
        ends = {one: one for one in ("sent", "failed", "accepted", "refused", "expired")}
        blocks = {"fetched": "fetched_blocks", "lost": "lost_blocks"}
        self._counter(
            "transfer_bytes",
            "KV between workers; hidden: sent before the prompt was computed to its end",
            "kind",
            lambda: _fields(stats, sent),
        )
        self._counter("transfer_seconds", "with a write under way", "kind", lambda: {"sending": stats.sending_s})
        self._counter(
            "transfers",
            "by how they ended at either side; expired: leases that were asked about",
            "kind",
            lambda: _fields(stats, ends),
        )
        self._counter(
            "transfer_blocks",
            "fetched from other workers' caches; lost: in quarantine until a restart",
            "kind",
            lambda: _fields(stats, blocks),
        )

    def _observe_tiers(self, status: Callable[[], TierStatus | None]) -> None:
        def blocks() -> Figures:
            now = status()
            return _fields(now, {state: state for state in TIER_STATES}) if now is not None else {}

        def work() -> Figures:
            now = status()
            if now is None:
                return {}
            return asdict(now.stats) | {"bad_files": now.bad_files, "write_errors": now.write_errors}

        self._gauge(
            "tier_blocks",
            "blocks below the device: room of host memory, cached there, cached on disk, under way; read_only is 1 "
            "while nothing can be written to disk",
            "state",
            blocks,
        )
        self._counter("tier_work", "what the tiers below the device did, by kind", "kind", work)

    def _gauge(self, name: str, description: str, label: str, read: Callable[[], Figures]) -> None:
        observed = [self._reader(label, read)]
        _meter.create_observable_gauge(f"headwater_{name}", observed, description=description)

    def _counter(self, name: str, description: str, label: str, read: Callable[[], Figures]) -> None:
        observed = [self._reader(label, read)]
        _meter.create_observable_counter(f"headwater_{name}", observed, description=description)

    def _reader(self, label: str, read: Callable[[], Figures]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """Observations of figures, each under its `label`; without one there is one figure."""

        def observed(_: CallbackOptions) -> Iterable[Observation]:
            for value, number in read().items():
                yield Observation(number, {"worker": self._worker, **({label: value} if label else {})})

        return observed


def _fields(of: Any, names: dict[str, str]) -> Figures:
    """Fields of an object, each under its label."""
    return {label: float(getattr(of, name)) for label, name in names.items()}
