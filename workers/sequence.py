"""Sequence: one request inside an engine, with its tokens, its block table and how far it has come."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum

import numpy as np

from transfer.guide import Guide
from transfer.messages import Request, unpack_tokens
from workers.engine.prompt_rows import PromptRows
from workers.kv.radix import Node
from workers.kv.tier_io import Load


class Stage(Enum):
    """Where a sequence stands in its worker."""

    WAITING = "waiting"
    RUNNING = "running"
    INCOMING = "incoming"
    BORROWING = "borrowing"
    SENDING = "sending"
    LENDING = "lending"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Behind:
    """What a queued sequence waits for: that `other` has computed `tokens` tokens, which both begin with."""

    other: Sequence
    tokens: int


class Sequence:
    """Tokens, table and progress of a request.

    It came at `arrived_at` (monotonic). `computed` tokens have their KV in the pool; `blocks[:shared_blocks]` belong to
    the radix cache (held by a pin on `node`), the rest to this sequence. `hand_off` sequences stop after their first
    output token. The scheduler numbers sequences by `arrival`, and counts later ones that begin before: in `overtaken`
    those of the same tenant that do not rank higher, in `held_up` those of anybody while this one lacks blocks. While
    it is queued it may be `behind` another.
    Of a hand-off, `offered_blocks` have been offered to the peer, and of those behind them the first `offered_layers`.
    While a `load` brings cached blocks from a lower tier to its table, it waits; of its cached tokens `loaded` came so,
    from host memory and from disk. What lies on disk may have been `prefetched` to host memory before.
    `spare` blocks are in no table any more, but a peer's copy of them may be under way. Of a prompt that has not begun,
    `believed` tokens are taken to be cached. `guide` has accepted the output; `rows` gather what is wanted of each
    token of the prompt.
    """

    def __init__(self, request: Request, hand_off: bool = False, guide: Guide | None = None) -> None:
        self.request = request
        self.hand_off = hand_off
        self.stage = Stage.WAITING
        self.arrival = 0
        self.arrived_at = time.monotonic()
        self.overtaken = 0
        self.held_up = 0
        self.behind: Behind | None = None
        self.prompt_length = request.prompt_tokens
        self.final_length = self.prompt_length + (0 if hand_off else request.sampling.max_tokens)
        self._tokens = np.empty(self.final_length + 1, dtype=np.int32)
        self._tokens[: self.prompt_length] = unpack_tokens(request.prompt)
        self.length = self.prompt_length
        self.computed = 0
        self.blocks: list[int] = []
        self.node: Node | None = None
        self.shared_blocks = 0
        self.cached_tokens: int | None = None
        self.offered_blocks = 0
        self.offered_layers = 0
        self.believed = 0
        self.load: Load | None = None
        self.loaded = (0, 0)
        self.prefetched = False
        self.spare: list[int] = []
        self.guide = guide
        self._seen: np.ndarray | None = None
        self._looked_at = 0
        self.rows = PromptRows(self._tokens[: self.prompt_length], request.sampling.prompt_logprobs)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def salt(self) -> bytes:
        """Which tree of the radix cache the sequence lives in."""
        return self.request.salt

    @property
    def generated(self) -> int:
        """Number of output tokens."""
        return self.length - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that are known but whose KV is not computed; 1 in plain decoding."""
        return self.length - self.computed

    @property
    def wants_logits(self) -> bool:
        """Whether the logits of the next tokens are wanted, since they tell of tokens of the prompt."""
        return self.request.sampling.prompt_logprobs is not None and self.computed < self.prompt_length - 1

    def seen(self, vocabulary: int) -> np.ndarray:
        """Which tokens there are so far, bool `[vocabulary]`."""
        if self._seen is None:
            self._seen = np.zeros(vocabulary, dtype=bool)
        new = self._tokens[self._looked_at : self.length]
        self._seen[new[new < vocabulary]] = True
        self._looked_at = self.length
        return self._seen

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids `[start, stop)`, int32."""
        return self._tokens[start:stop]

    def packed(self, count: int) -> bytes:
        """The first `count` tokens, packed."""
        return self._tokens[:count].tobytes()

    def append(self, token: int) -> None:
        """Add an output token."""
        self._tokens[self.length] = token
        self.length += 1
