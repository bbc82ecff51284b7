"""The results of admin clients as plain named tuples: topics, the cluster, groups, transactions and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from raftlog._core.cluster import TopicView
from raftlog.errors import RaftlogError, from_wire
from raftlog.security import AclOperation
from raftlog.types import TopicPartition
from raftlog.v1 import admin_pb2, common_pb2, group_pb2, node_pb2, transaction_pb2


class PartitionDescription(NamedTuple):
    """One partition; `leader` is -1 if it has none. `replicas` are in order of preference.

    `isr`: the in-sync replicas. `eligible_leader_replicas` left the ISR when it was already too small to commit
    records, so they have every committed record (KIP-966). `adding_replicas` and `removing_replicas` belong to a move
    in progress; the latter come last in `replicas`. `offline_replicas`: their broker is down, was removed, or has no
    working log for them. `lost_replicas`: their broker came back without their log, because its disk was replaced.
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
    """One topic; `partitions[i]` is partition i. `authorized_operations`: what the caller may do, if asked for."""

    name: str
    topic_id: bytes
    internal: bool
    partitions: list[PartitionDescription]
    authorized_operations: frozenset[AclOperation] | None = None


class ReplicaDescription(NamedTuple):
    """One replica as its leader sees it; -1: unknown, because the replica has not reported in this leader epoch.

    `log_end_offset`: the end of its durable log (exclusive). `lag`: by how many records it is behind the leader's log.
    `in_sync`: whether it is in the ISR. `last_caught_up_ms`: how many ms ago it last had all records.
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
    """A move in progress. `replicas`: the replicas after the move, in order of preference."""

    replicas: list[int]
    adding_replicas: list[int]
    removing_replicas: list[int]


class BrokerDescription(NamedTuple):
    """One broker. `leaderships`: how many partitions it leads. `replicas`: of how many partitions it has a replica.

    `cordoned`: it gets no new replicas. `drained`: it gets no new replicas, and leads no partition that another in-sync
    replica can lead. `drained_until_restart`: it is drained until its process restarts. `storage_full`: a log directory
    is full and refuses writes; the broker then gives leaderships away, as a drained broker does.
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
    storage_full: bool = False


class ClusterDescription(NamedTuple):
    """The cluster as of `metadata_offset`; `controller_id` is -1 if there is no active controller.

    `features`: the levels in effect. `supported_features`: the lowest and highest level of each feature that every
    registered broker supports. If asked for, `authorized_operations` are the operations that the caller may do on the
    cluster, and `may_create_topics` tells whether the caller may create a topic of any name; otherwise both are None.
    """

    cluster_id: str
    controller_id: int
    controller_epoch: int
    brokers: list[BrokerDescription]
    metadata_offset: int
    features: dict[str, int]
    supported_features: Mapping[str, tuple[int, int]] = MappingProxyType({})
    authorized_operations: frozenset[AclOperation] | None = None
    may_create_topics: bool | None = None


class QuorumVoterDescription(NamedTuple):
    """One voter of the metadata quorum. `state`: leader, follower, joining or unreachable.

    `lag`: in entries; -1: unknown. `last_contact_ms`: how many ms ago it answered last; -1: never.
    """

    node_id: int
    host: str
    port: int
    state: str
    log_end_index: int
    lag: int
    last_contact_ms: int


class QuorumObserverDescription(NamedTuple):
    """One broker as the controller sees it. `lag`: how many metadata entries it has yet to apply; -1: unknown.

    `last_heartbeat_ms`: how many ms ago it sent its last heartbeat; -1: never.
    """

    broker_id: int
    applied_offset: int
    lag: int
    fenced: bool
    last_heartbeat_ms: int


