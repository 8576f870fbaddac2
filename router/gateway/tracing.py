"""The gateway's spans: one of the server for each request (`middleware.Traced`), by the conventions for generative AI,
in it one for each attempt, and in these the router's decisions. What workers do belongs to the attempt that asked them.

Where a request is not sampled, nothing of this is computed. No attribute has what prompts, answers or keys say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode

from transfer.messages import Plan

if TYPE_CHECKING:
    from router.gateway.jobs import Job

_tracer = trace.get_tracer("headwater.gateway")
MAX_WHY = 4096
"""Characters of a plan's reasons."""


def asked(operation: str, model: str, jobs: Sequence[Job]) -> None:
    """What the request that is being served wants: an operation of GenAI's conventions, of a model that is served."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    sampling = jobs[0].sampling
    span.update_name(f"{operation} {model}")
    span.set_attributes(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headwater",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.choice.count": len(jobs),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.usage.input_tokens": sum(job.prompt_tokens for job in jobs if job.leads),
        }
    )


@contextmanager
def attempt(number: int) -> Iterator[Span]:
    """The span of an attempt at a prompt of the request that is being served."""
    if not trace.get_current_span().is_recording():
        yield INVALID_SPAN
        return
    span = _tracer.start_span("attempt", attributes={"headwater.attempt": number})
    try:
        yield span
    except (GeneratorExit, asyncio.CancelledError):
        span.set_attribute("headwater.aborted", True)
        raise
    except Exception as error:
        failed(span, type(error).__name__)
        raise
    finally:
        span.end()


def routed(attempt: Span, request_id: str, begun: int, plan: Plan) -> None:
    """The router has made a plan for an attempt; it began at `begun` (ns)."""
    if not attempt.is_recording():
        return
    attempt.set_attribute("headwater.request_id", request_id)
    about: dict[str, Any] = {
        "headwater.prefill": plan.prefill,
        "headwater.decode": plan.decode or plan.prefill,
        "headwater.cached_tokens": plan.cached,
        "headwater.queued_tokens": plan.queued_tokens,
        "headwater.why": json.dumps(plan.why, default=str)[:MAX_WHY],
    }
    if plan.fetch is not None:
        about["headwater.fetch"] = f"{plan.fetch.tokens} tokens from {plan.fetch.worker}"
    span = _tracer.start_span("route", trace.set_span_in_context(attempt), attributes=about, start_time=begun)
    span.end()


def failed(attempt: Span, reason: str, moved: bool = False) -> None:
    """Another attempt has to go on, since this one has failed, or since a worker leaves (`moved`)."""
    if moved:
        attempt.set_attribute("headwater.moved", True)
    else:
        attempt.set_status(Status(StatusCode.ERROR, reason))
