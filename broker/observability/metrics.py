"""The metrics at `/metrics`: Kafka's metrics under Kafka's names, in Prometheus's spelling.

Collectors run on the thread of a scrape and read plain attributes that the event loop writes, so a scrape of thousands
of partitions delays no produce request; values of one scrape may be some milliseconds apart.

`catalogue` lists every family without values, for docs/metrics.md and to check the alerts against. `ElectionCounter`
counts leader changes on the active controller.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily

from broker.clock import SystemClock
from broker.observability.counters import Counters, Histogram
from broker.observability.event_loop import LoopLagMonitor
from broker.observability.group_lag import GroupSample
from broker.partition.partition import Partition
from broker.quotas.client_quotas import Usage
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import NO_LEADER, MetadataImage
from raftmeta.quorum.description import RaftView

PREFIX: Final = "raftlog_"
Families = Iterator[Metric]


class Logs(Protocol):
    """The log manager's part of the metrics."""

    @property
    def offline_dirs(self) -> Mapping[str, object]: ...


class BrokerMetrics:
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
        """Yield Kafka's ReplicaManager metrics: of the partitions that this broker leads, and of all its replicas."""
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
            ("under_min_isr_partition_count", "Led partitions that refuse acks=all.", under_min_isr),
            (
                "at_min_isr_partition_count",
                "Led partitions that will refuse acks=all if one more replica leaves the ISR.",
                at_min_isr,
            ),
            ("reassigning_partitions", "Led partitions that are being reassigned.", reassigning),
            ("offline_replica_count", "Replicas on this broker without a working log.", offline),
        ):
            yield gauge(name, doc, value)
        yield counter("isr_shrinks", "ISR changes that removed a replica.", self._counters.isr_shrinks)
        yield counter("isr_expands", "ISR changes that added a replica.", self._counters.isr_expands)

    def _disks(self) -> Families:
        flushes = HistogramMetricFamily(f"{PREFIX}log_flush_seconds", "Duration of the logs' fsyncs.", labels=("dir",))
        for log_dir, histogram in sorted(self._counters.flushes.items()):
            flushes.add_metric([log_dir], histogram.cumulative(), histogram.total)
        yield flushes
        offline = GaugeMetricFamily(f"{PREFIX}log_dir_offline", "Whether a log directory has failed.", labels=("dir",))
        free = GaugeMetricFamily(
            f"{PREFIX}log_dir_free_bytes", "Free space on the disk of a log directory.", labels=("dir",)
        )
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
                    continue  # the directory is failing at this moment; its log reports it
                free.add_metric([path], usage.free)
                total.add_metric([path], usage.total)
        yield from (offline, free, total)


