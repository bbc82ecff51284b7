"""A member on its way from what it has to what it is to have (KIP-848). Pure.

    STABLE                 it has its target
    UNREVOKED_PARTITIONS   it was asked to let partitions go; its member epoch stays what it is until it has
    UNRELEASED_PARTITIONS  it is in the target's epoch, and some of its target is still somebody else's

    from        by                                                       to
    any         something it has is not in its target any more           UNREVOKED
    UNREVOKED   it has let go of part                                     UNREVOKED; that part is free
    UNREVOKED   it has let go of all: it enters the target's epoch        STABLE or UNRELEASED
    STABLE      a newer target that only adds                             STABLE or UNRELEASED
    UNRELEASED  another member lets go, or is gone                        STABLE or UNRELEASED
    AWAY        a newer target: what is not in it is free (it reads       AWAY
                nothing), nothing is added

A partition that is pending revocation stays so even when a newer target gives it back: it is let go first and given
anew, so that commits of the time before are recognized by their epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from enum import Enum

from broker.groups.group import Assignment
from broker.groups.topics import TopicPartition


class MemberState(Enum):
    """Where a member stands."""

    STABLE = "stable"
    UNREVOKED_PARTITIONS = "unrevoked partitions"
    UNRELEASED_PARTITIONS = "unreleased partitions"
    AWAY = "away"


def member_state(current: Assignment, target: Set[TopicPartition]) -> MemberState:
    """Return where a member stands on its way to `target`."""
    if current.away:
        return MemberState.AWAY
    if current.pending_revocation or not target >= current.assigned.keys():
        return MemberState.UNREVOKED_PARTITIONS
    if len(current.assigned) < len(target):
        return MemberState.UNRELEASED_PARTITIONS
    return MemberState.STABLE


def reconcile(
    current: Assignment,
    target: Set[TopicPartition],
    assignment_epoch: int,
    let_go: Set[TopicPartition],
    is_free: Callable[[TopicPartition], bool],
) -> Assignment:
    """Return what the member has next.

    `let_go`: what the member has told it does not read any more. `is_free`: whether nobody else has a partition; it is
    asked only of what the member itself does not have.
    """
    kept = {partition: since for partition, since in current.assigned.items() if partition in target}
    if current.away:
        return Assignment(current.member_epoch, current.previous_member_epoch, kept, {})
    pending = {
        partition: since
        for source in (current.pending_revocation, current.assigned)
        for partition, since in source.items()
        if partition not in kept and (source is current.assigned or partition not in let_go)
    }
    if pending:
        return Assignment(current.member_epoch, current.previous_member_epoch, kept, pending)
    if len(kept) < len(target):
        for partition in target:
            if partition not in kept and is_free(partition):
                kept[partition] = assignment_epoch
    if current.member_epoch == assignment_epoch:
        return Assignment(assignment_epoch, current.previous_member_epoch, kept, {})
    return Assignment(assignment_epoch, current.member_epoch, kept, {})
