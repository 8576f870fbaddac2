"""The OpenTelemetry SDK, set up once a process; everything else uses the API."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest


def setup() -> Callable[[], bytes]:
    """Collect this process's metrics; returns what renders them as Prometheus text."""
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    return lambda: generate_latest(REGISTRY)
