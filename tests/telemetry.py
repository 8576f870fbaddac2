"""The telemetry of the tests' own process."""

from __future__ import annotations

from functools import lru_cache

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
