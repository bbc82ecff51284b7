"""Descriptions of groups for tools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from broker.coordinator.groups import transactional
from broker.coordinator.groups.change import Change, MemberState, member_state
from broker.coordinator.groups.group import Assignment, Group
from broker.coordinator.groups.records import subscription_message, topic_partitions
from broker.coordinator.groups.sessions import Session
from broker.coordinator.groups.topics import TopicPartition
from raftlog.errors import GroupIdNotFound, NonEmptyGroup, to_wire
from raftlog.v1 import group_pb2

_NAMED: Final = 5
"""How many members a refusal names."""


def state_of(group: Group) -> group_pb2.GroupState.ValueType:
    """Return the state of a group."""
    head = group.head
    if not group.members:
        return group_pb2.EMPTY if group.exists else group_pb2.DEAD
    if head is None or head.assignment_epoch < head.group_epoch:
        return group_pb2.ASSIGNING
    for member_id, assignment in group.assignments.items():
        state = member_state(assignment, group.targets.get(member_id, frozenset()))
        behind = assignment.member_epoch != head.assignment_epoch and state is not MemberState.AWAY
        if behind or state in (MemberState.UNREVOKED_PARTITIONS, MemberState.UNRELEASED_PARTITIONS):
            return group_pb2.RECONCILING
    return group_pb2.STABLE


def listed(group: Group) -> group_pb2.ListedGroup:
    """Return a line of the list of groups."""
    return group_pb2.ListedGroup(group_id=group.group_id, state=state_of(group), members=len(group.members))


def describe(change: Change, group: Group) -> group_pb2.GroupDescription:
    """Return the description of a group; its members are added one by one (`member`)."""
    if not group.exists:
        error = to_wire(GroupIdNotFound(f"there is no group {group.group_id!r}"))
        return group_pb2.GroupDescription(error=error, group_id=group.group_id, state=group_pb2.DEAD)
    head = change.head
    return group_pb2.GroupDescription(
        group_id=group.group_id,
        state=state_of(group),
        group_epoch=head.group_epoch,
        assignment_epoch=head.assignment_epoch,
        assignor=head.assignor,
        empty_since_ms=head.empty_since_ms,
    )


def member(change: Change, group: Group, member_id: str) -> group_pb2.GroupMember:
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
        connected=session.to is not None,
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
    if draft.members:
        count = len(draft.members)
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
