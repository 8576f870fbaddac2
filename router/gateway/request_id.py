"""The name of the request that is being served, by which a client and the log's lines can name the same one."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

HEADER = "x-request-id"
MAX_CHARS = 128
current: ContextVar[str] = ContextVar("request_id", default="")
"""In every task that a request starts; empty elsewhere."""
_PRINTABLE = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


def chosen(given: bytes | None) -> str:
    """The client's own name for its request if it is printable ASCII and not too long, otherwise a new one. It names
    nothing inside of the cluster: two clients may choose the same."""
    if given is not None and len(given) <= MAX_CHARS and _PRINTABLE.fullmatch(given):
        return given.decode("ascii")
    return f"req_{uuid.uuid4().hex}"
