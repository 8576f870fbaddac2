"""The telemetry of the tests' own process."""

from __future__ import annotations

from functools import lru_cache

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from prometheus_client.parser import text_string_to_metric_families

from cluster import telemetry
from transfer.telemetry import Telemetry


@lru_cache(1)
def own() -> Telemetry:
    """Set up with the first test that looks: that can be done once a process."""
    return telemetry.setup("tests")


def samples() -> dict[str, float]:
    """Everything that is exported, by name and labels."""
    found = {}
    for family in text_string_to_metric_families(own().render().decode()):
        for one in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(one.labels.items()))
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return {name: value for name, value in found.items() if name.startswith("headwater_")}


def since(before: dict[str, float]) -> dict[str, float]:
    """What has changed, by how much."""
    return {name: value - before.get(name, 0.0) for name, value in samples().items() if value != before.get(name, 0.0)}


TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"


@lru_cache(1)
def traced() -> InMemorySpanExporter:
    """Where the spans of this process go, of requests whose callers want them."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def spans() -> list[ReadableSpan]:
    """Those that have ended since the last time, by when they began."""
    found = traced().get_finished_spans()
    traced().clear()
    return sorted(found, key=lambda one: one.start_time or 0)
