"""The dataclasses that travel between gateway and workers, and the msgpack codec of those that travel as bytes.

Token ids travel packed: little-endian int32, four bytes a token (`pack_tokens`, `unpack_tokens`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields
from typing import Any, TypeVar

import msgpack
import numpy as np

CODEC_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20

M = TypeVar("M")


class MessageError(ValueError):
    """Bytes that are no message of the expected kind: wrong version, type, shape or size."""


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32."""
    return np.fromiter(tokens, dtype="<i4").tobytes()


def unpack_tokens(packed: bytes) -> np.ndarray:
    """The int32 array `[len(packed) / 4]` behind packed token ids; read-only."""
    return np.frombuffer(packed, dtype="<i4")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen, and what is told about them.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. No token that ends an answer comes before
    `min_tokens` others. Presence and frequency penalties look at the output, `repetition_penalty` (1 is off) at the
    prompt, too. `logit_bias` is added to the logits of the tokens it names. `guide` is a grammar that the output has to
    follow, in llguidance's form. With `logprobs` each output token comes with its own log-probability and those of so
    many of the likeliest tokens, with `prompt_logprobs` each prompt token but the first.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    guide: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt on its way through the workers.

    `request_id` is unique in the cluster whatever the client sent. `salt` separates caches: two requests share
    blocks only when their salts are equal. `timeout_s` is what is left, in seconds, when the request is handed over.
    A higher `priority` is served first, and what it leaves in the cache is evicted last; `keep_s` seconds long that is
    only evicted when nothing else can be. Workers share their time fairly between `tenant`s, by `weight`. The last
    `answered` tokens of the prompt are output that an earlier attempt gave. With `embed` the answer is an embedding of
    the prompt. Where it is traced, `traceparent` names the span that it belongs to.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    gateway: str
    timeout_s: float
    salt: bytes = b""
    priority: int = 0
    keep_s: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    answered: int = 0
    embed: bool = False
    traceparent: str = ""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt) // 4

    @property
    def sees_all_rows(self) -> bool:
        """Whether the whole prompt has to be computed, since something is wanted of each of its tokens."""
        return self.embed or self.sampling.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability that the model gave to a token, natural and before sampling parameters changed anything, and
    those of the likeliest tokens there, descending."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step added to a request.

    `start` is the index of `tokens[0]` among the output tokens, so that a receiver can order and deduplicate.
    `finish_reason` is "stop" or "length" on the last delta; `error` is set instead where the request failed, and
    `refused` with it where it would fail on any worker, `moved` where this one only wants others to go on with it, with
    what it has cached of it. `logprobs` has one entry a token where they are asked for. With
    the first token comes what is wanted of the prompt: `prompt_logprobs` of its tokens from the second on, and
    `embedding`, the mean of its last hidden states as little-endian float32. `loaded`, with the first token only, says
    how many of the `cached_tokens` came from host memory and how many from disk.
    """

    request_id: str
    start: int
    tokens: tuple[int, ...]
    cached_tokens: int
    finish_reason: str | None = None
    error: str | None = None
    refused: bool = False
    moved: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    embedding: bytes = b""
    loaded: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: the machine's name, the cores that it may use there, and the Ray node's id and address."""

    host: str
    cores: int
    node: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker that there should be. One that is `leaving` gets nothing new; what it holds may be copied from it."""

    name: str
    role: str
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that is believed to have the prompt's first `tokens` tokens in its cache, whole blocks of them. To fetch
    them is expected to take `seconds`."""

    worker: str
    tokens: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The router's decision. `decode` is None where the worker `prefill` generates the whole answer itself. `fetch` is
    where it is to copy a beginning of the prompt from, and `cached` how many tokens it is believed to have, or to get
    so. It refuses if more than `new_tokens` of the prompt would have to be computed. `queued_tokens` are believed to be
    in its queue. `why` is for people."""

    prefill: str
    decode: str | None
    fetch: Source | None = None
    new_tokens: int | None = None
    cached: int = 0
    queued_tokens: int = 0
    why: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """What a worker tells another one so that the other can write into its KV pool.

    `metadata` is the transport's own address blob, `base` the pool's memory address on the worker and `device` its
    device number; `layout` a `KVLayout` as a tuple (see `KVLayout.to_tuple`). That is rank 0's where the worker has
    several, each with a pool of its own; `others` are the other ones.
    """

    name: str
    incarnation: int
    agent: str
    metadata: bytes
    base: int
    device: int
    on_cuda: bool
    layout: tuple[Any, ...]
    others: tuple[Peer, ...] = ()

    @property
    def ranks(self) -> tuple[Peer, ...]:
        """All ranks, in order."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Prefill worker to decode worker: keep blocks for this request's prompt. The lease goes by the request's id."""

    request: Request
    sender: str
    sender_agent: str
    sender_incarnation: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer to `Reserve`: `blocks[i]` receives the prompt's block number `first_block + i`; earlier ones are there."""

    incarnation: int
    first_block: int
    blocks: tuple[int, ...]


