"""What the other chat formats share on their way to a chat request and back to their clients."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from router.gateway.errors import ApiError
from router.gateway.schemas.chat import ChatRequest
from router.gateway.schemas.common import validate


def new_id(prefix: str) -> str:
    """A name for an object or a part of one."""
    return f"{prefix}_{uuid.uuid4().hex}"


def typed_event(data: dict[str, Any]) -> bytes:
    """A server-sent event named by its `type`, in ASCII: some clients end lines at separators of Unicode."""
    return f"event: {data['type']}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def chat_request(**fields: Any) -> ChatRequest:
    """The chat request with those of the fields that are not None. Raises ApiError 400 in the chat's terms."""
    return validate(ChatRequest, {name: value for name, value in fields.items() if value is not None})


@contextmanager
def named(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a field of the chat request, or a part of one, name the client's own instead."""
    try:
        yield
    except ApiError as error:
        theirs = error.param or ""
        for field, own in fields.items():
            if theirs == field or theirs.startswith(f"{field}."):
                param = own + theirs.removeprefix(field)
                message = error.message
                if message.startswith(f"{theirs}:"):
                    message = param + message.removeprefix(theirs)
                raise ApiError(error.status, message, param, error.code, error.retry_after_s) from None
        raise
