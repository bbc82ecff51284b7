"""The metrics of clients, under the names of Kafka's client metrics. Pure.

Groups are Kafka's, with the values of its tags appended as in kafka-python: `producer-topic-metrics.orders`,
`producer-node-metrics.node-1`, `consumer-fetch-manager-metrics.orders.0`. Times are in ms, sizes in bytes, rates per
second over the last half minute; a name in `-total` never falls.

A `Meter` has a slot for each of the last few periods; older values count only in its total. One thread writes at a
time; others may read, and may miss a value that is being added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from raftlog.types import TopicPartition

if TYPE_CHECKING:
    from raftlog._core.accumulator import Batch

SLOT_S: Final = 10.0
SLOTS: Final = 3
LEAST_S: Final = 1.0
"""The shortest time that a rate is divided by: otherwise the first values of a new meter would give a huge rate."""

assert SLOTS * SLOT_S == 30.0, "the documentation says half a minute"

_Slot = tuple[int, int, float, float]
"""The number of the period, and the count, sum and maximum of its values."""


class Meter:
    """The total, rate, average and maximum of values. `now_s`: one monotonic clock for all calls."""

    __slots__ = ("_born_s", "_slots", "count", "total")

    def __init__(self, now_s: float) -> None:
        self.count = 0
        self.total = 0.0
        """The sum of all values since the meter was created."""
        self._born_s = now_s
        self._slots: list[_Slot] = [(-1, 0, 0.0, 0.0)] * SLOTS

    def add(self, value: float, now_s: float, count: int = 1) -> None:
        """Add a value, or the sum of `count` values."""
        self.count += count
        self.total += value
        number = int(now_s // SLOT_S)
        at = number % SLOTS
        held, held_count, held_sum, largest = self._slots[at]
        if held == number:
            self._slots[at] = (number, held_count + count, held_sum + value, value if value > largest else largest)
        else:
            self._slots[at] = (number, count, value, value)

    def rate(self, now_s: float) -> float:
        """Return the sum of recent values per second."""
        return sum(slot[2] for slot in self._live(now_s)) / self._span_s(now_s)

    def frequency(self, now_s: float) -> float:
        """Return the number of recent values per second."""
        return sum(slot[1] for slot in self._live(now_s)) / self._span_s(now_s)

    def average(self, now_s: float) -> float:
        """Return the average of recent values, or 0 without any."""
        live = self._live(now_s)
        count = sum(slot[1] for slot in live)
        return sum(slot[2] for slot in live) / count if count else 0.0

    def largest(self, now_s: float) -> float:
        """Return the maximum of recent values, or 0 without any."""
        return float(max((slot[3] for slot in self._live(now_s)), default=0.0))

    def _live(self, now_s: float) -> list[_Slot]:
        oldest = int(now_s // SLOT_S) - SLOTS + 1
        return [slot for slot in list(self._slots) if slot[0] >= oldest]

    def _span_s(self, now_s: float) -> float:
        since_s = (now_s // SLOT_S - SLOTS + 1) * SLOT_S
        return max(LEAST_S, now_s - max(since_s, self._born_s))


MEANINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "assigned-partitions": "Partitions that the consumer reads.",
        "batch-size": "Bytes of a sent batch, compressed.",
        "batch-split": "Batches that were split, because they were too large for the topic.",
        "buffer-available-bytes": "Free bytes of `buffer.memory`.",
        "buffer-total-bytes": "`buffer.memory`.",
        "bufferpool-wait-ratio": "Share of the time that threads wait for `buffer.memory`.",
        "bufferpool-wait-time-ns": "Nanoseconds that threads have waited for `buffer.memory`.",
        "byte": "Bytes of batches, compressed.",
        "bytes-consumed": "Bytes of fetched batches, compressed.",
        "commit": "Commits of offsets that were answered.",
        "commit-latency": "Time until a commit was answered.",
        "compression-rate": "Compressed size of batches divided by their uncompressed size.",
        "connection-count": "Brokers to which the client has a stream for records.",
        "failed-commit": "Commits that were refused for at least one partition, or not answered.",
        "fetch": "Messages with records that brokers have sent.",
        "fetch-size": "Bytes of a message with records.",
        "fetch-throttle-time": "Time for which a broker sends nothing, because the client is over its quota.",
        "last-poll-seconds-ago": "Seconds since the last poll; -1: never.",
        "outgoing-byte": "Bytes of batches, compressed.",
        "produce-throttle-time": "Time for which a producer pauses, because the client is over its quota.",
        "rebalance": "How often the consumer told the application of changed partitions.",
        "record-error": "Records whose delivery has failed for good.",
        "record-queue-time": "Time from the first record of a batch until its first sending.",
        "record-retry": "Records that were retried.",
        "record-send": "Records that were acknowledged.",
        "record-size": "Bytes of a record, uncompressed, with its overhead.",
        "records-consumed": "Records that polls have returned.",
        "records-lag": "Records from the position to the last known high watermark.",
        "records-per-request": "Records in a request, or in a fetched message.",
        "request": "Requests that were sent.",
        "request-error": "Requests that were not answered.",
        "request-latency": "Time until a request was answered.",
        "request-size": "Bytes of batches in a request.",
        "requests-in-flight": "Requests without an answer.",
    }
)
"""By name, without the suffixes `-rate` (per second), `-total`, `-avg` and `-max`."""


def meaning_of(name: str) -> str:
    """Return the meaning of a metric.

    Raises:
        KeyError: there is no metric of that name.
    """
    if name in MEANINGS:
        return MEANINGS[name]
    stem, _, suffix = name.rpartition("-")
    assert suffix in ("rate", "total", "avg", "max"), f"no metric has this suffix: {name}"
    return MEANINGS[stem]


Metrics = dict[str, dict[str, float]]
"""Group -> name -> value."""


def rate_and_total(name: str, meter: Meter, now_s: float) -> dict[str, float]:
    """Return `NAME-rate` and `NAME-total`."""
    return {f"{name}-rate": meter.rate(now_s), f"{name}-total": meter.total}


def average_and_max(name: str, meter: Meter, now_s: float) -> dict[str, float]:
    """Return `NAME-avg` and `NAME-max`."""
    return {f"{name}-avg": meter.average(now_s), f"{name}-max": meter.largest(now_s)}


class CallMetrics:
    """Requests to brokers: all of an admin client, or those of a producer to one node."""

    def __init__(self, now_s: float) -> None:
        self.requests = Meter(now_s)
        """The size of each request in bytes; 1 where sizes are not known."""
        self.latency_ms = Meter(now_s)
        self.errors = Meter(now_s)

    def answered(self, latency_ms: float, now_s: float, *, failed: bool = False) -> None:
        """A request was answered, or (`failed`) was not."""
        self.latency_ms.add(latency_ms, now_s)
        if failed:
            self.errors.add(1, now_s)

    @contextmanager
    def counted(self, clock_s: Callable[[], float]) -> Iterator[None]:
        """Count the request made in the block; if it raises, it was not answered."""
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
        """Return the metrics by name."""
        return {
            "request-rate": self.requests.frequency(now_s),
            "request-total": float(self.requests.count),
            **average_and_max("request-latency", self.latency_ms, now_s),
        }


class _TopicMetrics:
    def __init__(self, now_s: float) -> None:
        self.records = Meter(now_s)
        self.bytes = Meter(now_s)
        self.errors = Meter(now_s)
        self.retries = Meter(now_s)


class ProducerMetrics:
    """The metrics of one producer. Call its methods under the engine's lock, except where they say otherwise."""

    def __init__(self, delivery_timeout_ms: float, now_s: float) -> None:
        self._delivery_timeout_ms = delivery_timeout_ms
        self._born_s = now_s
        self._all = _TopicMetrics(now_s)
        self._topics: dict[str, _TopicMetrics] = {}
        self._calls = CallMetrics(now_s)
        self._nodes: dict[int, CallMetrics] = {}
        self._batch_bytes = Meter(now_s)
        self._record_bytes = Meter(now_s)
        self._compression = Meter(now_s)
        self._queue_ms = Meter(now_s)
        self._requests_records = Meter(now_s)
        self._splits = Meter(now_s)
        self._room_waits_s = Meter(now_s)
        self._throttles_ms = Meter(now_s)

    def sent(self, node_id: int, batches: Sequence[Batch], now_s: float) -> None:
        """A request with these batches is about to be sent."""
        size = records = 0
        for batch in batches:
            assert batch.encoded is not None, "a sent batch is encoded"
            encoded = len(batch.encoded)
            size += encoded
            records += batch.count
            self._batch_bytes.add(encoded, now_s)
            self._record_bytes.add(batch.size_bytes, now_s, batch.count)
            self._compression.add(encoded / max(1, batch.size_bytes), now_s)
            if not batch.failures:
                self._queue_ms.add(max(0.0, now_s * 1_000 - batch.deadline_ms + self._delivery_timeout_ms), now_s)
            self._topic(batch).bytes.add(encoded, now_s)
        self._requests_records.add(records, now_s)
        self._calls.requests.add(size, now_s)
        self._node(node_id).requests.add(size, now_s)

    def answered(self, node_id: int, latency_ms: float, now_s: float) -> None:
        """A request was answered; on the event loop, without the lock."""
        self._calls.answered(latency_ms, now_s)
        self._node(node_id).answered(latency_ms, now_s)

    def throttled(self, delay_ms: float, now_s: float) -> None:
        """A broker has answered that this client is over its quota; on the event loop, without the lock."""
        self._throttles_ms.add(delay_ms, now_s)

    def done(self, batch: Batch, now_s: float) -> None:
        """A batch was acknowledged or has failed for good. The halves of a split batch count in its place."""
        if batch.parts is not None:
            return
        for metrics in (self._all, self._topic(batch)):
            (metrics.records if batch.error is None else metrics.errors).add(batch.count, now_s)

    def retried(self, batch: Batch, now_s: float) -> None:
        """A batch is sent again."""
        for metrics in (self._all, self._topic(batch)):
            metrics.retries.add(batch.count, now_s)

    def split(self, now_s: float) -> None:
        """A batch was split, because it was too large."""
        self._splits.add(1, now_s)

    def waited(self, seconds: float, now_s: float) -> None:
        """A caller has waited for `buffer.memory`."""
        self._room_waits_s.add(seconds, now_s)

    def show(self, now_s: float, *, used_bytes: int, buffer_bytes: int, in_flight: int, connections: int) -> Metrics:
        """Return all metrics; from any thread."""
        totals = self._all
        shown: Metrics = {
            "producer-metrics": {
                **rate_and_total("record-send", totals.records, now_s),
                **rate_and_total("record-error", totals.errors, now_s),
                **rate_and_total("record-retry", totals.retries, now_s),
                **rate_and_total("outgoing-byte", self._calls.requests, now_s),
                **rate_and_total("batch-split", self._splits, now_s),
                **average_and_max("batch-size", self._batch_bytes, now_s),
                "record-size-avg": self._record_bytes.average(now_s),
                "records-per-request-avg": self._requests_records.average(now_s),
                "compression-rate-avg": self._compression.average(now_s),
                **average_and_max("record-queue-time", self._queue_ms, now_s),
                **self._calls.show(now_s),
                **average_and_max("request-size", self._calls.requests, now_s),
                **average_and_max("produce-throttle-time", self._throttles_ms, now_s),
                "requests-in-flight": float(in_flight),
                "buffer-total-bytes": float(buffer_bytes),
                "buffer-available-bytes": float(buffer_bytes - used_bytes),
                "bufferpool-wait-ratio": self._room_waits_s.rate(now_s),
                "bufferpool-wait-time-ns-total": self._room_waits_s.total * 1e9,
                "connection-count": float(connections),
            }
        }
        for topic, metrics in sorted(self._topics.copy().items()):
            shown[f"producer-topic-metrics.{topic}"] = {
                **rate_and_total("record-send", metrics.records, now_s),
                **rate_and_total("record-error", metrics.errors, now_s),
                **rate_and_total("record-retry", metrics.retries, now_s),
                **rate_and_total("byte", metrics.bytes, now_s),
            }
        for node_id, calls in sorted(self._nodes.copy().items()):
            shown[f"producer-node-metrics.node-{node_id}"] = {
                **calls.show(now_s),
                **rate_and_total("outgoing-byte", calls.requests, now_s),
            }
        return shown

    def _topic(self, batch: Batch) -> _TopicMetrics:
        found = self._topics.get(batch.queue.topic)
        if found is None:
            found = self._topics[batch.queue.topic] = _TopicMetrics(self._born_s)
        return found

    def _node(self, node_id: int) -> CallMetrics:
        found = self._nodes.get(node_id)
        if found is None:
            found = self._nodes[node_id] = CallMetrics(self._born_s)
        return found


