"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from router.gateway.schemas.chat import Message, Tools
from router.gateway.schemas.common import Items, Strict


class TokenizeRequest(Strict):
    """A `prompt`, or the `messages` of a chat."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, fail_fast=True)
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str
    tokens: Items[int]
