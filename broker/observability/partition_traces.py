"""The spans of one partition's records on this broker, for sampled traces.

The producer sends its trace with a batch (a Kafka client only with the records), and the leader passes it on with a
frame:

    send          the producer's (raftlog/_tracing.py)
      append      on the leader: until the producer is answered
        commit    from the append until as many replicas as requested have the records
      replicate   on a follower: until the records are durable
      fetch       on the broker that serves a consumer: from the read until the frame is written

Records outside of any sampled trace cost a check of an empty list.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from broker.quotas.new_producers import AdmitProducer
from raftlog._core.traceparent import MAX_TRACES, Traceparent, sampled_traces
from raftlog._tracing import SYSTEM, fail, remote_context, traceparent_of
from raftlog.format import BatchHeader, Buffer
from replication.high_watermark import Answer

MAX_RANGES: Final = 256
"""Batches whose traces a partition remembers, for later followers and consumers."""


class Appended(Protocol):
    """`broker.partition.partition.Partition` as far as an append needs it."""

    @property
    def log_end_offset(self) -> int: ...

    def append(
        self,
        batch: Buffer,
        leader_epoch: int,
        answer: Answer | None,
        *,
        all_replicas: bool = False,
        checked: BatchHeader | None = None,
        session_epoch: int = -1,
        admit_producer: AdmitProducer | None = None,
    ) -> tuple[int, int]:
        """Append a batch; return its base offset and log append time."""
        ...


def remote_parent(parent: Traceparent) -> Context:
    """Return a context for children of a span on another process."""
    return set_span_in_context(NonRecordingSpan(remote_context(parent)))


class PartitionTraces:
    """The traces of one partition, for the event loop only. Remembers those of the last MAX_RANGES traced batches."""

    def __init__(self, tracer: Tracer, topic: str, partition: int) -> None:
        self._tracer = tracer
        self._topic = topic
        self._attributes: dict[str, AttributeValue] = {
            "messaging.system": SYSTEM,
            "messaging.destination.name": topic,
            "messaging.destination.partition.id": str(partition),
        }
        self._ranges: deque[tuple[int, int, tuple[str, ...]]] = deque(maxlen=MAX_RANGES)
        """Begin, end (exclusive) and spans of each batch, by offset."""

    def __len__(self) -> int:
        return len(self._ranges)

    def note(self, begin: int, end: int, traceparents: Sequence[str]) -> None:
        """Remember the spans of the records from `begin` to `end` (exclusive); drop older ones that reach beyond it."""
        while self._ranges and self._ranges[-1][1] > begin:
            self._ranges.pop()
        self._ranges.append((begin, end, tuple(traceparents[:MAX_TRACES])))

    def between(self, begin: int, end: int) -> list[str]:
        """Return the spans of records from `begin` to `end` (exclusive), at most the newest `MAX_TRACES`."""
        found: list[str] = []
        for first, behind, traceparents in reversed(self._ranges):
            if behind <= begin or len(found) >= MAX_TRACES:
                break
            if first < end:
                found += traceparents
        return found[:MAX_TRACES]

    def start(
        self, name: str, parent: Traceparent, kind: SpanKind, operation: str = "", start_ns: int | None = None
    ) -> Span:
        """Begin a span of this partition. `operation`: its name in OpenTelemetry's messaging conventions, if any."""
        span = self._tracer.start_span(
            f"{name} {self._topic}", remote_parent(parent), kind, self._attributes, start_time=start_ns
        )
        span.set_attribute("messaging.operation.name", name)
        if operation:
            span.set_attribute("messaging.operation.type", operation)
        return span

    def append(
        self,
        partition: Appended,
        traceparents: Sequence[str],
        batch: Buffer,
        leader_epoch: int,
        answer: Answer | None,
        *,
        all_replicas: bool = False,
        checked: BatchHeader | None = None,
        session_epoch: int = -1,
        admit_producer: AdmitProducer | None = None,
    ) -> tuple[int, int]:
        """Append a batch with spans around it; returns and raises as `partition.append` does."""
        parents = sampled_traces(traceparents)
        spans = _Appending(self, parents, len(batch), all_replicas=all_replicas)
        begin = partition.log_end_offset
        try:
            base_offset, timestamp_ms = partition.append(
                batch,
                leader_epoch,
                None if answer is None else spans.answering(answer),
                all_replicas=all_replicas,
                checked=checked,
                session_epoch=session_epoch,
                admit_producer=admit_producer,
            )
        except BaseException as error:
            spans.end(error)
            raise
        end = partition.log_end_offset
        if parents and end > begin:  # else the batch is a duplicate
            self.note(begin, end, spans.traceparents())
        spans.appended(base_offset, end - begin, leader_epoch, answered=answer is None)
        return base_offset, timestamp_ms

    def replicate(self, traceparents: Sequence[str]) -> ReplicatedSpans:
        """Begin the spans of records that have arrived from the leader."""
        return ReplicatedSpans(
            [self.start("replicate", parent, SpanKind.SERVER) for parent in sampled_traces(traceparents)]
        )

    def fetched(self, begin: int, end: int, size_bytes: int, begun_s: float, *, from_follower: bool) -> None:
        """Make the spans of records whose read began at `begun_s` (`time.monotonic`) and whose frame has now left."""
        start_ns = time.time_ns() - int((time.monotonic() - begun_s) * 1e9)
        for parent in sampled_traces(self.between(begin, end)):
            span = self.start("fetch", parent, SpanKind.SERVER, start_ns=start_ns)
            span.set_attribute("raftlog.offset.begin", begin)
            span.set_attribute("raftlog.offset.end", end)
            span.set_attribute("raftlog.frame.bytes", size_bytes)
            span.set_attribute("raftlog.from_follower", from_follower)
            span.end()


