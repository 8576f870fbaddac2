"""PromptRows: what is wanted of each token of a prompt, gathered over the chunks in which it is computed."""

from __future__ import annotations

import numpy as np
import torch

from transfer.messages import TokenLogprobs
from workers.engine.logprobs import logprobs

ROWS_AT_ONCE = 64
"""Rows of logits that are turned into log-probabilities at once; it bounds the memory that this takes."""


class PromptRows:
    """Of a sequence's prompt. A prompt that is pushed back is computed again; what is known by then stays as it is."""

    def __init__(self, prompt: np.ndarray, top: int | None) -> None:
        self._prompt = prompt
        self._top = top
        self._hidden: np.ndarray | None = None
        self._pooled = 0
        self.logprobs: list[TokenLogprobs] = []

    def add_logits(self, start: int, logits: torch.Tensor) -> None:
        """Logits `[n, vocab]` of the tokens from number `start` on; row i tells of token `start + i + 1`."""
        assert self._top is not None
        first = len(self.logprobs)
        last = min(start + logits.shape[0], len(self._prompt) - 1)
        for begin in range(first, last, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, last)
            tokens = self._prompt[begin + 1 : end + 1].tolist()
            self.logprobs += logprobs(logits[begin - start : end - start], tokens, self._top)

    def add_hidden(self, start: int, hidden: torch.Tensor) -> None:
        """Last hidden states `[n, size]` of the tokens from number `start` on."""
        end = min(start + hidden.shape[0], len(self._prompt))
        if end > self._pooled:
            new = hidden[self._pooled - start : end - start].double().sum(dim=0).cpu().numpy()
            self._hidden = new if self._hidden is None else self._hidden + new
            self._pooled = end

    @property
    def embedding(self) -> bytes:
        """The mean of the hidden states, little-endian float32."""
        assert self._hidden is not None
        mean: np.ndarray = self._hidden / self._pooled
        return mean.astype("<f4").tobytes()
