"""What it costs, in seconds, to have a prompt computed by a worker: from what workers measure of themselves."""

from __future__ import annotations

from dataclasses import dataclass

from router.view import WorkerView
from transfer.messages import Source

HANDOVER_S = 0.02
BYTES_S = 1e9
"""What is assumed of a worker that has not measured it yet."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How a worker gets at a prompt: it computes `missing` tokens behind what it has, or has after fetching from
    `fetch`; `seconds` for both, once it begins."""

    missing: int
    fetch: Source | None
    seconds: float


def reach(worker: WorkerView, tokens: int, own: int, source: WorkerView | None, held: int) -> Reach:
    """Of a prompt of `tokens`, the first `own` are cached on the worker, and `held` on `source`, if there is such a
    worker. Takes what is faster."""
    plain = Reach(tokens - own, None, (tokens - own) / worker.prompt_tokens_s)
    if source is None or source.status is None:
        return plain
    fetch_s = handover_s(source) + (held - own) * source.status.token_bytes / bytes_s(source)
    missing = tokens - held
    fetched = Reach(missing, Source(source.name, held, fetch_s), fetch_s + missing / worker.prompt_tokens_s)
    return min(plain, fetched, key=lambda one: one.seconds)


def handed_over(worker: WorkerView, way: Reach, now: float) -> float:
    """Until the decode worker can go on, when this worker computes the prompt."""
    return worker.wait_s(now) + way.seconds + handover_s(worker)


def local(worker: WorkerView, way: Reach, now: float) -> float:
    """The same when the decode worker computes it. Its answers under way stand still meanwhile: their delay counts like
    the request's own."""
    computing = way.missing / worker.prompt_tokens_s
    return worker.wait_s(now) + way.seconds + computing * worker.decodes


def handover_s(worker: WorkerView) -> float:
    """From the end of a prompt's computation until another worker has all of it."""
    return (worker.status.speeds.handover_s if worker.status else 0.0) or HANDOVER_S


def bytes_s(worker: WorkerView) -> float:
    """Bytes a second between workers."""
    return (worker.status.speeds.bytes_s if worker.status else 0.0) or BYTES_S
