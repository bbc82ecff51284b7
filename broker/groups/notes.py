"""What people are told of an assignment: why there is nothing to read, or less than they think."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from broker.groups.group import Assignment, Member
from raftlog._core.words import some

if TYPE_CHECKING:
    from broker.groups.change import Change

MAX_NAMED: Final = 5


def note_for(change: Change, member: Member, assignment: Assignment) -> str:
    """Return what a member should be told; empty where all is as expected."""
    notes = []
    names = member.subscription.topics
    missing = change.missing(names)
    if missing:
        what = "a topic that does" if len(missing) == 1 else "topics that do"
        notes.append(f"waits for {what} not exist: {some(missing, MAX_NAMED)}")
    if not names:
        pattern = member.subscription.pattern
        notes.append(f"no topic matches {pattern!r}" if pattern else "subscribed to nothing")
    elif not assignment.assigned and len(missing) < len(names):
        target = change.draft.targets.get(member.member_id, frozenset())
        if assignment.pending_revocation:
            pass
        elif target:
            notes.append(f"waits for {len(target)} partitions that other members are letting go")
        elif change.head.assignment_epoch == change.head.group_epoch:
            notes.append("idle: more members than partitions")
    return "; ".join(notes)