class QuorumDescription(NamedTuple):
    """The metadata quorum as `answered_by` sees it: its leader, or without one (`leader_id` -1) another node.

    The indexes refer to that node's log.
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


def operations_of(answer: Any) -> frozenset[AclOperation] | None:
    """Return the operations in a field `authorized_operations` (KIP-430); None if the broker did not fill it in."""
    if not answer.HasField("authorized_operations"):
        return None
    return frozenset(each for each in AclOperation if answer.authorized_operations >> each & 1)


def describe(view: TopicView) -> TopicDescription:
    """Return the description of a topic."""
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
    """Yield a leader's partitions, of topics with a known name."""
    for part in response.partitions:
        if part.topic_id not in names:
            continue  # deleted or just created
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
    """Return the description of a cluster."""
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
        operations_of(response),
        response.may_create_topics if response.HasField("may_create_topics") else None,
    )


def describe_quorum(info: common_pb2.QuorumInfo) -> QuorumDescription:
    """Return the description of a quorum."""
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


STATES = tuple(
    name.lower()
    for name, number in group_pb2.GroupState.items()
    if number not in (group_pb2.GROUP_STATE_UNKNOWN, group_pb2.DEAD)
)
"""The states of a group: empty, assigning, reconciling, stable; a classic group's are empty, preparing_rebalance,
completing_rebalance and stable."""


class GroupListing(NamedTuple):
    """One group. `state`: one of `STATES`. `members`: how many. `coordinator_id`: the broker that coordinates it.

    `type`: "consumer" if the coordinator assigns partitions (raftlog's clients, KIP-848), "classic" if a member does
    (Kafka's clients), or if the group has only offsets.
    """

    group_id: str
    state: str
    members: int
    coordinator_id: int
    type: str = "consumer"


class GroupMemberDescription(NamedTuple):
    """One member as its coordinator sees it.

    `assigned`: the partitions that it may read. `target`: its partitions after the rebalance. `pending_revocation`:
    partitions that it must release but has not yet released. `topics`, `pattern`: its subscription. `assignor`: the one
    that it requests. `instance_id`: empty unless it is a static member. `last_heartbeat_ms`: how many ms ago its last
    heartbeat arrived; -1: none has reached the present coordinator. `connected`: whether it has a stream to the
    coordinator.
    """

    member_id: str
    instance_id: str
    client_id: str
    host: str
    rack: str
    member_epoch: int
    topics: list[str]
    pattern: str
    assignor: str
    assigned: list[TopicPartition]
    target: list[TopicPartition]
    pending_revocation: list[TopicPartition]
    last_heartbeat_ms: int
    connected: bool


class GroupDescription(NamedTuple):
    """One group. `state`: one of `STATES`. `type`: as in `GroupListing`.

    In a classic group `group_epoch` is the generation, `assignor` the protocol that its members have chosen.
    `offsets_partition`: the partition of __consumer_offsets that holds its state; that partition's leader,
    `coordinator_id`, coordinates it. `empty_since_ms`: Unix time at which the last member left; 0: it has members, or
    never had any. `authorized_operations`: the operations that the caller may do on the group, if asked for.
    """

    group_id: str
    state: str
    group_epoch: int
    assignment_epoch: int
    assignor: str
    coordinator_id: int
    offsets_partition: int
    empty_since_ms: int
    members: list[GroupMemberDescription]
    authorized_operations: frozenset[AclOperation] | None = None
    type: str = "consumer"


class PartitionLag(NamedTuple):
    """The lag of a group in one partition.

    `offset`: the committed offset, that of the next record to read; None: no offset is committed. `lag`: the number of
    offsets from there (or from the log's start, if that is later) to the log's end. `lag_seconds`: the age of the first
    unread record; 0.0 if there is none. Unknown values are None: no offset is committed, the leader does not answer,
    the topic was deleted, or the committed offset is beyond the log's end; `error` says which. `member_id`: the member
    that reads the partition now; empty: none.
    """

    offset: int | None
    log_start_offset: int | None
    log_end_offset: int | None
    lag: int | None
    lag_seconds: float | None
    metadata: str
    committed_at_ms: int | None
    member_id: str
    error: str | None


