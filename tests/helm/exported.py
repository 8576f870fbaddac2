"""What gateways and workers can export: run as a program, prints it, every instrument used once."""

import sys
from types import SimpleNamespace
from typing import Any

from opentelemetry.metrics import Counter, Histogram

from cluster import telemetry
from router.view import View
from transfer.messages import CacheStats, TierStats, TierStatus, TransferStats
from transfer.telemetry import HISTOGRAMS

BLOCKS = ("total", "free", "private", "cached", "pinned", "quarantined")


def main() -> None:
    """Print it."""
    made = telemetry.setup("all")
    from router.gateway import metrics as gateway
    from transfer.gossip import node
    from workers import metrics as worker
    from workers.engine.attention.sharing import Reuse

    view = View([("prefill-0", "prefill")])
    view.age = lambda _: 0.1  # type: ignore[method-assign]
    gateway.observe(view, lambda: 1)
    tiers = TierStatus("exact", 1, 1, 1, 1, 0, False, 0, 0, TierStats())
    cache = SimpleNamespace(
        counts=lambda: dict.fromkeys(BLOCKS, 1), stats=CacheStats(), tiers=SimpleNamespace(status=lambda: tiers)
    )
    engine: Any = SimpleNamespace(cache=cache, running=1, waiting=0, reuse=Reuse())
    one = worker.Metrics("prefill-0", engine, TransferStats())
    for kind in ("prompt", "reservation"):
        one.queued(kind, 0.1)
    one.transferred(0.2, 0.1)
    for module in (gateway, node):
        for instrument in vars(module).values():
            if isinstance(instrument, Counter):
                instrument.add(1)
            elif isinstance(instrument, Histogram):
                instrument.record(1)
    for histogram in HISTOGRAMS:
        for series in histogram.series.values():
            series.record(1)
    sys.stdout.write(made.render().decode())


if __name__ == "__main__":
    main()
