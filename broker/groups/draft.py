"""A group as it will be once the records of a decision have been replayed."""

from __future__ import annotations

from collections.abc import Mapping

from broker.groups import records
from broker.groups.group import Assignment, Committed, Fence, Group, Head, Member, Pending
from broker.groups.overlay import Overlay
from broker.groups.topics import TopicPartition


class Draft:
    """Reads as the group with the changes made; every change is a record in `records`, in order.

    Only of pending offsets and fences it shows nothing: no decision looks at those that it has changed itself.
    """

    def __init__(self, group: Group, names: Mapping[bytes, str], records: list[records.Record]) -> None:
        self.group_id = group.group_id
        self._names = names
        self.records = records
        self.head = group.head
        self.members = Overlay(group.members)
        self.targets = Overlay(group.targets)
        self.assignments = Overlay(group.assignments)
        self.offsets = Overlay(group.offsets)
        self.owners = Overlay(group.owners)
        self.target_of = Overlay(group.target_of)
        self.instances = Overlay(group.instances)

    def set_head(self, head: Head | None) -> None:
        """Change the group as a whole."""
        if head != self.head:
            self.head = head
            self.records.append(records.head_record(self.group_id, head))

    def set_member(self, member_id: str, member: Member | None) -> None:
        """Change what a member has said of itself; None: it is gone."""
        old = self.members.get(member_id)
        if old == member:
            return
        if old is not None and self.instances.get(old.instance_id) == member_id:
            self.instances.set(old.instance_id, None)
        if member is not None and member.instance_id:
            self.instances.set(member.instance_id, member_id)
        self.members.set(member_id, member)
        self.records.append(records.member_record(self.group_id, member_id, member))

    def set_target(self, member_id: str, target: frozenset[TopicPartition] | None) -> None:
        """Change what a member is to have."""
        old = self.targets.get(member_id)
        if old == target:
            return
        for partition in (old or frozenset()) - (target or frozenset()):
            if self.target_of.get(partition) == member_id:
                self.target_of.set(partition, None)
        for partition in target or ():
            self.target_of.set(partition, member_id)
        self.targets.set(member_id, target)
        self.records.append(records.target_record(self.group_id, member_id, target, self._names))

    def set_assignment(self, member_id: str, assignment: Assignment | None) -> list[TopicPartition]:
        """Change what a member has; return the partitions that nobody has now.

        Whoever gets something has to find it free: so no prefix of the records gives a partition to two.
        """
        old = self.assignments.get(member_id)
        if old == assignment:
            return []
        had = {*old.assigned, *old.pending_revocation} if old is not None else set()
        has = {*assignment.assigned, *assignment.pending_revocation} if assignment is not None else set()
        freed = sorted(had - has)
        for partition in freed:
            self.owners.set(partition, None)
        for partition in has - had:
            assert partition not in self.owners, "a partition is given only when it is free"
            self.owners.set(partition, member_id)
        self.assignments.set(member_id, assignment)
        self.records.append(records.assignment_record(self.group_id, member_id, assignment, self._names))
        return freed

    def set_offset(self, partition: TopicPartition, committed: Committed | None) -> None:
        """Commit or forget an offset."""
        self.offsets.set(partition, committed)
        self.records.append(records.offset_record(self.group_id, partition, committed))

    def set_pending(self, producer_id: int, partition: TopicPartition, pending: Pending | None) -> None:
        """Take an offset for a transaction, or forget it."""
        self.records.append(records.pending_record(self.group_id, producer_id, partition, pending))

    def set_fence(self, producer_id: int, fence: Fence | None) -> None:
        """Note, or forget, that a producer's transaction has ended."""
        self.records.append(records.fence_record(self.group_id, producer_id, fence))

    def since(self, member_id: str, partition: TopicPartition) -> int | None:
        """Return the member epoch since which a member has a partition."""
        return self.assignments.get(member_id, Assignment()).since_epoch(partition)
