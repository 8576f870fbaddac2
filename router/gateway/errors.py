"""Errors as OpenAI's clients expect them: a status and an object with message, type, param and code."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse


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
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else None
        return JSONResponse(self.body(), self.status, headers=headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The client's mistake: 400."""
    return ApiError(400, message, param, code)


def overloaded(message: str) -> ApiError:
    """Every candidate's queue is at its bound: 429."""
    return ApiError(429, message, code="overloaded", retry_after_s=1)


def unavailable(message: str) -> ApiError:
    """Nobody could serve this now: 503."""
    return ApiError(503, message, code="unavailable", retry_after_s=2)


def failed(message: str) -> ApiError:
    """Accepted and then not completed: 500."""
    return ApiError(500, message, code="failed")


def expired(message: str) -> ApiError:
    """Accepted and not completed within the time that it may take: 504."""
    return ApiError(504, message, code="deadline_exceeded")
