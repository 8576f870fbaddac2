"""View: what this router knows of the workers, and what it has sent them itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from router.held import Held
from transfer.messages import WorkerStatus

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
HELD_UNKNOWN = 65_536
"""Blocks that a worker is taken to have room for before it has said so."""


@dataclass(slots=True)
class WorkerView:
    """One worker. `prefill_tokens`, those to be computed, and `decodes` count this router's own requests that are under
    way there."""

    name: str
    role: str
    alive: bool = True
    status: WorkerStatus | None = None
    prefill_tokens: int = 0
    decodes: int = 0
    held: Held = field(default_factory=lambda: Held(HELD_UNKNOWN))


class View:
    """All workers by name, in the order they were announced."""

    def __init__(self, workers: Iterable[tuple[str, str]] = ()) -> None:
        self.workers = {name: WorkerView(name, role) for name, role in workers}

    def update(self, status: WorkerStatus) -> None:
        """A worker has answered."""
        worker = self.workers[status.name]
        if worker.status is not None and worker.status.incarnation != status.incarnation:
            worker.held.clear()
        worker.alive, worker.status = True, status
        worker.held.limit = status.blocks["total"] if status.prefix_cache else 0

    def mark_dead(self, name: str) -> None:
        """A worker's process has ended; it gets nothing until it answers again."""
        self.workers[name].alive = False

    def able(self, *roles: str) -> list[WorkerView]:
        """Living workers of any of these roles."""
        return [worker for worker in self.workers.values() if worker.alive and worker.role in roles]

    @property
    def ready(self) -> bool:
        """Whether some request could be served now: a worker with both roles, or one of each."""
        return bool(self.able(BOTH)) or bool(self.able(PREFILL) and self.able(DECODE))
