"""Errors as OpenAI's clients expect them: a status and an object with message, type, param and code."""

from __future__ import annotations

import math
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

_TYPES = {408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}
"""Where OpenAI's type is not that of its class of statuses. An unknown key or model, too, is an `invalid_request_error`
there: the status tells them apart, and `code`."""


MAX_RETRY_AFTER_S = 120


class ErrorObject(BaseModel):
    """What went wrong. `param` is the field that is at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorObject


class ApiError(Exception):
    """An answer that is an error. `param` names the field; `retry_after_s` becomes a header."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}
        if self.status == 408:
            headers["Connection"] = "close"  # the rest of the request must not be taken for the next one
        return JSONResponse(self.body(), self.status, headers=headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's mistake: 400."""
    return ApiError(400, message, param, code)


def overloaded(message: str, wait_s: float = 0.0) -> ApiError:
    """Every candidate's queue is at its bound: 429. There may be room in `wait_s` seconds."""
    return ApiError(429, message, code="overloaded", retry_after_s=min(max(1, math.ceil(wait_s)), MAX_RETRY_AFTER_S))


def unavailable(message: str) -> ApiError:
    """Nobody could serve this now: 503."""
    return ApiError(503, message, code="unavailable", retry_after_s=2)


def deadline(message: str) -> ApiError:
    """Accepted, and not completed before its deadline: 504."""
    return ApiError(504, message, code="deadline_exceeded")


def failed(message: str) -> ApiError:
    """Accepted and then not completed: 500."""
    return ApiError(500, message, code="failed")
