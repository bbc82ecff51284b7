"""What a client counts of its own work, and how that is shown: under the names of Kafka's client metrics. Pure.

Groups are Kafka's, with what its tags say appended as kafka-python does: `producer-topic-metrics.orders`,
`producer-node-metrics.node-1`, `consumer-fetch-manager-metrics.orders.0`. Times are in ms, sizes in bytes, rates for
each second, over the last half minute (`meters.py`); a name in `-total` only rises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from raftlog._core.batch import Batch
from raftlog._core.meters import Meter
from raftlog.types import TopicPartition

Figures = dict[str, dict[str, float]]
"""Group -> name -> value."""


def rate_and_total(name: str, meter: Meter, now_s: float) -> dict[str, float]:
    """Return `NAME-rate` and `NAME-total`."""
    return {f"{name}-rate": meter.rate(now_s), f"{name}-total": meter.total}


def average_and_max(name: str, meter: Meter, now_s: float) -> dict[str, float]:
    """Return `NAME-avg` and `NAME-max`."""
    return {f"{name}-avg": meter.average(now_s), f"{name}-max": meter.largest(now_s)}


class CallFigures:
    """Requests to brokers: of an admin client all of them, of a producer those to one node."""

    def __init__(self, now_s: float) -> None:
        self.requests = Meter(now_s)
        self.latency_ms = Meter(now_s)
        self.errors = Meter(now_s)
        self.bytes_out = Meter(now_s)

    def answered(self, latency_ms: float, now_s: float, *, failed: bool = False) -> None:
        """A request was answered, or (`failed`) was not."""
        self.latency_ms.add(latency_ms, now_s)
        if failed:
            self.errors.add(1, now_s)

    @contextmanager
    def counted(self, clock_s: Callable[[], float]) -> Iterator[None]:
        """Count a request that is made within; one that raises was not answered."""
        began_s = clock_s()
        self.requests.add(1, began_s)
        failed = True
        try:
            yield
            failed = False
        finally:
            now_s = clock_s()
            self.answered((now_s - began_s) * 1_000, now_s, failed=failed)

    def show(self, now_s: float) -> dict[str, float]:
        """Return the figures by name."""
        return {
            **rate_and_total("request", self.requests, now_s),
            **average_and_max("request-latency", self.latency_ms, now_s),
        }


class _TopicFigures:
    def __init__(self, now_s: float) -> None:
        self.records = Meter(now_s)
        self.bytes = Meter(now_s)
        self.errors = Meter(now_s)
        self.retries = Meter(now_s)


class ProducerFigures:
    """Of one producer. Called under its lock, but for `show` and those that say so."""

    def __init__(self, delivery_timeout_ms: float, now_s: float) -> None:
        self._delivery_timeout_ms = delivery_timeout_ms
        self._born_s = now_s
        self._all = _TopicFigures(now_s)
        self._topics: dict[str, _TopicFigures] = {}
        self._calls = CallFigures(now_s)
        self._nodes: dict[int, CallFigures] = {}
        self._batch_bytes = Meter(now_s)
        self._record_bytes = Meter(now_s)
        self._compression = Meter(now_s)
        self._queue_ms = Meter(now_s)
        self._requests_bytes = Meter(now_s)
        self._requests_records = Meter(now_s)
        self._splits = Meter(now_s)
        self._room_waits_s = Meter(now_s)

    def sent(self, node_id: int, batches: Sequence[Batch], now_s: float) -> None:
        """A request with these batches is about to leave."""
        size = records = 0
        for batch in batches:
            assert batch.encoded is not None, "what is sent has bytes"
            encoded = len(batch.encoded)
            size += encoded
            records += batch.count
            self._batch_bytes.add(encoded, now_s)
            self._record_bytes.add(batch.size_bytes, now_s, batch.count)
            self._compression.add(encoded / max(1, batch.size_bytes), now_s)
            if not batch.failures:
                self._queue_ms.add(max(0.0, now_s * 1_000 - batch.deadline_ms + self._delivery_timeout_ms), now_s)
            self._topic(batch).bytes.add(encoded, now_s)
        self._all.bytes.add(size, now_s)
        self._requests_bytes.add(size, now_s)
        self._requests_records.add(records, now_s)
        for calls in (self._calls, self._node(node_id)):
            calls.requests.add(1, now_s)
            calls.bytes_out.add(size, now_s)

    def answered(self, node_id: int, latency_ms: float, now_s: float) -> None:
        """A request was answered; on the event loop, without the lock."""
        self._calls.answered(latency_ms, now_s)
        self._node(node_id).answered(latency_ms, now_s)

    def done(self, batch: Batch, now_s: float) -> None:
        """A batch was acknowledged, or has failed for good. One that was split counts by its halves."""
        if batch.parts is not None:
            return
        for figures in (self._all, self._topic(batch)):
            (figures.records if batch.error is None else figures.errors).add(batch.count, now_s)

    def retried(self, batch: Batch, now_s: float) -> None:
        """A batch is sent again."""
        for figures in (self._all, self._topic(batch)):
            figures.retries.add(batch.count, now_s)

    def split(self, now_s: float) -> None:
        """A batch was halved, because it was too large."""
        self._splits.add(1, now_s)

    def waited(self, seconds: float, now_s: float) -> None:
        """Somebody has waited for room in `buffer.memory`."""
        self._room_waits_s.add(seconds, now_s)

    def show(self, now_s: float, *, used_bytes: int, buffer_bytes: int, in_flight: int, connections: int) -> Figures:
        """Return everything; from any thread."""
        totals = self._all
        shown: Figures = {
            "producer-metrics": {
                **rate_and_total("record-send", totals.records, now_s),
                **rate_and_total("record-error", totals.errors, now_s),
                **rate_and_total("record-retry", totals.retries, now_s),
                **rate_and_total("outgoing-byte", totals.bytes, now_s),
                **rate_and_total("batch-split", self._splits, now_s),
                **average_and_max("batch-size", self._batch_bytes, now_s),
                "record-size-avg": self._record_bytes.average(now_s),
                "records-per-request-avg": self._requests_records.average(now_s),
                "compression-rate-avg": self._compression.average(now_s),
                **average_and_max("record-queue-time", self._queue_ms, now_s),
                **self._calls.show(now_s),
                **average_and_max("request-size", self._requests_bytes, now_s),
                "requests-in-flight": float(in_flight),
                "buffer-total-bytes": float(buffer_bytes),
                "buffer-available-bytes": float(buffer_bytes - used_bytes),
                "bufferpool-wait-ratio": self._room_waits_s.rate(now_s),
                "bufferpool-wait-time-ns-total": self._room_waits_s.total * 1e9,
                "connection-count": float(connections),
            }
        }
        for topic, figures in sorted(self._topics.copy().items()):
            shown[f"producer-topic-metrics.{topic}"] = {
                **rate_and_total("record-send", figures.records, now_s),
                **rate_and_total("record-error", figures.errors, now_s),
                **rate_and_total("record-retry", figures.retries, now_s),
                **rate_and_total("byte", figures.bytes, now_s),
            }
        for node_id, calls in sorted(self._nodes.copy().items()):
            shown[f"producer-node-metrics.node-{node_id}"] = {
                **calls.show(now_s),
                **rate_and_total("outgoing-byte", calls.bytes_out, now_s),
            }
        return shown

    def _topic(self, batch: Batch) -> _TopicFigures:
        found = self._topics.get(batch.queue.topic)
        if found is None:
            found = self._topics[batch.queue.topic] = _TopicFigures(self._born_s)
        return found

    def _node(self, node_id: int) -> CallFigures:
        found = self._nodes.get(node_id)
        if found is None:
            found = self._nodes[node_id] = CallFigures(self._born_s)
        return found


class ConsumerFigures:
    """Of one consumer."""

    def __init__(self, now_s: float) -> None:
        self._born_s = now_s
        self._frames = Meter(now_s)
        self._records = Meter(now_s)
        self._topics: dict[str, tuple[Meter, Meter]] = {}
        """Records and bytes."""
        self._commits = Meter(now_s)
        self._failed_commits = Meter(now_s)
        self._rebalances = Meter(now_s)
        self._polled_s: float | None = None

    def received(self, topic: str, size: int, now_s: float) -> None:
        """A frame of so many bytes has come; on the event loop."""
        self._frames.add(size, now_s)
        self._topic(topic)[1].add(size, now_s)

    def polled(self, now_s: float) -> None:
        """The application asks for records."""
        self._polled_s = now_s

    def handed_out(self, topic: str, records: int, now_s: float) -> None:
        """It was given so many."""
        self._records.add(records, now_s)
        self._topic(topic)[0].add(records, now_s)

    def committed(self, latency_ms: float, now_s: float, *, failed: bool) -> None:
        """The group's coordinator has answered a commit; `failed`: for some partition with an error."""
        self._commits.add(latency_ms, now_s)
        if failed:
            self._failed_commits.add(1, now_s)

    def rebalanced(self, now_s: float) -> None:
        """Partitions came or went."""
        self._rebalances.add(1, now_s)

    def show(self, now_s: float, *, lags: dict[TopicPartition, int], assigned: int, connections: int) -> Figures:
        """Return everything; from any thread. `lags`: records to the high watermark, where that is known."""
        frames, records = self._frames, self._records
        shown: Figures = {
            "consumer-metrics": {
                "last-poll-seconds-ago": now_s - self._polled_s if self._polled_s is not None else -1.0,
                "connection-count": float(connections),
            },
            "consumer-fetch-manager-metrics": {
                "fetch-rate": frames.frequency(now_s),
                "fetch-total": float(frames.count),
                **average_and_max("fetch-size", frames, now_s),
                **rate_and_total("bytes-consumed", frames, now_s),
                **rate_and_total("records-consumed", records, now_s),
                "records-per-request-avg": records.rate(now_s) / (frames.frequency(now_s) or 1.0),
                "records-lag-max": float(max(lags.values(), default=0)),
            },
            "consumer-coordinator-metrics": {
                "assigned-partitions": float(assigned),
                "commit-rate": self._commits.frequency(now_s),
                "commit-total": float(self._commits.count),
                **average_and_max("commit-latency", self._commits, now_s),
                "failed-commit-total": self._failed_commits.total,
                "rebalance-total": self._rebalances.total,
            },
        }
        for topic, (consumed, size) in sorted(self._topics.copy().items()):
            shown[f"consumer-fetch-manager-metrics.{topic}"] = {
                **rate_and_total("records-consumed", consumed, now_s),
                **rate_and_total("bytes-consumed", size, now_s),
            }
        for part, lag in sorted(lags.items()):
            of_part = shown.setdefault(f"consumer-fetch-manager-metrics.{part.topic}.{part.partition}", {})
            of_part["records-lag"] = float(lag)  # there may be a topic of that name, with figures of its own
        return shown

    def _topic(self, topic: str) -> tuple[Meter, Meter]:
        found = self._topics.get(topic)
        if found is None:
            found = self._topics[topic] = Meter(self._born_s), Meter(self._born_s)
        return found
