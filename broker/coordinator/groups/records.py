"""Records of __consumer_offsets (raftlog/v1/group_records.proto): written and read.

Keys are serialized deterministically, since compaction compares their bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError, Message

from broker.coordinator.groups.group import (
    Assignment,
    ClassicHead,
    ClassicPart,
    Committed,
    Fence,
    Group,
    Head,
    Member,
    Pending,
    Subscription,
)
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import CorruptRecordError
from raftlog.v1 import group_pb2
from raftlog.v1.group_records_pb2 import (
    AssignedPartitions,
    AssignmentValue,
    ClassicMemberValue,
    ClassicProtocol,
    ClassicValue,
    GroupRecordKey,
    GroupValue,
    KnownTopic,
    MemberValue,
    OffsetKey,
    OffsetValue,
    PendingOffsetKey,
    ProducerFenceValue,
    TargetValue,
)

Record = tuple[bytes, bytes | None]

TOPIC_ID_BYTES: Final = 16


def by_topic(partitions: Iterable[TopicPartition]) -> dict[bytes, list[int]]:
    """Return topic id -> partitions, both ascending."""
    topics: dict[bytes, list[int]] = {}
    for topic_id, number in sorted(partitions):
        topics.setdefault(topic_id, []).append(number)
    return topics


def topic_partitions(
    partitions: Iterable[TopicPartition], names: Mapping[bytes, str]
) -> list[group_pb2.TopicPartitions]:
    """Return partitions as messages; the name is empty if it is unknown."""
    return [
        group_pb2.TopicPartitions(topic_id=topic_id, topic=names.get(topic_id, ""), partitions=numbers)
        for topic_id, numbers in by_topic(partitions).items()
    ]


# Written


def record(key: Message, value: Message | None) -> Record:
    """Return a record as bytes; a value of None is a tombstone."""
    return key.SerializeToString(deterministic=True), None if value is None else value.SerializeToString()


def head_record(group_id: str, head: Head | None, user: str = "") -> Record:
    """The group as a whole; `user`: the one that made it."""
    key = GroupRecordKey(group_id=group_id, group=True)
    if head is None:
        return record(key, None)
    known = [KnownTopic(topic_id=topic_id, partitions=count) for topic_id, count in sorted(head.known_topics.items())]
    return record(
        key,
        GroupValue(
            group_epoch=head.group_epoch,
            assignment_epoch=head.assignment_epoch,
            assignor=head.assignor,
            empty_since_ms=head.empty_since_ms,
            known_topics=known,
            patterns=head.patterns,
            classic=None
            if (classic := head.classic) is None
            else ClassicValue(protocol_type=classic.protocol_type, protocol=classic.protocol, leader=classic.leader),
            user=user,
        ),
    )


def subscription_message(subscription: Subscription) -> group_pb2.Subscription:
    """Return a subscription as a message."""
    return group_pb2.Subscription(
        topics=subscription.topics, pattern=subscription.pattern, assignor=subscription.assignor
    )


def member_record(group_id: str, member_id: str, member: Member | None) -> Record:
    """Return the record of a member."""
    key = GroupRecordKey(group_id=group_id, member_id=member_id)
    if member is None:
        return record(key, None)
    return record(
        key,
        MemberValue(
            instance_id=member.instance_id,
            client_id=member.client_id,
            host=member.host,
            rack=member.rack,
            subscription=subscription_message(member.subscription),
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            classic=None
            if (classic := member.classic) is None
            else ClassicMemberValue(
                session_timeout_ms=classic.session_timeout_ms,
                metadata=classic.metadata,
                assignment=classic.assignment,
                protocols=[ClassicProtocol(name=name, metadata=said) for name, said in classic.protocols],
            ),
        ),
    )


def target_record(
    group_id: str, member_id: str, target: frozenset[TopicPartition] | None, names: Mapping[bytes, str]
) -> Record:
    """Return the record of a member's target."""
    key = GroupRecordKey(group_id=group_id, target_of=member_id)
    return record(key, None if target is None else TargetValue(partitions=topic_partitions(target, names)))


def assignment_record(
    group_id: str, member_id: str, assignment: Assignment | None, names: Mapping[bytes, str]
) -> Record:
    """Return the record of a member's assignment."""
    key = GroupRecordKey(group_id=group_id, assignment_of=member_id)
    if assignment is None:
        return record(key, None)
    return record(
        key,
        AssignmentValue(
            member_epoch=assignment.member_epoch,
            previous_member_epoch=assignment.previous_member_epoch,
            assigned=_with_epochs(assignment.assigned, names),
            pending_revocation=_with_epochs(assignment.pending_revocation, names),
        ),
    )


