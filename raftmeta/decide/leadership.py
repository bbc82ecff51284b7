"""Decisions on ISRs, on leaders, and on moving partitions to other brokers (KIP-455).

replicas 1 2 3, wanted 3 4 5:   replicas 3 4 5 1 2   adding 4 5   removing 1 2
all of 4 5 are in the ISR:      replicas 3 4 5       the ISR without 1 and 2 (`elections.settle` does it)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from raftlog.errors import (
    ElectionNotNeeded,
    EligibleLeadersNotAvailable,
    FencedLeaderEpoch,
    IneligibleReplica,
    InvalidReplicaAssignment,
    InvalidRequestError,
    InvalidUpdateVersion,
    NoReassignmentInProgress,
    PreferredLeaderNotAvailable,
    RaftlogError,
    StaleBrokerEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import AlterationOutcome, MetadataRecord, PartitionRef
from raftmeta.decide.brokers import find_broker
from raftmeta.decide.outcome import MAX_ALTERATION_ERROR_CHARACTERS, Accepted, CommandResult, bounded_error
from raftmeta.decide.topics import check_takes_replicas, find_topic
from raftmeta.elections import (
    SETTLE,
    UNCLEAN,
    ElectionType,
    eligible_replicas,
    is_unclean,
    revoke,
    settle,
    take_offline,
    why_leaderless,
    with_new_epochs,
    with_replicas,
    without_marks,
)
from raftmeta.features import ALTER_PARTITIONS, ALTER_PARTITIONS_LEVEL, check_metadata_version
from raftmeta.image import NO_LEADER, BrokerImage, MetadataImage, PartitionImage, TopicImage, partition_record

MAX_PARTITIONS_PER_COMMAND = 500
MAX_ALTERATIONS_PER_COMMAND: Final = 100
"""ISR changes in one command. Fewer than a command may name partitions: each refusal is kept with a text of its own."""
Alteration: TypeAlias = records_pb2.AlterPartitionCommand | records_pb2.PartitionAlteration
"""Both have the same fields, except for the leader's, which stand once in a command."""


def find_partition(image: MetadataImage, topic_id: bytes, partition: int) -> tuple[TopicImage, PartitionImage]:
    """Return a partition and its topic.

    Raises:
        UnknownTopicId, UnknownTopicOrPartition: it is not there.
    """
    topic = image.topics.get(topic_id)
    if topic is None:
        raise UnknownTopicId(f"there is no topic with the id {topic_id.hex()}")
    if not 0 <= partition < len(topic.partitions):
        raise UnknownTopicOrPartition(
            f"topic {topic.name!r} has {len(topic.partitions)} partitions and none numbered {partition}"
        )
    return topic, topic.partitions[partition]


# ISR


def alter_partition(image: MetadataImage, command: records_pb2.AlterPartitionCommand, offset: int) -> Accepted:
    """Give a partition the ISR that its leader asks for, if both see the same partition and brokers.

    Leader epoch and partition epoch are compared and set: a request based on older metadata is refused, and so is
    a member that was fenced or registered again after the leader learned its broker epoch (KIP-903).
    """
    leader = _find_leader(image, command.broker_id, command.broker_epoch)
    topic, partition = find_partition(image, command.topic_id, command.partition)
    altered = _altered(image, leader, topic, partition, command, offset)
    record = partition_record(topic.topic_id, altered)
    if altered is partition:
        return (), CommandResult(image.offset, partitions=(record.partition,))
    return (record,), CommandResult(offset, partitions=(record.partition,))


def alter_partitions(image: MetadataImage, command: records_pb2.AlterPartitionsCommand, offset: int) -> Accepted:
    """Give many partitions of one leader the ISRs that it asks for; each alteration is decided by itself.

    A refused alteration has an outcome with its error, and the others take effect. Only what is wrong with the command
    as a whole, or with its sender, refuses all of them.
    """
    check_metadata_version(image, ALTER_PARTITIONS_LEVEL, ALTER_PARTITIONS)
    if len(command.alterations) > MAX_ALTERATIONS_PER_COMMAND:
        raise InvalidRequestError(
            f"{len(command.alterations)} alterations in one command, at most {MAX_ALTERATIONS_PER_COMMAND}"
        )
    leader = _find_leader(image, command.broker_id, command.broker_epoch)
    records: list[MetadataRecord] = []
    outcomes: list[AlterationOutcome] = []
    decided: set[tuple[bytes, int]] = set()
    for alteration in command.alterations:
        partition: PartitionImage | None = None
        try:
            topic, partition = find_partition(image, alteration.topic_id, alteration.partition)
            key = (topic.topic_id, partition.partition)
            if key in decided:  # the image does not show yet what the first one changed
                raise InvalidRequestError(f"{topic.name}-{partition.partition} is named twice in one command")
            decided.add(key)
            altered = _altered(image, leader, topic, partition, alteration, offset)
        except RaftlogError as error:
            epoch = -1 if partition is None else partition.partition_epoch
            wire = bounded_error(error, MAX_ALTERATION_ERROR_CHARACTERS)
            outcomes.append(AlterationOutcome(error=wire, partition_epoch=epoch))
            continue
        outcomes.append(AlterationOutcome(partition_epoch=altered.partition_epoch))
        if altered is not partition:
            records.append(partition_record(topic.topic_id, altered))
    return tuple(records), CommandResult(offset if records else image.offset, alterations=tuple(outcomes))


