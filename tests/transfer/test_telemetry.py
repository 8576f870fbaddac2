"""Our histograms say what those of prometheus_client say."""

import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest

from cluster.telemetry import Ours
from transfer.telemetry import HISTOGRAMS, Histogram

BOUNDS = [0.5, 1, 2.5]


def test_they_are_exported_as_prometheus_does_it() -> None:
    theirs = CollectorRegistry()
    other = prometheus_client.Histogram("took_seconds", "how long", ["kind"], buckets=BOUNDS, registry=theirs)
    mine = Histogram("took_seconds", "how long", BOUNDS)
    try:
        for number, value in enumerate([0.1, 0.5, 0.5001, 1, 2.4, 2.6, 100]):
            kind = "even" if number % 2 == 0 else "odd"
            other.labels(kind).observe(value)
            mine.of(kind=kind).record(value)
        ours = CollectorRegistry()
        ours.register(Ours([mine]))
        expected = {line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line}
        assert set(generate_latest(ours).decode().splitlines()) == expected
    finally:
        HISTOGRAMS.remove(mine)


def test_a_series_is_made_once() -> None:
    mine = Histogram("other_seconds", "how long", BOUNDS)
    try:
        mine.of(kind="a").record(1)
        mine.of(kind="a").record(1)
        assert mine.of(kind="a").counts == [0, 2, 0, 0]
    finally:
        HISTOGRAMS.remove(mine)