Piece = tuple[int, ...]
"""What of a prompt has travelled: first block number, blocks, first layer, layer behind the last, and xxh3-64 of each
slice of the KV heads."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The last message of a transfer. It travels as the transport's notification behind the last write.

    `checksums` cover everything that travelled.
    """

    lease_id: str
    incarnation: int
    sender_incarnation: int
    first_token: int
    cached_tokens: int
    checksums: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How a router counts a request that it sends to a worker: `number` is the router's for it and this worker, and
    `cached` of its prompt tokens are believed to be there. The worker answers busy if more than `most_queued` prompt
    tokens wait there."""

    router: str = ""
    number: int = 0
    cached: int = 0
    most_queued: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker's part of a request ended.

    `status`: "done" (it answered the whole request), "handed off" (a decode worker goes on), "busy" (its queue is at
    the bound, or longer than the caller believed; `queued` requests and `queued_tokens` prompt tokens are in it; or
    that of the decode worker `worker` is), "aborted", "stale" (what the caller believes of it is not so), "refused" (it
    cannot be answered, by no worker) or "failed", both with the reason in `error`.
    """

    status: str
    queued: int = 0
    error: str | None = None
    queued_tokens: int = 0
    worker: str = ""


@dataclass(slots=True)
class CacheStats:
    """What a worker's prefix cache did since the worker started. Hits are counted once for a request, when it is first
    admitted; a request is a hit from one whole block on. `new_tokens` are prompt tokens that were computed or received,
    those computed again after a preemption included."""

    requests: int = 0
    request_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_blocks: int = 0
    cached_blocks: int = 0
    new_tokens: int = 0
    evicted_blocks: int = 0
    cleared_blocks: int = 0
    preemptions: int = 0

    def count(self, prompt_tokens: int, cached_tokens: int, block_size: int) -> None:
        """Add one request of which `cached_tokens` were there."""
        self.requests += 1
        self.request_hits += cached_tokens >= block_size
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.prompt_blocks += prompt_tokens // block_size
        self.cached_blocks += cached_tokens // block_size

    @property
    def rates(self) -> dict[str, float]:
        """Shares of tokens, requests and whole blocks that were hits, and 1 - new tokens / prompt tokens."""
        saved = 1 - self.new_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        return {
            "token_hit_rate": _share(self.cached_tokens, self.prompt_tokens),
            "request_hit_rate": _share(self.request_hits, self.requests),
            "block_hit_rate": _share(self.cached_blocks, self.prompt_blocks),
            "saved_share": saved,
        }


@dataclass(slots=True)
class TransferStats:
    """What a worker's ends of the KV channel did since the worker started.

    `sent_bytes` were written by this worker, `hidden_bytes` of them before the prompt was computed to its end, and
    `sending_s` is how long at least one write was under way. `sent`, `failed`: transfers by how they ended here.
    `accepted`, `refused`: manifests by what was made of them; a refusal is a checksum that differs or a manifest that
    does not fit. `fetched_blocks` came from other workers' caches. `expired` leases were asked about; `lost_blocks`
    stay in quarantine until the worker restarts.
    """

    sent_bytes: int = 0
    hidden_bytes: int = 0
    sending_s: float = 0.0
    sent: int = 0
    failed: int = 0
    accepted: int = 0
    refused: int = 0
    received_bytes: int = 0
    fetched_blocks: int = 0
    expired: int = 0
    lost_blocks: int = 0

    @property
    def hidden_share(self) -> float:
        """Share of the bytes that computing hid."""
        return _share(self.hidden_bytes, self.sent_bytes)


