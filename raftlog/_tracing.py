"""The spans of clients, by OpenTelemetry's conventions for messaging. Imported only with `tracing=True`.

    send        for each `send`, or `send_batch`, within a sampled span: until the acknowledgement
    poll        for each poll that returns records of sampled traces, with a link to each of them

A record carries the headers `traceparent` and `tracestate` of the span `send`, or of the current span if that is not
sampled. Brokers continue the trace (`broker/observability/partition_traces.py`), with the helpers of this module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import pyarrow.compute as pc
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from raftlog._core.rows import header_entries
from raftlog._core.traceparent import TRACEPARENT, TRACESTATE, Traceparent, parse_traceparent
from raftlog._delivery import when_done
from raftlog.types import VERSION, Header

if TYPE_CHECKING:
    from raftlog._core.accumulator import Batch
    from raftlog._core.positions import Rows


SYSTEM: Final = "raftlog"
"""The attribute `messaging.system`."""


def fail(span: Span, error: BaseException) -> None:
    """Record an error in a span, without ending it."""
    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))


def remote_context(parent: Traceparent, state: TraceState | None = None) -> SpanContext:
    """Return OpenTelemetry's reference to a span in another process."""
    return SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(parent.flags), state)


def traceparent_of(context: SpanContext) -> Traceparent:
    """Return the `traceparent` header of a span."""
    return Traceparent(context.trace_id, context.span_id, int(context.trace_flags))


MAX_LINKS: Final = 128
"""The most links in one span: OpenTelemetry keeps no more by default."""
_NAMES: Final = (TRACEPARENT, TRACESTATE)


def tracer() -> trace.Tracer:
    """Return the tracer of the application's provider."""
    return trace.get_tracer("raftlog", VERSION)


def span_context_of(headers: Iterable[Header]) -> SpanContext | None:
    """Return the span that a record's headers name, or None."""
    parent, state = None, None
    for name, content in headers:
        if name == TRACEPARENT:
            parent = parse_traceparent(content)
        elif name == TRACESTATE and content is not None:
            state = TraceState.from_header([content.decode("ascii", "replace")])
    return None if parent is None else remote_context(parent, state)


class Sending:
    """The trace of one `send`: the headers of its records, and its span.

    `span` is None if nothing is recorded; `traceparent` is None if brokers do not take part.
    """

    __slots__ = ("_left", "_lock", "headers", "span", "traceparent")

    def __init__(self, headers: tuple[Header, ...], traceparent: str | None, span: Span | None) -> None:
        self.headers = headers
        self.traceparent = traceparent
        self.span = span
        self._left = 0
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Record that the records were not queued."""
        if self.span is not None:
            fail(self.span, error)
            self.span.end()

    def follow(self, batches: Sequence[Batch], index: int | None = None) -> None:
        """End the span once these batches are done. `index`: the position of a single record in them."""
        span = self.span
        if span is None:
            return
        self._left = len(batches) + 1
        for batch in batches:
            done = self._done(batch, index)
            if not when_done(batch, done):
                done()
        self._one_less()

    def _done(self, batch: Batch, index: int | None) -> Callable[[], None]:
        def done() -> None:
            assert self.span is not None
            leaves = batch.leaves() if index is None else [batch.leaf(index)[0]]
            error = next((leaf.error for leaf in leaves if leaf.error is not None), None)
            if error is not None:
                fail(self.span, error)
            elif index is not None:
                place = batch.metadata(index)
                self.span.set_attribute("messaging.destination.partition.id", str(place.partition))
                self.span.set_attribute("raftlog.offset", place.offset)
            self._one_less()

        return done

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last and self.span is not None:
            self.span.end()


_NOTHING: Final = Sending((), None, None)


class ProducerTracing:
    """Makes the spans of one producer. Any thread may ask."""

    def __init__(self, client_id: str) -> None:
        self._tracer = tracer()
        self._attributes: dict[str, AttributeValue] = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.client.id": client_id,
        }

    def begin(self, topic: str, headers: tuple[Header, ...] = ()) -> Sending:
        """Begin a `send` with these headers; it has a span if the current one is sampled.

        Without a current span the headers stay unchanged, so a forwarded record keeps its context.
        """
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            if not headers:
                return _NOTHING
            given = span_context_of(headers)
            sampled = given is not None and given.trace_flags.sampled
            return Sending(headers, str(traceparent_of(given)) if given is not None and sampled else None, None)
        span = None
        if context.trace_flags.sampled:
            span = self._tracer.start_span(
                f"send {topic}",
                kind=SpanKind.PRODUCER,
                attributes={**self._attributes, "messaging.destination.name": topic},
            )
            context = span.get_span_context()
            if not span.is_recording():
                span = None
        traceparent = str(traceparent_of(context))
        own: list[Header] = [(TRACEPARENT, traceparent.encode())]
        if context.trace_state:
            own.append((TRACESTATE, context.trace_state.to_header().encode()))
        others = tuple(pair for pair in headers if pair[0] not in _NAMES)
        return Sending((*others, *own), traceparent if context.trace_flags.sampled else None, span)


class ConsumerTracing:
    """Makes the spans of one consumer."""

    def __init__(self, client_id: str, group_id: str) -> None:
        self._tracer = tracer()
        self._attributes: dict[str, AttributeValue] = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "poll",
            "messaging.operation.type": "receive",
            "messaging.client.id": client_id,
        }
        if group_id:
            self._attributes["messaging.consumer.group.name"] = group_id

    @staticmethod
    def begin() -> int:
        """Note that a poll begins; return its time."""
        return time.time_ns()

    def end(self, begun_ns: int, chunks: Sequence[Rows]) -> None:
        """Record a span for a poll, if any of its rows belongs to a sampled trace."""
        links = list(islice(chain.from_iterable(map(_links, chunks)), MAX_LINKS))
        if not links:
            return
        topics = {rows.topic_partition.topic for rows in chunks}
        attributes = {**self._attributes, "messaging.batch.message_count": sum(map(len, chunks))}
        name = "poll"
        if len(topics) == 1:
            attributes["messaging.destination.name"] = topic = topics.pop()
            name = f"poll {topic}"
        span = self._tracer.start_span(
            name, kind=SpanKind.CLIENT, attributes=attributes, links=links, start_time=begun_ns
        )
        span.end()


def _links(rows: Rows) -> Iterator[Link]:
    """Yield a link to each sampled span that the rows name, once."""
    headers: Any = rows.column("headers")
    if headers is None:
        return
    names, contents, _ = header_entries(headers)
    for text in contents.filter(pc.equal(names, TRACEPARENT)).unique():
        parent = parse_traceparent(text.as_py())
        if parent is not None and parent.sampled:
            yield Link(remote_context(parent))
