"""The gateway's metrics, through the OpenTelemetry API; cluster/telemetry.py exports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from router.view import View

_meter = metrics.get_meter("headwater.gateway")
requests = _meter.create_counter("headwater_requests", description="finished requests by route and outcome")
prompt_tokens = _meter.create_counter("headwater_prompt_tokens", description="prompt tokens of answered requests")
cached_tokens = _meter.create_counter("headwater_cached_prompt_tokens", description="prompt tokens nobody computed")
output_tokens = _meter.create_counter("headwater_output_tokens", description="tokens generated")
first_token = _meter.create_histogram(
    "headwater_time_to_first_token", unit="s", description="from the request's arrival to its first token"
)
prediction_error = _meter.create_histogram(
    "headwater_router_prediction_error_tokens",
    unit="{token}",
    description="difference between the prompt tokens that a plan took to be cached and those that were",
    explicit_bucket_boundaries_advisory=[0, 16, 64, 256, 1024, 4096, 16384],
)
duration = _meter.create_histogram("headwater_request_duration", unit="s", description="from arrival to the end")


TIER_PROBLEMS = ("bad_files", "write_errors")


def observe(view: View, in_flight: Callable[[], int]) -> None:
    """Register gauges over the router's view of the workers and the gateway's running requests."""

    def workers(value: Callable[[View], Iterable[Observation]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: value(view)

    def blocks(view: View) -> Iterable[Observation]:
        for worker in view.workers.values():
            for state, number in worker.status.blocks.items() if worker.status and worker.alive else ():
                yield Observation(number, {"worker": worker.name, "state": state})

    def queue(view: View) -> Iterable[Observation]:
        for worker in view.workers.values():
            if worker.status and worker.alive:
                yield Observation(worker.status.running, {"worker": worker.name, "state": "running"})
                yield Observation(worker.status.waiting, {"worker": worker.name, "state": "waiting"})

    def transfers(**fields: str) -> list[Callable[[CallbackOptions], Iterable[Observation]]]:
        """Fields of `TransferStats`, each under its label."""

        def read(view: View) -> Iterable[Observation]:
            for worker in view.workers.values():
                if worker.status is not None:
                    for kind, name in fields.items():
                        yield Observation(getattr(worker.status.transfer, name), {"worker": worker.name, "kind": kind})

        return [workers(read)]

    def tier_blocks(view: View) -> Iterable[Observation]:
        for worker in view.workers.values():
            if worker.status and worker.alive and (tiers := worker.status.tiers) is not None:
                for state in ("host_blocks", "host_cached", "disk_cached", "under_way", "read_only"):
                    yield Observation(getattr(tiers, state), {"worker": worker.name, "state": state})

    def tier_work(view: View) -> Iterable[Observation]:
        for worker in view.workers.values():
            if worker.status is not None and (tiers := worker.status.tiers) is not None:
                for kind, number in (
                    asdict(tiers.stats) | {name: getattr(tiers, name) for name in TIER_PROBLEMS}
                ).items():
                    yield Observation(number, {"worker": worker.name, "kind": kind})

    def alive(view: View) -> Iterable[Observation]:
        for worker in view.workers.values():
            yield Observation(int(worker.alive), {"worker": worker.name, "role": worker.role})

    _meter.create_observable_gauge("headwater_worker_blocks", [workers(blocks)], description="KV blocks by state")
    _meter.create_observable_gauge("headwater_worker_requests", [workers(queue)], description="requests by state")
    _meter.create_observable_gauge("headwater_worker_up", [workers(alive)], description="1 while the worker answers")
    _meter.create_observable_counter(
        "headwater_transfer_bytes",
        transfers(sent="sent_bytes", hidden="hidden_bytes", received="received_bytes"),
        description="KV between workers; hidden: sent before the prompt was computed to its end",
    )
    _meter.create_observable_counter(
        "headwater_transfer_seconds", transfers(sending="sending_s"), description="with a write under way"
    )
    _meter.create_observable_counter(
        "headwater_transfers",
        transfers(sent="sent", failed="failed", accepted="accepted", refused="refused", expired="expired"),
        description="transfers by how they ended at either side; expired: leases that were asked about",
    )
    _meter.create_observable_counter(
        "headwater_transfer_blocks",
        transfers(fetched="fetched_blocks", lost="lost_blocks"),
        description="blocks fetched from other workers' caches; blocks in quarantine until a restart",
    )
    _meter.create_observable_gauge(
        "headwater_tier_blocks",
        [workers(tier_blocks)],
        description="blocks below the device: room of host memory, cached there, cached on disk, under way; read_only "
        "is 1 while nothing can be written to disk",
    )
    _meter.create_observable_counter(
        "headwater_tier_work", [workers(tier_work)], description="what the tiers below the device did, by kind"
    )
    _meter.create_observable_gauge(
        "headwater_requests_in_flight", [lambda _: [Observation(in_flight())]], description="prompts under way"
    )
