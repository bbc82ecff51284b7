"""What the coordinator knows of members only for as long as it lives: streams, deadlines, what they have told."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from itertools import count

from broker.groups.group import Assignment
from broker.groups.topics import TopicPartition

NEVER = float("inf")


@dataclass(slots=True)
class Session:
    """One member's. `to` is None while it has no stream.

    When is a partition let go? The stream keeps its order, so when a partition was among those that the member said to
    read, and is not any more. One that never was may still be on its way to the member: then only a heartbeat which was
    sent after the member had the assignment without it proves anything. A member has one unanswered heartbeat at most,
    and sends none before the first assignment of a stream; hence with a heartbeat everything has arrived that was
    pushed before the last answer (`_arrived`), and with the first one the answer to the join.
    """

    deadline_ms: float
    to: object | None = None
    host: str = ""
    heard_of_ms: float | None = None
    expelled: bool = False
    owned: frozenset[TopicPartition] = frozenset()
    timer_ms: float = NEVER
    pushed: tuple[int, Set[TopicPartition], str] | None = None
    _pushes: int = 0
    _pushes_at_answer: int = 0
    _arrived: int = 0
    _taken_away: dict[TopicPartition, int] = field(default_factory=dict)
    let_go_by: dict[TopicPartition, float] = field(default_factory=dict)
    """What is pending, and until when it has to be let go. Each has its time, for rebalances may follow each other."""

    def connect(self, to: object, host: str, owned: frozenset[TopicPartition]) -> None:
        """The member has a new stream; it reads `owned`, or nothing when it joins."""
        self.to, self.host, self.owned = to, host, owned
        self.expelled = False
        self.pushed = None
        self._pushes = self._arrived = 0
        self._pushes_at_answer = 1
        self._taken_away = {}

    def push(self, assignment: Assignment, note: str) -> bool:
        """Whether the member has to be told its assignment: it was told another one, or none yet."""
        now = (assignment.member_epoch, frozenset(assignment.assigned), note)
        if self.to is None or now == self.pushed:
            return False
        self.pushed = now
        self._pushes += 1
        pending = assignment.pending_revocation
        self._taken_away = {partition: self._taken_away.get(partition, self._pushes) for partition in pending}
        return True

    def heard(self, owned: frozenset[TopicPartition] | None, pending: Set[TopicPartition]) -> frozenset[TopicPartition]:
        """Take a heartbeat (`owned` None: as before); return which of `pending` are let go.

        Where the member reads none of the others, but may not have had the assignment without them when it said so, it
        is told that assignment once more: it answers with a heartbeat, and that one is sure.
        """
        before = self.owned
        if owned is not None:
            self.owned = owned
        self._arrived = self._pushes_at_answer
        not_read = pending - self.owned
        let_go = frozenset(
            partition
            for partition in not_read
            if partition in before or self._taken_away.get(partition, NEVER) <= self._arrived
        )
        if len(let_go) < len(not_read):
            self.pushed = None
        return let_go

    def answered(self) -> None:
        """A heartbeat is answered after what was pushed so far."""
        self._pushes_at_answer = self._pushes

    def wait_for(self, pending: Iterable[TopicPartition], deadline_ms: float) -> None:
        """Give what is newly pending until `deadline_ms` to be let go; what is not pending any more is done."""
        self.let_go_by = {partition: self.let_go_by.get(partition, deadline_ms) for partition in pending}

    @property
    def rebalance_deadline_ms(self) -> float:
        """When the first of what is pending has to be let go."""
        return min(self.let_go_by.values(), default=NEVER)

    @property
    def due_ms(self) -> float:
        """When something has to be done about the member if it stays silent."""
        return min(self.deadline_ms, NEVER if self.expelled else self.rebalance_deadline_ms)


@dataclass(slots=True)
class GroupSessions:
    """The sessions of one group, and what is due: an assignment, a look after a load, members to be reconciled."""

    sessions: dict[str, Session] = field(default_factory=dict)
    assign_due_ms: float = NEVER
    assigned_at_ms: float = -NEVER
    check: bool = False
    to_reconcile: list[str] = field(default_factory=list)
    warned: str = ""


class Kind(Enum):
    """What a timer is of."""

    MEMBER = 1
    GROUP = 2
    EXPIRY = 3


class Timers:
    """Deadlines of all groups. An entry may be out of date: whoever takes it looks again."""

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