class ConsumerMetrics:
    """The metrics of one consumer."""

    def __init__(self, now_s: float) -> None:
        self._born_s = now_s
        self._frames = Meter(now_s)
        self._records = Meter(now_s)
        self._topics: dict[str, tuple[Meter, Meter]] = {}
        """Records and bytes, by topic."""
        self._commits = Meter(now_s)
        self._failed_commits = Meter(now_s)
        self._rebalances = Meter(now_s)
        self._throttles_ms = Meter(now_s)
        self._polled_s: float | None = None

    def throttled(self, delay_ms: float, now_s: float) -> None:
        """A broker sends nothing for this time; on the event loop."""
        self._throttles_ms.add(delay_ms, now_s)

    def received(self, topic: str, size: int, now_s: float) -> None:
        """A frame of `size` bytes has arrived; on the event loop."""
        self._frames.add(size, now_s)
        self._topic(topic)[1].add(size, now_s)

    def polled(self, now_s: float) -> None:
        """The application asks for records."""
        self._polled_s = now_s

    def handed_out(self, topic: str, records: int, now_s: float) -> None:
        """A poll returns this many records."""
        self._records.add(records, now_s)
        self._topic(topic)[0].add(records, now_s)

    def committed(self, latency_ms: float, now_s: float, *, failed: bool) -> None:
        """The group's coordinator has answered a commit; `failed`: for some partition with an error."""
        self._commits.add(latency_ms, now_s)
        if failed:
            self._failed_commits.add(1, now_s)

    def rebalanced(self, now_s: float) -> None:
        """The application was told of changed partitions."""
        self._rebalances.add(1, now_s)

    def show(self, now_s: float, *, lags: dict[TopicPartition, int], assigned: int, connections: int) -> Metrics:
        """Return all metrics; from any thread. `lags`: records to the high watermark, where that is known."""
        frames, records = self._frames, self._records
        shown: Metrics = {
            "consumer-metrics": {
                "last-poll-seconds-ago": now_s - self._polled_s if self._polled_s is not None else -1.0,
                "connection-count": float(connections),
            },
            "consumer-fetch-manager-metrics": {
                "fetch-rate": frames.frequency(now_s),
                "fetch-total": float(frames.count),
                **average_and_max("fetch-size", frames, now_s),
                **average_and_max("fetch-throttle-time", self._throttles_ms, now_s),
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
            of_part["records-lag"] = float(lag)  # there may be a topic of that name, with metrics of its own
        return shown

    def _topic(self, topic: str) -> tuple[Meter, Meter]:
        found = self._topics.get(topic)
        if found is None:
            found = self._topics[topic] = Meter(self._born_s), Meter(self._born_s)
        return found
