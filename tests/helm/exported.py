"""What `/metrics` of a gateway can contain: run as a program, prints it, every instrument used once."""

import sys
from types import SimpleNamespace

from opentelemetry.metrics import Counter, Histogram

from cluster import telemetry
from transfer.messages import TierStats, TierStatus, TransferStats

BLOCKS = ("total", "free", "private", "cached", "pinned", "quarantined")


def main() -> None:
    """Print it. Instruments are made when their modules are imported, and the SDK comes before that."""
    render = telemetry.setup()
    from router.gateway import metrics
    from transfer.gossip import node

    tiers = TierStatus("exact", 1, 1, 1, 1, 0, False, 0, 0, TierStats())
    status = SimpleNamespace(
        blocks=dict.fromkeys(BLOCKS, 1), running=1, waiting=0, transfer=TransferStats(), tiers=tiers
    )
    worker = SimpleNamespace(name="prefill-0", role="prefill", alive=True, status=status)
    metrics.observe(SimpleNamespace(workers={"prefill-0": worker}), lambda: 1)  # type: ignore[arg-type]
    for module in (metrics, node):
        for instrument in vars(module).values():
            if isinstance(instrument, Counter):
                instrument.add(1)
            elif isinstance(instrument, Histogram):
                instrument.record(1)
    sys.stdout.write(render().decode())


if __name__ == "__main__":
    main()