def _with_epochs(partitions: Mapping[TopicPartition, int], names: Mapping[bytes, str]) -> list[AssignedPartitions]:
    return [
        AssignedPartitions(
            topic_id=topic_id,
            topic=names.get(topic_id, ""),
            partitions=numbers,
            since_epochs=[partitions[topic_id, number] for number in numbers],
        )
        for topic_id, numbers in by_topic(partitions).items()
    ]


def offset_record(group_id: str, partition: TopicPartition, committed: Committed | None, user: str = "") -> Record:
    """A committed offset; `user`: the one that made the group, where no record of the group as a whole says so."""
    key = GroupRecordKey(group_id=group_id, offset=OffsetKey(topic_id=partition[0], partition=partition[1]))
    return record(key, None if committed is None else _offset_value(committed, user))


def _offset_value(committed: Committed, user: str, producer_epoch: int = 0) -> OffsetValue:
    return OffsetValue(
        offset=committed.offset,
        leader_epoch=committed.leader_epoch,
        metadata=committed.metadata,
        committed_at_ms=committed.committed_at_ms,
        topic=committed.topic,
        producer_epoch=producer_epoch,
        user=user,
    )


def pending_record(
    group_id: str, producer_id: int, partition: TopicPartition, pending: Pending | None, user: str = ""
) -> Record:
    """An offset of a transaction that is open; `user` as of `offset_record`."""
    pending_key = PendingOffsetKey(producer_id=producer_id, topic_id=partition[0], partition=partition[1])
    key = GroupRecordKey(group_id=group_id, pending=pending_key)
    return record(key, None if pending is None else _offset_value(pending.committed, user, pending.producer_epoch))


def fence_record(group_id: str, producer_id: int, fence: Fence | None) -> Record:
    """The end of a producer's transaction."""
    key = GroupRecordKey(group_id=group_id, transaction_of=producer_id)
    if fence is None:
        return record(key, None)
    return record(key, ProducerFenceValue(producer_epoch=fence.producer_epoch, ended_at_ms=fence.ended_at_ms))


# Read


def parse_key(key: bytes) -> GroupRecordKey:
    """Return a record's key.

    Raises:
        CorruptRecordError: the bytes are no key, or name no group or nothing of it.
    """
    parsed = GroupRecordKey()
    try:
        parsed.ParseFromString(key)
    except DecodeError as error:
        raise CorruptRecordError(f"a key of {len(key)} bytes is no key of a group's record: {error}") from error
    if not parsed.group_id:
        raise CorruptRecordError(f"a key of {len(key)} bytes names no group")
    if parsed.WhichOneof("kind") is None:
        raise CorruptRecordError(
            f"a record of the group {parsed.group_id!r} is of no kind that this version knows; was it written by a "
            "newer one?"
        )
    return parsed


def replay(group: Group, key: GroupRecordKey, value: bytes | None) -> None:
    """Apply a record to its group.

    Raises:
        CorruptRecordError: the value is not what the key says.
    """
    try:
        match key.WhichOneof("kind"):
            case "offset":
                at = checked_partition(key.offset.topic_id, key.offset.partition)
                group.set_offset(at, None if value is None else _committed(_offset(group, value)))
            case "pending":
                at = checked_partition(key.pending.topic_id, key.pending.partition)
                producer_id = _producer_id(key.pending.producer_id)
                group.set_pending(producer_id, at, None if value is None else _pending(group, value))
            case "transaction_of":
                group.set_fence(_producer_id(key.transaction_of), None if value is None else _fence(value))
            case "group":
                group.head = None if value is None else _head(group, value)
            case "member_id":
                group.set_member(key.member_id, None if value is None else _member(key.member_id, value))
            case "target_of":
                group.set_target(key.target_of, None if value is None else _target(group, value))
            case _:
                group.set_assignment(key.assignment_of, None if value is None else _assignment(group, value))
    except (DecodeError, ValueError) as error:
        raise CorruptRecordError(f"{key.WhichOneof('kind')} of the group {key.group_id!r}: {error}") from error
    if not group.exists:
        group.user = ""


def check_topic_id(topic_id: bytes) -> None:
    """Check the length of a topic id that a record holds.

    Raises:
        ValueError: it has not 16 bytes.
    """
    if len(topic_id) != TOPIC_ID_BYTES:
        raise ValueError(f"a topic id has {TOPIC_ID_BYTES} bytes, not {len(topic_id)}")


def checked_partition(topic_id: bytes, number: int) -> TopicPartition:
    """Return a partition as records name it.

    Raises:
        ValueError: the topic id has not 16 bytes, or the partition is negative.
    """
    check_topic_id(topic_id)
    if number < 0:
        raise ValueError(f"partition {number} is below 0")
    return topic_id, number


