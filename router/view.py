"""View: what this router knows of the workers, and what it has sent them itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transfer.messages import WorkerStatus

PREFILL, DECODE, BOTH = "prefill", "decode", "both"


@dataclass(slots=True)
class WorkerView:
    """One worker. `prefill_tokens` and `decodes` count this router's own requests that are under way there."""

    name: str
    role: str
    alive: bool = True
    status: WorkerStatus | None = None
    prefill_tokens: int = 0
    decodes: int = 0


class View:
    """All workers by name, in the order they were announced."""

    def __init__(self, workers: Iterable[tuple[str, str]] = ()) -> None:
        self.workers = {name: WorkerView(name, role) for name, role in workers}

    def update(self, status: WorkerStatus) -> None:
        """A worker has answered."""
        worker = self.workers[status.name]
        worker.alive, worker.status = True, status

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
