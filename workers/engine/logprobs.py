"""Log-probabilities of tokens, from the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from transfer.messages import TokenLogprobs


def logprobs(logits: torch.Tensor, tokens: Items[int], top: int) -> list[TokenLogprobs]:
    """For rows of logits `[n, vocab]`, float32: of `tokens[i]` in row i, and of its `top` likeliest."""
    values = torch.log_softmax(logits, dim=-1)
    chosen = values.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None])[:, 0].tolist()
    best = torch.topk(values, min(top, logits.shape[-1]))
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids, numbers, strict=True)))
        for token, logprob, (ids, numbers) in zip(tokens, chosen, likeliest, strict=True)
    ]
