"""Committed offsets: permission to commit, and expiry.

A member commits for partitions that it has, assigned or pending revocation, in the epoch in which it got them or a
later one (KIP-848, KIP-1251). This detects a commit that was under way while the partition went to another member and
came back. An offset may go back, because a consumer may seek back. A client that is not a member commits only while the
group has no members.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from broker.coordinator.groups.change import Change
from broker.coordinator.groups.classic import calls as classic
from broker.coordinator.groups.classic import embedded
from broker.coordinator.groups.group import Committed, Group, kept_bytes
from broker.coordinator.groups.topics import Topic, TopicPartition
from raftlog.errors import (
    FencedMemberEpoch,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    IllegalGeneration,
    InvalidRequestError,
    OffsetMetadataTooLarge,
    PartitionNotOwned,
    RaftlogError,
    StaleMemberEpoch,
    UnknownMemberId,
    UnknownTopicId,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
    to_wire,
)
from raftlog.v1 import group_pb2


def commit(
    change: Change,
    member_id: str,
    member_epoch: int,
    offsets: Iterable[group_pb2.CommitOffset],
    instance_id: str = "",
) -> list[group_pb2.CommitOffsetResult]:
    """Commit the offsets that may be committed; return a result for each, in order.

    Raises:
        UnknownMemberId, FencedMemberEpoch: none of them may be committed; in a classic group as `check_commit` says.
        PolicyViolation: the offsets of the user's groups would take too much.
    """
    check_member(change, member_id, member_epoch, instance_id, commits=True)
    results = []
    accepted: list[tuple[TopicPartition, Committed]] = []
    more_bytes = 0
    for offset in offsets:
        result = group_pb2.CommitOffsetResult()
        try:
            partition, committed = read(change, member_id, member_epoch, offset)
            more_bytes += kept_bytes(committed) - kept_bytes(change.draft.offsets.get(partition))
            accepted.append((partition, committed))
        except RaftlogError as error:
            result.error.CopyFrom(to_wire(error))
        results.append(result)
    change.context.kept.check(change.draft.user, more_bytes)
    for partition, committed in accepted:
        change.draft.set_offset(partition, committed)
    return results


def check_member(
    change: Change,
    member_id: str,
    member_epoch: int,
    instance_id: str = "",
    *,
    commits: bool,
    transactional: bool = False,
) -> None:
    """Check that a client may commit or read offsets, as this member, or without membership ("").

    Raises:
        UnknownMemberId, FencedMemberEpoch: it may not; in a classic group as `ClassicGroup.check_commit` says.
    """
    if change.soft.classic is not None:
        if commits:
            classic.check_commit(change, (member_id, instance_id, member_epoch), transactional=transactional)
        return
    if not member_id:
        if commits and change.draft.members:
            raise UnknownMemberId(
                f"the group {change.group_id!r} has {len(change.draft.members)} members, and only they commit offsets"
            )
        return
    assignment = change.draft.assignments.get(member_id)
    if assignment is None or member_id not in change.draft.members:
        raise UnknownMemberId(f"the group {change.group_id!r} has no member {member_id}: join again")
    if change.draft.members[member_id].classic is not None:
        embedded.check_commit(change, member_id, instance_id, member_epoch)
        return
    if member_epoch < 0 or member_epoch > assignment.member_epoch:
        raise FencedMemberEpoch(f"the member epoch is {assignment.member_epoch}, not {member_epoch}")


def _check_owner(change: Change, member_id: str, member_epoch: int, partition: TopicPartition) -> None:
    since = change.draft.since(member_id, partition)
    if since is None and change.draft.members[member_id].classic is not None:
        # The clients of that protocol take this for what it is: they are behind, and join again.
        raise IllegalGeneration(f"partition {partition[1]} of {_shown(change, partition[0])} is not the member's")
    if since is None:
        raise PartitionNotOwned(f"partition {partition[1]} of {_shown(change, partition[0])} is not the member's")
    if member_epoch < since:
        raise StaleMemberEpoch(
            f"the member has partition {partition[1]} of {_shown(change, partition[0])} since its epoch {since}, "
            f"and this is of {member_epoch}"
        )


def _shown(change: Change, topic_id: bytes) -> str:
    return change.names[topic_id] or topic_id.hex()


def _topic(change: Change, topic_id: bytes, name: str) -> Topic:
    topics = change.context.topics
    if topic_id:
        topic = topics.by_id(topic_id)
        if topic is None:
            raise UnknownTopicId(f"there is no topic with the id {topic_id[:16].hex()}")
        return topic
    topic = topics.by_name(name)
    if topic is None:
        raise UnknownTopicOrPartition(f"there is no topic {name[:100]!r}")
    return topic


def read(
    change: Change, member_id: str, member_epoch: int, offset: group_pb2.CommitOffset
) -> tuple[TopicPartition, Committed]:
    """Check an offset, and return the partition and the value to commit.

    Of a partition that a transaction is to commit, too, whichever was sent last counts, whenever the transaction ends:
    so what is sent later has a later time, however the clock goes.

    Raises:
        RaftlogError: it cannot be; says why.
    """
    topic = _topic(change, offset.topic_id, offset.topic)
    if not 0 <= offset.partition < topic.partitions:
        raise UnknownTopicOrPartition(f"{topic.name} has {topic.partitions} partitions, and no {offset.partition}")
    partition = topic.topic_id, offset.partition
    if member_id and change.soft.classic is None:
        _check_owner(change, member_id, member_epoch, partition)
    if offset.offset < 0:
        raise InvalidRequestError(f"offset {offset.offset} is below 0: commit that of the next record to be read")
    most = change.context.config.offset_metadata_max_bytes
    size = len(offset.metadata.encode())
    if size > most:
        raise OffsetMetadataTooLarge(
            f"the offset's metadata has {size} bytes, at most {most} (offset.metadata.max.bytes)"
        )
    pending_ms = change.group.newest_pending_ms(partition)
    return partition, Committed(
        offset=offset.offset,
        leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
        committed_at_ms=change.now.wall_ms if pending_ms is None else max(change.now.wall_ms, pending_ms + 1),
        topic=topic.name,
    )


def show(
    change: Change,
    request: group_pb2.FetchOffsetsRequest,
    asked: tuple[group_pb2.TopicPartitions, int],
    response: group_pb2.FetchOffsetsResponse,
) -> None:
    """Add the committed offset of a requested partition; a member may ask for its own partitions only."""
    topic, number = asked
    shown = response.offsets.add(
        topic_id=topic.topic_id, topic=topic.topic, partition=number, offset=-1, leader_epoch=-1
    )
    try:
        found = topic.topic_id
        if (found, number) not in change.draft.offsets:
            found = _topic(change, topic.topic_id, topic.topic).topic_id
        if request.member_id and change.soft.classic is None:
            _check_owner(change, request.member_id, request.member_epoch, (found, number))
        shown.topic_id, shown.topic = found, change.names[found] or topic.topic
        if request.require_stable:
            _check_stable(change, (found, number))
        committed = change.draft.offsets.get((found, number))
        if committed is not None:
            _show(shown, committed)
    except RaftlogError as error:
        shown.error.CopyFrom(to_wire(error))


def show_known(
    change: Change,
    request: group_pb2.FetchOffsetsRequest,
    partition: TopicPartition,
    response: group_pb2.FetchOffsetsResponse,
) -> None:
    """Add a committed offset, if it is still there."""
    known = change.draft.offsets.get(partition)
    if request.require_stable and partition in change.group.pending_at:
        shown = response.offsets.add(
            topic_id=partition[0], topic=change.names[partition[0]], partition=partition[1], offset=-1, leader_epoch=-1
        )
        shown.error.CopyFrom(to_wire(_unstable(change, partition)))
    elif known is not None:
        _show(response.offsets.add(topic_id=partition[0], topic=known.topic, partition=partition[1]), known)


def _check_stable(change: Change, partition: TopicPartition) -> None:
    if partition in change.group.pending_at:
        raise _unstable(change, partition)


def _unstable(change: Change, partition: TopicPartition) -> UnstableOffsetCommit:
    producer_ids = sorted(change.group.pending_at[partition])
    return UnstableOffsetCommit(
        f"an open transaction of producer {producer_ids[0]} may replace the offset of partition {partition[1]} of "
        f"{_shown(change, partition[0])} that {change.group_id!r} has committed; wait until it has ended"
    )


def _show(shown: group_pb2.CommittedOffset, committed: Committed) -> None:
    shown.offset = committed.offset
    shown.leader_epoch = committed.leader_epoch
    shown.metadata = committed.metadata
    shown.committed_at_ms = committed.committed_at_ms


def check_delete(change: Change) -> None:
    """Whether there is something to delete offsets of.

    Raises:
        GroupIdNotFound: there is no such group.
    """
    if change.draft.head is None and not change.draft.offsets and not change.group.pending:
        raise GroupIdNotFound(f"there is no group {change.group_id!r}")


def delete(
    change: Change, partitions: Iterable[tuple[group_pb2.TopicPartitions, int]]
) -> list[group_pb2.CommitOffsetResult]:
    """Forget offsets of topics that no member subscribes to; return a result for each, in order.

    That of a partition which an open transaction is to commit stays: what becomes of it is not decided yet.
    """
    results = []
    for asked, number in partitions:
        result = group_pb2.CommitOffsetResult()
        results.append(result)
        try:
            topic_id = asked.topic_id or _topic(change, b"", asked.topic).topic_id
            name = change.names[topic_id]
            if name and change.context.is_read(change.group_id, name):
                raise GroupSubscribedToTopic(f"members of {change.group_id!r} read {name}, so its offsets stay")
            _check_stable(change, (topic_id, number))
            if (topic_id, number) in change.draft.offsets:
                change.draft.set_offset((topic_id, number), None)
        except RaftlogError as error:
            result.error.CopyFrom(to_wire(error))
    return results


def may_expire(group: Group, retention_ms: int, wall_ms: int) -> bool:
    """Whether `expired` has to look at a group: a cheap look at all of them finds those."""
    if retention_ms < 0 or group.members or group.pending:
        return False
    return group.head is None or group.head.empty_since_ms <= wall_ms - retention_ms


def expired(change: Change, most: int) -> bool:
    """Forget offsets that are old enough, `most` at a time; return whether there are more.

    Those of a group without members age since it lost the last one, and since each was committed; those of a group
    with members do not (KIP-211), nor do those of a group with a transaction open (redpanda #31483). A group of which
    nothing is left but its age is forgotten, too.
    """
    retention_ms = change.context.config.offsets_retention_ms
    if retention_ms < 0 or change.has_members or change.group.pending:
        return False
    head = change.draft.head
    empty_since_ms = head.empty_since_ms if head is not None else 0
    before_ms = change.now.wall_ms - retention_ms
    if head is not None and not empty_since_ms <= before_ms:
        return False
    stored = change.group.offsets.items()
    aged = (at for at, committed in stored if committed.committed_at_ms <= before_ms)
    old = list(islice(aged, most + 1))
    for partition in old[:most]:
        change.draft.set_offset(partition, None)
    if len(old) > most:
        return True
    if not change.draft.offsets and head is not None:
        change.draft.set_head(None)
    return False


def forget_topics(change: Change, most: int) -> bool:
    """Forget offsets of topics that were deleted, `most` at a time; return whether there are more."""
    by_id = change.context.topics.by_id
    is_deleted: dict[bytes, bool] = {}
    for topic_id, _ in change.group.offsets:
        if topic_id not in is_deleted:
            is_deleted[topic_id] = by_id(topic_id) is None
    if not any(is_deleted.values()):
        return False
    gone = list(islice((partition for partition in change.group.offsets if is_deleted[partition[0]]), most + 1))
    for partition in gone[:most]:
        change.draft.set_offset(partition, None)
    return len(gone) > most