def _find_leader(image: MetadataImage, broker_id: int, broker_epoch: int) -> BrokerImage:
    leader = find_broker(image, broker_id, broker_epoch)
    if leader.fenced:
        raise StaleBrokerEpoch(f"broker {leader.broker_id} is fenced and decides nothing; it has to be unfenced first")
    return leader


def _altered(
    image: MetadataImage,
    leader: BrokerImage,
    topic: TopicImage,
    partition: PartitionImage,
    alteration: Alteration,
    offset: int,
) -> PartitionImage:
    """Return a partition with the ISR that `leader` asks for; the same object if it has it already."""
    _check_versions(topic, partition, leader.broker_id, alteration)
    _check_members(image, topic, partition, alteration)
    members = {member.broker_id for member in alteration.new_isr}
    isr = tuple(replica for replica in partition.replicas if replica in members)
    if set(partition.isr) == members:
        isr = partition.isr
    altered = replace(
        without_marks(partition, members),  # a replica that has caught up has a working log again
        isr=isr,
        eligible_leader_replicas=eligible_replicas(image, topic, partition, isr),
    )
    # A move may be complete now, or a leader that is shutting down have a successor.
    return with_new_epochs(partition, settle(image, topic, altered, offset=offset))


def _check_versions(topic: TopicImage, partition: PartitionImage, broker_id: int, command: Alteration) -> None:
    where = f"{topic.name}-{partition.partition}"
    if command.leader_epoch != partition.leader_epoch:
        raise FencedLeaderEpoch(
            f"{where} is in leader epoch {partition.leader_epoch}, with leader {partition.leader}, "
            f"not in {command.leader_epoch}; refresh metadata"
        )
    if broker_id != partition.leader:
        raise InvalidRequestError(f"{where} is led by {partition.leader}, broker {broker_id} cannot alter it")
    if command.partition_epoch != partition.partition_epoch:
        raise InvalidUpdateVersion(
            f"{where} is at partition epoch {partition.partition_epoch}, not {command.partition_epoch}; "
            "refresh metadata and look again"
        )


def _check_members(image: MetadataImage, topic: TopicImage, partition: PartitionImage, command: Alteration) -> None:
    where = f"{topic.name}-{partition.partition}"
    members = [member.broker_id for member in command.new_isr]
    if len(set(members)) < len(members) or not set(members) <= set(partition.replicas):
        raise InvalidRequestError(
            f"{where}: {members} cannot be in sync, the replicas are {list(partition.replicas)}, each of them once"
        )
    if partition.leader not in members:
        raise InvalidRequestError(f"{where}: the leader {partition.leader} cannot leave the ISR by itself")
    for member in command.new_isr:
        broker = image.brokers.get(member.broker_id)
        if broker is None or broker.fenced:
            raise IneligibleReplica(f"{where}: broker {member.broker_id} is fenced and cannot be in sync")
        if member.broker_epoch != broker.broker_epoch:
            raise IneligibleReplica(
                f"{where}: broker {member.broker_id} was heard of with the epoch {member.broker_epoch}, "
                f"it has {broker.broker_epoch}: it is another process"
            )
        if broker.in_controlled_shutdown and member.broker_id not in partition.isr:
            raise IneligibleReplica(f"{where}: broker {member.broker_id} is shutting down and cannot join the ISR")


def offline_replicas(image: MetadataImage, command: records_pb2.OfflineReplicasCommand, offset: int) -> Accepted:
    """Note that a broker has no working log for some of its replicas (`elections.take_offline`).

    Fenced or not: it says so before it is let in. Partitions that are gone, or that it holds no replica of, are passed
    over. Lasts until the broker registers anew, or has caught up and is taken into the ISR.
    """
    broker = find_broker(image, command.broker_id, command.broker_epoch)

    def without(topic: TopicImage, partition: PartitionImage) -> PartitionImage:
        return take_offline(image, topic, partition, broker, offset=offset)

    return _change_partitions(image, command.partitions, without, offset)


# Leaders


def elect_leaders(image: MetadataImage, command: records_pb2.ElectLeadersCommand, offset: int) -> Accepted:
    """Settle partitions (`raftmeta.elections`); deleted partitions and those that need no change are skipped.

    A PREFERRED or UNCLEAN election that no partition needs or allows is refused, with the reason of the first one.
    """

    def settled(topic: TopicImage, partition: PartitionImage) -> PartitionImage:
        handed_over = 0 < partition.revoked_at_offset <= command.handed_over_as_of
        return settle(image, topic, partition, offset=offset, election=command.type, handed_over=handed_over)

    accepted = _change_partitions(image, command.partitions, settled, offset)
    if not accepted[0] and command.type != SETTLE and command.partitions:
        raise _why_nothing(image, command.partitions[0], command.type)
    return accepted


