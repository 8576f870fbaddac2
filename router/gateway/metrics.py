"""The gateway's metrics; cluster/telemetry.py exports them. What workers know of themselves they export themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from router.view import View
from transfer.telemetry import SECONDS, Histogram

_meter = metrics.get_meter("headwater.gateway")
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
    description="from a request's arrival to its first token, whatever number of choices and attempts it has",
    explicit_bucket_boundaries_advisory=SECONDS,
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
    description="of requests that were answered to their end, from arrival on",
    explicit_bucket_boundaries_advisory=SECONDS,
)
token_gaps = Histogram(
    "headwater_time_between_tokens_seconds", "from one token of an answer to the next, as clients take them", SECONDS
).of()


def observe(view: View, in_flight: Callable[[], int]) -> None:
    """Register gauges over the router's view of the workers and the gateway's running requests."""

    def gauge(name: str, description: str, read: Callable[[], Iterable[Observation]], unit: str = "") -> None:
        def observed(_: CallbackOptions) -> Iterable[Observation]:
            return read()

        _meter.create_observable_gauge(name, [observed], unit, description)

    gauge("headwater_requests_in_flight", "prompts under way", lambda: [Observation(in_flight())])
    gauge("headwater_worker_up", "1 while the worker answers", lambda: _alive(view))
    gauge("headwater_gossip_age", "since the last news of a worker by gossip", lambda: _ages(view), "s")


def _alive(view: View) -> Iterable[Observation]:
    for worker in list(view.workers.values()):
        yield Observation(int(worker.alive), {"worker": worker.name, "role": worker.role})


def _ages(view: View) -> Iterable[Observation]:
    for name in list(view.workers):
        if (age := view.age(name)) is not None:
            yield Observation(age, {"worker": name})
