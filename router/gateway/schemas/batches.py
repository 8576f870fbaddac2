"""Request body of OpenAI's Batch API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from router.gateway.schemas.common import Metadata, Strict

MIN_KEEP_S, MAX_KEEP_S = 3600, 30 * 86_400
KeepS = Annotated[int, Field(ge=MIN_KEEP_S, le=MAX_KEEP_S)]


class ExpiresAfter(Strict):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: KeepS


class BatchRequest(Strict):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
