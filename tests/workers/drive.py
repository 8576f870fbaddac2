"""What the tests of this package share: requests, and an engine driven by hand."""

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from transfer.channel import Chunk, Ending, Layers
from transfer.guide import Guide
from transfer.layout import WHOLE, Shard
from transfer.messages import Delta, Request, SamplingParams, pack_tokens
from workers.config import WorkerConfig
from workers.engine.engine import Engine
from workers.engine.model import Model
from workers.engine.step import Offer, Produced, Reserved
from workers.kv.pool import FREE

_ids = itertools.count()
_owners: weakref.WeakKeyDictionary[Engine, np.ndarray] = weakref.WeakKeyDictionary()


def request(prompt: Iterable[int], max_tokens: int = 8, salt: bytes = b"", **sampling: float) -> Request:
    """Greedy and without a stop token unless `sampling` says otherwise."""
    params = SamplingParams(max_tokens, **{"temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Request(f"r{next(_ids)}", pack_tokens(prompt), params, gateway="", timeout_s=60.0, salt=salt)


def engine(model: Path | Model, shard: Shard = WHOLE, **config: object) -> Engine:
    """A float32 engine with 8 MiB of KV whose memory is poisoned, so that reading what nobody wrote shows."""
    settings = WorkerConfig(**{"dtype": "float32", "device": "cpu", "kv_memory": 8 << 20, **config})  # type: ignore[arg-type]
    made = Engine(model if isinstance(model, Model) else Model(model, "float32", "cpu"), settings, shard)
    made.memory.flat.fill_(0xFF)
    return made


def poison(one: Engine) -> None:
    """Overwrite every block that has become free since the last time with NaN."""
    owners = one.cache.pool.owners()
    freed = np.flatnonzero((owners == FREE) & (_owners.get(one, owners) != FREE))
    _owners[one] = owners
    size = one.cache.block_size
    for block in freed.tolist():
        for part in (*one.memory.keys, *one.memory.values):
            part[block * size : (block + 1) * size] = torch.nan


@dataclass
class Step:
    """A plan and what running it brought."""

    started: list[str]
    reserved: list[Reserved]
    produced: list[Produced]
    deltas: list[Delta]


def step(one: Engine, offer: Offer | None = None) -> Step:
    """One step, after which free blocks hold nothing."""
    plan = one.plan()
    result = one.run(plan.works, offer)
    poison(one)
    return Step(plan.started, plan.reserved, result.produced, result.deltas)


def finish(one: Engine, wanted: Iterable[str], deltas: list[Delta]) -> None:
    """Step until all `wanted` requests have their last token."""
    open_ids = set(wanted) - {delta.request_id for delta in deltas if delta.finish_reason}
    for _ in range(10_000):
        if not open_ids:
            return
        result = step(one)
        deltas.extend(result.deltas)
        open_ids -= {delta.request_id for delta in result.deltas if delta.finish_reason}
    raise AssertionError(f"{open_ids} did not finish")


def output(deltas: Iterable[Delta], request_id: str) -> list[int]:
    """The tokens of a request, whose deltas must continue each other."""
    tokens: list[int] = []
    for delta in deltas:
        if delta.request_id == request_id:
            assert delta.start == len(tokens)
            tokens.extend(delta.tokens)
    return tokens


def answers(one: Engine, requests: list[Request]) -> list[list[int]]:
    """All at once; the tokens of each."""
    for each in requests:
        one.add(each)
    deltas: list[Delta] = []
    finish(one, [each.request_id for each in requests], deltas)
    return [output(deltas, each.request_id) for each in requests]


def copy_blocks(source: Engine, target: Engine, pairs: Iterable[tuple[int, int]], layers: Layers) -> None:
    """Copy these layers' KV of blocks from one engine's memory into another's, as (from, to)."""
    here, size = slice(*layers), source.cache.block_size
    parts = [
        [part for piece in one.memory.slices for part in (*piece.keys[here], *piece.values[here])]
        for one in (source, target)
    ]
    for mine, theirs in pairs:
        for a, b in zip(*parts, strict=True):
            b[theirs * size : (theirs + 1) * size] = a[mine * size : (mine + 1) * size]


class HandOff:
    """A prompt computed on `prefill` and decoded on `decode`, without channel and threads. `offers` are the layers of
    what was copied, in order."""

    def __init__(
        self, prefill: Engine, decode: Engine, one: Request, guide: Callable[[], Guide | None] = lambda: None
    ) -> None:
        self.prefill, self.decode, self.request = prefill, decode, one
        self.reserved: Reserved | None = None
        self.ending: Ending | None = None
        self.deltas: list[Delta] = []
        self.offers: list[Layers] = []
        self._chunks: list[Chunk] = []
        prefill.add(one, hand_off=True, guide=guide())
        decode.reserve(one, guide())

    @property
    def ready(self) -> bool:
        """Whether every block of the prompt is on D."""
        return self.ending is not None and self.reserved is not None

    def run(self) -> list[int]:
        """All of it; the tokens of the answer."""
        assert self.accept(self.compute())
        finish(self.decode, [self.request.request_id], self.deltas)
        return output(self.deltas, self.request.request_id)

    def compute(self) -> Ending:
        """Step both until the prompt is done and D has its blocks, which are copied as they become final."""
        for _ in range(10_000):
            made, kept = step(self.prefill, self._early), step(self.decode)
            self.deltas.extend(made.deltas + kept.deltas)
            self.reserved = self.reserved or next(iter(kept.reserved), None)
            self.take(made)
            if self.ready:
                assert self.ending is not None
                return self.ending
        raise AssertionError("the prompt was never finished")

    def take(self, made: Step) -> None:
        """What P's step produced; it is copied once D has reserved."""
        for one in made.produced:
            if one.request_id == self.request.request_id:
                self._chunks.append(one.chunk)
                self.ending = one.ending
        self._copy()

    def _early(self, made: Produced) -> None:
        """Offered while P's step runs."""
        if made.request_id == self.request.request_id:
            assert made.ending is None
            self._chunks.append(made.chunk)
            self._copy()

    def _copy(self) -> None:
        if self.reserved is not None:
            first, blocks = self.reserved.first_block, self.reserved.blocks
            for chunk in self._chunks:
                part = chunk.after(first)
                start = part.first - first
                pairs = zip(part.blocks, blocks[start : start + len(part.blocks)], strict=True)
                copy_blocks(self.prefill, self.decode, pairs, chunk.layers)
            self.offers += [chunk.layers for chunk in self._chunks]
            self._chunks = []

    def accept(self, ending: Ending) -> bool:
        """The manifest has arrived: P lets go, D decodes."""
        self.prefill.sent(self.request.request_id)
        poison(self.prefill)
        return self.decode.accept(self.request.request_id, ending.first_token, ending.cached_tokens)


def assert_idle(one: Engine) -> None:
    """Nothing runs, nothing is pinned or private, and every block is free or cached."""
    counts = one.cache.counts()
    assert (one.running, one.waiting, one.has_work) == (0, 0, False)
    assert (counts["private"], counts["pinned"], counts["quarantined"]) == (0, 0, 0)
    assert counts["free"] + counts["cached"] == counts["total"]
    cached = [block for node in one.cache.radix.nodes() for block in node.blocks]
    assert len(cached) == len(set(cached)) == counts["cached"]