def state_name(state: group_pb2.GroupState.ValueType) -> str:
    """Return the name of a state in lower case; `unknown` for a state of a later version."""
    names: dict[int, str] = {number: name for name, number in group_pb2.GroupState.items()}
    return names.get(state, "unknown").removeprefix("GROUP_STATE_").lower()


def type_name(group_type: group_pb2.GroupType.ValueType) -> str:
    """Return the name of a group's type. Brokers that send no type have no classic groups."""
    return "classic" if group_type == group_pb2.GROUP_TYPE_CLASSIC else "consumer"


def describe_group(group: group_pb2.GroupDescription) -> GroupDescription:
    """Return the description of a group."""
    return GroupDescription(
        group.group_id,
        state_name(group.state),
        group.group_epoch,
        group.assignment_epoch,
        group.assignor,
        group.coordinator_id,
        group.offsets_partition,
        group.empty_since_ms,
        [_member(member) for member in group.members],
        operations_of(group),
        type_name(group.type),
    )


def _member(member: group_pb2.GroupMember) -> GroupMemberDescription:
    return GroupMemberDescription(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.host,
        member.rack,
        member.member_epoch,
        list(member.subscription.topics),
        member.subscription.pattern,
        member.subscription.assignor,
        partitions_of(member.assigned),
        partitions_of(member.target),
        partitions_of(member.pending_revocation),
        member.last_heartbeat_ms,
        member.connected,
    )


def partitions_of(topics: Iterable[group_pb2.TopicPartitions]) -> list[TopicPartition]:
    """Return the partitions of all topics, sorted."""
    return sorted(TopicPartition(topic.topic, part) for topic in topics for part in topic.partitions)


class LoopLagDescription(NamedTuple):
    """How late a node's event loop woke since its process started. Shares are from 0 to 1."""

    measurements: int
    largest_ms: float
    share_above_10_ms: float
    share_above_100_ms: float


class OpenFilesDescription(NamedTuple):
    """The number of open files of a node (-1: unknown), and its limits (-1: unlimited)."""

    used: int
    soft_limit: int
    hard_limit: int


class VoterDescription(NamedTuple):
    """A controller's own view of the metadata log. `role`: leader, candidate or follower; `leader_id` -1: unknown."""

    role: str
    term: int
    leader_id: int
    commit_index: int
    applied_index: int
    last_index: int
    snapshot_index: int


class NodeLogDirDescription(NamedTuple):
    """One directory of a node: with partitions, or, if `metadata`, with the metadata log. `error`: why it is offline.

    `usable_bytes` of `total_bytes` are free on its file system; its logs take `log_bytes`.
    """

    path: str
    metadata: bool
    error: RaftlogError | None
    total_bytes: int
    usable_bytes: int
    log_bytes: int
    partitions: int


class NodeDescription(NamedTuple):
    """One node, a broker, a controller or both, as it describes itself.

    `clock_offset_ms`: by how much its clock is ahead of the client's, give or take `clock_uncertainty_ms`, which is
    half the time of the round trip. `not_ready`: why it does not serve at the moment, or "". Listeners are host:port,
    or "". `log_file`: "" if it does not log to a file. `voter`: None if the node does not vote. `features`: the lowest
    and highest level that its software supports. `configs`: the values in effect, without documentation and with
    [hidden] in place of secrets. `certificate_expires_ms`: Unix time; 0: it has no certificate. `asked_through`: the
    address that answered, that of another broker if the client cannot reach the node.
    """

    node_id: int
    cluster_id: str
    version: str
    roles: list[str]
    clock_offset_ms: float
    clock_uncertainty_ms: float
    uptime_ms: int
    not_ready: str
    hostname: str
    pid: int
    python_version: str
    platform: str
    client_listener: str
    inter_node_listener: str
    metrics_listener: str
    log_file: str
    metadata_offset: int
    controller_id: int
    controller_epoch: int
    loop_lag: LoopLagDescription
    open_files: OpenFilesDescription
    voter: VoterDescription | None
    log_dirs: list[NodeLogDirDescription]
    features: dict[str, tuple[int, int]]
    configs: dict[str, ConfigDescription]
    certificate_expires_ms: int
    asked_through: str


