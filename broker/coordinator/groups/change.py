"""One decision on one group: its records, its members' sessions, and the messages to members.

`Draft` is the group as it will be once the records of the decision have been replayed; an `Overlay` holds its changes.

A member moves from its assignment to its target (KIP-848):

    STABLE                 it has its target
    UNREVOKED_PARTITIONS   it was asked to release partitions, and keeps its member epoch until it has
    UNRELEASED_PARTITIONS  it is in the target's epoch, but other members still have some of its target

    from        by                                                       to
    any         a partition it has is no longer in its target             UNREVOKED
    UNREVOKED   it has released some                                      UNREVOKED; these are free
    UNREVOKED   it has released all: it enters the target's epoch         STABLE or UNRELEASED
    STABLE      a newer target that only adds                             STABLE or UNRELEASED
    UNRELEASED  another member releases partitions, or is gone            STABLE or UNRELEASED
    AWAY        a newer target: partitions not in it are free (the        AWAY
                member reads nothing), none is added

A member of the classic protocol is moved only while it joins: then it says what it reads (`classic.embedded`).

A partition pending revocation stays so even if a newer target has it again: it is released first and then assigned
anew, so that older commits are recognized by their epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Generic, TypeVar

from broker.coordinator.core import Reply
from broker.coordinator.groups import records
from broker.coordinator.groups.assignors import Assignor
from broker.coordinator.groups.classic.commands import Joined
from broker.coordinator.groups.classic.consumer import CONSUMER
from broker.coordinator.groups.commands import Decision, GroupConfig, Now, Send
from broker.coordinator.groups.group import (
    ASSIGNED_BYTES,
    AWAY,
    Assignment,
    ClassicPart,
    Committed,
    Fence,
    Group,
    Head,
    Member,
    Pending,
    member_bytes,
)
from broker.coordinator.groups.records import by_topic
from broker.coordinator.groups.sessions import GroupSessions, Kind, Session, Timers
from broker.coordinator.groups.topics import TopicPartition, TopicsView
from broker.coordinator.user_bound import NO_AMOUNT_BOUND, AmountBound
from raftlog._core.words import counted, some
from raftlog.errors import GroupMaxSizeReached, RaftlogError
from raftlog.v1 import group_pb2

K = TypeVar("K")
V = TypeVar("V")


class Overlay(Mapping[K, V], Generic[K, V]):
    """`base` as it would be with the changes; None takes a key away. The base must not change meanwhile."""

    __slots__ = ("_base", "_changes")

    def __init__(self, base: Mapping[K, V]) -> None:
        self._base = base
        self._changes: dict[K, V | None] = {}

    def set(self, key: K, value: V | None) -> None:
        """Set a key, or take it away."""
        self._changes[key] = value

    def __getitem__(self, key: K) -> V:
        value = self._changes[key] if key in self._changes else self._base.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        if key in self._changes:
            return self._changes[key] is not None
        return key in self._base

    def __iter__(self) -> Iterator[K]:
        for key in self._base:
            if key not in self._changes:
                yield key
        for key, value in self._changes.items():
            if value is not None:
                yield key

    def __len__(self) -> int:
        length = len(self._base)
        for key, value in self._changes.items():
            length += (value is not None) - (key in self._base)
        return length


class Draft:
    """Reads as the group with the changes made; every change is a record in `records`, in order.

    Only of pending offsets and fences it shows nothing: no decision looks at those that it has changed itself.
    """

    def __init__(self, group: Group, names: Mapping[bytes, str], records: list[records.Record], user: str = "") -> None:
        """`user`: the one that makes the group, if it does not exist."""
        self.group_id = group.group_id
        self._names = names
        self._user = group.user if group.exists else user
        self.records = records
        self.head = group.head
        self.members = Overlay(group.members)
        self.targets = Overlay(group.targets)
        self.assignments = Overlay(group.assignments)
        self.offsets = Overlay(group.offsets)
        self.owners = Overlay(group.owners)
        self.target_of = Overlay(group.target_of)
        self.instances = Overlay(group.instances)

    @property
    def user(self) -> str:
        """The user that has made the group, or makes it; "": none."""
        return self._user

    def set_head(self, head: Head | None) -> None:
        """Change the group as a whole."""
        if head != self.head:
            self.head = head
            self.records.append(records.head_record(self.group_id, head, self._user))

    def set_member(self, member_id: str, member: Member | None) -> None:
        """Change a member; None removes it."""
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
        """Change a member's target."""
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
        """Change a member's assignment; return the partitions that are free now.

        A member gets only free partitions, so no prefix of the records assigns a partition to two members.
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
        self.records.append(records.offset_record(self.group_id, partition, committed, self._user_of_offsets))

    def set_pending(self, producer_id: int, partition: TopicPartition, pending: Pending | None) -> None:
        """Take an offset for a transaction, or forget it."""
        user = self._user_of_offsets
        self.records.append(records.pending_record(self.group_id, producer_id, partition, pending, user))

    @property
    def _user_of_offsets(self) -> str:
        """The user to name in records of offsets: the record of the group as a whole names it, if there is one."""
        return "" if self.head is not None else self._user

    def set_fence(self, producer_id: int, fence: Fence | None) -> None:
        """Note, or forget, that a producer's transaction has ended."""
        self.records.append(records.fence_record(self.group_id, producer_id, fence))

    def since(self, member_id: str, partition: TopicPartition) -> int | None:
        """Return the member epoch since which a member has a partition."""
        return self.assignments.get(member_id, Assignment()).since_epoch(partition)


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
    """Return the member's next assignment.

    `let_go`: the partitions that the member has reported as released. `is_free`: whether no other member has a
    partition; called only for partitions that this member does not have.
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


MAX_NAMED: Final = 5


def note_for(change: Change, member: Member, assignment: Assignment) -> str:
    """Return the note for a member about its assignment; empty if it is as expected."""
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
            notes.append(f"waits for {counted(len(target), 'partition')} that other members are letting go")
        elif change.head.assignment_epoch == change.head.group_epoch:
            notes.append("idle: more members than partitions")
    return "; ".join(notes)


@dataclass(slots=True)
class Context:
    """The state that all groups of a shard share."""

    config: GroupConfig
    topics: TopicsView
    assignors: Mapping[str, Assignor]
    timers: Timers
    is_read: Callable[[str, str], bool]
    """Whether a group (by id) has members that subscribe to a topic (by name)."""
    may_upgrade: Callable[[], bool]
    """Whether every broker of the cluster knows groups with members of both protocols."""
    name_count: Callable[[str], int]
    """How many names the members of a group (by id) subscribe to together, each member's counted by themselves."""
    partition_count: Callable[[str], int]
    """How many partitions the topics have that the members of a group (by id) subscribe to."""
    kept: AmountBound = NO_AMOUNT_BOUND
    """The bound on the memory for the committed offsets of a user's groups."""
    members: AmountBound = NO_AMOUNT_BOUND
    """The bound on the memory for the members of a user's groups."""

    def name_of(self, topic_id: bytes, group: Group) -> str:
        """Return a topic's name; of a deleted one as the group has known it."""
        topic = self.topics.by_id(topic_id)
        return topic.name if topic is not None else group.topic_names.get(topic_id, "")


