"""One decision about one group: what becomes of its records, of its members' sessions, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from broker.groups.assignors import Assignor
from broker.groups.commands import Decision, Now, Send
from broker.groups.config import GroupConfig
from broker.groups.draft import Draft
from broker.groups.group import AWAY, Assignment, Group, Head, Member
from broker.groups.notes import note_for
from broker.groups.reconcile import reconcile
from broker.groups.records import by_topic
from broker.groups.sessions import GroupSessions, Kind, Session, Timers
from broker.groups.topics import TopicPartition, TopicsView
from raftlog.errors import RaftlogError
from raftlog.v1 import group_pb2


@dataclass(slots=True)
class Context:
    """What all groups of a shard share."""

    config: GroupConfig
    topics: TopicsView
    assignors: Mapping[str, Assignor]
    timers: Timers
    is_read: Callable[[str, str], bool]
    """Whether a group (by id) has members that subscribe to a topic (by name)."""

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

    def __iter__(self) -> None:  # type: ignore[override] # nobody asks for all of them
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class Change:
    """Reads as the group will be (`draft`); `finish` tells members what has become of their assignments."""

    def __init__(self, context: Context, group: Group, soft: GroupSessions, now: Now, decision: Decision) -> None:
        self.context = context
        self.group = group
        """As it is before the records are replayed."""
        self.group_id = group.group_id
        self.soft = soft
        self.now = now
        self.names: Mapping[bytes, str] = _Names(context, group)
        self.draft = Draft(group, self.names, decision.records)
        self._decision = decision
        self._touched: dict[str, None] = {}
        self._missing: dict[tuple[str, ...], list[str]] = {}

    @property
    def head(self) -> Head:
        """The group as a whole; a new one where there is none yet."""
        return self.draft.head or Head()

    def send(self, to: object, message: group_pb2.GroupResponse | RaftlogError | None) -> None:
        """Tell a stream."""
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
            known_topics=head.known_topics if known_topics is None else known_topics,
            patterns=head.patterns if patterns is None else patterns,
        )
        self.draft.set_head(head)
        self.assign_soon()

    def assign_soon(self) -> None:
        """Have the assignment made, in a while where the group is large: one for many changes."""
        pace_ms = max(0, len(self.draft.members) - UNPACED_MEMBERS) * PACE_MS
        due_ms = max(self.now.monotonic_ms, self.soft.assigned_at_ms + pace_ms)
        if due_ms < self.soft.assign_due_ms:
            self.soft.assign_due_ms = due_ms
            self.context.timers.at(due_ms, Kind.GROUP, self.group_id)

    # Members

    def touch(self, member_id: str) -> None:
        """Tell the member its assignment at the end, where it is not what it was told last."""
        self._touched[member_id] = None

    def reconcile(self, member_id: str, let_go: frozenset[TopicPartition] = frozenset()) -> None:
        """Bring a member nearer to its target, and then whoever waits for what it let go."""
        draft = self.draft
        head = self.head
        settled = head.assignment_epoch == head.group_epoch

        def is_free(partition: TopicPartition) -> bool:
            # What nobody has is given out only by the newest assignment: `since_epoch` has to be above every epoch in
            # which the partition was read before.
            return settled and draft.owners.get(partition, member_id) == member_id

        waiting = [member_id]
        while waiting:
            member_id = waiting.pop()
            if member_id not in draft.members:
                continue
            current = draft.assignments.get(member_id, Assignment())
            target = draft.targets.get(member_id, frozenset())
            following = reconcile(current, target, head.assignment_epoch, let_go, is_free)
            let_go = frozenset()
            if following == current:
                continue
            freed = draft.set_assignment(member_id, following)
            self.touch(member_id)
            waiting += self._waiting_for(freed, member_id)

    def _waiting_for(self, freed: list[TopicPartition], member_id: str) -> list[str]:
        holders = {self.draft.target_of.get(partition, member_id) for partition in freed}
        return sorted(holders - {member_id}, reverse=True)

    def remove(self, member_id: str) -> None:
        """The member is gone, and what it had is free. `bump` comes first where the assignment has to change."""
        draft = self.draft
        self.soft.sessions.pop(member_id, None)
        self._touched.pop(member_id, None)
        draft.set_member(member_id, None)
        draft.set_target(member_id, None)
        freed = draft.set_assignment(member_id, None)
        for waiting in self._waiting_for(freed, member_id):
            self.reconcile(waiting)

    def leave_empty(self) -> None:
        """Where the last member has gone: nothing is to be assigned, and offsets begin to age."""
        if self.draft.members:
            return
        head = self.head
        self.draft.set_head(replace(head, assignment_epoch=head.group_epoch, empty_since_ms=self.now.wall_ms))

    def put_away(self, member_id: str, left: Assignment) -> None:
        """A static member has left and will be back: it reads nothing, and keeps what it had."""
        freed = self.draft.set_assignment(member_id, Assignment(AWAY, left.member_epoch, left.assigned, {}))
        for waiting in self._waiting_for(freed, member_id):
            self.reconcile(waiting)

    def missing(self, names: tuple[str, ...]) -> list[str]:
        """Return the topics that do not exist; looked up once for all members that subscribe to the same."""
        missing = self._missing.get(names)
        if missing is None:
            by_name = self.context.topics.by_name
            missing = self._missing[names] = [name for name in names if by_name(name) is None]
        return missing

    # The end

    def watch(self, session: Session, member_id: str) -> None:
        """Have a timer that goes off when the member is due."""
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
        if assignment.pending_revocation or session.let_go_by:
            deadline_ms = self.now.monotonic_ms + self._rebalance_timeout_ms(member)
            session.wait_for(assignment.pending_revocation, deadline_ms)
            self.watch(session, member_id)
        note = note_for(self, member, assignment)
        if session.push(assignment, note):
            self.send(session.to, group_pb2.GroupResponse(assignment=self._message(member, assignment, note)))

    def _rebalance_timeout_ms(self, member: Member) -> int:
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
            rebalance_timeout_ms=self._rebalance_timeout_ms(member),
            assignor=head.assignor,
        )


UNPACED_MEMBERS: Final = 100
PACE_MS: Final = 1.0
"""Per member above that, between two assignments of a group: where 10 000 join one by one, one in 10 s is made."""