def _why_nothing(image: MetadataImage, ref: PartitionRef, election: ElectionType) -> RaftlogError:
    topic, partition = find_partition(image, ref.topic_id, ref.partition)
    where = f"{topic.name}-{partition.partition}"
    if election == UNCLEAN:
        if partition.leader != NO_LEADER:
            return ElectionNotNeeded(f"{where} has a leader, {partition.leader}")
        return EligibleLeadersNotAvailable(f"{where}: none of the replicas {list(partition.replicas)} is up")
    if partition.leader == partition.replicas[0]:
        return ElectionNotNeeded(f"{where} is led by its preferred replica, {partition.leader}")
    if (why := why_leaderless(image, topic.name, partition)) is not None:
        return PreferredLeaderNotAvailable(f"{where}: {why}")
    return PreferredLeaderNotAvailable(
        f"{where}: the preferred replica {partition.replicas[0]} is down, shutting down, drained or not in sync"
    )


def revoke_leaders(image: MetadataImage, command: records_pb2.RevokeLeadersCommand, offset: int) -> Accepted:
    """Revoke the leadership of partitions from their live leaders, where another replica in sync can lead."""

    def revoked(topic: TopicImage, partition: PartitionImage) -> PartitionImage:
        return revoke(image, topic, partition, offset=offset)

    return _change_partitions(image, command.partitions, revoked, offset)


def _change_partitions(
    image: MetadataImage,
    refs: Sequence[PartitionRef],
    change: Callable[[TopicImage, PartitionImage], PartitionImage],
    offset: int,
) -> Accepted:
    if len(refs) > MAX_PARTITIONS_PER_COMMAND:
        raise InvalidRequestError(f"{len(refs)} partitions in one command, at most {MAX_PARTITIONS_PER_COMMAND}")
    records: list[MetadataRecord] = []
    for topic_id, number in dict.fromkeys((ref.topic_id, ref.partition) for ref in refs):
        topic, before = image.topics.get(topic_id), image.partition(topic_id, number)
        if topic is None or before is None:
            continue
        after = change(topic, before)
        if after is not before:
            records.append(partition_record(topic_id, after, unclean_election=is_unclean(image, before, after.leader)))
    result = CommandResult(offset if records else image.offset, partitions=tuple(each.partition for each in records))
    return tuple(records), result


def alter_reassignments(image: MetadataImage, command: records_pb2.AlterReassignmentsCommand, offset: int) -> Accepted:
    """Begin to move a partition, turn a move under way to another goal, or cancel it (no replicas named)."""
    topic = find_topic(image, command.topic)
    if not 0 <= command.partition < len(topic.partitions):
        raise UnknownTopicOrPartition(f"topic {topic.name!r} has no partition {command.partition}")
    partition = topic.partitions[command.partition]
    if command.replicas:
        altered = _begin(image, topic, partition, tuple(command.replicas))
    else:
        altered = _cancel(image, topic, partition, offset)
    altered = with_new_epochs(partition, settle(image, topic, altered, offset=offset))
    unclean = is_unclean(image, partition, altered.leader)
    record = partition_record(topic.topic_id, altered, unclean_election=unclean)
    if altered is partition:
        return (), CommandResult(image.offset, topic_id=topic.topic_id, partitions=(record.partition,))
    return (record,), CommandResult(offset, topic_id=topic.topic_id, partitions=(record.partition,))


def _begin(
    image: MetadataImage, topic: TopicImage, partition: PartitionImage, wanted: tuple[int, ...]
) -> PartitionImage:
    if len(set(wanted)) < len(wanted):
        raise InvalidReplicaAssignment(f"{topic.name}-{partition.partition}: {list(wanted)} names a broker twice")
    unknown = sorted(set(wanted) - image.brokers.keys())
    if unknown:
        raise InvalidReplicaAssignment(f"{topic.name}-{partition.partition}: broker {unknown[0]} is not registered")
    for replica in wanted:
        if replica not in partition.replicas:
            check_takes_replicas(image.brokers[replica], f"{topic.name}-{partition.partition}")
    # A replica that was being added does not count yet: it has to catch up for the new goal as well.
    held = set(partition.replicas).difference(partition.adding_replicas)
    removing = tuple(replica for replica in partition.replicas if replica not in wanted)
    return replace(
        partition,
        replicas=wanted + removing,
        adding_replicas=tuple(replica for replica in wanted if replica not in held),
        removing_replicas=removing,
    )


def _cancel(image: MetadataImage, topic: TopicImage, partition: PartitionImage, offset: int) -> PartitionImage:
    if not partition.adding_replicas and not partition.removing_replicas:
        raise NoReassignmentInProgress(f"{topic.name}-{partition.partition} is not being moved")
    held = tuple(replica for replica in partition.replicas if replica not in partition.adding_replicas)
    cancelled = with_replicas(image, partition, held, offset)
    if cancelled is None:
        raise EligibleLeadersNotAvailable(
            f"{topic.name}-{partition.partition}: none of {list(held)} could lead after the move is cancelled; "
            "wait until one of them is up and in sync"
        )
    return cancelled
