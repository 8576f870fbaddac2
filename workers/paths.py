"""Where Headwater keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$HEADWATER_CACHE, or else `headwater` in the user's cache directory; not created here."""
    if own := os.environ.get("HEADWATER_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headwater"
