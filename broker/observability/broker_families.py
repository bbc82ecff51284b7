"""What a broker shows at `/metrics`: Kafka's figures under Kafka's names, in Prometheus' spelling.

Runs on the thread of a scrape. It reads plain attributes of what the event loop writes, so that a scrape of thousands
of partitions holds no produce up; figures of one scrape may be some milliseconds apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from broker.observability.counters import Counters, Histogram
from broker.partition import Partition
from raftmeta.image import MetadataImage

PREFIX: Final = "raftlog_"
Families = Iterator[Metric]


class Logs(Protocol):
    """The part of the log manager that is shown."""

    @property
    def offline_dirs(self) -> Mapping[str, object]: ...


class BrokerFamilies:
    """A collector of `prometheus_client`: the partitions, topics, requests and disks of one broker."""

    def __init__(
        self,
        broker_id: int,
        counters: Counters,
        image: Callable[[], MetadataImage],
        partitions: Callable[[], Sequence[Partition]],
        logs: Logs,
        log_dirs: Sequence[str],
        has_lease: Callable[[], bool],
    ) -> None:
        self._broker_id = broker_id
        self._counters = counters
        self._image = image
        self._partitions = partitions
        self._logs = logs
        self._log_dirs = log_dirs
        self._has_lease = has_lease

    def collect(self) -> Families:
        """Yield every family."""
        image = self._image()
        partitions = self._partitions()
        self._counters.keep_topics(frozenset(image.topic_id_by_name))
        yield from _topics(self._counters)
        yield from _requests(self._counters)
        yield from self._replicas(image, partitions)
        yield from _partitions(partitions)
        yield from self._disks()
        yield gauge("broker_has_lease", "Whether this broker may serve: 1 or 0.", self._has_lease())
        yield counter(
            "replication_bytes_in", "Bytes of record batches fetched from leaders.", self._counters.replication_bytes_in
        )
        yield counter(
            "replication_bytes_out", "Bytes of record batches sent to followers.", self._counters.replication_bytes_out
        )

    def _replicas(self, image: MetadataImage, partitions: Sequence[Partition]) -> Families:
        """Kafka's ReplicaManager: of the partitions that this broker leads, and of all replicas here."""
        led = under_replicated = under_min_isr = at_min_isr = reassigning = 0
        for partition in partitions:
            if not partition.leads:
                continue
            topic = image.topics.get(partition.log.topic_id)
            part = image.partition(partition.log.topic_id, partition.log.partition)
            if topic is None or part is None or part.leader != self._broker_id:
                continue
            least = image.min_insync_replicas(topic)
            led += 1
            under_replicated += len(part.isr) < len(part.replicas) - len(part.adding_replicas)
            under_min_isr += len(part.isr) < least
            at_min_isr += len(part.isr) == least
            reassigning += bool(part.adding_replicas or part.removing_replicas)
        offline = sum(
            1
            for topic in image.topics.values()
            for part in topic.partitions
            if self._broker_id in part.replicas and image.is_offline(part, self._broker_id)
        )
        for name, doc, value in (
            ("partition_count", "Replicas on this broker.", len(partitions)),
            ("leader_count", "Partitions that this broker leads.", led),
            ("under_replicated_partitions", "Led partitions whose ISR lacks a replica.", under_replicated),
            ("under_min_isr_partition_count", "Led partitions that take no acks=all.", under_min_isr),
            ("at_min_isr_partition_count", "Led partitions that would take none with one less.", at_min_isr),
            ("reassigning_partitions", "Led partitions that are being moved.", reassigning),
            ("offline_replica_count", "Replicas here without a log that works.", offline),
        ):
            yield gauge(name, doc, value)
        yield counter("isr_shrinks", "Changes of an ISR that took a replica out.", self._counters.isr_shrinks)
        yield counter("isr_expands", "Changes of an ISR that took a replica in.", self._counters.isr_expands)

    def _disks(self) -> Families:
        flushes = HistogramMetricFamily(
            f"{PREFIX}log_flush_seconds", "Seconds that fsyncs of logs took.", labels=("dir",)
        )
        for log_dir, histogram in sorted(self._counters.flushes.items()):
            flushes.add_metric([log_dir], histogram.cumulative(), histogram.total)
        yield flushes
        offline = GaugeMetricFamily(f"{PREFIX}log_dir_offline", "Whether a log directory has failed.", labels=("dir",))
        free = GaugeMetricFamily(f"{PREFIX}log_dir_free_bytes", "Room on the disk of a log directory.", labels=("dir",))
        total = GaugeMetricFamily(
            f"{PREFIX}log_dir_size_bytes", "Size of the disk of a log directory.", labels=("dir",)
        )
        for path in self._log_dirs:
            failed = path.rstrip("/") in self._logs.offline_dirs
            offline.add_metric([path], failed)
            if not failed:
                try:
                    usage = shutil.disk_usage(path)
                except OSError:
                    continue  # it fails in this moment; its log says so
                free.add_metric([path], usage.free)
                total.add_metric([path], usage.total)
        yield from (offline, free, total)


