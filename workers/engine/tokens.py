"""What a step's logits become: the next token of every sequence, and what is to be told about it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch

from transfer.guide import GuideError
from transfer.messages import SamplingParams, TokenLogprobs
from workers.engine.logits import Constraints, adjust, constraints
from workers.engine.logprobs import logprobs
from workers.engine.model import Model
from workers.engine.sampler import NO_TOKEN, finite_rows, sample
from workers.scheduler import Work


@dataclass(frozen=True, slots=True)
class Chosen:
    """The token at the end of a work, which means something where that is the end of its sequence. With `error` there
    is none, `refused` if there would be none on any worker."""

    token: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    refused: bool = False


def ending(sampling: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """Tokens that end an answer. With a grammar `ignore_eos` has no meaning: it says where the answer ends."""
    return frozenset() if sampling.ignore_eos and not sampling.guide else eos


def choose_tokens(works: Items[Work], logits: torch.Tensor, model: Model) -> list[Chosen]:
    """The next tokens for a batch of works, from the logits of its `logit_rows`; waits for the device."""
    own = logits[: len(works)]
    _see_rows(works, logits[len(works) :], model)
    adjusted, errors = _adjusted(works, own, model)
    params = [_sampling(work) for work in works]
    tokens = sample(adjusted, params, [work.sequence.computed + work.count for work in works])
    if adjusted is not own:  # what was hidden there may be what is wrong with the row
        tokens = [token if good else NO_TOKEN for token, good in zip(tokens, finite_rows(own).tolist(), strict=True)]
    told = _logprobs(works, own, tokens)
    chosen = []
    for row, token in enumerate(tokens):
        if token == NO_TOKEN:
            chosen.append(Chosen(token, error="the model's logits are not finite"))
        else:
            chosen.append(Chosen(token, told.get(row, ()), errors.get(row), refused=row in errors))
    return chosen


def _see_rows(works: Items[Work], others: torch.Tensor, model: Model) -> None:
    """Gather what is wanted of each token of a prompt; `others` are the logits of the works that are wanted whole."""
    row = other = 0
    for work in works:
        sequence = work.sequence
        if sequence.wants_logits:
            sequence.rows.add_logits(sequence.computed, others[other : other + work.count])
            other += work.count
        if sequence.request.embed:
            sequence.rows.add_hidden(sequence.computed, model.hidden[row : row + work.count])
        row += work.count


def _adjusted(works: Items[Work], logits: torch.Tensor, model: Model) -> tuple[torch.Tensor, dict[int, str]]:
    """The logits as the requests want them, in a copy where that makes a difference; by row, what went wrong."""
    heeded: dict[int, Constraints] = {}
    for row, work in enumerate(works):
        ends = ending(work.sequence.request.sampling, model.eos)
        if _ends(work) and (one := constraints(work.sequence, ends, logits.shape[-1])) is not None:
            heeded[row] = one
    errors: dict[int, str] = {}
    if heeded:
        logits = logits.clone()
    for row, one in heeded.items():
        try:
            adjust(logits[row], one)
        except GuideError as error:
            errors[row] = str(error)
    return logits, errors


def _logprobs(works: Items[Work], logits: torch.Tensor, tokens: Items[int]) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By row, for those that want them."""
    tops = {row: work.sequence.request.sampling.logprobs for row, work in enumerate(works) if _ends(work)}
    wanted = {row: top for row, top in tops.items() if top is not None and tokens[row] != NO_TOKEN}
    if not wanted:
        return {}
    told = logprobs(logits[list(wanted)], [tokens[row] for row in wanted], max(wanted.values()))
    return {row: (replace(one, top=one.top[:top]),) for (row, top), one in zip(wanted.items(), told, strict=True)}


def _ends(work: Work) -> bool:
    """Whether a token is wanted: the work reaches the end of its sequence."""
    return work.sequence.computed + work.count == work.sequence.length


def _sampling(work: Work) -> SamplingParams:
    """How the last row of a work is sampled: the cheapest way where no token is wanted and only NaNs are looked for."""
    return work.sequence.request.sampling if _ends(work) else SamplingParams(1, temperature=0)
