"""`POST /v1/embeddings`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.gateway.schemas.common import MAX_PRIORITY, MAX_SALT_CHARS, MAX_TENANT_CHARS, Finite, Items, Strict


class EmbeddingRequest(Strict):
    """Texts to embed, or their tokens. Embeddings have the model's own size: `dimensions` is refused."""

    model: str
    input: str | Items[int] | Items[str] | Items[Items[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: None = None
    user: str | None = Field(None, max_length=MAX_TENANT_CHARS)
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    timeout: Annotated[Finite, Field(gt=0)] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)

    @property
    def tenant(self) -> str:
        """Between whom workers divide their time."""
        return self.user or ""
