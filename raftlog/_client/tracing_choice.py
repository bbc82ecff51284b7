"""The choice to trace: OpenTelemetry is imported only if a client traces, and calls carry the current span."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from raftlog._client.options import ConsumerOptions, ProducerOptions
from raftlog._core.traceparent import TRACEPARENT, Traceparent
from raftlog._installed import install
from raftlog.errors import InvalidConfig

if TYPE_CHECKING:
    from raftlog._tracing import ConsumerTracing, ProducerTracing


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata with which the server continues the current trace; empty without a sampled span.

    An application that has a span has already imported OpenTelemetry, so this function never imports it.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ()
    context = trace.get_current_span().get_span_context()
    parent = Traceparent(context.trace_id, context.span_id, int(context.trace_flags))
    return ((TRACEPARENT, str(parent)),) if context.is_valid and parent.sampled else ()


def producer_tracing(options: ProducerOptions) -> ProducerTracing | None:
    """Return the tracing of a producer, or None with `tracing=False`.

    Raises:
        InvalidConfig: OpenTelemetry is not installed.
    """
    if not options.tracing:
        return None
    try:
        from raftlog._tracing import ProducerTracing
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    return ProducerTracing(options.client_id)


def consumer_tracing(options: ConsumerOptions) -> ConsumerTracing | None:
    """Return the tracing of a consumer, or None with `tracing=False`.

    Raises:
        InvalidConfig: OpenTelemetry is not installed.
    """
    if not options.tracing:
        return None
    try:
        from raftlog._tracing import ConsumerTracing
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    return ConsumerTracing(options.client_id, options.group_id)


def _not_installed(error: ModuleNotFoundError) -> Exception:
    if not (error.name or "").startswith("opentelemetry"):
        return error
    return InvalidConfig(
        f"tracing=true: OpenTelemetry is not installed ({error}); install it with {install('otel')}; or "
        "leave tracing out"
    )
