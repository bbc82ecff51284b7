"""The current span, as metadata of a call."""

from __future__ import annotations

import sys
from typing import Any

from raftlog._core.traceparent import TRACEPARENT, Traceparent


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Return what a call is to carry so that its server goes on with the trace; nothing where none is sampled.

    Who has a span has loaded OpenTelemetry: where nobody has, there is nothing to ask.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ()
    context = trace.get_current_span().get_span_context()
    parent = Traceparent(context.trace_id, context.span_id, int(context.trace_flags))
    return ((TRACEPARENT, str(parent)),) if context.is_valid and parent.sampled else ()
