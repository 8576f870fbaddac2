"""What code and the telemetry of its process, which cluster/telemetry.py sets up, have to agree about.

Code measures with OpenTelemetry's API. Only what happens with every token or every step goes to a `Histogram` of ours:
to record there costs a tenth of a microsecond, and four with the SDK's, a tenth of what a token costs in a gateway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 25, 50, 100, 250, 1000]
"""Bounds of histograms of times; the SDK's own are meant for milliseconds."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """That of one process. `render` gives its metrics as Prometheus text, which is also served at `address`, where that
    is not empty. `close` sends what there still is of traces, within so many seconds."""

    render: Callable[[], bytes] = lambda: b""
    close: Callable[[float], None] = lambda _: None
    address: str = ""


SetUp: TypeAlias = Callable[[str], Telemetry]
"""Sets it up in the process of the actor of this name. Raises OSError where its metrics cannot be served."""


def none(_: str) -> Telemetry:
    """A `SetUp` that does nothing."""
    return Telemetry()


class Series:
    """Observations under one set of labels: `counts[i]` of them were at most `bounds[i]` and above the bound before,
    the last above all bounds. One thread records, any may read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def record(self, value: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histogram:
    """A metric of this process, of which there is one of each `name`, unit included; `bounds` ascend."""

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.description = description
        self.bounds = tuple(bounds)
        self.series: dict[tuple[tuple[str, str], ...], Series] = {}
        HISTOGRAMS.append(self)

    def of(self, **labels: str) -> Series:
        """The series with these labels."""
        return self.series.setdefault(tuple(labels.items()), Series(self.bounds))


HISTOGRAMS: list[Histogram] = []
"""All of this process."""