def _producer_id(producer_id: int) -> int:
    if producer_id < 0:
        raise ValueError(f"producer id {producer_id} is below 0")
    return producer_id


def _producer_epoch(producer_epoch: int) -> int:
    if producer_epoch < 0:
        raise ValueError(f"producer epoch {producer_epoch} is below 0")
    return producer_epoch


def _note_user(group: Group, user: str) -> None:
    """Note the user that made the group: all of its records that name one name the same."""
    if user:
        group.user = sys.intern(user)


def _offset(group: Group, value: bytes) -> OffsetValue:
    parsed = OffsetValue.FromString(value)
    _note_user(group, parsed.user)
    return parsed


def _pending(group: Group, value: bytes) -> Pending:
    parsed = _offset(group, value)
    return Pending(_committed(parsed), _producer_epoch(parsed.producer_epoch))


def _fence(value: bytes) -> Fence:
    parsed = ProducerFenceValue.FromString(value)
    return Fence(_producer_epoch(parsed.producer_epoch), parsed.ended_at_ms)


def _committed(parsed: OffsetValue) -> Committed:
    if parsed.offset < 0:
        raise ValueError(f"offset {parsed.offset} is below 0")
    return Committed(parsed.offset, parsed.leader_epoch, parsed.metadata, parsed.committed_at_ms, parsed.topic)


def _head(group: Group, value: bytes) -> Head:
    parsed = GroupValue.FromString(value)
    _note_user(group, parsed.user)
    if not 0 <= parsed.assignment_epoch <= parsed.group_epoch:
        raise ValueError(f"assignment epoch {parsed.assignment_epoch} in group epoch {parsed.group_epoch}")
    return Head(
        group_epoch=parsed.group_epoch,
        assignment_epoch=parsed.assignment_epoch,
        assignor=parsed.assignor,
        empty_since_ms=parsed.empty_since_ms,
        known_topics=dict(checked_partition(known.topic_id, known.partitions) for known in parsed.known_topics),
        patterns=tuple(parsed.patterns),
        classic=ClassicHead(parsed.classic.protocol_type, parsed.classic.protocol, parsed.classic.leader)
        if parsed.HasField("classic")
        else None,
    )


def read_subscription(message: group_pb2.Subscription) -> Subscription:
    """Return a subscription from a message: topics ascending, none twice."""
    return Subscription(tuple(sorted(set(message.topics))), message.pattern, message.assignor)


def _member(member_id: str, value: bytes) -> Member:
    parsed = MemberValue.FromString(value)
    return Member(
        member_id=member_id,
        instance_id=parsed.instance_id,
        client_id=parsed.client_id,
        host=parsed.host,
        rack=parsed.rack,
        subscription=read_subscription(parsed.subscription),
        rebalance_timeout_ms=parsed.rebalance_timeout_ms,
        classic=_classic_part(parsed.classic) if parsed.HasField("classic") else None,
    )


def _classic_part(parsed: ClassicMemberValue) -> ClassicPart:
    protocols = tuple((each.name, each.metadata) for each in parsed.protocols)
    return ClassicPart(parsed.session_timeout_ms, parsed.metadata, parsed.assignment, protocols)


def _target(group: Group, value: bytes) -> frozenset[TopicPartition]:
    partitions = []
    for topic in TargetValue.FromString(value).partitions:
        partitions += [checked_partition(topic.topic_id, number) for number in topic.partitions]
        if topic.topic:
            group.topic_names[topic.topic_id] = topic.topic
    return frozenset(partitions)


def _assignment(group: Group, value: bytes) -> Assignment:
    parsed = AssignmentValue.FromString(value)
    assigned = _read_epochs(group, parsed.assigned)
    pending = _read_epochs(group, parsed.pending_revocation)
    if not assigned.keys().isdisjoint(pending):
        raise ValueError("a partition is assigned and pending revocation at once")
    return Assignment(parsed.member_epoch, parsed.previous_member_epoch, assigned, pending)


def _read_epochs(group: Group, topics: Iterable[AssignedPartitions]) -> dict[TopicPartition, int]:
    since: dict[TopicPartition, int] = {}
    for topic in topics:
        if len(topic.partitions) != len(topic.since_epochs):
            raise ValueError(f"{len(topic.partitions)} partitions with {len(topic.since_epochs)} epochs")
        for number, epoch in zip(topic.partitions, topic.since_epochs, strict=True):
            since[checked_partition(topic.topic_id, number)] = epoch
        if topic.topic:
            group.topic_names[topic.topic_id] = topic.topic
    return since
