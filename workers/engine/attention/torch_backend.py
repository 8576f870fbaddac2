"""The attention backend that runs everywhere: PyTorch operators over views of the pool.

Rows see disjoint sets of keys, and the partial results are merged by their log-sum-exp (as in cascade attention):
contexts that several sequences of the batch share, each of which is read once for all of them; the sequence's own
context; and the chunk itself, causally. Where a compiled kernel is wanted and supports the pool, it takes all but the
last, and a chunk's rows by pieces: what is before a piece is context, and only the piece itself is causal. Layers with
a window, a soft cap or unequal key and value sizes take a plain masked path.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

from workers.engine.attention import AttentionOptions, kernel
from workers.engine.attention.contexts import Contexts, gather
from workers.engine.attention.sharing import Reuse, shared_blocks, shared_contexts
from workers.engine.batch import Batch, Span, as_index
from workers.engine.kernels.threads import threads
from workers.engine.linear import float32_is_faster
from workers.kv.memory import KVMemory

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KERNEL_ROWS = 64
"""Rows that the compiled kernel attends for together: so many that a tile of keys is worth bringing, so few that their
scores stay in the first-level cache. Longer chunks are taken in pieces of so many rows."""
WIDEN_MIN_ROWS = 64
"""From this many rows on, attention in half precision is computed in float32 where the CPU is faster at it (1.6 times,
measured at 600 rows of one without matrix tiles): multiplying is what costs then. It is more exact, too."""
DENSE_SCORES = 1 << 24
"""Elements of a score matrix that the masked path holds at a time."""


@dataclass(frozen=True, slots=True)
class _Context:
    """Tokens of the pool that some rows see in full: a slice of slots where blocks are consecutive, else an index of
    slots. `first`: nothing has been computed for these rows before."""

    rows: slice | torch.Tensor
    slots: slice | torch.Tensor
    first: bool


class TorchBackend:
    """See the module; `memory` is the pool this backend writes to and reads from. `compiled` and `shared` switch the
    kernel and the grouping by shared context on; results do not depend on them beyond rounding."""

    def __init__(self, memory: KVMemory, compiled: bool, shared: bool) -> None:
        self._memory = memory
        self._compiled = compiled and kernel.supports(memory)
        if self._compiled:
            kernel.prepare(memory)
        self._share = shared
        self.reuse = Reuse()
        self._block_size = memory.layout.block_size
        self._batch: Batch | None = None
        self._shared: list[_Context] = []
        self._own: list[_Context] = []
        self._gathered: list[Contexts] = []
        self._causal: list[tuple[slice, int]] = []

    def prepare(self, batch: Batch) -> None:
        """Group sequences by the context they share; see `Backend`."""
        self._batch = batch
        self._shared, self._own, self._gathered, self._causal = [], [], [], []
        shared = self._shared_tokens(batch.spans) if self._share else {}
        compiled = self._compiled and threads() == torch.get_num_threads()
        singles: list[Span] = []
        for span in batch.spans:
            begin, end = shared.get(span.row, 0), self._context_end(span)
            if span.count == 1 and end > begin and self._compiled:
                singles.append(span)
            elif span.count > 1:
                step = KERNEL_ROWS if compiled else span.count
                self._causal += _pieces(span, step)
                self._own += self._before(span, begin, step)
            elif end > begin:
                rows = slice(span.row, span.row + 1)
                self._own.append(_Context(rows, self._slots(span.blocks, begin, end), first=True))
        if singles:
            own = [_numbers(self._slots(one.blocks, shared.get(one.row, 0), one.start + 1)) for one in singles]
            self._gathered.append(gather(np.array([[one.row] for one in singles]), own, threads()))
        if compiled:
            self._gather(self._own)
            for one in self._shared:
                self._gather([one])
            self._own, self._shared = [], []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """One layer's attention; see `Backend`."""
        batch = self._batch
        assert batch is not None
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        keys[batch.slots] = key
        values[batch.slots] = value
        plain = options.window is None and options.softcap is None and key.shape[-1] == value.shape[-1]
        if plain and query.device.type == "cpu":
            return self._merged(layer, query, key, value, options)
        return torch.cat([self._masked(span, query, keys, values, options) for span in batch.spans])

    def _before(self, span: Span, begin: int, step: int) -> list[_Context]:
        """What a chunk's rows see in full, `step` rows at a time: all tokens from `begin` on that are before them."""
        found = []
        for row in range(0, span.count, step):
            if (end := span.start + row) > begin:
                rows = slice(span.row + row, span.row + min(row + step, span.count))
                found.append(_Context(rows, self._slots(span.blocks, begin, end), first=False))
        return found

    def _gather(self, contexts: list[_Context]) -> None:
        """Leave contexts to the kernel, those of equally many rows at a time. No row may be in two of them: threads
        merge what they find into a row's result without regard to each other."""
        alike: dict[int, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        for one in contexts:
            rows, slots = _numbers(one.rows), _numbers(one.slots)
            for at in range(0, len(rows), KERNEL_ROWS):
                piece = rows[at : at + KERNEL_ROWS]
                alike[len(piece)].append((piece, slots))
        for some in alike.values():
            self._gathered.append(gather(np.stack([rows for rows, _ in some]), [slots for _, slots in some], threads()))

    @staticmethod
    def _context_end(span: Span) -> int:
        """Tokens before the causal part: a single row sees itself like any context."""
        return span.start + 1 if span.count == 1 else span.start

    def _shared_tokens(self, spans: list[Span]) -> dict[int, int]:
        """Fill `_shared`. Returns how many tokens of each span are in there, by its first row."""
        size = self._block_size
        contexts = shared_contexts(spans, size)
        self.reuse.count(contexts, size)
        for one in contexts:
            slots = self._slots(one.spans[0].blocks, one.begin * size, one.end * size)
            self._shared.append(_Context(as_index(one.rows), slots, first=False))
        return {row: blocks * size for row, blocks in shared_blocks(contexts).items()}

    def _slots(self, blocks: np.ndarray, begin: int, end: int) -> slice | torch.Tensor:
        """Slots of a sequence's tokens `[begin, end)`; `begin` is at a block's start."""
        size = self._block_size
        table = blocks[begin // size : -(-end // size)]
        if (np.diff(table) == 1).all():
            return slice(int(table[0]) * size, int(table[0]) * size + end - begin)
        slots = (table[:, None] * size + np.arange(size)).ravel()[: end - begin]
        return torch.from_numpy(slots).to(self._memory.flat.device)

    def _merged(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        total, heads = query.shape[:2]
        keys, values = self._memory.keys[layer], self._memory.values[layer]
        output = torch.zeros((total, heads, value.shape[-1]))
        lse = torch.full((total, heads), -torch.inf)
        for rows, length in self._causal:
            parts = _widened(query[rows], key[rows], value[rows])
            q, k, v = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in parts)
            out, out_lse = _flash(q, k, v, 0.0, True, scale=options.scaling)
            output[rows], lse[rows] = out.transpose(1, 2).flatten(0, 1).float(), out_lse.transpose(1, 2).flatten(0, 1)
        if self._gathered:
            scaled = query.float().mul(options.scaling).contiguous()
            for contexts in self._gathered:
                kernel.attend(scaled, keys, values, contexts, output, lse)
        for context in (*self._own, *self._shared):
            q, k, v = _widened(query[context.rows], keys[context.slots], values[context.slots])
            part, part_lse = _attend_all(q, k, v, options.scaling)
            if context.first:
                output[context.rows], lse[context.rows] = part.float(), part_lse
                continue
            before = lse[context.rows]
            both = torch.logaddexp(before, part_lse)
            weight = torch.exp(part_lse - both)[..., None]
            output[context.rows] = torch.lerp(output[context.rows], part.float(), weight)
            lse[context.rows] = both
        if options.sinks is not None:
            # A sink is one more score without a value: it only takes its share of the softmax.
            output = output * torch.sigmoid(lse - options.sinks.float())[..., None]
        return output.to(query.dtype)

    def _masked(
        self, span: Span, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Softmax attention of one sequence with everything spelled out, in float32, a few rows at a time."""
        stop = span.start + span.count
        begin = 0
        if options.window is not None:
            begin = max(0, span.start + 1 - options.window) // self._block_size * self._block_size
        slots = self._slots(span.blocks, begin, stop)
        heads, kv_heads = query.shape[1], keys.shape[1]
        k = keys[slots].float().permute(1, 2, 0)
        v = values[slots].float().transpose(0, 1)
        step = max(1, DENSE_SCORES // (heads * (stop - begin)))
        parts = []
        for row in range(0, span.count, step):
            count = min(step, span.count - row)
            q = query[span.row + row : span.row + row + count].float()
            q = q.reshape(count, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3)
            scores = torch.matmul(q, k[:, None]) * options.scaling
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            at = torch.arange(span.start + row, span.start + row + count, device=q.device)[:, None]
            seen = torch.arange(begin, stop, device=q.device)[None]
            hidden = seen > at
            if options.window is not None:
                hidden = hidden | (seen <= at - options.window)
            scores = scores.masked_fill(hidden, -torch.inf)
            if options.sinks is not None:
                sinks = options.sinks.float().reshape(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : stop - begin]
            parts.append(torch.matmul(weights, v[:, None]).permute(2, 0, 1, 3).reshape(count, heads, -1))
        return torch.cat(parts).to(query.dtype)


def _pieces(span: Span, step: int) -> list[tuple[slice, int]]:
    """A chunk in pieces of `step` rows and a rest: rows, and how many there are in a piece."""
    whole, end = span.row + span.count // step * step, span.row + span.count
    pieces = [(slice(span.row, whole), step), (slice(whole, end), end - whole)]
    return [(rows, length) for rows, length in pieces if rows.stop > rows.start]


def _numbers(index: slice | torch.Tensor) -> np.ndarray:
    """What the index selects."""
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index.numpy()


def _widened(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in float32, where that is faster; see WIDEN_MIN_ROWS."""
    if query.dtype == torch.float32 or len(query) < WIDEN_MIN_ROWS or not float32_is_faster(query.dtype):
        return query, keys, values
    return query.float(), keys.float(), values.float()


def _attend_all(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unmasked attention of `query [n, heads, k]` over `keys [L, kv_heads, k]`: output `[n, heads, v]` and
    log-sum-exp `[n, heads]`. The query heads of a KV head are folded into the rows, so that keys are read once."""
    count, heads, size = query.shape
    kv_heads = keys.shape[1]
    q = query.reshape(count, kv_heads, heads // kv_heads, size).permute(1, 0, 2, 3).reshape(1, kv_heads, -1, size)
    output, lse = _flash(q, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], 0.0, False, scale=scaling)
    output = output.reshape(kv_heads, count, heads // kv_heads, -1).transpose(0, 1).reshape(count, heads, -1)
    return output, lse.reshape(kv_heads, count, heads // kv_heads).transpose(0, 1).reshape(count, heads)
