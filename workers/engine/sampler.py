"""Choosing the next token: a pure function of (logits, parameters, seed, position).

The random number for a token comes from Philox, a counter-based generator (Salmon et al., 2011), keyed by the request's
seed and counted by the token's absolute position. There is no state, so a sequence that is resumed elsewhere, batched
differently or split between workers draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch

from transfer.messages import SamplingParams

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to a seed and an absolute token position."""
    bits = int(np.random.Philox(key=seed & _MASK, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: Items[SamplingParams], positions: Items[int]) -> list[int]:
    """Next tokens for `logits [n, vocab]` (float32); `positions[i]` is where row i's token will stand."""
    greedy = torch.argmax(logits, dim=-1).tolist()
    return [
        greedy[row] if one.temperature == 0 else _draw(logits[row], one, uniform(one.seed, position))
        for row, (one, position) in enumerate(zip(params, positions, strict=True))
    ]


def _draw(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """Inverse-transform sampling over the tokens that `top_k` and `top_p` leave, in vocabulary order: reordering by
    probability would let rounding noise between near-equal tokens move the result."""
    # The largest logit is taken off before dividing, so that a tiny temperature stays finite.
    scaled = (logits - logits.max()).double() / params.temperature
    if 0 < params.top_k < len(scaled):
        threshold = torch.topk(scaled, params.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    weights = torch.softmax(scaled, dim=-1)
    if params.top_p < 1.0:
        ordered, index = torch.sort(weights, descending=True, stable=True)
        before = torch.cumsum(ordered, dim=-1) - ordered
        weights[index[before >= params.top_p]] = 0.0
    cumulative = torch.cumsum(weights, dim=-1)
    target = number * float(cumulative[-1])
    chosen = int(torch.searchsorted(cumulative, torch.tensor(target, dtype=torch.float64), right=True))
    if chosen >= len(weights):
        # Rounding at the very top: the last token that has any weight.
        chosen = int(torch.nonzero(weights)[-1])
    return chosen
