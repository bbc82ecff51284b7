"""Descriptions of groups for tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from broker.coordinator.groups import transactional
from broker.coordinator.groups.change import Change, MemberState, member_state
from broker.coordinator.groups.classic.consumer import CONSUMER, assigned_partitions, subscribed_topics
from broker.coordinator.groups.classic.machine import ClassicGroup, ClassicMember, State
from broker.coordinator.groups.group import Assignment, Group
from broker.coordinator.groups.records import subscription_message, topic_partitions
from broker.coordinator.groups.sessions import GroupSessions, Session
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import GroupIdNotFound, NonEmptyGroup, to_wire
from raftlog.v1 import group_pb2

_NAMED: Final = 5
"""How many members a refusal names."""


def state_of(group: Group, soft: GroupSessions | None) -> group_pb2.GroupState.ValueType:
    """Return the state of a group."""
    if soft is not None and soft.classic is not None and group.exists:
        return _CLASSIC[soft.classic.state]
    head = group.head
    if not group.members:
        return group_pb2.EMPTY if group.exists else group_pb2.DEAD
    if head is not None and head.classic is not None:
        return group_pb2.STABLE if head.assignment_epoch == head.group_epoch else group_pb2.PREPARING_REBALANCE
    if head is None or head.assignment_epoch < head.group_epoch:
        return group_pb2.ASSIGNING
    for member_id, assignment in group.assignments.items():
        state = member_state(assignment, group.targets.get(member_id, frozenset()))
        behind = assignment.member_epoch != head.assignment_epoch and state is not MemberState.AWAY
        if behind or state in (MemberState.UNREVOKED_PARTITIONS, MemberState.UNRELEASED_PARTITIONS):
            return group_pb2.RECONCILING
    return group_pb2.STABLE


_CLASSIC: Final = {
    State.EMPTY: group_pb2.EMPTY,
    State.PREPARING_REBALANCE: group_pb2.PREPARING_REBALANCE,
    State.COMPLETING_REBALANCE: group_pb2.COMPLETING_REBALANCE,
    State.STABLE: group_pb2.STABLE,
}


def type_of(group: Group, soft: GroupSessions | None) -> tuple[group_pb2.GroupType.ValueType, str]:
    """Return the type of a group, and of its members; one with offsets only is a classic group, as in Kafka."""
    if soft is not None and soft.classic is not None:
        return group_pb2.GROUP_TYPE_CLASSIC, soft.classic.protocol_type
    head = group.head
    if head is None:
        return group_pb2.GROUP_TYPE_CLASSIC, ""
    if head.classic is not None:
        return group_pb2.GROUP_TYPE_CLASSIC, head.classic.protocol_type
    return group_pb2.GROUP_TYPE_CONSUMER, CONSUMER


def listed(group: Group, soft: GroupSessions | None) -> group_pb2.ListedGroup:
    """Return a line of the list of groups."""
    of_type, protocol_type = type_of(group, soft)
    members = group.members if soft is None or soft.classic is None else soft.classic.members
    return group_pb2.ListedGroup(
        group_id=group.group_id,
        state=state_of(group, soft),
        members=len(members),
        type=of_type,
        protocol_type=protocol_type,
    )


def describe(change: Change, group: Group) -> group_pb2.GroupDescription:
    """Return the description of a group; its members are added one by one (`member`)."""
    if not group.exists:
        error = to_wire(GroupIdNotFound(f"there is no group {group.group_id!r}"))
        return group_pb2.GroupDescription(error=error, group_id=group.group_id, state=group_pb2.DEAD)
    head = change.head
    of_type, protocol_type = type_of(group, change.soft)
    return group_pb2.GroupDescription(
        group_id=group.group_id,
        type=of_type,
        protocol_type=protocol_type,
        state=state_of(group, change.soft),
        group_epoch=head.group_epoch,
        assignment_epoch=head.assignment_epoch,
        assignor=head.assignor,
        empty_since_ms=head.empty_since_ms,
    )


def member_ids(change: Change, group: Group) -> list[str]:
    """Return the members to describe, in order."""
    classic = change.soft.classic
    return sorted(group.members if classic is None else classic.members) if group.exists else []


def members(change: Change, group: Group, some: Sequence[str]) -> Iterator[group_pb2.GroupMember]:
    """Yield the descriptions of those that are still members."""
    classic = change.soft.classic
    for member_id in some:
        if classic is not None and member_id in classic.members:
            yield _classic_member(change, classic, classic.members[member_id])
        elif classic is None and member_id in group.members:
            yield _member(change, group, member_id)


def _classic_member(change: Change, classic: ClassicGroup, member: ClassicMember) -> group_pb2.GroupMember:
    is_stable = classic.state is State.STABLE
    said = member.said(classic.protocol) if is_stable else b""
    assignment = member.assignment if is_stable else b""
    assigned = []
    for name, numbers in assigned_partitions(classic.protocol_type, assignment).items():
        topic = change.context.topics.by_name(name)
        topic_id = topic.topic_id if topic is not None else b""
        assigned.append(group_pb2.TopicPartitions(topic_id=topic_id, topic=name, partitions=numbers))
    topics = subscribed_topics(classic.protocol_type, member.said(classic.protocol) or member.protocols[0][1])
    return group_pb2.GroupMember(
        member_id=member.member_id,
        instance_id=member.instance_id,
        client_id=member.client_id,
        host=member.host,
        member_epoch=classic.generation,
        subscription=group_pb2.Subscription(topics=topics),
        assigned=assigned,
        last_heartbeat_ms=-1,
        connected=True,
        classic_metadata=said,
        classic_assignment=assignment,
        speaks_classic=True,
    )


def _member(change: Change, group: Group, member_id: str) -> group_pb2.GroupMember:
    """Return the description of a member."""
    known = group.members[member_id]
    assignment = group.assignments.get(member_id, Assignment())
    session = change.soft.sessions.get(member_id) or Session(0.0)
    heard_of_ms = session.heard_of_ms
    return group_pb2.GroupMember(
        member_id=member_id,
        instance_id=known.instance_id,
        client_id=known.client_id,
        host=session.host or known.host,
        rack=known.rack,
        member_epoch=assignment.member_epoch,
        subscription=subscription_message(known.subscription),
        assigned=topic_partitions(assignment.assigned, change.names),
        target=topic_partitions(group.targets.get(member_id, ()), change.names),
        pending_revocation=topic_partitions(assignment.pending_revocation, change.names),
        last_heartbeat_ms=-1 if heard_of_ms is None else max(0, int(change.now.monotonic_ms - heard_of_ms)),
        connected=session.to is not None or known.classic is not None,
        speaks_classic=known.classic is not None,
    )


def _is_away(assignments: Mapping[str, Assignment], member_id: str) -> bool:
    """Whether it is a static member that has left and may come back."""
    return member_id in assignments and assignments[member_id].away


def delete(
    change: Change, partitions: Iterable[TopicPartition], *, is_last: bool
) -> group_pb2.CommitOffsetResult | None:
    """Forget offsets of a group without members, and the group itself with the last ones; return the answer then."""
    draft = change.draft
    result = group_pb2.CommitOffsetResult()
    if change.has_members:
        count = len(member_ids(change, change.group))
        members, them = ("member", "it") if count == 1 else ("members", "them")
        refusal = f"the group {change.group_id!r} has {count} {members}; stop {them} first"
        away = sorted(
            member.instance_id for member_id, member in draft.members.items() if _is_away(draft.assignments, member_id)
        )
        if away:
            named = ", ".join(away[:_NAMED]) + (", ..." if len(away) > _NAMED else "")
            verb = "is" if len(away) == 1 else "are"
            refusal += f" ({named} {verb} away, and in the group until the session timeout is over)"
        result.error.CopyFrom(to_wire(NonEmptyGroup(refusal)))
    elif change.group.pending:
        result.error.CopyFrom(to_wire(NonEmptyGroup(transactional.pending_refusal(change.group))))
    elif draft.head is None and not draft.offsets:
        result.error.CopyFrom(to_wire(GroupIdNotFound(f"there is no group {change.group_id!r}")))
    else:
        for partition in partitions:
            if partition in draft.offsets:
                draft.set_offset(partition, None)
        if not is_last:
            return None
        draft.set_head(None)
    return result