class _Appending:
    """The spans of one batch: an `append` for each trace, with the wait for the commit inside.

    The answer ends them, or the append if it needs no answer; the two come in any order.
    """

    def __init__(
        self, traces: PartitionTraces, parents: Sequence[Traceparent], size_bytes: int, *, all_replicas: bool
    ) -> None:
        self._traces = traces
        self._spans = [traces.start("append", parent, SpanKind.SERVER) for parent in parents]
        self._commits: list[Span] = []
        self._answered = False
        for span in self._spans:
            span.set_attribute("raftlog.acks", "all" if all_replicas else "leader")
            span.set_attribute("raftlog.batch.bytes", size_bytes)

    def answering(self, answer: Answer) -> Answer:
        """Return `answer`, which first ends the spans."""

        def answered(error: BaseException | None) -> None:
            self._answered = True
            self.end(error)
            answer(error)

        return answered

    def appended(self, base_offset: int, records: int, leader_epoch: int, *, answered: bool) -> None:
        """Note that the batch is in the log; 0 `records` mean a duplicate. `answered`: no answer is pending."""
        for span in self._spans:
            if span.is_recording():
                span.set_attribute("raftlog.base_offset", base_offset)
                span.set_attribute("messaging.batch.message_count", records)
                span.set_attribute("raftlog.leader_epoch", leader_epoch)
        if answered:
            self.end(None)
        elif not self._answered:  # an immediate answer has already ended the spans
            self._commits = [
                self._traces.start("commit", traceparent_of(span.get_span_context()), SpanKind.INTERNAL)
                for span in self._spans
            ]

    def end(self, error: BaseException | None) -> None:
        """End the spans that have not ended."""
        for span in (*self._commits, *self._spans):
            if span.is_recording():
                if error is not None:
                    fail(span, error)
                span.end()

    def traceparents(self) -> list[str]:
        """Return the spans' traceparents, for children on other nodes."""
        return [str(traceparent_of(span.get_span_context())) for span in self._spans]


class ReplicatedSpans:
    """The spans of records on a follower; `appended`, then `end`."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self.end_offset = 0
        """Exclusive: where the records end."""

    def appended(self, begin: int, end: int) -> None:
        """Note that the records are in the log, and not durable yet."""
        self.end_offset = end
        for span in self._spans:
            span.set_attribute("raftlog.base_offset", begin)
            span.set_attribute("messaging.batch.message_count", end - begin)

    def end(self, error: BaseException | None = None) -> None:
        """End the spans: the records are durable, or never will be."""
        for span in self._spans:
            if error is not None:
                fail(span, error)
            span.end()
