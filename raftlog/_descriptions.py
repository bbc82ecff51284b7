"""What the admin clients return: plain named tuples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from raftlog._core.cluster import TopicView
from raftlog.errors import RaftlogError
from raftlog.v1 import admin_pb2, common_pb2


class PartitionDescription(NamedTuple):
    """One partition; `leader` is -1 when nobody leads. `replicas` stand in order of preference.

    `eligible_leader_replicas` left the ISR when it was too small to commit anything, so they have every committed
    record (KIP-966). `adding_replicas` and `removing_replicas` belong to a move under way; the latter stand at the end
    of `replicas`. `offline_replicas`: their broker is down, gone, or has no working log for them.
    `lost_replicas`: their broker came back without their log, since its disk was replaced.
    """

    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    eligible_leader_replicas: list[int]
    adding_replicas: list[int]
    removing_replicas: list[int]
    offline_replicas: list[int]
    lost_replicas: list[int]


class TopicDescription(NamedTuple):
    """One topic; `partitions[i]` is partition i."""

    name: str
    topic_id: bytes
    internal: bool
    partitions: list[PartitionDescription]


class ReplicaDescription(NamedTuple):
    """One replica as its leader sees it; -1: not heard of in this leader epoch.

    `log_end_offset`: what it holds for certain. `lag`: how many records it is behind the leader's log. `in_sync`:
    the leader counts it as such. `last_caught_up_ms`: how long ago it had everything.
    """

    broker_id: int
    log_end_offset: int
    lag: int
    last_caught_up_ms: int
    in_sync: bool


class PartitionReplicas(NamedTuple):
    """A partition as its leader sees it; its own replica comes first."""

    topic: str
    partition: int
    leader: int
    leader_epoch: int
    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    replicas: list[ReplicaDescription]


class Reassignment(NamedTuple):
    """A move under way. `replicas`: the goal, in order of preference."""

    replicas: list[int]
    adding_replicas: list[int]
    removing_replicas: list[int]


class BrokerDescription(NamedTuple):
    """One broker. `leaderships` and `replicas`: of how many partitions it is the leader, and holds a copy.

    `cordoned`: it gets no new replicas; so it is with a drained one. `drained`: it leads nothing that another replica
    in sync can lead. `drained_until_restart`: until another process of that broker starts.
    """

    broker_id: int
    host: str
    port: int
    rack: str
    fenced: bool
    in_controlled_shutdown: bool = False
    broker_epoch: int = -1
    leaderships: int = 0
    replicas: int = 0
    cordoned: bool = False
    drained: bool = False
    drained_until_restart: bool = False


class ClusterDescription(NamedTuple):
    """The cluster as of `metadata_offset`; `controller_id` is -1 when nobody is the active controller.

    `features` has the levels that the cluster has agreed on, `supported_features` the lowest and highest level of each
    feature that every registered broker knows.
    """

    cluster_id: str
    controller_id: int
    controller_epoch: int
    brokers: list[BrokerDescription]
    metadata_offset: int
    features: dict[str, int]
    supported_features: Mapping[str, tuple[int, int]] = MappingProxyType({})


class QuorumVoterDescription(NamedTuple):
    """One voter of the metadata quorum. `state`: leader, follower, joining or unreachable; -1: not known, or never."""

    node_id: int
    host: str
    port: int
    state: str
    log_end_index: int
    lag: int
    last_contact_ms: int


class QuorumObserverDescription(NamedTuple):
    """One broker as the controller hears of it. `lag`: metadata that it has yet to apply; -1: not known, or never."""

    broker_id: int
    applied_offset: int
    lag: int
    fenced: bool
    last_heartbeat_ms: int


class QuorumDescription(NamedTuple):
    """The metadata quorum as `answered_by` sees it: its leader, or when nobody leads (`leader_id` -1) another node.

    Indexes are of that node's log.
    """

    cluster_id: str
    leader_id: int
    leader_epoch: int
    commit_index: int
    log_start_index: int
    log_end_index: int
    snapshot_index: int
    snapshot_bytes: int
    snapshot_at_ms: int
    answered_by: int
    voters: list[QuorumVoterDescription]
    observers: list[QuorumObserverDescription]


class ConfigDescription(NamedTuple):
    """One config key. `source`: default, static_broker, dynamic_topic, dynamic_broker or dynamic_broker_logger."""

    key: str
    value: str
    source: str
    read_only: bool
    documentation: str


class LogDirPartition(NamedTuple):
    """One partition in a log directory."""

    topic: str
    partition: int
    size_bytes: int
    log_start_offset: int
    log_end_offset: int
    high_watermark: int
    segments: int


class LogDirDescription(NamedTuple):
    """One log directory of a broker; `error` says why it is offline."""

    broker_id: int
    path: str
    error: RaftlogError | None
    total_bytes: int
    usable_bytes: int
    partitions: list[LogDirPartition]


def describe(view: TopicView) -> TopicDescription:
    """Return a topic as users see it."""
    return TopicDescription(
        view.name,
        view.topic_id,
        view.internal,
        [
            PartitionDescription(
                part.partition,
                part.leader,
                part.leader_epoch,
                *(list(getattr(part, field)) for field in PartitionDescription._fields[3:]),
            )
            for part in view.partitions
        ],
    )


def describe_replicas(
    leader: int, response: admin_pb2.DescribeReplicasResponse, names: Mapping[bytes, str]
) -> Iterator[PartitionReplicas]:
    """Yield what a leader says of its partitions, of topics that are known by name."""
    for part in response.partitions:
        if part.topic_id not in names:
            continue  # deleted, or made a moment ago
        yield PartitionReplicas(
            names[part.topic_id],
            part.partition,
            leader,
            part.leader_epoch,
            part.log_start_offset,
            part.high_watermark,
            part.log_end_offset,
            [
                ReplicaDescription(*(getattr(replica, field) for field in ReplicaDescription._fields))
                for replica in part.replicas
            ],
        )


def describe_cluster(response: admin_pb2.DescribeClusterResponse) -> ClusterDescription:
    """Return a cluster as users see it."""
    return ClusterDescription(
        response.cluster_id,
        response.controller_id,
        response.controller_epoch,
        [
            BrokerDescription(*(getattr(broker, field) for field in BrokerDescription._fields))
            for broker in response.brokers
        ],
        response.metadata_offset,
        dict(response.features),
        {known.name: (known.min_level, known.max_level) for known in response.supported_features},
    )


def describe_quorum(info: common_pb2.QuorumInfo) -> QuorumDescription:
    """Return a quorum as users see it."""
    numbers = {field: getattr(info, field) for field in QuorumDescription._fields[:-2]}
    return QuorumDescription(
        **numbers,
        voters=[
            QuorumVoterDescription(*(getattr(voter, field) for field in QuorumVoterDescription._fields))
            for voter in info.voters
        ],
        observers=[
            QuorumObserverDescription(*(getattr(seen, field) for field in QuorumObserverDescription._fields))
            for seen in info.observers
        ],
    )
