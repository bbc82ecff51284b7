"""Decisions on moving partitions to other brokers (KIP-455).

replicas 1 2 3, wanted 3 4 5:   replicas 3 4 5 1 2   adding 4 5   removing 1 2
all of 4 5 are in the ISR:      replicas 3 4 5       the ISR without 1 and 2 (`elections.settle` does it)
"""

from __future__ import annotations

from dataclasses import replace

from raftlog.errors import (
    EligibleLeadersNotAvailable,
    InvalidReplicaAssignment,
    NoReassignmentInProgress,
    UnknownTopicOrPartition,
)
from raftlog.v1 import records_pb2
from raftmeta.decide.outcome import Accepted, CommandResult
from raftmeta.decide.topics import check_takes_replicas, find_topic
from raftmeta.elections import is_unclean, settle, with_new_epochs, with_replicas
from raftmeta.image import MetadataImage, PartitionImage, TopicImage, partition_record


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
    # Who was being added counts for nothing yet: it has to catch up for the new goal as well.
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