def _topics(counters: Counters) -> Families:
    families = {
        name: CounterMetricFamily(f"{PREFIX}{name}", doc, labels=("topic",))
        for name, doc in (
            ("bytes_in", "Bytes of record batches written by producers."),
            ("bytes_out", "Bytes of record batches sent to consumers."),
            ("messages_in", "Records written by producers."),
            ("failed_produce_requests", "Batches of producers that were refused."),
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
        "Duration of requests by stage: queue, local work, remote (disk and replicas), response, total.",
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
            ("high_watermark", "Offset below which records are committed, as far as this replica knows."),
            ("last_stable_offset", "Offset below which no transaction is open."),
            ("size_bytes", "Size of a replica's segments."),
        )
    }
    lag = GaugeMetricFamily(
        f"{PREFIX}replica_lag_records",
        "Records that a follower lacks, as far as this leader knows; absent until the follower has reported.",
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
    """Return a family with one gauge."""
    return GaugeMetricFamily(PREFIX + name, doc, value=float(value))


def counter(name: str, doc: str, value: float) -> Metric:
    """Return a family with one counter."""
    return CounterMetricFamily(PREFIX + name, doc, value=float(value))


def histogram_family(name: str, doc: str, histogram: Histogram) -> Metric:
    """Return a family with one histogram."""
    return HistogramMetricFamily(PREFIX + name, doc, buckets=histogram.cumulative(), sum_value=histogram.total)


class Shard(Protocol):
    """A coordinator partition's part of the metrics."""

    @property
    def queued(self) -> int: ...
    @property
    def state(self) -> Any: ...


class Throttle(Protocol):
    """A token bucket's part of the metrics."""

    @property
    def rate_bytes_per_s(self) -> float | None: ...
    @property
    def throttled_ms(self) -> float: ...


class SegmentCache(Protocol):
    """The segment cache's part of the metrics."""

    @property
    def index_bytes(self) -> int: ...
    def __len__(self) -> int: ...


class LoadMetrics:
    """A collector: queues, streams, throttles and caches of one broker.

    `coordinators`: the shards by coordinated kind; `behind`: returns the metadata records that await being acted on.
    """

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
        yield gauge("kafka_connections", "Open connections of Kafka clients.", counters.streams["kafka"])
        yield gauge(
            "produce_queue_depth", "Produce requests whose responses are not sent yet.", counters.produces_unanswered
        )
        yield gauge(
            "pending_acks",
            "Batches that wait for enough replicas.",
            sum(partition.pending_acks for partition in partitions),
        )
        yield gauge("metadata_lag_records", "Metadata records that this broker has yet to act on.", self._behind())
        yield from self._queues()
        yield from self._held_back()
        reads = CounterMetricFamily(
            f"{PREFIX}fetch_reads", "Reads for consumers by source: page cache or disk.", labels=("source",)
        )
        reads.add_metric(["page_cache"], counters.reads_from_cache)
        reads.add_metric(["disk"], counters.reads_from_disk)
        yield reads
        yield gauge("segment_cache_segments", "Sealed segments that are open for reading.", len(self._segments))
        yield gauge(
            "segment_cache_index_bytes", "Bytes of the open segments' index entries.", self._segments.index_bytes
        )
        yield gauge(
            "producer_states",
            "Producers that the replicas on this broker remember, to recognize batches sent again.",
            sum(len(partition.log.producers) for partition in partitions),
        )

    def _queues(self) -> Iterator[Metric]:
        depth = GaugeMetricFamily(
            f"{PREFIX}coordinator_queue_depth", "Commands that wait for a coordinator.", labels=("coordinator",)
        )
        states = GaugeMetricFamily(
            f"{PREFIX}coordinator_partitions",
            "Coordinator partitions on this broker, by state.",
            labels=("coordinator", "state"),
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
            f"{PREFIX}throttle_rate_bytes",
            "Rate of a throttle in bytes a second; absent if unlimited.",
            labels=("quota",),
        )
        for name, throttle in self._throttles().items():
            seconds.add_metric([name], throttle.throttled_ms / 1_000)
            if throttle.rate_bytes_per_s is not None:
                rates.add_metric([name], throttle.rate_bytes_per_s)
        yield from (seconds, rates)


class GroupMetrics:
    """A collector: lag by group and partition, members by group."""

    def __init__(self, sample: Callable[[], GroupSample]) -> None:
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        sample = self._sample()
        labels = ("group", "topic", "partition")
        records = GaugeMetricFamily(
            f"{PREFIX}group_lag_records", "Records that a group has yet to read and commit.", labels=labels
        )
        seconds = GaugeMetricFamily(
            f"{PREFIX}group_lag_seconds",
            "Seconds since the first record that a group has not committed; absent while unknown.",
            labels=labels,
        )
        for lag in sample.lags:
            key = [lag.group, lag.topic, str(lag.partition)]
            records.add_metric(key, lag.records)
            if lag.seconds is not None:
                seconds.add_metric(key, lag.seconds)
        members = GaugeMetricFamily(
            f"{PREFIX}group_members", "Members of a group, by the group's state.", labels=("group", "state")
        )
        for size in sample.sizes:
            members.add_metric([size.group, size.state], size.members)
        yield from (records, seconds, members)
        yield gauge(
            "group_series_left_out", "Groups, and partitions of groups, that the limit leaves out.", sample.left_out
        )


ROLES = ("leader", "candidate", "follower")


class Voter(Protocol):
    """A voter's part of the metrics."""

    @property
    def is_active_controller(self) -> bool: ...
    def raft_view(self) -> RaftView: ...


class NodeMetrics:
    """A collector: the process, its event loop, its view of the metadata, and its vote if it has one."""

    def __init__(
        self,
        node_id: int,
        version: str,
        image: Callable[[], MetadataImage],
        loop_lag: LoopLagMonitor,
        voter: Voter | None,
        counters: Counters,
    ) -> None:
        self._node_id = node_id
        self._version = version
        self._image = image
        self._loop_lag = loop_lag
        self._voter = voter
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        image = self._image()
        yield InfoMetricFamily(
            f"{PREFIX}build", "Version and id of this node.", {"version": self._version, "node_id": str(self._node_id)}
        )
        yield histogram_family(
            "event_loop_lag_seconds", "How late the event loop ran its timers.", self._loop_lag.seconds
        )
        yield gauge("metadata_offset", "Metadata offset of this node's image.", image.offset)
        yield gauge("controller_epoch", "Latest controller epoch that this node knows.", image.controller_epoch)
        active = self._voter is not None and self._voter.is_active_controller
        yield gauge("active_controller_count", "1 on the active controller, else 0; the sum must be 1.", active)
        if self._voter is not None:
            yield from _raft(self._voter.raft_view())
            yield from self._decided()
        if active:
            yield from _cluster(image)

    def _decided(self) -> Iterator[Metric]:
        counters = self._counters
        yield histogram_family(
            "raft_commit_latency_seconds",
            "Seconds from a command's proposal until the active controller applied it.",
            counters.commit_seconds,
        )
        yield counter(
            "leader_elections",
            "Leader changes of partitions while this node was the active controller.",
            counters.leader_elections,
        )
        yield counter(
            "unclean_leader_elections",
            "Leader changes to a replica that was not in sync: committed records may be lost.",
            counters.unclean_leader_elections,
        )


def _raft(view: RaftView) -> Iterator[Metric]:
    state = GaugeMetricFamily(f"{PREFIX}raft_state", "1 for this voter's role, else 0.", labels=("state",))
    for role in ROLES:
        state.add_metric([role], view.role == role)
    yield state
    for name, doc, value in (
        ("raft_term", "Raft term, which is the controller epoch.", view.term),
        ("raft_leader_id", "Id of the leading voter, as far as this voter knows; -1: none.", view.leader_id),
        ("raft_commit_index", "Last committed entry.", view.commit_index),
        ("raft_applied_index", "Last applied entry.", view.last_applied),
        ("raft_log_end_index", "Last entry of the log.", view.last_index),
        ("raft_snapshot_index", "Last entry that the snapshot covers.", view.snapshot_index),
    ):
        yield gauge(name, doc, value)
    lags = GaugeMetricFamily(
        f"{PREFIX}raft_voter_lag", "Entries that a voter lacks, as far as the leader knows.", labels=("voter",)
    )
    for voter_id, lag in sorted(view.lags.items()):
        lags.add_metric([str(voter_id)], lag)
    yield lags


def _cluster(image: MetadataImage) -> Iterator[Metric]:
    """Yield Kafka's KafkaController metrics: the whole cluster, on the active controller."""
    partitions = offline = elsewhere = 0
    for topic in image.topics.values():
        partitions += len(topic.partitions)
        for part in topic.partitions:
            offline += part.leader == NO_LEADER
            elsewhere += part.leader != NO_LEADER and part.leader != part.replicas[0]
    brokers = image.brokers.values()
    for name, doc, value in (
        ("global_topic_count", "Topics.", len(image.topics)),
        ("global_partition_count", "Partitions.", partitions),
        ("offline_partitions_count", "Partitions without a leader.", offline),
        ("preferred_replica_imbalance_count", "Partitions led by another replica than their first.", elsewhere),
        ("active_broker_count", "Brokers that may lead partitions.", sum(broker.active for broker in brokers)),
        ("fenced_broker_count", "Registered brokers that are fenced.", sum(broker.fenced for broker in brokers)),
    ):
        yield gauge(name, doc, value)


class SecurityMetrics:
    """A collector: authentication and authorization. `streams`: returns the number of open streams and
    connections with a login."""

    def __init__(self, counters: Counters, streams: Callable[[], int]) -> None:
        self._counters = counters
        self._streams = streams

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        authentications = CounterMetricFamily(
            f"{PREFIX}authentications",
            "Authentication exchanges by mechanism and outcome. Mechanism mTLS counts certificates of Kafka clients, "
            "and calls of raftlog's clients whose certificate is revoked, or expired since their TLS session began; "
            "other certificates that raftlog's listener refuses do not count, since gRPC does not report them.",
            labels=("mechanism", "outcome"),
        )
        for (mechanism, outcome), count in sorted(self._counters.authentications.copy().items()):
            authentications.add_metric([mechanism, outcome], count)
        yield authentications
        yield counter(
            "unauthenticated_calls",
            "Calls refused because the caller had not logged in, or its login had ended.",
            self._counters.unauthenticated_calls,
        )
        refusals = CounterMetricFamily(
            f"{PREFIX}authorization_refusals", "Refusals for a missing permission, by operation.", labels=("operation",)
        )
        for operation, count in sorted(self._counters.authorization_refusals.copy().items()):
            refusals.add_metric([operation], count)
        yield refusals
        yield gauge(
            "authenticated_streams",
            "Open streams of clients with a token, and connections of Kafka clients with a password.",
            self._streams(),
        )


class QuotaMetrics:
    """A collector: the use of clients with quotas, and refused connections.

    `usage`: as `QuotaManager.usage`; `refused`: connections by listener and limit; `refused_streams`: by limit.
    """

    def __init__(
        self,
        usage: Callable[[], list[Usage]],
        refused: Callable[[], Mapping[str, Mapping[str, int]]],
        refused_streams: Mapping[str, int],
    ) -> None:
        self._usage = usage
        self._refused = refused
        self._refused_streams = refused_streams

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        labels = ("quota", "user", "client_id")
        used = CounterMetricFamily(
            f"{PREFIX}quota_used",
            "Use of clients with a quota: bytes, milliseconds of the event loop, or changes of the metadata.",
            labels=labels,
        )
        seconds = CounterMetricFamily(
            f"{PREFIX}quota_throttle_seconds", "Seconds in which clients were over their quota.", labels=labels
        )
        for each in self._usage():
            place = [each.key, each.scope.user or "", each.scope.client_id or ""]
            used.add_metric(place, each.used)
            seconds.add_metric(place, each.throttled_ms / 1_000)
        yield from (used, seconds)
        refused = CounterMetricFamily(
            f"{PREFIX}connections_refused",
            "Connections that the broker closed because a limit was reached. Of raftlog's clients above "
            "max.connections, only connections without a login beyond half of it are counted.",
            labels=("listener", "limit"),
        )
        for listener, counts in self._refused().items():
            for limit, count in sorted(dict(counts).items()):
                refused.add_metric([listener, limit], count)
        yield refused
        streams = CounterMetricFamily(
            f"{PREFIX}streams_refused",
            "Streams, other calls and logins that were refused because a limit was reached.",
            labels=("limit",),
        )
        for limit, count in sorted(dict(self._refused_streams).items()):
            streams.add_metric([limit], count)
        yield streams


class Bounded(Protocol):
    """Coordinators whose users may make so many ids."""

    LIMIT: ClassVar[str]
    refused_ids: int

    def made(self) -> Mapping[str, int]:
        """Return how many ids each user has made."""
        ...


class IdMetrics:
    """A collector: the ids that users make, and those that were refused."""

    def __init__(self, coordinators: Sequence[Bounded]) -> None:
        self._coordinators = coordinators

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        most = GaugeMetricFamily(
            f"{PREFIX}ids_of_one_user",
            "The most groups, or transactional ids and sinks, that one user has made, of those that this broker "
            "coordinates.",
            labels=("limit",),
        )
        refused = CounterMetricFamily(
            f"{PREFIX}ids_refused",
            "New groups, or transactional ids and sinks, that were refused because their user has made as many as it "
            "may, and requests of transactions that have named as many groups as those of their user may.",
            labels=("limit",),
        )
        for each in self._coordinators:
            most.add_metric([each.LIMIT], max(each.made().values(), default=0))
            refused.add_metric([each.LIMIT], each.refused_ids)
        yield from (most, refused)


class CertificateMetrics:
    """A collector. `not_after_s`: returns the expiry of the certificate for new connections, in seconds since 1970."""

    def __init__(self, not_after_s: Callable[[], float]) -> None:
        self._not_after_s = not_after_s

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        yield gauge(
            "certificate_not_after_seconds",
            "Unix time at which this node's certificate expires.",
            self._not_after_s(),
        )


class ElectionCounter:
    """A listener of the metadata: counts leader changes while this node is the active controller.

    The first leader of a new partition does not count. A partition that lost its leader counts once it has the next.
    """

    def __init__(self, counters: Counters, is_active: Callable[[], bool], image: MetadataImage) -> None:
        self._counters = counters
        self._is_active = is_active
        self._image = image

    def __call__(self, image: MetadataImage, records: Sequence[MetadataRecord] | None) -> None:
        """Take a change of the metadata; `records` is None if the image was replaced as a whole."""
        before, self._image = self._image, image
        if records is None or not self._is_active():
            return
        for record in records:
            if record.WhichOneof("record") != "partition":
                continue
            part = record.partition
            was = before.partition(part.topic_id, part.partition)
            if was is not None and part.leader != NO_LEADER and part.leader != was.leader:
                self._counters.leader_elections += 1
                self._counters.unclean_leader_elections += part.unclean_election


class Described(NamedTuple):
    """A metric family: its name in the text format, its kind, its labels and its help text."""

    name: str
    kind: str
    labels: Sequence[str]
    doc: str

    def samples(self) -> set[str]:
        """Return the names of its samples."""
        if self.kind == "histogram":
            return {f"{self.name}{suffix}" for suffix in ("_bucket", "_count", "_sum")}
        return {self.name}


class _Nothing:
    """A leading voter, a log manager without offline directories, and an empty cache."""

    is_active_controller = True
    offline_dirs: Mapping[str, object] = {}
    index_bytes = 0

    def raft_view(self) -> RaftView:
        return RaftView("leader", 0, 0, 0, 0, 0, 0, {})

    def __len__(self) -> int:
        return 0


def catalogue() -> dict[str, list[Described]]:
    """Return all families by the kind of node that shows them, in the order of a scrape."""
    counters, image, nothing = Counters(), MetadataImage(), _Nothing()
    return {
        "Every node; the quorum's on controllers, the whole cluster's on the active one": _described(
            NodeMetrics(0, "", lambda: image, LoopLagMonitor(SystemClock()), nothing, counters)
        ),
        "Every node with TLS": _described(CertificateMetrics(float)),
        "Brokers: topics, requests, replicas, disks": _described(
            BrokerMetrics(0, counters, lambda: image, lambda: (), nothing, (), lambda: True)
        ),
        "Brokers: queues, streams, throttles, caches": _described(
            LoadMetrics(counters, lambda: (), {}, dict, nothing, lambda: 0)
        ),
        "Brokers with TLS or an authorizer: users and permissions": _described(SecurityMetrics(counters, int)),
        "Brokers, for clients with quotas, and limits of connections (quotas.md)": _described(
            QuotaMetrics(list, dict, {})
        ),
        "Brokers: bounds on what users make": _described(IdMetrics(())),
        "Brokers, for the groups that they coordinate": _described(GroupMetrics(GroupSample)),
    }


def _described(collector: Any) -> list[Described]:
    return [_of(family) for family in collector.collect()]


def _of(family: Metric) -> Described:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = getattr(family, "_labelnames", ())
    if family.type == "info":
        labels = tuple(family.samples[0].labels)
    return Described(family.name + suffix, family.type, labels, family.documentation)
