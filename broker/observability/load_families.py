"""What a broker has under way: queues, streams, throttles, and what its caches hold and save it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from broker.observability.broker_families import PREFIX, gauge
from broker.observability.counters import Counters
from broker.partition import Partition


class Shard(Protocol):
    """The part of a coordinator's partition that is shown."""

    @property
    def queued(self) -> int: ...
    @property
    def state(self) -> Any: ...


class Throttle(Protocol):
    """The part of a token bucket that is shown."""

    @property
    def rate_bytes_per_s(self) -> int | None: ...
    @property
    def throttled_ms(self) -> float: ...


class SegmentCache(Protocol):
    """The part of the cache of open segments that is shown."""

    @property
    def index_bytes(self) -> int: ...
    def __len__(self) -> int: ...


class LoadFamilies:
    """A collector. `coordinators`: the shards by what they coordinate; `behind`: metadata that is not acted on yet."""

    def __init__(
        self,
        counters: Counters,
        partitions: Callable[[], Sequence[Partition]],
        coordinators: Mapping[str, Callable[[], Iterable[tuple[int, Shard]]]],
        throttles: Callable[[], Mapping[str, Throttle]],
        segments: SegmentCache,
        behind: Callable[[], int],
    ) -> None:
        self._counters = counters
        self._partitions = partitions
        self._coordinators = coordinators
        self._throttles = throttles
        self._segments = segments
        self._behind = behind

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        counters, partitions = self._counters, self._partitions()
        yield gauge("produce_sessions", "Open produce streams of clients.", counters.streams["produce"])
        yield gauge("fetch_sessions", "Open fetch streams of clients.", counters.streams["fetch"])
        yield gauge(
            "produce_queue_depth", "Produce requests whose answers have not left.", counters.produces_unanswered
        )
        yield gauge(
            "pending_acks",
            "Batches that wait to be held by enough replicas.",
            sum(partition.pending_acks for partition in partitions),
        )
        yield gauge("metadata_lag_records", "Metadata that this broker knows and does not act on yet.", self._behind())
        yield from self._queues()
        yield from self._held_back()
        reads = CounterMetricFamily(
            f"{PREFIX}fetch_reads", "Reads for consumers by where the records came from.", labels=("source",)
        )
        reads.add_metric(["page_cache"], counters.reads_from_cache)
        reads.add_metric(["disk"], counters.reads_from_disk)
        yield reads
        yield gauge("segment_cache_segments", "Sealed segments that are open.", len(self._segments))
        yield gauge("segment_cache_index_bytes", "Bytes of their index entries.", self._segments.index_bytes)
        yield gauge(
            "producer_states",
            "Producers that the replicas here remember, to recognise what is sent again.",
            sum(len(partition.log.producers) for partition in partitions),
        )

    def _queues(self) -> Iterator[Metric]:
        depth = GaugeMetricFamily(
            f"{PREFIX}coordinator_queue_depth", "Commands that wait for a coordinator.", labels=("coordinator",)
        )
        states = GaugeMetricFamily(
            f"{PREFIX}coordinator_partitions", "Partitions coordinated here by state.", labels=("coordinator", "state")
        )
        for name, shards in self._coordinators.items():
            found = [shard for _, shard in shards()]
            depth.add_metric([name], sum(shard.queued for shard in found))
            counts: dict[str, int] = {"active": 0, "loading": 0, "failed": 0}
            for shard in found:
                counts[shard.state.value] = counts.get(shard.state.value, 0) + 1
            for state, count in counts.items():
                states.add_metric([name, state], count)
        yield from (depth, states)

    def _held_back(self) -> Iterator[Metric]:
        seconds = CounterMetricFamily(
            f"{PREFIX}throttle_seconds", "Seconds in which a throttle let nothing pass.", labels=("quota",)
        )
        rates = GaugeMetricFamily(
            f"{PREFIX}throttle_rate_bytes", "Bytes a second that a throttle lets pass; absent: all.", labels=("quota",)
        )
        for name, throttle in self._throttles().items():
            seconds.add_metric([name], throttle.throttled_ms / 1_000)
            if throttle.rate_bytes_per_s is not None:
                rates.add_metric([name], throttle.rate_bytes_per_s)
        yield from (seconds, rates)