@dataclass(slots=True)
class TierStats:
    """What a worker's tiers below the device did since the worker started, in blocks. `saved_blocks` were copied to
    host memory, `loaded_blocks` to the device, `read_blocks` of them from disk first. `evicted_slots` and
    `evicted_files` made room for others, and of the former `lost_blocks` were nowhere else. `skipped` prefixes were not
    copied down for lack of time or room. `failed_loads` met a bad file, `given_up` ones took too long."""

    saved_blocks: int = 0
    loaded_blocks: int = 0
    read_blocks: int = 0
    evicted_slots: int = 0
    evicted_files: int = 0
    lost_blocks: int = 0
    skipped: int = 0
    failed_loads: int = 0
    given_up: int = 0


EXACT = "exact"
"""The format of blocks that come back as they were."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A worker's tiers below the device: the `format` of blocks there, blocks that host memory has room for and holds,
    and that it has on disk with the bytes that they take there; some are `under_way`. `read_only` while nothing can be
    written to disk; files that were not what they should be, and writes that failed, are counted."""

    format: str
    host_blocks: int
    host_cached: int
    disk_cached: int
    disk_bytes: int
    under_way: int
    read_only: bool
    bad_files: int
    write_errors: int
    stats: TierStats


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a worker has measured of itself lately; 0 for what it has not done yet. `prompt_tokens_s`: prompt tokens a
    second in steps of some length. `handover_s`: from a first token until the decode worker has all blocks. `bytes_s`:
    while it sends. `host_bytes_s`: while it loads from host memory. `disk_bytes_s`: while it reads from disk to host
    memory. Bytes are those of KV on the device. `gap_s`: what the last step took that had answers in it, so many
    `answers`."""

    prompt_tokens_s: float = 0.0
    handover_s: float = 0.0
    bytes_s: float = 0.0
    host_bytes_s: float = 0.0
    disk_bytes_s: float = 0.0
    gap_s: float = 0.0
    answers: int = 0


@dataclass(frozen=True, slots=True)
class Pulse:
    """How an actor is: how many steps its engine has made, whether it has something to do, how many seconds a full step
    takes, 0 while that is unknown, and whether it serves: not when it leaves. Gateways have no engine, and are never
    `busy`; they say which `version` of the list of workers they know."""

    steps: int = 0
    busy: bool = False
    step_s: float = 0.0
    serves: bool = True
    version: int = 0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's own account of itself, as `headwater status` shows it. `metrics` is where they are served."""

    name: str
    role: str
    node: str
    pid: int
    state: str
    model: str
    incarnation: int
    running: int
    waiting: int
    queued_tokens: int
    prefix_cache: bool
    blocks: dict[str, int]
    fragmentation: float
    cache: CacheStats
    transfer: TransferStats
    speeds: Speeds
    token_bytes: int
    resident_bytes: int
    block_size: int
    max_model_len: int
    vocab_size: int
    fingerprint: str
    tiers: TierStatus | None = None
    metrics: str = ""


def check_whole(data: bytes | memoryview) -> None:
    """Raise msgpack's error for data that is no whole message. Nested arrays that claim elements which never come would
    each be allocated in full before that is noticed."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


def encode(message: Any) -> bytes:
    """A message dataclass as msgpack: `[version, class name, field, ...]`. Raises MessageError when it is too large."""
    data: bytes = msgpack.packb([CODEC_VERSION, type(message).__name__, *astuple(message)])
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{type(message).__name__} of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return data


def decode(kind: type[M], data: bytes) -> M:
    """The inverse of `encode` for a flat dataclass; the result's lists are tuples again.

    Raises MessageError for anything that is not exactly one message of this kind; allocates at most a small multiple
    of the (capped) input.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        check_whole(data)
        items = msgpack.unpackb(data, use_list=False, max_ext_len=0)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise MessageError(f"not a message: {error}") from None
    names = fields(kind)  # type: ignore[arg-type]
    if not isinstance(items, tuple) or len(items) != len(names) + 2:
        raise MessageError(f"not a {kind.__name__}: wrong number of fields")
    version, name, *values = items
    if version != CODEC_VERSION or name != kind.__name__:
        raise MessageError(f"expected {kind.__name__} version {CODEC_VERSION}, got {name!r} version {version!r}")
    for spec, value in zip(names, values, strict=True):
        wanted = {"int": int, "str": str, "bytes": bytes, "float": float}.get(str(spec.type), tuple)
        if type(value) is not wanted:
            raise MessageError(f"{kind.__name__}.{spec.name} is a {type(value).__name__}, expected {spec.type}")
    return kind(*values)
