"""The OpenTelemetry SDK, set up once a process; everything else uses the API."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import DropAggregation, View
from prometheus_client import REGISTRY, generate_latest


def setup() -> Callable[[], bytes]:
    """Collect this process's metrics; returns what renders them as Prometheus text."""
    # FastAPI measures its routes as well; the gateway's own figures say more under fewer names.
    only_ours = View(meter_name="fastapi", instrument_name="*", aggregation=DropAggregation())
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False)
    metrics.set_meter_provider(MeterProvider([reader], views=[only_ours]))
    return lambda: generate_latest(REGISTRY)
