"""What goes into a step of the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from transfer.channel import Chunk, Ending
from transfer.messages import Delta
from workers.scheduler import Work
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Produced:
    """What became final of a handed-off sequence's KV; `ending` with the last of it."""

    request_id: str
    chunk: Chunk
    ending: Ending | None


@dataclass(frozen=True, slots=True)
class Reserved:
    """A reservation was served: the prompt's blocks `first_block`… are `blocks`."""

    request_id: str
    first_block: int
    blocks: tuple[int, ...]


Offer = Callable[[Produced], None]


@dataclass(slots=True)
class StepPlan:
    """What the next step will compute, prompts that `began` with it, the hand-offs that will be at it for long enough
    to ask for room meanwhile, and reservations that were served."""

    works: list[Work] = field(default_factory=list)
    began: list[Sequence] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    promoted: list[str] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """What a step brought: blocks that became final and new tokens."""

    produced: list[Produced] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
