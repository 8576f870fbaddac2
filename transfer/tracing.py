"""Traces across processes: a request carries the span that it belongs to, in the form of W3C's `traceparent`."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, ProxyTracerProvider, Span, SpanContext, TraceFlags


def enabled() -> bool:
    """Whether this process records any traces."""
    return not isinstance(trace.get_tracer_provider(), ProxyTracerProvider)


def carried(span: Span) -> str:
    """What others need to go on with a span; empty where it is not recorded, so that they record nothing either."""
    if not span.is_recording():
        return ""
    about = span.get_span_context()
    return f"00-{about.trace_id:032x}-{about.span_id:016x}-{about.trace_flags:02x}"


def parent(traceparent: str) -> Context:
    """The context of spans that belong to one that was `carried` here."""
    _, trace_id, span_id, flags = traceparent.split("-")
    about = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return trace.set_span_in_context(NonRecordingSpan(about))