_PLAIN = (
    "uptime_ms",
    "not_ready",
    "hostname",
    "pid",
    "python_version",
    "platform",
    "client_listener",
    "inter_node_listener",
    "metrics_listener",
    "log_file",
    "metadata_offset",
    "controller_id",
    "controller_epoch",
    "certificate_expires_ms",
)


def describe_node(
    info: node_pb2.NodeInfo, asked_ms: float, round_trip_ms: float, asked_through: str
) -> NodeDescription:
    """Return the description of a node. `asked_ms`: Unix time of the client when it asked."""
    return NodeDescription(
        node_id=info.node_id,
        cluster_id=info.cluster_id,
        version=info.version,
        roles=list(info.roles),
        clock_offset_ms=round(info.wall_clock_ms - (asked_ms + round_trip_ms / 2), 1),
        clock_uncertainty_ms=round(round_trip_ms / 2 + 1, 1),  # both clocks are read in whole milliseconds
        **{field: getattr(info, field) for field in _PLAIN},
        loop_lag=LoopLagDescription(*(getattr(info.loop_lag, field) for field in LoopLagDescription._fields)),
        open_files=OpenFilesDescription(*(getattr(info.open_files, field) for field in OpenFilesDescription._fields)),
        voter=(
            VoterDescription(*(getattr(info.voter, field) for field in VoterDescription._fields))
            if info.HasField("voter")
            else None
        ),
        log_dirs=[
            NodeLogDirDescription(
                each.path,
                each.metadata,
                from_wire(each.error) if each.error.code else None,
                each.total_bytes,
                each.usable_bytes,
                each.log_bytes,
                each.partitions,
            )
            for each in info.log_dirs
        ],
        features={each.name: (each.min_level, each.max_level) for each in info.features},
        configs={
            each.key: ConfigDescription(
                each.key, each.value, admin_pb2.ConfigEntry.Source.Name(each.source).lower(), each.read_only, ""
            )
            for each in info.configs
        },
        asked_through=asked_through,
    )


_PREFIX = "transaction_"

STATE_NUMBERS = {
    name.lower().removeprefix(_PREFIX): number
    for name, number in transaction_pb2.TransactionState.items()
    if number != transaction_pb2.TRANSACTION_STATE_UNKNOWN
}
"""The states of a transaction: empty, ongoing, prepare_commit, prepare_abort, complete_commit, complete_abort."""

ONGOING = "ongoing"
OPEN_STATES = (ONGOING, "prepare_commit", "prepare_abort")
"""In these states partitions have an open transaction, or still need a marker."""


MAX_TRANSACTION_TIMEOUT_MS = 15 * 60 * 1000
"""The default of the servers' transaction.max.timeout.ms, the longest time that a transaction may be open."""


class TransactionListing(NamedTuple):
    """A transactional id; or a stage of `sink_id`, with an empty transactional id.

    `state`: empty, ongoing, prepare_commit, prepare_abort, complete_commit or complete_abort. `started_ms`: Unix time,
    0: none is open. `coordinator_id`: the broker that coordinates it.
    """

    transactional_id: str
    sink_id: str
    producer_id: int
    state: str
    started_ms: int
    coordinator_id: int


class TransactionDescription(NamedTuple):
    """A transactional id and its last transaction.

    `producer_epoch`: that of the transaction or, once it is decided, of the next one. `partitions`: those that it
    writes to. `group_ids`: the groups whose offsets it commits. `pending`: once it is decided, the partitions that
    still need a marker. `state_partition`: the partition of __transaction_state that holds its state; that partition's
    leader, `coordinator_id`, coordinates it. `started_ms`: Unix time; 0: no transaction is open.
    `authorized_operations`: the operations that the caller may do on the id, if asked for.
    """

    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int
    updated_ms: int
    partitions: list[TopicPartition]
    group_ids: list[str]
    pending: list[TopicPartition]
    coordinator_id: int
    state_partition: int
    authorized_operations: frozenset[AclOperation] | None = None


