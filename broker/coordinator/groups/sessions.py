"""The coordinator's soft state of members: streams, deadlines, reported partitions."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from itertools import count

from broker.coordinator.groups.classic.machine import ClassicGroup
from broker.coordinator.groups.group import Assignment
from broker.coordinator.groups.topics import TopicPartition

NEVER = float("inf")
NOTHING = Assignment()


@dataclass(slots=True)
class Session:
    """One member's session. `to` is None while it has no stream.

    A partition counts as released when the member has reported that it reads the partition, and then reports without
    it; the stream keeps the order. An assignment with a partition that was never reported may still be on its way to
    the member: then only a heartbeat that was sent after the member had the assignment without it proves the release.
    A member has at most one unanswered heartbeat, and sends none before a stream's first assignment. So a heartbeat
    proves the arrival of everything pushed before the last answer (`_arrived`), and the first heartbeat that of the
    answer to the join.

    A raftlog client also reports the partitions that it is about to read. A Kafka client (`reports_late`) reports a
    partition only once it reads it, which may be long after the assignment; until then its heartbeats report nothing.
    Such a heartbeat releases none of the partitions that the client was assigned (`_told`). A report releases those
    that it does not list, because the client sends no report while it is taking partitions. What was
    pushed and taken away again between two heartbeats was in no response: the client has what it is told then, and
    reports nothing, so the coordinator does not wait for it.
    """

    deadline_ms: float
    to: object | None = None
    host: str = ""
    heard_of_ms: float | None = None
    expelled: bool = False
    owned: frozenset[TopicPartition] = frozenset()
    reports_late: bool = False
    timer_ms: float = NEVER
    pushed: tuple[int, Set[TopicPartition], str] | None = None
    _pushes: int = 0
    _pushes_at_answer: int = 0
    _arrived: int = 0
    _taken_away: dict[TopicPartition, int] = field(default_factory=dict)
    _told: set[TopicPartition] = field(default_factory=set)
    """With `reports_late`: partitions that the member was assigned and has not released since."""
    _returned: set[TopicPartition] = field(default_factory=set)
    """Partitions that were taken away and given back before the member had released them."""
    _stopped: set[TopicPartition] = field(default_factory=set)
    """Partitions that the member had reported, and did not when it came back on a new stream. It has stopped to read
    them, and was not told of them again: it reports this no second time, and need not."""
    let_go_by: dict[TopicPartition, float] = field(default_factory=dict)
    """Deadlines for the release of partitions pending revocation; each its own, since rebalances may overlap."""
    joining: object | None = None
    """The JoinGroup call of a member of Kafka's classic protocol that waits for the assignment of the group's epoch."""
    act_by_ms: float = NEVER
    """When a member of the classic protocol has to have joined again, or to have synced."""

    def connect(
        self,
        to: object,
        host: str,
        owned: frozenset[TopicPartition],
        *,
        reports_late: bool = False,
        told: Assignment = NOTHING,
    ) -> None:
        """The member has a new stream; it reads `owned`, or nothing when it joins. `told`: what a Kafka client may have
        been told, all of it or a part."""
        self._stopped |= self.owned - self._returned
        self._stopped &= told.pending_revocation.keys() - owned
        self.to, self.host, self.owned = to, host, owned
        self.reports_late, self._told = reports_late, {*told.assigned, *told.pending_revocation} - self._stopped
        self.expelled = False
        self.pushed = None
        self._pushes = self._arrived = 0
        self._pushes_at_answer = 1
        self._taken_away = {}

    def push(self, assignment: Assignment, note: str) -> bool:
        """Note an assignment to send; return whether the member has another one, or none yet."""
        now = (assignment.member_epoch, frozenset(assignment.assigned), note)
        if self.to is None or now == self.pushed:
            return False
        self.pushed = now
        self._pushes += 1
        self._returned |= self._taken_away.keys() & assignment.assigned.keys()
        self._stopped -= assignment.assigned.keys()
        pending = assignment.pending_revocation
        self._returned = {each for each in self._returned if each in assignment.assigned or each in pending}
        self._taken_away = {partition: self._taken_away.get(partition, self._pushes) for partition in pending}
        return True

    def heard(self, owned: frozenset[TopicPartition] | None, pending: Set[TopicPartition]) -> frozenset[TopicPartition]:
        """Note a heartbeat (`owned` None: unchanged); return the released ones of `pending`.

        Where the member reads none of the others, but may not have had the assignment without them when it said so, it
        is told that assignment once more: it answers with a heartbeat, and that one is sure. Except a
        member that reports late and has reported nothing: the coordinator waits for its next report.
        """
        before = self.owned
        if owned is not None:
            self.owned = owned
        self._arrived = self._pushes_at_answer
        not_read = pending - self.owned
        may_begin = self._told if owned is None else ()
        let_go = frozenset(
            partition
            for partition in not_read
            if partition in before
            or (self._taken_away.get(partition, NEVER) <= self._arrived and partition not in may_begin)
        )
        if len(let_go) < len(not_read) and not (self.reports_late and owned is None):
            self.pushed = None
        self._told -= let_go
        return let_go

    def was_told(self, partitions: frozenset[TopicPartition]) -> None:
        """Note what was in responses to a client since its last heartbeat."""
        self._told |= partitions

    def answered(self) -> None:
        """Note that a heartbeat is answered, behind everything pushed so far."""
        self._pushes_at_answer = self._pushes

    def wait_for(self, pending: Iterable[TopicPartition], deadline_ms: float) -> None:
        """Set the deadline of newly pending partitions; drop those no longer pending."""
        self.let_go_by = {partition: self.let_go_by.get(partition, deadline_ms) for partition in pending}

    @property
    def rebalance_deadline_ms(self) -> float:
        """The earliest deadline of a pending partition."""
        return min(self.let_go_by.values(), default=NEVER)

    @property
    def due_ms(self) -> float:
        """When something has to be done about the member if it stays silent."""
        return min(self.deadline_ms, NEVER if self.expelled else min(self.rebalance_deadline_ms, self.act_by_ms))


@dataclass(slots=True)
class GroupSessions:
    """The sessions of one group, and its due work: an assignment, a check after a load, members to reconcile.

    Or, for a classic group, its state machine.
    """

    sessions: dict[str, Session] = field(default_factory=dict)
    assign_due_ms: float = NEVER
    assigned_at_ms: float = -NEVER
    check: bool = False
    to_reconcile: list[str] = field(default_factory=list)
    warned: str = ""
    classic: ClassicGroup | None = None


class Kind(Enum):
    """The subject of a timer."""

    MEMBER = 1
    GROUP = 2
    EXPIRY = 3
    CLASSIC = 4


class Timers:
    """Deadlines of all groups. An entry may be out of date, so the caller checks the deadline again."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Kind, str, str]] = []
        self._order = count()

    def at(self, deadline_ms: float, kind: Kind, group_id: str = "", member_id: str = "") -> None:
        """Look at a group or member then."""
        heappush(self._heap, (deadline_ms, next(self._order), kind, group_id, member_id))

    def next_ms(self) -> float | None:
        """Return the earliest deadline."""
        return self._heap[0][0] if self._heap else None

    def take(self, now_ms: float) -> tuple[float, Kind, str, str] | None:
        """Take one that is due, with its deadline."""
        if not self._heap or self._heap[0][0] > now_ms:
            return None
        deadline_ms, _, kind, group_id, member_id = heappop(self._heap)
        return deadline_ms, kind, group_id, member_id
