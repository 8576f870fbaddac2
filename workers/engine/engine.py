"""The engine: one step is plan, run, sample, report. Single-threaded and without I/O.

A request is added in one of two ways. `add`: compute the prompt and, unless it is handed off, generate the answer.
`reserve`: keep blocks for a prompt that a peer computes; `accept` starts decoding once they are filled, `recompute`
falls back to computing here.

Cached prefixes travel without a request of their own: `lend` offers what is here to a peer, `borrow` keeps blocks for
what a peer offers, and `borrowed` makes them part of the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from transfer.channel import Chunk, Ending
from transfer.guide import Guide
from transfer.layout import WHOLE, KVLayout, Shard
from transfer.messages import CacheStats, Delta, Request, SamplingParams, pack_tokens
from workers.config import StartError, TiersConfig, WorkerConfig
from workers.engine.attention import Backend
from workers.engine.attention.choice import choose
from workers.engine.attention.flashinfer_backend import FlashInferBackend
from workers.engine.batch import build
from workers.engine.graphs import DecodeGraphs
from workers.engine.layerwise import LayerWatch, cuts
from workers.engine.model import Model, context_length
from workers.engine.sampler import NO_TOKEN
from workers.engine.step import Offer, Produced, Reserved, StepPlan, StepResult
from workers.engine.tokens import Chosen, choose_tokens, ending
from workers.kv.cache import KVCache
from workers.kv.disk import DiskStore
from workers.kv.journal import Journal
from workers.kv.memory import KVMemory
from workers.kv.records import RecordLayout, Records
from workers.kv.tier_io import TierIO
from workers.kv.tiers import Tiers
from workers.scheduler import Limits, Scheduler, Work
from workers.sequence import Sequence, Stage

EARLY_TOKENS = 128
"""A last chunk of at least so many tokens is offered layer by layer, and asks for room on the peer before it runs:
shorter ones are computed in less time than that takes."""


def spare_blocks(model: Model) -> int:
    """Blocks at the end of the pool that no sequence can own: on CUDA one, for rows that only fill up a batch."""
    return 1 if model.device.type == "cuda" else 0


def plan_memory(model: Model, config: WorkerConfig, shard: Shard = WHOLE) -> tuple[KVLayout, int]:
    """The pool's layout, spare blocks included, and the longest sequence, in tokens. `shard` is what of the KV heads
    the model has here. Raises StartError when they do not fit together."""
    limit = context_length(model.config)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise StartError(f"max_model_len: {config.max_model_len} is more than the model's context of {limit} tokens")
    length = config.max_model_len or limit
    layout = KVLayout(model.identity, model.dtype, config.block_size, model.layers, num_blocks=1, shard=shard)
    blocks = config.kv_memory // layout.block_bytes
    needed = -(-length // config.block_size) + spare_blocks(model)
    if blocks < needed:
        raise StartError(
            f"kv_memory: {config.kv_memory} bytes hold {blocks} blocks, but one request of the maximum length "
            f"({length} tokens) needs {needed} blocks, {needed * layout.block_bytes} bytes "
            f"({needed * layout.block_bytes / 2**20:.0f} MiB); raise kv_memory or lower max_model_len"
        )
    return replace(layout, num_blocks=blocks), length


class Engine:
    """Sequences of one worker over one model, of which it has a `shard` of the KV heads, and one pool."""

    def __init__(self, model: Model, config: WorkerConfig, shard: Shard = WHOLE) -> None:
        layout, self.max_model_len = plan_memory(model, config, shard)
        self.model = model
        self.memory = KVMemory(layout, model.device)
        blocks = layout.num_blocks - spare_blocks(model)
        self.cache = KVCache(blocks, config.block_size, config.prefix_cache, config.eviction, self.memory.copy_tokens)
        self._backend = choose(config, self.memory, model.attention)
        self.reuse = self._backend.reuse
        self._graphs: DecodeGraphs | None = None
        if isinstance(self._backend, FlashInferBackend):
            longest = -(-self.max_model_len // config.block_size)
            self._graphs = DecodeGraphs(model, self._backend, config.max_running, longest)
        limits = Limits(config.step_tokens, config.max_running, config.max_overtaken)
        self._scheduler = Scheduler(self.cache, limits)
        self._max_running, self._max_waiting = config.max_running, config.max_waiting
        self._max_overtaken = config.max_overtaken
        self._sequences: dict[str, Sequence] = {}
        self._reservations: deque[Sequence] = deque()
        self._layers = len(model.layers)

    @property
    def running(self) -> int:
        """Sequences that hold blocks, those aside that only copy what is cached."""
        # A copy: other threads read this, too, while sequences come and go.
        aside = sum(one.stage in (Stage.BORROWING, Stage.LENDING) for one in list(self._sequences.values()))
        return len(self._sequences) - self.waiting - aside

    @property
    def waiting(self) -> int:
        """Sequences queued for blocks or for a place in the running set."""
        return self._scheduler.waiting + len(self._reservations)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed here, as far as is known. Other threads read this, too."""
        tokens = 0
        for one in list(self._sequences.values()):
            if one.stage is Stage.WAITING:
                tokens += max(1, one.length - one.believed)
            elif one.stage is Stage.RUNNING and one.remaining > 1:
                tokens += one.remaining
        return tokens

    @property
    def full(self) -> bool:
        """Whether the queue is at its bound."""
        return self.waiting >= self._max_waiting

    @property
    def has_work(self) -> bool:
        """Whether a step would do something now or soon."""
        return bool(self._scheduler.running or self._scheduler.waiting or self._reservations) or self.cache.moving

    def found(self, request: Request) -> int:
        """How many of a prompt's tokens are cached here."""
        return self.cache.found(Sequence(request))

    def add(self, request: Request, hand_off: bool = False, believed: int = 0, guide: Guide | None = None) -> None:
        """Queue a request of which `believed` tokens are taken to be cached, and whose answer follows a fresh `guide`.
        Raises ValueError when it can never run here."""
        sequence = self._new(request, hand_off, guide)
        sequence.believed = believed
        self._scheduler.add(sequence)

    def reserve(self, request: Request, guide: Guide | None = None) -> None:
        """Queue a request whose prompt a peer computes; `Reserved` follows from a step. Raises ValueError."""
        sequence = self._new(request, hand_off=False, guide=guide)
        sequence.stage = Stage.INCOMING
        self._scheduler.number(sequence)
        self._reservations.append(sequence)

    def accept(self, request_id: str, first_token: int, cached_tokens: int) -> bool:
        """The reserved blocks are filled: decode from `first_token` on. False when the request is gone."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.stage is not Stage.INCOMING:
            return False
        self._count(sequence)
        self.cache.stats.new_tokens += sequence.prompt_length - sequence.computed
        sequence.cached_tokens = cached_tokens
        sequence.computed = sequence.prompt_length
        sequence.append(first_token)
        if sequence.guide is not None and first_token not in self._ending(sequence):
            sequence.guide.accept([first_token])
        self.cache.commit(sequence)
        self._scheduler.join(sequence)
        return True

    def recompute(self, request_id: str, written: tuple[int, ...]) -> list[int] | None:
        """The reserved blocks cannot be used: compute the prompt here. `written` blocks go to quarantine and are
        returned; None when the request no longer waits for them."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.stage is not Stage.INCOMING:
            return None
        held = self.cache.release(sequence, written)
        self._scheduler.add(sequence)
        return held

    def borrow(self, request: Request) -> Reserved | None:
        """Keep blocks for those of a prompt that are not cached here; None when there are no such, or no room at once
        without taking it from those that wait for blocks."""
        sequence = self._new(request, hand_off=False)
        sequence.stage = Stage.BORROWING
        wanted = self._scheduler.short or any(one.held_up for one in self._reservations)
        if wanted or not self.cache.admit(sequence, sequence.prompt_length, whole=True):
            self._drop(request.request_id, ())
            return None
        blocks = tuple(sequence.blocks[sequence.shared_blocks :])
        if not blocks:
            self._drop(request.request_id, ())
            return None
        return Reserved(sequence.id, sequence.shared_blocks, blocks)

    def borrowed(self, request_id: str, blocks: int) -> None:
        """The first `blocks` of those kept by `borrow` are filled, and become the cache's."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.stage is Stage.BORROWING:
            sequence.computed = (sequence.shared_blocks + blocks) * self.cache.block_size
            self.cache.commit(sequence)
            self._drop(request_id, ())

    def lend(self, request: Request, first_block: int) -> Produced:
        """What is cached of a prompt from its block number `first_block` on, in whole blocks, and perhaps nothing. It
        stays until `sent`."""
        sequence = self._new(request, hand_off=True)
        sequence.stage = Stage.LENDING
        self.cache.hold(sequence)
        chunk = Chunk(first_block, tuple(sequence.blocks[first_block:]), (0, self._layers))
        return Produced(sequence.id, chunk, Ending(NO_TOKEN, 0))

    def promote(self, request: Request) -> bool:
        """Load what a lower tier has of a prompt, so that it can be lent; a step's plan says when that is over. False
        when there is nothing to load, or no room."""
        if not self.cache.below(request.salt, request.prompt):
            return False  # and nothing was evicted for it
        sequence = self._new(request, hand_off=False)
        sequence.stage = Stage.BORROWING
        room = not self._scheduler.short and self.cache.admit(sequence, sequence.prompt_length, whole=True)
        if room and self.cache.load(sequence, sequence.prompt_length):
            return True
        self._drop(request.request_id, ())
        return False

    def sent(self, request_id: str) -> None:
        """A hand-off is complete: its blocks may be evicted."""
        self._drop(request_id, ())

    def abort(self, request_id: str, quarantine: tuple[int, ...] = ()) -> list[int]:
        """Forget a request at any stage; private blocks in `quarantine` are kept from reuse and returned."""
        return self._drop(request_id, quarantine)

    def plan(self) -> StepPlan:
        """Serve reservations and decide what to compute. The plan must be run before anything else changes."""
        plan = StepPlan()
        self._settle_loads(plan)
        self._serve_reservations(plan)
        incoming = sum(one.stage is Stage.INCOMING for one in self._sequences.values()) - len(self._reservations)
        if self._reservations and self._held_up(self._reservations[0]):
            incoming = self._max_running  # prompts that begin would take every block that becomes free
        plan.works, admitted = self._scheduler.schedule(incoming)
        for sequence in admitted:
            self._begins(sequence, plan)
        for work in plan.works:
            one = work.sequence
            if one.hand_off and (work.count < one.remaining or work.count >= EARLY_TOKENS):
                plan.started.append(one.id)
        return plan

    def run(self, works: list[Work], offer: Offer | None = None) -> StepResult:
        """Compute the works of a plan. With `offer`, parts of hand-offs are offered before the step's end, too."""
        result = StepResult()
        if not works:
            return result
        batch = build(works, self.cache.block_size, self.model.device)
        backend = self._offering(works, offer) if offer is not None else self._backend
        logits = self._graphs.forward(batch) if self._graphs else self.model.forward(batch, backend)
        # This waits for the device, once a step: before the next one is planned into the same buffers, and before
        # blocks are offered to a peer.
        chosen = choose_tokens(works, logits, self.model)
        ready: dict[str, Chosen] = {}
        for work, one in zip(works, chosen, strict=True):
            sequence = work.sequence
            if one.error:
                # Before its blocks of this step become the cache's: they may be spoilt. A row sees all that is before
                # it, so chunks in the middle of a prompt are checked by their last row, too.
                self._fail(sequence, one, result)
            elif sequence.computed + work.count == sequence.length:
                sequence.append(one.token)
                ready[sequence.id] = one
        works = [work for work in works if work.sequence.stage is not Stage.FINISHED]
        for work in works:
            self._progress(work)
        for work in works:
            self._report(work.sequence, ready.get(work.sequence.id), result)
        return result

    def drop_running(self) -> list[str]:
        """Forget every sequence that is running, after a step failed; returns their ids."""
        ids = [sequence.id for sequence in self._scheduler.running]
        for request_id in ids:
            self._drop(request_id, ())
        return ids

    def warm_up(self) -> None:
        """Record graphs where they are used, run one small request through prompt and decode, and forget it."""
        if self._graphs is not None:
            self._graphs.capture()
        prompt = max(1, min(self.cache.block_size + 1, self.max_model_len - 2))
        sampling = SamplingParams(min(2, self.max_model_len - prompt), temperature=0, ignore_eos=True)
        self.add(Request("warm-up", pack_tokens([0] * prompt), sampling, "", 0.0))
        while self.has_work:
            self.run(self.plan().works)
        self.cache.clear()
        self.cache.stats = CacheStats()

    def watch(self) -> Journal:
        """A journal of which prefixes are cached from now on, while nothing is: after `warm_up`, before any request.
        Somebody has to read it."""
        journal = Journal(self.memory.layout.fingerprint)
        self.cache.watch(journal)
        return journal

    def attach(
        self,
        name: str,
        config: TiersConfig,
        journal: Journal | None,
        wake: Callable[[], object],
        records: Callable[[KVMemory, RecordLayout, int], Records] = Records,
    ) -> TierIO:
        """Keep what the pool has no room for in host memory, and on disk under the worker's `name`: after `warm_up`,
        before any request. `wake` is called by other threads when `plan` has something to do. `records` makes what
        is kept in host memory. Raises StartError."""
        if not self.cache.reuse:
            raise StartError("tiers.host: worker.prefix_cache is off, so there is nothing to keep")
        whole = self.memory.layout.whole
        layout = RecordLayout(whole, config.format)
        slots = config.host // layout.record_bytes
        if not slots:
            raise StartError(f"tiers.host: {config.host} bytes do not hold one block, {layout.record_bytes} bytes")
        disk = None
        if config.disk:
            assert config.disk_path is not None
            disk = DiskStore(config.disk_path, name, layout.fingerprint, config.disk, layout.record_bytes)
        io = TierIO(records(self.memory, layout, slots), disk, wake)
        self.cache.tiers = Tiers(name, config, whole, slots, self.cache.radix, io, journal)
        return io

    def _new(self, request: Request, hand_off: bool, guide: Guide | None = None) -> Sequence:
        """Raises ValueError, before anything is allocated, for what can never run here."""
        output = request.sampling.max_tokens
        if request.prompt_tokens < 1 or output < 1 or request.prompt_tokens + output > self.max_model_len:
            raise ValueError(f"{request.prompt_tokens} + {output} tokens do not fit {self.max_model_len}")
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is already here")
        sequence = Sequence(request, hand_off, guide)
        if guide is not None and request.answered:
            guide.accept(sequence.tokens(sequence.length - request.answered, sequence.length).tolist())
        self._sequences[request.request_id] = sequence
        return sequence

    def _settle_loads(self, plan: StepPlan) -> None:
        for sequence in self.cache.settled():
            if sequence.stage is Stage.BORROWING:
                plan.promoted.append(sequence.id)
                self._drop(sequence.id, ())
            else:
                self._begins(sequence, plan)

    def _serve_reservations(self, plan: StepPlan) -> None:
        # Older prompts that wait to be computed here go first. So does what was preempted or has to be computed after
        # all: it keeps its number.
        while self._reservations and self.running < self._max_running:
            sequence = self._reservations[0]
            if sequence.arrival > self._scheduler.oldest:
                return
            if not self.cache.admit(sequence, sequence.prompt_length, whole=True):
                sequence.held_up += 1
                return
            self._reservations.popleft()
            blocks = tuple(sequence.blocks[sequence.shared_blocks :])
            plan.reserved.append(Reserved(sequence.id, sequence.shared_blocks, blocks))

    def _held_up(self, reservation: Sequence) -> bool:
        """Whether it has lacked blocks for long enough, and waits for nobody older."""
        return reservation.held_up > self._max_overtaken and reservation.arrival < self._scheduler.oldest

    def _begins(self, sequence: Sequence, plan: StepPlan) -> None:
        if sequence.cached_tokens is None:
            plan.began.append(sequence)
        self._count(sequence)

    def _count(self, sequence: Sequence) -> None:
        """Hit statistics, once a request: what is computed again after a preemption is not a hit."""
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_length)
            self.cache.stats.count(sequence.prompt_length, sequence.cached_tokens, self.cache.block_size)

    def _progress(self, work: Work) -> None:
        prompt_left = max(0, work.sequence.prompt_length - work.sequence.computed)
        self.cache.stats.new_tokens += min(work.count, prompt_left)
        work.sequence.computed += work.count
        self.cache.commit(work.sequence)

    def _fail(self, sequence: Sequence, chosen: Chosen, result: StepResult) -> None:
        cached = sequence.cached_tokens or 0
        delta = Delta(sequence.id, sequence.generated, (), cached, error=chosen.error, refused=chosen.refused)
        result.deltas.append(delta)
        self._drop(sequence.id, ())

    def _report(self, sequence: Sequence, chosen: Chosen | None, result: StepResult) -> None:
        finish = None
        if chosen is not None:
            finish = self._finish(sequence, chosen.token)
            delta = Delta(
                request_id=sequence.id,
                start=sequence.generated - 1,
                tokens=(chosen.token,),
                cached_tokens=sequence.cached_tokens or 0,
                finish_reason=finish,
                logprobs=chosen.logprobs,
                prompt_logprobs=tuple(sequence.rows.logprobs) if sequence.generated == 1 else (),
                embedding=sequence.rows.embedding if sequence.request.embed else b"",
                loaded=sequence.loaded if sequence.generated == 1 else (0, 0),
            )
            result.deltas.append(delta)
        if finish is not None:
            self._drop(sequence.id, ())
        elif sequence.hand_off:
            self._produce(sequence, chosen is not None, result)

    def _finish(self, sequence: Sequence, token: int) -> str | None:
        """Why the answer ends with this token, its last one; None when it does not."""
        if token in self._ending(sequence):
            return "stop"
        if sequence.guide is not None:
            sequence.guide.accept([token])
            if sequence.guide.complete:
                return "stop"
        return "length" if sequence.generated >= sequence.request.sampling.max_tokens else None

    def _ending(self, sequence: Sequence) -> frozenset[int]:
        return ending(sequence.request.sampling, self.model.eos)

    def _offering(self, works: list[Work], offer: Offer) -> Backend:
        """Offer what is cached of hand-offs that begin; the backend that offers long last chunks layer by layer."""
        last: list[Sequence] = []
        for work in works:
            one = work.sequence
            if not one.hand_off:
                continue
            cached = one.computed // self.cache.block_size
            if cached > one.offered_blocks:
                offer(Produced(one.id, self._chunk(one, cached, self._layers), None))
            if work.count == one.remaining and work.count >= EARLY_TOKENS:
                last.append(one)
        # On other devices a layer is not computed when its operators have been called.
        if not last or self.model.device.type != "cpu" or not self.model.in_order:
            return self._backend
        ends = cuts(self._layers)

        def after(layer: int) -> None:
            if layer + 1 in ends:
                for one in last:
                    offer(Produced(one.id, self._chunk(one, len(one.blocks), layer + 1), None))

        return LayerWatch(self._backend, after)

    def _chunk(self, sequence: Sequence, stop: int, layers: int) -> Chunk:
        """What is to be offered next: blocks up to number `stop`, up to so many layers; it counts as offered."""
        blocks = tuple(sequence.blocks[sequence.offered_blocks : stop])
        chunk = Chunk(sequence.offered_blocks, blocks, (sequence.offered_layers, layers))
        sequence.offered_layers = layers
        if layers == self._layers:
            sequence.offered_blocks, sequence.offered_layers = stop, 0
        return chunk

    def _produce(self, sequence: Sequence, last: bool, result: StepResult) -> None:
        """Offer what became final. Whole blocks are the cache's by now (or stay until sent), so they cannot move."""
        size = self.cache.block_size
        stop = len(sequence.blocks) if last else sequence.computed // size
        ending = None
        if last:
            token = int(sequence.tokens(sequence.prompt_length, sequence.length)[0])
            ending = Ending(token, sequence.cached_tokens or 0)
            sequence.stage = Stage.SENDING
            self._scheduler.remove(sequence)
        elif stop == sequence.offered_blocks:
            return
        result.produced.append(Produced(sequence.id, self._chunk(sequence, stop, self._layers), ending))

    def _drop(self, request_id: str, quarantine: tuple[int, ...]) -> list[int]:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return []
        if sequence in self._reservations:
            self._reservations.remove(sequence)
        self._scheduler.remove(sequence)
        sequence.stage = Stage.FINISHED
        return self.cache.release(sequence, quarantine)
