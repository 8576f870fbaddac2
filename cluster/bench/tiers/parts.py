"""The parts of `headwater bench tiers`."""

from enum import Enum


class Part(str, Enum):
    """What can be measured by itself."""

    HITS = "hits"
    GUARD = "guard"
    DEMOTION = "demotion"
    ROUNDS = "rounds"
    OVERHEAD = "overhead"
