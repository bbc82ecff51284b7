"""The state of one group: immutable values, and the table of them that records change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from broker.coordinator.groups.topics import TopicPartition
from broker.coordinator.user_bound import OFFSET_BYTES

JOINING: Final = 0
"""Member epoch of a member that has not been part of any assignment yet."""
AWAY: Final = -2
"""Member epoch of a static member that left and will be back (KIP-345, KIP-848)."""


@dataclass(frozen=True, slots=True)
class Subscription:
    """A member's subscription: topic names in ascending order, and the pattern that matched them, if any."""

    topics: tuple[str, ...] = ()
    pattern: str = ""
    assignor: str = ""


@dataclass(frozen=True, slots=True)
class ClassicPart:
    """A member that speaks Kafka's classic protocol.

    In a classic group: what it says with the chosen protocol, and what the leader gave it. In a group in which the
    coordinator assigns: all `protocols` that it offers, each with what it says, the one that it prefers first.
    """

    session_timeout_ms: int
    metadata: bytes = b""
    assignment: bytes = b""
    protocols: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A member as it describes itself. `rebalance_timeout_ms` 0: the coordinator's.

    `classic`: it speaks Kafka's classic protocol, in a classic group or in one in which the coordinator assigns.
    """

    member_id: str
    instance_id: str = ""
    client_id: str = ""
    host: str = ""
    rack: str = ""
    subscription: Subscription = Subscription()
    rebalance_timeout_ms: int = 0
    classic: ClassicPart | None = None


MEMBER_BYTES: Final = 2_000
"""Memory of a member, besides its topic names and the bytes of the classic protocol."""
ASSIGNED_BYTES: Final = 600
"""Memory of a partition in a group in which the coordinator assigns: in the target, the assignment, and the member's
session."""
NAME_BYTES: Final = 150
"""Memory of a topic name in a subscription, besides its characters."""


def member_bytes(member: Member | None) -> int:
    """Return about how much memory a member's description takes; 0 for None."""
    if member is None:
        return 0
    topics, classic = member.subscription.topics, member.classic
    size = MEMBER_BYTES + NAME_BYTES * len(topics) + sum(map(len, topics)) + len(member.subscription.pattern)
    if classic is not None:
        size += len(classic.metadata) + len(classic.assignment) + protocols_bytes(classic.protocols)
    return size


def protocols_bytes(protocols: tuple[tuple[str, bytes], ...]) -> int:
    """Return the size of the protocols that a classic member offers."""
    return sum(len(name) + len(said) for name, said in protocols)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A member's assignment: partition -> the member epoch in which the member got it.

    `pending_revocation`: partitions that it was asked to release; no other member gets them before. Invariant: no
    partition is in both.
    """

    member_epoch: int = JOINING
    previous_member_epoch: int = JOINING
    assigned: Mapping[TopicPartition, int] = field(default_factory=dict)
    pending_revocation: Mapping[TopicPartition, int] = field(default_factory=dict)

    def since_epoch(self, partition: TopicPartition) -> int | None:
        """Return the member epoch since which the member has the partition; None: it does not."""
        since = self.assigned.get(partition)
        return since if since is not None else self.pending_revocation.get(partition)

    @property
    def away(self) -> bool:
        """Whether the static member has left for a while; it reads nothing."""
        return self.member_epoch == AWAY


@dataclass(frozen=True, slots=True)
class ClassicHead:
    """A classic group: its chosen protocol, and the member that assigns; both empty without members."""

    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """The state of the group as a whole. `classic`: it is a classic one, and its epochs are generations.

    `known_topics`: topic id -> its partitions when the group first saw it (0: it is newer than the
    subscription). `empty_since_ms` 0: it has members. Invariant: assignment_epoch <= group_epoch.
    """

    group_epoch: int = 0
    assignment_epoch: int = 0
    assignor: str = ""
    empty_since_ms: int = 0
    known_topics: Mapping[bytes, int] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()
    classic: ClassicHead | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed offset: of the next record to be read."""

    offset: int
    leader_epoch: int
    metadata: str
    committed_at_ms: int
    topic: str


def kept_bytes(committed: Committed | None) -> int:
    """Return what a committed offset takes in memory, about; 0: there is none."""
    return 0 if committed is None else OFFSET_BYTES + len(committed.metadata.encode())


@dataclass(frozen=True, slots=True)
class Pending:
    """An offset that counts once the transaction that it belongs to commits: the producer's of this epoch."""

    committed: Committed
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Fence:
    """The end of a producer's transaction in this group, at `ended_at_ms`; lower epochs belong to earlier ones."""

    producer_epoch: int
    ended_at_ms: int


