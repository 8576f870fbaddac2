"""What Ray does first in each process of a cluster, before anything of Headwater is loaded there."""

from __future__ import annotations

import gc

from cluster import logs

COLLECT_AFTER = (50_000, 20, 50)
"""Modules are a million objects that stay: with Python's own thresholds a sixth of loading them is the collector's."""


def setup() -> None:
    """Set up logs and the collector."""
    logs.setup()
    gc.set_threshold(*COLLECT_AFTER)
