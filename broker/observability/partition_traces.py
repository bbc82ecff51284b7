"""The spans of one partition's records on this broker, for those traces that are sampled.

What a producer says of a batch begins it, what the leader says of a frame goes on with it:

    send          the producer's (raftlog/_tracing.py)
      append      here, on the leader: until the producer is answered
        commit    from the append until it is held as asked
      replicate   here, on a follower: until the records are held
      fetch       here, on whoever is read from: from the read until the frame is written

All of it is asked for only where records belong to a sampled trace; who is not, costs a look at an empty list.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from raftlog._core.traceparent import MAX_TRACES, Traceparent, sampled_traces
from raftlog._spans import SYSTEM, fail, remote_context, traceparent_of
from raftlog.format import BatchHeader, Buffer
from replication.pending_acks import Answer

MAX_RANGES: Final = 256
"""Batches of which a partition remembers the traces, for the followers and readers that are to come."""


class Appended(Protocol):
    """The part of `broker.partition.Partition` that a batch is appended to."""

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
    ) -> tuple[int, int]:
        """Append a batch; return its base offset and log append time."""
        ...


def remote_parent(parent: Traceparent) -> Context:
    """Return the context whose spans are children of a span elsewhere."""
    return set_span_in_context(NonRecordingSpan(remote_context(parent)))


class PartitionTraces:
    """Of one partition. Used on the event loop's thread.

    Bounded: the traces of the last `MAX_RANGES` batches are remembered, of those that belong to one.
    """

    def __init__(self, tracer: Tracer, topic: str, partition: int) -> None:
        self._tracer = tracer
        self._topic = topic
        self._attributes: dict[str, AttributeValue] = {
            "messaging.system": SYSTEM,
            "messaging.destination.name": topic,
            "messaging.destination.partition.id": str(partition),
        }
        self._ranges: deque[tuple[int, int, tuple[str, ...]]] = deque(maxlen=MAX_RANGES)
        """Begin, end (exclusive) and spans of batches, by offset."""

    def __len__(self) -> int:
        return len(self._ranges)

    def note(self, begin: int, end: int, traceparents: Sequence[str]) -> None:
        """Remember of which spans the records from `begin` to `end` (exclusive) are; what was there before is cut."""
        while self._ranges and self._ranges[-1][1] > begin:
            self._ranges.pop()
        self._ranges.append((begin, end, tuple(traceparents[:MAX_TRACES])))

    def between(self, begin: int, end: int) -> list[str]:
        """Return the spans of records from `begin` to `end` (exclusive), `MAX_TRACES` of the newest at most."""
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
        """Begin a span of this partition. `operation`: what the messaging conventions call it, if they do."""
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
    ) -> tuple[int, int]:
        """Append a batch with spans around it; as `partition.append` does, which may raise."""
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
            )
        except BaseException as error:
            spans.end(error)
            raise
        end = partition.log_end_offset
        if parents and end > begin:  # else it was appended before
            self.note(begin, end, spans.traceparents())
        spans.appended(base_offset, end - begin, leader_epoch, answered=answer is None)
        return base_offset, timestamp_ms

    def replicate(self, traceparents: Sequence[str]) -> ReplicatedSpans:
        """Begin the spans of records that have come from the leader."""
        return ReplicatedSpans(
            [self.start("replicate", parent, SpanKind.SERVER) for parent in sampled_traces(traceparents)]
        )

    def fetched(self, begin: int, end: int, size_bytes: int, begun_s: float, *, from_follower: bool) -> None:
        """Make the spans of records that were read from `begun_s` on, as `time.monotonic` says, and have left now."""
        start_ns = time.time_ns() - int((time.monotonic() - begun_s) * 1e9)
        for parent in sampled_traces(self.between(begin, end)):
            span = self.start("fetch", parent, SpanKind.SERVER, start_ns=start_ns)
            span.set_attribute("raftlog.offset.begin", begin)
            span.set_attribute("raftlog.offset.end", end)
            span.set_attribute("raftlog.frame.bytes", size_bytes)
            span.set_attribute("raftlog.from_follower", from_follower)
            span.end()


class _Appending:
    """The spans of one batch: one `append` for each trace, and in it the wait for the commit.

    Ended by the answer, or by the append where nobody is answered; the two come in any order.
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
        """Return `answer` with the end of the spans before it."""

        def answered(error: BaseException | None) -> None:
            self._answered = True
            self.end(error)
            answer(error)

        return answered

    def appended(self, base_offset: int, records: int, leader_epoch: int, *, answered: bool) -> None:
        """The batch is in the log; no records: it was before. `answered`: nobody waits for more."""
        for span in self._spans:
            if span.is_recording():
                span.set_attribute("raftlog.base_offset", base_offset)
                span.set_attribute("messaging.batch.message_count", records)
                span.set_attribute("raftlog.leader_epoch", leader_epoch)
        if answered:
            self.end(None)
        elif not self._answered:  # an answer that came at once has ended the spans
            self._commits = [
                self._traces.start("commit", traceparent_of(span.get_span_context()), SpanKind.INTERNAL)
                for span in self._spans
            ]

    def end(self, error: BaseException | None) -> None:
        """End all of them; those that have ended are fine."""
        for span in (*self._commits, *self._spans):
            if span.is_recording():
                if error is not None:
                    fail(span, error)
                span.end()

    def traceparents(self) -> list[str]:
        """Return the spans for others to refer to."""
        return [str(traceparent_of(span.get_span_context())) for span in self._spans]


class ReplicatedSpans:
    """The spans of records on a follower; `appended`, then `end`."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self.end_offset = 0
        """Exclusive: where the records end."""

    def appended(self, begin: int, end: int) -> None:
        """The records are in the log, and not held yet."""
        self.end_offset = end
        for span in self._spans:
            span.set_attribute("raftlog.base_offset", begin)
            span.set_attribute("messaging.batch.message_count", end - begin)

    def end(self, error: BaseException | None = None) -> None:
        """The records are held, or never will be."""
        for span in self._spans:
            if error is not None:
                fail(span, error)
            span.end()