class Group:
    """The hard state of a group; changed by replayed records only (`broker.coordinator.groups.records`).

    `owners` and `target_of` follow from assignments and targets, `pending_at` from `pending`. A log that is being
    compacted may show them in another order than they were written in, so nothing here relies on it.
    """

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.head: Head | None = None
        self.members: dict[str, Member] = {}
        self.targets: dict[str, frozenset[TopicPartition]] = {}
        self.assignments: dict[str, Assignment] = {}
        self.offsets: dict[TopicPartition, Committed] = {}
        self.pending: dict[int, dict[TopicPartition, Pending]] = {}
        """By producer id; one producer's are all of one epoch."""
        self.pending_at: dict[TopicPartition, set[int]] = {}
        """Which producers have a pending offset of a partition."""
        self.fences: dict[int, Fence] = {}
        """Fences by producer id, in the order of their end."""
        self.owners: dict[TopicPartition, str] = {}
        self.target_of: dict[TopicPartition, str] = {}
        self.instances: dict[str, str] = {}
        self.topic_names: dict[bytes, str] = {}
        self.user = ""
        """The user that made it, while it exists; "": it counts for none."""
        self.kept_bytes = 0
        """What the committed offsets and the pending ones take in memory."""
        self.members_bytes = 0
        """Memory of the members' descriptions."""

    @property
    def gone(self) -> bool:
        """Whether no record is left of it."""
        return not (self.exists or self.fences)

    @property
    def exists(self) -> bool:
        """Whether clients see such a group; fences alone are not one."""
        there = self.members or self.targets or self.assignments or self.offsets or self.pending
        return self.head is not None or bool(there)

    def newest_pending_ms(self, partition: TopicPartition) -> int | None:
        """Return when the newest of a partition's pending offsets was sent; None: there is none."""
        producer_ids = self.pending_at.get(partition, ())
        return max((self.pending[each][partition].committed.committed_at_ms for each in producer_ids), default=None)

    def set_member(self, member_id: str, member: Member | None) -> None:
        """A member has joined or changed; None: it is gone."""
        old = self.members.get(member_id)
        self.members_bytes += member_bytes(member) - member_bytes(old)
        if old is not None and self.instances.get(old.instance_id) == member_id:
            del self.instances[old.instance_id]
        if member is None:
            self.members.pop(member_id, None)
            return
        self.members[member_id] = member
        if member.instance_id:
            self.instances[member.instance_id] = member_id

    def set_target(self, member_id: str, target: frozenset[TopicPartition] | None) -> None:
        """Set a member's target; None removes it."""
        old = self.targets.get(member_id, frozenset())
        for partition in old if target is None else old - target:
            if self.target_of.get(partition) == member_id:
                del self.target_of[partition]
        if target is None:
            self.targets.pop(member_id, None)
            return
        self.targets[member_id] = target
        for partition in target:
            self.target_of[partition] = member_id

    def set_assignment(self, member_id: str, assignment: Assignment | None) -> None:
        """Set a member's assignment; None removes it."""
        old = self.assignments.get(member_id)
        if old is not None:
            for partition in (*old.assigned, *old.pending_revocation):
                if self.owners.get(partition) == member_id:
                    del self.owners[partition]
        if assignment is None:
            self.assignments.pop(member_id, None)
            return
        self.assignments[member_id] = assignment
        for partition in (*assignment.assigned, *assignment.pending_revocation):
            self.owners[partition] = member_id

    def set_offset(self, partition: TopicPartition, committed: Committed | None) -> None:
        """An offset was committed; None: it is forgotten."""
        self.kept_bytes += kept_bytes(committed) - kept_bytes(self.offsets.get(partition))
        if committed is None:
            self.offsets.pop(partition, None)
        else:
            self.offsets[partition] = committed

    def set_pending(self, producer_id: int, partition: TopicPartition, pending: Pending | None) -> None:
        """A transaction is to commit an offset; None: it is over, or has none of this partition."""
        before = self.pending.get(producer_id, {}).get(partition)
        self.kept_bytes -= 0 if before is None else kept_bytes(before.committed)
        if pending is not None:
            self.kept_bytes += kept_bytes(pending.committed)
            self.pending.setdefault(producer_id, {})[partition] = pending
            self.pending_at.setdefault(partition, set()).add(producer_id)
            return
        offsets = self.pending.get(producer_id)
        if offsets is None or offsets.pop(partition, None) is None:
            return
        if not offsets:
            del self.pending[producer_id]
        producer_ids = self.pending_at[partition]
        producer_ids.discard(producer_id)
        if not producer_ids:
            del self.pending_at[partition]

    def set_fence(self, producer_id: int, fence: Fence | None) -> None:
        """A producer's transaction has ended; None: that was long ago."""
        self.fences.pop(producer_id, None)
        if fence is not None:
            self.fences[producer_id] = fence
