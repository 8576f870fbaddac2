"""What a request's parameters do to its logits before a token is sampled: penalties, bias, length, grammar."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from transfer.guide import Guide
from transfer.messages import SamplingParams
from workers.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Constraints:
    """One row's: `seen` says which tokens prompt and output have, where that is of interest, `output` are those of the
    output, and `ending` those that would end the answer."""

    params: SamplingParams
    seen: np.ndarray | None
    output: np.ndarray
    ending: frozenset[int]
    guide: Guide | None


def constraints(sequence: Sequence, ending: frozenset[int], vocabulary: int) -> Constraints | None:
    """What the next token of a sequence has to heed; None where its logits stay as they are."""
    params = sequence.request.sampling
    count = sequence.request.answered + sequence.generated
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    if not (penalties or params.logit_bias or sequence.guide or count < params.min_tokens):
        return None
    seen = sequence.seen(vocabulary) if params.repetition_penalty != 1.0 else None
    output = sequence.tokens(sequence.length - count, sequence.length)
    return Constraints(params, seen, output, ending, sequence.guide)


def adjust(row: torch.Tensor, heeded: Constraints) -> None:
    """Change one row of logits `[vocab]` in place. Raises GuideError when the grammar lets no token follow."""
    params, vocabulary, output = heeded.params, row.shape[-1], heeded.output
    if heeded.seen is not None:
        seen = torch.from_numpy(heeded.seen).to(row.device, non_blocking=True)
        # As in CTRL (Keskar et al., 2019): what was there becomes less likely, whatever its sign.
        lower = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        row.copy_(torch.where(seen, lower, row))
    if (params.presence_penalty or params.frequency_penalty) and len(output):
        there, counts = np.unique(output, return_counts=True)
        row[_index(row, there)] -= _values(row, params.presence_penalty + params.frequency_penalty * counts)
    if params.logit_bias:
        biased = [(token, bias) for token, bias in params.logit_bias if token < vocabulary]
        tokens, biases = zip(*biased, strict=True) if biased else ((), ())
        row[_index(row, np.array(tokens, dtype=np.int64))] += _values(row, np.array(biases))
    early = len(output) < params.min_tokens
    if heeded.guide is None and not early:
        return
    allowed = heeded.guide.allowed() if heeded.guide is not None else np.ones(vocabulary, dtype=bool)
    if early:
        going_on = allowed.copy()
        going_on[[token for token in heeded.ending if token < vocabulary]] = False
        if going_on.any():  # a grammar that can only end here is stronger
            allowed = going_on
    row.masked_fill_(torch.from_numpy(~allowed).to(row.device, non_blocking=True), -torch.inf)


def _index(row: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).to(row.device, non_blocking=True)


def _values(row: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(row.device, row.dtype, non_blocking=True)
