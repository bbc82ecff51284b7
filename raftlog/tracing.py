"""OpenTelemetry traces for consumers: from a record to its trace.

Needs the extra `raftlog[otel]`. A producer made with `tracing=True` puts the context of the current span into the
headers of its records; docs/tracing.md explains traces from end to end.

    with Consumer(bootstrap, "billing", tracing=True) as consumer:
        consumer.subscribe("orders")
        for record in consumer:
            with tracing.process(record):
                handle(record)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from raftlog._installed import install
from raftlog.types import Record

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanKind

    from raftlog._tracing import MAX_LINKS, SYSTEM, span_context_of, tracer
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("opentelemetry"):
        raise
    raise ModuleNotFoundError(
        f"raftlog.tracing needs OpenTelemetry ({error}); install it with {install('otel')}", name=error.name
    ) from None

__all__ = ["context_of", "link_of", "process"]


def context_of(record: Record[Any, Any]) -> Context | None:
    """Return the context in which a record was sent, as the parent of new spans; None if it carries none."""
    context = span_context_of(record.headers)
    return None if context is None else trace.set_span_in_context(NonRecordingSpan(context), Context())


def link_of(record: Record[Any, Any]) -> Link | None:
    """Return a link to the span that sent a record; None if it carries none."""
    context = span_context_of(record.headers)
    return None if context is None else Link(context)


@contextmanager
def process(records: Record[Any, Any] | Iterable[Record[Any, Any]], name: str = "process") -> Iterator[Span]:
    """Run the block in a span named `name` and the topic, with links to the senders of these records, at most 128.

    Inside another span, the new span is its child. Otherwise the span of a single record continues the record's trace,
    and that of several records begins a trace. The span records an exception that leaves the block.
    """
    several = [records] if isinstance(records, Record) else list(records)
    links = list(filter(None, map(link_of, several)))[:MAX_LINKS]
    attributes: dict[str, str | int] = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": "process",
    }
    parent: Context | None = None
    topics = {record.topic for record in several}
    if len(topics) == 1:
        attributes["messaging.destination.name"] = several[0].topic
    if isinstance(records, Record):
        attributes["messaging.destination.partition.id"] = str(records.partition)
        attributes["raftlog.offset"] = records.offset
        if not trace.get_current_span().get_span_context().is_valid:
            parent = context_of(records)
    else:
        attributes["messaging.batch.message_count"] = len(several)
    title = f"{name} {several[0].topic}" if len(topics) == 1 else name
    with tracer().start_as_current_span(title, parent, SpanKind.CONSUMER, attributes, links) as span:
        yield span