class _Names(Mapping[bytes, str]):
    """Names of topics, looked up one by one."""

    def __init__(self, context: Context, group: Group) -> None:
        self._context = context
        self._group = group

    def __getitem__(self, topic_id: bytes) -> str:
        return self._context.name_of(topic_id, self._group)

    def __iter__(self) -> None:  # type: ignore[override] # no caller needs all names
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class Change:
    """A decision on a group: it reads and writes `draft`; `finish` sends members their changed assignments."""

    def __init__(
        self, context: Context, group: Group, soft: GroupSessions, now: Now, decision: Decision, user: str = ""
    ) -> None:
        """`user`: the one that makes the group, if it does not exist."""
        self.context = context
        self.group = group
        """As it is before the records are replayed."""
        self.group_id = group.group_id
        self.soft = soft
        self.now = now
        self.names: Mapping[bytes, str] = _Names(context, group)
        self.draft = Draft(group, self.names, decision.records, user)
        self._decision = decision
        self._touched: dict[str, None] = {}
        self._missing: dict[tuple[str, ...], list[str]] = {}

    @property
    def head(self) -> Head:
        """The group as a whole; a new one where there is none yet."""
        return self.draft.head or Head()

    @property
    def has_members(self) -> bool:
        """Whether it has members, those of a classic group that are joining included."""
        return bool(self.draft.members) or (self.soft.classic is not None and bool(self.soft.classic.members))

    def check_room(self, members: int) -> None:
        """Check that one more member may join, where there are `members`.

        Raises:
            GroupMaxSizeReached: it may not.
        """
        most = self.context.config.max_size
        if members >= most:
            raise GroupMaxSizeReached(
                f"the group {self.group_id!r} has {members} members, no more than {most} may join "
                "(group.consumer.max.size)"
            )

    def check_member(self, member: Member) -> None:
        """Check that a member, as it is about to be, keeps the group and its user within their bounds.

        Raises:
            GroupMaxSizeReached: the members would subscribe to too many topics together.
            PolicyViolation: the members of the user's groups would take too much memory.
        """
        draft, topics = self.draft, member.subscription.topics
        known = draft.members.get(member.member_id) or draft.members.get(draft.instances.get(member.instance_id, ""))
        more = len(topics) - (0 if known is None else len(known.subscription.topics))
        count = self.context.name_count(self.group_id) + more
        if more > 0 and count > MAX_NAMES:
            raise GroupMaxSizeReached(
                f"the members of the group {self.group_id!r} would subscribe to {count} topics together, at most "
                f"{MAX_NAMES} are allowed, each member's counted by themselves: use more groups, or fewer members"
            )
        if not draft.user:
            return
        by_name, is_read = self.context.topics.by_name, self.context.is_read
        new = (by_name(name) for name in topics if not is_read(self.group_id, name))
        partitions = sum(topic.partitions for topic in new if topic is not None)
        if self.soft.classic is not None:  # it is about to become a group in which the coordinator assigns
            partitions += self.context.partition_count(self.group_id)
        more_bytes = member_bytes(member) - member_bytes(known) + partitions * ASSIGNED_BYTES
        self.context.members.check(draft.user, more_bytes)

    def send(self, to: object, message: group_pb2.GroupResponse | Reply | RaftlogError | None) -> None:
        """Tell a stream, or a call."""
        self._decision.effects.append(Send(to, message))

    # What is true of the group

    def bump(self, *, known_topics: Mapping[bytes, int] | None = None, patterns: tuple[str, ...] | None = None) -> None:
        """Something has changed that calls for a new assignment: the group is in a new epoch (KIP-848).

        Without members there is nothing to assign, and the assignment is in that epoch at once. Call it with the
        members as they are from now on; it has to come before their records, so that a coordinator which finds only
        the first of them makes an assignment.
        """
        head = self.head
        head = replace(
            head,
            group_epoch=head.group_epoch + 1,
            empty_since_ms=0,
            classic=None,
            known_topics=head.known_topics if known_topics is None else known_topics,
            patterns=head.patterns if patterns is None else patterns,
        )
        self.draft.set_head(head)
        self.assign_soon()

    def assign_soon(self) -> None:
        """Have the assignment made, in a while where the group is large: one for many changes."""
        pace_ms = max(0, len(self.draft.members) - UNPACED_MEMBERS) * PACE_MS
        pace_ms += self.context.name_count(self.group_id) // NAMES_PER_MS
        due_ms = max(self.now.monotonic_ms, self.soft.assigned_at_ms + pace_ms)
        if due_ms < self.soft.assign_due_ms:
            self.soft.assign_due_ms = due_ms
            self.context.timers.at(due_ms, Kind.GROUP, self.group_id)

    # Members

    def touch(self, member_id: str) -> None:
        """Send the member its assignment at the end of the decision, if it differs from the last one sent."""
        self._touched[member_id] = None

    def reconcile(self, member_id: str, let_go: frozenset[TopicPartition] = frozenset()) -> None:
        """Move a member towards its target, and then the members that wait for partitions it released."""
        draft = self.draft
        head = self.head
        settled = head.assignment_epoch == head.group_epoch

        def is_free(partition: TopicPartition) -> bool:
            # Only the newest assignment gives out free partitions: `since_epoch` must be above every epoch in which
            # the partition was read before.
            return settled and draft.owners.get(partition, member_id) == member_id

        waiting = [member_id]
        while waiting:
            member_id = waiting.pop()
            member = draft.members.get(member_id)
            if member is None:
                continue
            current = draft.assignments.get(member_id, Assignment())
            target = draft.targets.get(member_id, frozenset())
            if member.classic is None:
                following = reconcile(current, target, head.assignment_epoch, let_go, is_free)
            else:
                session = self.soft.sessions.get(member_id)
                if not settled or session is None or session.joining is None:
                    continue
                # What it does not read any more is released, whether it was asked to or not.
                has = {**current.assigned, **current.pending_revocation}
                kept = {each: since for each, since in current.assigned.items() if each in target}
                pending = {each: since for each, since in has.items() if each not in kept}
                said = replace(current, assigned=kept, pending_revocation=pending)
                let_go = frozenset(pending.keys() - session.owned)
                following = reconcile(said, target, head.assignment_epoch, let_go, is_free)
            let_go = frozenset()
            if following == current:
                continue
            freed = draft.set_assignment(member_id, following)
            self.touch(member_id)
            waiting += self._waiting_for(freed, member_id)

    def reconcile_waiting(self, freed: list[TopicPartition], member_id: str) -> None:
        """Move the members, other than the one that had them, that wait for partitions which are free now."""
        for waiting in self._waiting_for(freed, member_id):
            self.reconcile(waiting)

    def _waiting_for(self, freed: list[TopicPartition], member_id: str) -> list[str]:
        holders = {self.draft.target_of.get(partition, member_id) for partition in freed}
        return sorted(holders - {member_id}, reverse=True)

    def remove(self, member_id: str) -> None:
        """Remove a member and free its partitions. The caller calls `bump` before, if the assignment must change."""
        draft = self.draft
        self.soft.sessions.pop(member_id, None)
        self._touched.pop(member_id, None)
        draft.set_member(member_id, None)
        draft.set_target(member_id, None)
        self.reconcile_waiting(draft.set_assignment(member_id, None), member_id)

    def leave_empty(self) -> None:
        """Where the last member has gone: nothing is to be assigned, and offsets begin to age."""
        if self.draft.members:
            return
        head = self.head
        self.draft.set_head(replace(head, assignment_epoch=head.group_epoch, empty_since_ms=self.now.wall_ms))

    def put_away(self, member_id: str, left: Assignment) -> None:
        """Note that a static member has left for a while: it reads nothing, and keeps its partitions."""
        freed = self.draft.set_assignment(member_id, Assignment(AWAY, left.member_epoch, left.assigned, {}))
        self.reconcile_waiting(freed, member_id)

    def missing(self, names: tuple[str, ...]) -> list[str]:
        """Return the topics that do not exist; looked up once for all members that subscribe to the same."""
        missing = self._missing.get(names)
        if missing is None:
            by_name = self.context.topics.by_name
            missing = self._missing[names] = [name for name in names if by_name(name) is None]
        return missing

    # The end

    def watch(self, session: Session, member_id: str) -> None:
        """Set a timer for the member's next deadline."""
        if session.due_ms < session.timer_ms:
            session.timer_ms = session.due_ms
            self.context.timers.at(session.due_ms, Kind.MEMBER, self.group_id, member_id)

    def finish(self) -> None:
        """Tell members of their new assignments; nothing is changed after this."""
        for member_id in self._touched:
            session = self.soft.sessions.get(member_id)
            if session is not None:
                self._finish(member_id, session)
        self._touched.clear()

    def _finish(self, member_id: str, session: Session) -> None:
        assignment = self.draft.assignments.get(member_id, Assignment())
        member = self.draft.members[member_id]
        if member.classic is not None:
            self._finish_join(member, member.classic, session, assignment)
            return
        if assignment.pending_revocation or session.let_go_by:
            deadline_ms = self.now.monotonic_ms + self.rebalance_timeout_ms(member)
            session.wait_for(assignment.pending_revocation, deadline_ms)
            self.watch(session, member_id)
        note = note_for(self, member, assignment)
        if session.push(assignment, note):
            self.send(session.to, group_pb2.GroupResponse(assignment=self._message(member, assignment, note)))

    def _finish_join(self, member: Member, said: ClassicPart, session: Session, assignment: Assignment) -> None:
        """Answer the join of a classic member that was waiting for the assignment of the group's epoch."""
        head = self.head
        if session.joining is None or head.assignment_epoch < head.group_epoch:
            return
        protocol, _ = said.protocols[0]
        self.send(session.joining, Joined(member.member_id, assignment.member_epoch, CONSUMER, protocol))
        session.joining = None
        session.deadline_ms = self.now.monotonic_ms + said.session_timeout_ms
        session.act_by_ms = self.now.monotonic_ms + self.rebalance_timeout_ms(member)
        self.watch(session, member.member_id)

    def rebalance_timeout_ms(self, member: Member) -> int:
        """Return how long a member may take to release partitions."""
        return member.rebalance_timeout_ms or self.context.config.rebalance_timeout_ms

    def _message(self, member: Member, assignment: Assignment, note: str) -> group_pb2.GroupAssignment:
        config, head = self.context.config, self.head
        return group_pb2.GroupAssignment(
            member_epoch=assignment.member_epoch,
            topics=[
                group_pb2.AssignedTopic(
                    topic_id=topic_id,
                    topic=self.names[topic_id],
                    partitions=numbers,
                    first_new_partition=head.known_topics.get(topic_id, 0),
                )
                for topic_id, numbers in by_topic(assignment.assigned).items()
            ],
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            session_timeout_ms=config.session_timeout_ms,
            note=note,
            rebalance_timeout_ms=self.rebalance_timeout_ms(member),
            assignor=head.assignor,
        )


UNPACED_MEMBERS: Final = 100
PACE_MS: Final = 1.0
"""Per member above that, between two assignments of a group: where 10 000 join one by one, one in 10 s is made."""
MAX_NAMES: Final = 1_000_000
"""Topics that the members of a group subscribe to together. To assign, each is looked up: some 30 ms for so many."""
NAMES_PER_MS: Final = 1_000
"""One ms more between two assignments for each so many of them, so that to look them up takes a small share of it."""
