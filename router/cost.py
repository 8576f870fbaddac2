"""What it costs, in seconds, to have a prompt computed by a worker: from what workers measure of themselves."""

from __future__ import annotations

from dataclasses import dataclass

from router.view import Held, WorkerView
from transfer.messages import Source

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
class Usable:
    """What a worker uses of the tokens of a prompt that it holds: so many `tokens`, once it has loaded for `seconds`
    what is below its device. What it computes sooner than it loads it is not among them."""

    tokens: int
    seconds: float


def usable(worker: WorkerView, held: Held) -> Usable:
    """What is usable of `held`. The worker itself decides about each tier, by the same comparison. How much it would
    have to load is not known before it has answered for the first time."""
    if held.device == held.total:
        return Usable(held.total, 0.0)
    if worker.status is None:
        return Usable(held.device, 0.0)
    tokens, seconds, speeds = held.device, 0.0, worker.status.speeds
    host_s = worker.status.token_bytes / (speeds.host_bytes_s or HOST_BYTES_S)
    disk_s = host_s + worker.status.token_bytes / (speeds.disk_bytes_s or DISK_BYTES_S)  # by way of host memory
    for count, token_s in ((held.host - held.device, host_s), (held.total - held.host, disk_s)):
        if token_s * worker.prompt_tokens_s < 1:
            tokens, seconds = tokens + count, seconds + count * token_s
    return Usable(tokens, seconds)


def saved(worker: WorkerView, use: Usable) -> float:
    """How many tokens' computing that saves the worker: as many less as it could compute while it loads."""
    return use.tokens - use.seconds * worker.prompt_tokens_s


def reach(worker: WorkerView, tokens: int, own: Held, source: WorkerView | None, lent: Usable) -> Reach:
    """Of a prompt of `tokens`, the worker holds `own`, and `source`, if there is such a worker, lends `lent`. Takes
    what is faster. What is fetched goes behind what is on the worker's device."""
    mine = usable(worker, own)
    missing = tokens - mine.tokens
    plain = Reach(missing, None, mine.seconds + missing / worker.prompt_tokens_s)
    if source is None or source.status is None or lent.tokens <= own.device:
        return plain
    sent_s = (lent.tokens - own.device) * source.status.token_bytes / bytes_s(source)
    fetch_s = lent.seconds + handover_s(source) + sent_s
    if fetch_s >= plain.seconds:
        return plain
    mine = usable(worker, own.with_device(lent.tokens))
    missing = tokens - mine.tokens
    seconds = fetch_s + mine.seconds + missing / worker.prompt_tokens_s
    return min(plain, Reach(missing, Source(source.name, lent.tokens, fetch_s), seconds), key=lambda one: one.seconds)


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
