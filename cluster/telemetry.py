"""The OpenTelemetry SDK, set up once a process; everything else uses the API."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import inf

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import DropAggregation, View
from prometheus_client import REGISTRY, generate_latest, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.config import TelemetryConfig
from transfer.directory import node_address
from transfer.telemetry import HISTOGRAMS, Histogram, Telemetry


def setup(name: str) -> Telemetry:
    """Collect the metrics of this process, that of the actor `name`."""
    # FastAPI measures its routes as well; the gateway's own figures say more under fewer names.
    only_ours = View(meter_name="fastapi", instrument_name="*", aggregation=DropAggregation())
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False)
    metrics.set_meter_provider(MeterProvider([reader], views=[only_ours]))
    REGISTRY.register(Ours(HISTOGRAMS))
    return Telemetry(lambda: generate_latest(REGISTRY), lambda _: None)


def serve(config: TelemetryConfig, name: str) -> Telemetry:
    """The same, with a small HTTP server for the metrics. Raises OSError where it cannot listen."""
    host, port = config.metrics_host or node_address(), config.metrics_port
    try:
        server, _ = start_http_server(port, host)
    except OSError as error:
        raise OSError(f"telemetry.metrics_port: cannot listen on {host}:{port}: {error.strerror}") from None
    made = setup(name)
    return Telemetry(made.render, made.close, f"{host}:{server.server_port}")


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