def _topics(counters: Counters) -> Families:
    families = {
        name: CounterMetricFamily(f"{PREFIX}{name}", doc, labels=("topic",))
        for name, doc in (
            ("bytes_in", "Bytes of record batches that producers wrote."),
            ("bytes_out", "Bytes of record batches that consumers were sent."),
            ("messages_in", "Records that producers wrote."),
            ("failed_produce_requests", "Batches that were refused."),
        )
    }
    for topic, found in sorted(counters.topics.items()):
        families["bytes_in"].add_metric([topic], found.bytes_in)
        families["bytes_out"].add_metric([topic], found.bytes_out)
        families["messages_in"].add_metric([topic], found.records_in)
        families["failed_produce_requests"].add_metric([topic], found.failed_produces)
    yield from families.values()


def _requests(counters: Counters) -> Families:
    requests = CounterMetricFamily(f"{PREFIX}requests", "Requests by outcome.", labels=("request", "error"))
    latency = HistogramMetricFamily(
        f"{PREFIX}request_latency_seconds",
        "Seconds that requests took, by stage: queue, local work, remote (disk and replicas), response, total.",
        labels=("request", "stage"),
    )
    for name, found in sorted(counters.requests.items()):
        for error, count in sorted(found.outcomes.items()):
            requests.add_metric([name, error], count)
        for stage, histogram in found.stages.items():
            rows = histogram.cumulative()
            if rows[-1][1]:
                latency.add_metric([name, stage], rows, histogram.total)
    yield from (requests, latency)


def _partitions(partitions: Iterable[Partition]) -> Families:
    labels = ("topic", "partition")
    families = {
        name: GaugeMetricFamily(f"{PREFIX}partition_{name}", doc, labels=labels)
        for name, doc in (
            ("log_start_offset", "First offset of a replica."),
            ("log_end_offset", "Offset after the last record of a replica."),
            ("high_watermark", "Offset below which records are committed, as this replica knows."),
            ("last_stable_offset", "Offset below which no transaction is open."),
            ("size_bytes", "Bytes of a replica's segments."),
        )
    }
    lag = GaugeMetricFamily(
        f"{PREFIX}replica_lag_records",
        "Records that a follower lacks, as the leader here knows; absent while it has said nothing.",
        labels=(*labels, "replica"),
    )
    for partition in partitions:
        log = partition.log
        key = [log.topic, str(log.partition)]
        families["log_start_offset"].add_metric(key, log.log_start_offset)
        families["log_end_offset"].add_metric(key, log.log_end_offset)
        families["high_watermark"].add_metric(key, log.high_watermark)
        families["last_stable_offset"].add_metric(key, log.last_stable_offset)
        families["size_bytes"].add_metric(key, log.size_bytes)
        for broker_id, records in partition.follower_lags():
            lag.add_metric([*key, str(broker_id)], records)
    yield from families.values()
    yield lag


def gauge(name: str, doc: str, value: float) -> Metric:
    """Return a family with one figure that goes up and down."""
    return GaugeMetricFamily(PREFIX + name, doc, value=float(value))


def counter(name: str, doc: str, value: float) -> Metric:
    """Return a family with one figure that only rises."""
    return CounterMetricFamily(PREFIX + name, doc, value=float(value))


def histogram_family(name: str, doc: str, histogram: Histogram) -> Metric:
    """Return a family with one histogram."""
    return HistogramMetricFamily(PREFIX + name, doc, buckets=histogram.cumulative(), sum_value=histogram.total)