class SinkListing(NamedTuple):
    """A sink of staged batches. `last_batch_id`: its last committed batch (-1: none); `updated_ms`: the time of that
    commit, Unix time."""

    sink_id: str
    target: str
    last_batch_id: int
    updated_ms: int
    open_stages: int
    coordinator_id: int


class StageDescription(NamedTuple):
    """A stage that has not ended: the records of one attempt of a writer, identified by its producer id.

    `state`: ongoing, or prepare_... while markers are written. `attempt`: the writer's name for the attempt.
    """

    producer_id: int
    batch_id: int
    state: str
    started_ms: int
    timeout_ms: int
    attempt: str
    partitions: list[TopicPartition]


class SinkDescription(NamedTuple):
    """A sink of staged batches and its open stages, by producer id. `last_batch_id` -1: it has committed none."""

    sink_id: str
    target: str
    last_batch_id: int
    updated_ms: int
    stages: list[StageDescription]


class ProducerState(NamedTuple):
    """The state of a producer in a partition.

    `last_sequence`: that of its last record in this epoch; -1: it has none. `transaction_start_offset`: the first
    offset of its open transaction in the partition, or None; `transaction_started_ms`: the Unix time at which that
    record was appended.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_append_ms: int
    transaction_start_offset: int | None
    transaction_started_ms: int | None


class PartitionProducers(NamedTuple):
    """The producers of a partition, by id. Readers of committed records read up to `last_stable_offset`."""

    last_stable_offset: int
    high_watermark: int
    producers: list[ProducerState]


class HangingTransaction(NamedTuple):
    """A transaction that is open in a partition but unknown to every coordinator, so that it never ends by itself.

    `started_ms`: the Unix time at which its first record was appended there, at `start_offset`.
    """

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    start_offset: int
    started_ms: int
    last_append_ms: int


def transaction_state_name(state: transaction_pb2.TransactionState.ValueType) -> str:
    """Return the name of a state in lower case; `unknown` for a state of a later version."""
    names: dict[int, str] = {number: name for name, number in transaction_pb2.TransactionState.items()}
    return names.get(state, "unknown").lower().removeprefix(_PREFIX).removeprefix("state_")


def describe_transaction(found: transaction_pb2.TransactionDescription) -> TransactionDescription:
    """Return the description of a transactional id."""
    return TransactionDescription(
        found.transactional_id,
        transaction_state_name(found.state),
        found.producer_id,
        found.producer_epoch,
        found.timeout_ms,
        found.started_ms,
        found.updated_ms,
        partitions_of(found.partitions),
        sorted(found.group_ids),
        partitions_of(found.pending),
        found.coordinator_id,
        found.state_partition,
        operations_of(found),
    )


def describe_sink(sink_id: str, found: transaction_pb2.LastBatchResponse) -> SinkDescription:
    """Return the description of a sink."""
    stages = [
        StageDescription(
            stage.producer_id,
            stage.batch_id,
            transaction_state_name(stage.state),
            stage.started_ms,
            stage.timeout_ms,
            stage.attempt,
            partitions_of(stage.partitions),
        )
        for stage in found.stages
    ]
    return SinkDescription(sink_id, found.target, found.last_batch_id, found.updated_ms, sorted(stages))


def describe_producers(found: transaction_pb2.PartitionProducers) -> PartitionProducers:
    """Return the producers of a partition."""
    producers = [
        ProducerState(
            each.producer_id,
            each.producer_epoch,
            each.last_sequence,
            each.last_append_ms,
            each.transaction_start_offset if each.transaction_start_offset >= 0 else None,
            each.transaction_started_ms or None,
        )
        for each in found.producers
    ]
    return PartitionProducers(found.last_stable_offset, found.high_watermark, sorted(producers))
