"""What the spans of clients and of brokers have in common. Imported only where something traces."""

from __future__ import annotations

from typing import Final

from opentelemetry.trace import Span, SpanContext, Status, StatusCode, TraceFlags, TraceState

from raftlog._core.traceparent import Traceparent

SYSTEM: Final = "raftlog"
"""The attribute `messaging.system`."""


def fail(span: Span, error: BaseException) -> None:
    """Say in a span, which goes on, what went wrong."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))


def remote_context(parent: Traceparent, state: TraceState | None = None) -> SpanContext:
    """Return what OpenTelemetry calls a span elsewhere."""
    return SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(parent.flags), state)


def traceparent_of(context: SpanContext) -> Traceparent:
    """Return how others refer to a span."""
    return Traceparent(context.trace_id, context.span_id, int(context.trace_flags))
