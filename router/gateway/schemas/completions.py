"""`POST /v1/completions`."""

from __future__ import annotations

from pydantic import Field

from router.gateway.schemas.common import INT64, MAX_CHOICES, MAX_TOP_LOGPROBS, Items, Sampling


class CompletionRequest(Sampling):
    """A completion request."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    max_tokens: int | None = Field(None, ge=0, lt=INT64)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    suffix: None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt, of which the best `n` are returned."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def logprobs_wanted(self) -> int | None:
        """As many as `logprobs` says; choosing the best answers needs each token's own."""
        return self.logprobs if self.logprobs is not None or self.choices == (self.n or 1) else 0

    @property
    def prompt_logprobs_wanted(self) -> int | None:
        """`echo` tells of the prompt what `logprobs` tells of the answer."""
        return self.prompt_logprobs if self.prompt_logprobs is not None or not self.echo else self.logprobs
