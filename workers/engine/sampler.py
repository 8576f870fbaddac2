"""Choosing the next token: a pure function of (logits, parameters, seed, position).

The random number for a token comes from Philox, a counter-based generator (Salmon et al., 2011), keyed by the request's
seed and counted by the token's absolute position. There is no state, so a sequence that is resumed elsewhere, batched
differently or split between workers draws the same numbers.

Rows are sampled where the logits are, on a GPU all at once, and the host waits for it once, for the ids.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch

from transfer.messages import SamplingParams

_MASK = 2**64 - 1
NO_TOKEN = -1
ROWS_ON_CPU = 1
"""Rows that a CPU samples at once: one of them stays in its cache, which makes 16 rows about twice as fast."""


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to a seed and an absolute token position."""
    bits = int(np.random.Philox(key=seed & _MASK, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Which of the rows `[n, vocab]` mean anything: NaN and infinity show in the largest of a row."""
    return torch.isfinite(logits.amax(dim=-1))


def sample(logits: torch.Tensor, params: Items[SamplingParams], positions: Items[int]) -> list[int]:
    """Next tokens for `logits [n, vocab]` (float32); `positions[i]` is where row i's token will stand. `NO_TOKEN` for a
    row that is not finite at its top: what is chosen from such a row would mean nothing."""
    finite = finite_rows(logits)
    chosen = torch.argmax(logits, dim=-1)
    drawn = [row for row, one in enumerate(params) if one.temperature != 0]
    at_once = ROWS_ON_CPU if logits.device.type == "cpu" else len(params)
    for begin in range(0, len(drawn), at_once):
        some = drawn[begin : begin + at_once]
        numbers = [uniform(params[row].seed, positions[row]) for row in some]
        rows = _on(logits, some)
        chosen[rows] = _draw(logits[rows], [params[row] for row in some], numbers)
    tokens: list[int] = torch.where(finite, chosen, NO_TOKEN).tolist()
    return tokens


def _draw(logits: torch.Tensor, params: Items[SamplingParams], numbers: Items[float]) -> torch.Tensor:
    """Inverse-transform sampling over the tokens that `top_k` and `top_p` leave, in vocabulary order: reordering by
    probability would let rounding noise between near-equal tokens move the result. `[n, vocab]` → `[n]`."""
    temperatures = _on(logits, [one.temperature for one in params])[:, None]
    # The largest logit is taken off before dividing, so that a tiny temperature stays finite.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperatures
    vocabulary = logits.shape[-1]
    if limited := [row for row, one in enumerate(params) if 0 < one.top_k < vocabulary]:
        rows = _on(logits, limited)
        scaled[rows] = _keep_top_k(scaled[rows], [params[row].top_k for row in limited])
    weights = torch.softmax(scaled, dim=-1)
    if limited := [row for row, one in enumerate(params) if one.min_p > 0]:
        rows = _on(logits, limited)
        weights[rows] = _keep_min_p(weights[rows], [params[row].min_p for row in limited])
    if limited := [row for row, one in enumerate(params) if one.top_p < 1.0]:
        rows = _on(logits, limited)
        weights[rows] = _keep_top_p(weights[rows], [params[row].top_p for row in limited])
    cumulative = torch.cumsum(weights, dim=-1)
    targets = _on(logits, numbers)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    # Rounding at the very top can bring a target up to the sum: then the token with which the sum is reached.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(chosen, last)


def _keep_top_k(scaled: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Minus infinity for all that is below row i's `counts[i]`-th largest."""
    best = torch.topk(scaled, max(counts)).values
    thresholds = best.gather(-1, _on(scaled, counts)[:, None] - 1)
    return scaled.masked_fill(scaled < thresholds, -torch.inf)


def _keep_min_p(weights: torch.Tensor, shares: list[float]) -> torch.Tensor:
    """Zero for all that is less likely than row i's `shares[i]` times its likeliest (Nguyen et al., 2024); what is left
    adds up to one."""
    least = weights.amax(dim=-1, keepdim=True) * _on(weights, shares)[:, None]
    kept = weights.masked_fill(weights < least, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _keep_top_p(weights: torch.Tensor, shares: list[float]) -> torch.Tensor:
    """Zero for all before which, from the largest on, row i's `shares[i]` is reached."""
    ordered, index = torch.sort(weights, dim=-1, descending=True, stable=True)
    before = torch.cumsum(ordered, dim=-1) - ordered
    beyond = before >= _on(weights, shares)[:, None]
    return weights.masked_fill(torch.empty_like(beyond).scatter_(-1, index, beyond), 0.0)


def _on(like: torch.Tensor, values: Items[int] | Items[float]) -> torch.Tensor:
    """Numbers of the host as int64 or float64 on the device of `like`, without waiting for it."""
    array = np.asarray(values)
    return torch.from_numpy(array).to(like.device, non_blocking=True)
