"""The OpenTelemetry SDK, set up once a process; everything else uses the API."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import inf
from threading import Thread

from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from prometheus_client import REGISTRY, generate_latest, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.config import TelemetryConfig
from transfer.directory import node_address
from transfer.telemetry import HISTOGRAMS, Histogram, Telemetry

_log = logging.getLogger(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Without one of these variables nothing is traced."""


def setup(name: str) -> Telemetry:
    """Collect the metrics of this process, that of the actor `name`, and its traces, where the environment says where
    they go."""
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False)
    metrics.set_meter_provider(MeterProvider([reader]))
    REGISTRY.register(Ours(HISTOGRAMS))
    return Telemetry(lambda: generate_latest(REGISTRY), _trace(name))


def serve(config: TelemetryConfig, name: str) -> Telemetry:
    """The same, with a small HTTP server for the metrics. Raises OSError where it cannot listen."""
    host, port = config.metrics_host or node_address(), config.metrics_port
    try:
        server, _ = start_http_server(port, host)
    except OSError as error:
        raise OSError(f"telemetry.metrics_port: cannot listen on {host}:{port}: {error.strerror}") from None
    made = setup(name)
    return Telemetry(made.render, made.close, f"{host}:{server.server_port}")


def _trace(name: str) -> Callable[[float], None]:
    """Send spans where OpenTelemetry's own variables say; returns what ends that within some seconds."""
    if not sends_traces(os.environ):
        return lambda _: None
    provider = tracer_provider(name)
    trace.set_tracer_provider(provider)
    return partial(end, provider)


def sends_traces(environ: Mapping[str, str]) -> bool:
    """Whether these variables of the environment say where traces go, and in a way that is supported."""
    wanted = environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp" and environ.get("OTEL_SDK_DISABLED") != "true"
    if not wanted or not any(environ.get(variable) for variable in ENDPOINTS):
        return False
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol and protocol != "http/protobuf":
        _log.error("OTEL_EXPORTER_OTLP_PROTOCOL: only http/protobuf is supported, not %r: nothing is traced", protocol)
        return False
    return True


def tracer_provider(name: str) -> TracerProvider:
    """One that samples and sends as the environment says, for the actor `name`."""
    # Only here: to load it takes longer than all others together.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    resource = Resource.create({SERVICE_INSTANCE_ID: name})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "headwater"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # that would wait for half a minute
    provider.add_span_processor(BatchSpanProcessor(_Quiet(OTLPSpanExporter())))
    return provider


def end(provider: TracerProvider, seconds: float) -> None:
    """Send what is left, but no longer than so many seconds."""
    ending = Thread(target=provider.shutdown, daemon=True)
    ending.start()
    ending.join(seconds)


class _Quiet(SpanExporter):
    """Exports by `exporter`, and says when that begins to fail and when it works again, where that would say it with
    every batch. Runs in a thread of the SDK's: requests never wait for it, and spans that find no room are dropped."""

    def __init__(self, exporter: SpanExporter) -> None:
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._exporter = exporter
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See `SpanExporter`."""
        result = self._exporter.export(spans)
        if self._failing != (result is not SpanExportResult.SUCCESS):
            self._failing = not self._failing
            _log.warning("traces cannot be sent, and are lost" if self._failing else "traces are sent again")
        return result

    def shutdown(self) -> None:
        """See `SpanExporter`."""
        self._exporter.shutdown()


class Ours(Collector):
    """Histograms of transfer/telemetry.py, for Prometheus."""

    def __init__(self, histograms: list[Histogram]) -> None:
        self._histograms = histograms

    def describe(self) -> list[HistogramMetricFamily]:
        """Names are not looked at: they are ours."""
        return []

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Each with all of its series."""
        for one in self._histograms:
            family = HistogramMetricFamily(one.name, one.description)
            for labels, series in list(one.series.items()):
                counts = list(accumulate(series.counts))
                for bound, count in zip((*series.bounds, inf), counts, strict=True):
                    family.add_sample(f"{one.name}_bucket", {**dict(labels), "le": floatToGoString(bound)}, count)
                family.add_sample(f"{one.name}_count", dict(labels), counts[-1])
                family.add_sample(f"{one.name}_sum", dict(labels), series.total)
            yield family
