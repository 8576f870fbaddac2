"""What it costs, in seconds, to have a prompt computed by a worker: from what workers measure of themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.view import Held, WorkerView
from transfer.messages import Source, Speeds

HANDOVER_S = 0.02
BYTES_S = 1e9
HOST_BYTES_S, DISK_BYTES_S = 2e9, 0.5e9
"""What is assumed of a worker that has not measured it yet."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How a worker gets at a prompt: it computes `missing` tokens beside what it has, or has after fetching from
    `fetch`; `seconds` for that and for what it loads from its lower tiers, once it begins."""

    missing: int
    fetch: Source | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Loading:
    """What a worker does about tokens that it has below its device: it loads them, in so many `seconds`, but for those
    that are `computed` sooner."""

    seconds: float = 0.0
    computed: int = 0


def reach(worker: WorkerView, tokens: int, own: Held, source: WorkerView | None, theirs: Held) -> Reach:
    """Of a prompt of `tokens`, the worker holds `own`, and `source`, if there is such a worker, `theirs`. Takes what is
    faster. What is fetched goes behind what is on the worker's device. What the source has below its own, it loads
    first, unless it would rather compute it: then it does not lend it."""
    plain = _reach(worker, tokens - own.total, _loading(worker, own), 0.0, None)
    if source is None or source.status is None:
        return plain
    lending = _loading(source, theirs)
    lent = theirs.total - lending.computed
    if lent <= own.device:
        return plain
    fetch_s = handover_s(source) + lending.seconds + (lent - own.device) * source.status.token_bytes / bytes_s(source)
    rest, missing = _loading(worker, own.with_device(lent)), tokens - max(own.total, lent)
    fetched = _reach(worker, missing, rest, fetch_s, Source(source.name, lent, fetch_s))
    return min(plain, fetched, key=lambda one: one.seconds)


def saved(worker: WorkerView, held: Held) -> float:
    """How many tokens' computing it saves a worker that it holds these: of those that it loads only as many as it could
    not compute meanwhile."""
    if held.device == held.total:
        return held.total
    loading = _loading(worker, held)
    return held.total - loading.computed - loading.seconds * worker.prompt_tokens_s


def _reach(worker: WorkerView, missing: int, loading: _Loading, fetch_s: float, fetch: Source | None) -> Reach:
    missing += loading.computed
    return Reach(missing, fetch, fetch_s + loading.seconds + missing / worker.prompt_tokens_s)


def _loading(worker: WorkerView, held: Held) -> _Loading:
    """The worker itself decides for each tier, by the same comparison; nobody knows yet how much it would have to load
    for a token before it has answered for the first time."""
    seconds, computed = 0.0, 0
    for count, speed in _below(worker, held):
        load_s = count * worker.status.token_bytes / speed if worker.status else math.inf
        if load_s < count / worker.prompt_tokens_s:
            seconds += load_s
        else:
            computed += count
    return _Loading(seconds, computed)


def _below(worker: WorkerView, held: Held) -> list[tuple[int, float]]:
    """Tokens that a worker holds in each tier below its device, and bytes a second from there. What is on disk comes by
    way of host memory."""
    if held.device == held.total:
        return []
    speeds = worker.status.speeds if worker.status else Speeds()
    host_bytes_s = speeds.host_bytes_s or HOST_BYTES_S
    disk_bytes_s = 1 / (1 / (speeds.disk_bytes_s or DISK_BYTES_S) + 1 / host_bytes_s)
    return [(held.host - held.device, host_bytes_s), (held.total - held.host, disk_bytes_s)]


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
