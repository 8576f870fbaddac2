"""The gateway's metrics, through the OpenTelemetry API; cluster/telemetry.py exports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from router.view import View

_meter = metrics.get_meter("headwater.gateway")
_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000]
"""Bounds of histograms of times; the SDK's own are meant for milliseconds."""
started = _meter.create_counter(
    "headwater_requests_started", description="requests that came; those that are not finished are under way"
)
requests = _meter.create_counter("headwater_requests", description="finished requests by route and outcome")
refused = _meter.create_counter(
    "headwater_requests_refused", description="requests that would have waited too long, by priority: low or normal"
)
prompt_tokens = _meter.create_counter("headwater_prompt_tokens", description="prompt tokens of answered requests")
cached_tokens = _meter.create_counter("headwater_cached_prompt_tokens", description="prompt tokens nobody computed")
output_tokens = _meter.create_counter("headwater_output_tokens", description="tokens generated")
first_token = _meter.create_histogram(
    "headwater_time_to_first_token",
    unit="s",
    description="from the request's arrival to its first token",
    explicit_bucket_boundaries_advisory=_SECONDS,
)
prediction_error = _meter.create_histogram(
    "headwater_router_prediction_error_tokens",
    unit="{token}",
    description="difference between the prompt tokens that a plan took to be cached and those that were",
    explicit_bucket_boundaries_advisory=[0, 16, 64, 256, 1024, 4096, 16384],
)
duration = _meter.create_histogram(
    "headwater_request_duration",
    unit="s",
    description="from arrival to the end",
    explicit_bucket_boundaries_advisory=_SECONDS,
)

Read = Callable[[View], Iterable[Observation]]


def observe(view: View, in_flight: Callable[[], int]) -> None:
    """Register gauges over the router's view of the workers and the gateway's running requests."""

    def of(read: Read) -> list[Callable[[CallbackOptions], Iterable[Observation]]]:
        return [lambda _: read(view)]

    def gauge(name: str, read: Read, description: str) -> None:
        _meter.create_observable_gauge(name, of(read), description=description)

    def counter(name: str, read: Read, description: str) -> None:
        _meter.create_observable_counter(name, of(read), description=description)

    gauge("headwater_worker_blocks", _blocks, "KV blocks by state")
    gauge("headwater_worker_requests", _queue, "requests by state")
    gauge("headwater_worker_up", _alive, "1 while the worker answers")
    counter(
        "headwater_transfer_bytes",
        _transfers(sent="sent_bytes", hidden="hidden_bytes", received="received_bytes"),
        "KV between workers; hidden: sent before the prompt was computed to its end",
    )
    counter("headwater_transfer_seconds", _transfers(sending="sending_s"), "with a write under way")
    counter(
        "headwater_transfers",
        _transfers(sent="sent", failed="failed", accepted="accepted", refused="refused", expired="expired"),
        "transfers by how they ended at either side; expired: leases that were asked about",
    )
    counter(
        "headwater_transfer_blocks",
        _transfers(fetched="fetched_blocks", lost="lost_blocks"),
        "blocks fetched from other workers' caches; blocks in quarantine until a restart",
    )
    gauge(
        "headwater_tier_blocks",
        _tier_blocks,
        "blocks below the device: room of host memory, cached there, cached on disk, under way; read_only is 1 while "
        "nothing can be written to disk",
    )
    counter("headwater_tier_work", _tier_work, "what the tiers below the device did, by kind")
    gauge("headwater_requests_in_flight", lambda _: [Observation(in_flight())], "prompts under way")


def _blocks(view: View) -> Iterable[Observation]:
    for worker in view.workers.values():
        for state, number in worker.status.blocks.items() if worker.status and worker.alive else ():
            yield Observation(number, {"worker": worker.name, "state": state})


def _queue(view: View) -> Iterable[Observation]:
    for worker in view.workers.values():
        if worker.status and worker.alive:
            yield Observation(worker.status.running, {"worker": worker.name, "state": "running"})
            yield Observation(worker.status.waiting, {"worker": worker.name, "state": "waiting"})


def _alive(view: View) -> Iterable[Observation]:
    for worker in view.workers.values():
        yield Observation(int(worker.alive), {"worker": worker.name, "role": worker.role})


def _transfers(**fields: str) -> Read:
    """Fields of `TransferStats`, each under its label."""

    def read(view: View) -> Iterable[Observation]:
        for worker in view.workers.values():
            if worker.status is not None:
                for kind, name in fields.items():
                    yield Observation(getattr(worker.status.transfer, name), {"worker": worker.name, "kind": kind})

    return read


def _tier_blocks(view: View) -> Iterable[Observation]:
    for worker in view.workers.values():
        if worker.status and worker.alive and (tiers := worker.status.tiers) is not None:
            for state in ("host_blocks", "host_cached", "disk_cached", "under_way", "read_only"):
                yield Observation(getattr(tiers, state), {"worker": worker.name, "state": state})


def _tier_work(view: View) -> Iterable[Observation]:
    for worker in view.workers.values():
        if worker.status is not None and (tiers := worker.status.tiers) is not None:
            problems = {"bad_files": tiers.bad_files, "write_errors": tiers.write_errors}
            for kind, number in (asdict(tiers.stats) | problems).items():
                yield Observation(number, {"worker": worker.name, "kind": kind})
