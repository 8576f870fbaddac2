"""What Ray does first in each process of a cluster, before anything of Headwater is loaded there."""

from __future__ import annotations

import gc
import os
import sys

from cluster import logs

WITHOUT_TORCH = "HEADWATER_WITHOUT_TORCH"
LIGHT = {WITHOUT_TORCH: "1", "TRANSFORMERS_VERBOSITY": "error"}
"""Environment of processes that never compute."""
COLLECT_AFTER = (50_000, 20, 50)
"""Modules are a million objects that stay: with Python's own thresholds a sixth of loading them is the collector's."""


def setup() -> None:
    """Set up logs and the collector. Where `WITHOUT_TORCH` is set, torch is not to be found: transformers loads it for
    its tokenizers, which do not need it, in half of the time that a gateway takes to start."""
    logs.setup()
    gc.set_threshold(*COLLECT_AFTER)
    if os.environ.get(WITHOUT_TORCH):
        sys.modules["torch"] = None  # type: ignore[assignment]  # what the import system takes for "there is none"
