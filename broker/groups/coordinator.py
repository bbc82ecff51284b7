"""The coordinator of the groups of one partition of __consumer_offsets. Pure.

decide, on_time, on_topics ─▶ Decision(records, effects)     one `Change` for each group; hard state stays
replay ─▶ Group                                              hard state changes

What is about many groups, or much of one, is done in pieces of a few milliseconds: `Decision.rest`, and `on_time`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias, assert_never

from broker.groups import answers, membership, offsets, rebalance, records, transactional
from broker.groups.answers import OfCalls, Rest
from broker.groups.assignors import Assignor
from broker.groups.change import Change, Context
from broker.groups.checks import check_group_id
from broker.groups.commands import (
    Command,
    CommitInSession,
    CommitOffsets,
    CommitTransactionOffsets,
    Decision,
    DeleteOffsets,
    Disconnected,
    FetchOffsets,
    Heartbeat,
    Join,
    Leave,
    ListGroups,
    Now,
    Send,
)
from broker.groups.committed_topics import CommittedTopics
from broker.groups.config import GroupConfig
from broker.groups.group import Group
from broker.groups.sessions import GroupSessions, Kind, Session, Timers
from broker.groups.topics import TopicsView
from broker.groups.watched import WatchedTopics
from raftlog.errors import RaftlogError, to_wire
from raftlog.v1 import group_pb2

MAX_RECORDS: Final = 200
MAX_WORK: Final = 60.0
"""After which `on_time` leaves the rest for its next call. A unit is some 30 us: a group that is looked at closely."""
GROUP_WORK: Final = 0.05
"""To see that there is nothing to do about a group."""
MEMBER_WORK: Final = 0.2
"""To begin a member's session."""
OFFSET_WORK: Final = 0.005
"""To look at a committed offset."""

_OfStreams: TypeAlias = Join | Heartbeat | Leave | Disconnected


class _Work:
    """What one call of `on_time` has done, and may do still."""

    def __init__(self, now: Now, decision: Decision) -> None:
        self.now = now
        self.decision = decision
        self.changes: dict[str, Change] = {}
        self.done = 0.0

    @property
    def is_enough(self) -> bool:
        return self.done >= MAX_WORK or len(self.decision.records) >= MAX_RECORDS


class GroupCoordinator:
    """State of the groups of one shard.

    `assignors`: by name, in the server's order of preference; the first is the default.
    """

    def __init__(self, config: GroupConfig, topics: TopicsView, assignors: Mapping[str, Assignor]) -> None:
        assert assignors, "a coordinator needs an assignor"
        self._timers = Timers()
        self._groups: dict[str, Group] = {}
        self._soft: dict[str, GroupSessions] = {}
        self._watched = WatchedTopics(topics)
        self._context = Context(config, topics, assignors, self._timers, self._watched.is_read)
        self._committed = CommittedTopics()
        # Groups that are still to be looked at, the next one last:
        self._beginning: list[str] = []
        """Since the load."""
        self._changed: list[str] = []
        """Since topics have changed that their members read."""
        self._cleaning: list[str] = []
        """Since topics are gone that they have offsets of."""
        self._expiring: list[str] = []
        """Since the last look for offsets that are too old."""

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups by id; not to be changed."""
        return self._groups

    # Records

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply a record: the only way hard state changes.

        Raises:
            CorruptRecordError: it is none that this version reads; says why.
        """
        parsed = records.parse_key(key)
        group = self._groups.get(parsed.group_id)
        if group is None:
            group = Group(parsed.group_id)
        kind = parsed.WhichOneof("kind")
        if kind == "member_id":
            before = group.members.get(parsed.member_id)
            records.replay(group, parsed, value)
            self._watched.changed(group.group_id, before, group.members.get(parsed.member_id))
        elif kind == "offset":
            at = parsed.offset.topic_id, parsed.offset.partition
            had = at in group.offsets
            records.replay(group, parsed, value)
            self._committed.changed(group.group_id, at[0], had, at in group.offsets)
        else:
            records.replay(group, parsed, value)
        if group.gone:
            self._groups.pop(group.group_id, None)
            self._soft.pop(group.group_id, None)
        else:
            self._groups[group.group_id] = group

    def loaded(self, now: Now) -> None:
        """The log has been replayed: sessions begin anew, and what the former coordinator left undone is looked for.

        Neither at once for all groups: a group's sessions begin when it is looked at, or heard of.
        """
        self._beginning = list(reversed(self._groups))
        self._cleaning = self._committed.take_deleted(self._context.topics)
        self._timers.at(now.monotonic_ms, Kind.GROUP)
        self._timers.at(now.monotonic_ms + self._context.config.offsets_retention_check_interval_ms, Kind.EXPIRY)

    def _soft_of(self, group: Group, now: Now) -> GroupSessions:
        """Return the sessions of a group; they begin now if this is the first time since the load."""
        soft = self._soft.get(group.group_id)
        if soft is not None:
            return soft
        if not (group.members or group.targets or group.assignments):
            head = group.head
            if head is None or head.empty_since_ms or group.group_id not in self._groups:
                return GroupSessions()
        due_ms = now.monotonic_ms + self._context.config.session_timeout_ms
        soft = self._soft[group.group_id] = GroupSessions(check=True)
        for member_id in group.members:
            soft.sessions[member_id] = Session(due_ms, timer_ms=due_ms)
            self._timers.at(due_ms, Kind.MEMBER, group.group_id, member_id)
        self._timers.at(now.monotonic_ms, Kind.GROUP, group.group_id)
        return soft

    # Commands

    def decide(self, command: Command | Rest, now: Now) -> Decision:
        """Answer a command. Hard state does not change before the records are replayed."""
        decision = Decision()
        rest = command if isinstance(command, Rest) else None
        asked: Command = rest.command if rest is not None else command  # type: ignore[assignment] # told apart by rest
        try:
            self._decide(asked, rest, now, decision)
        except RaftlogError as error:
            assert not decision.records, "who is refused changes nothing"
            if isinstance(asked, CommitInSession):
                decision.effects = [Send(asked.to, _refused(asked, error))]
            elif not isinstance(asked, Disconnected):
                decision.effects = [Send(asked.to, error)]
        return decision

    def _decide(self, command: Command, rest: Rest | None, now: Now, decision: Decision) -> None:
        if isinstance(command, ListGroups):
            rest = rest or Rest(command, sorted(self._groups))
            listed = answers.list_some(rest, self._groups)
            if listed is None:
                decision.rest = rest
            else:
                decision.effects.append(Send(command.to, listed))
            return
        group_id = _group_id(command)
        check_group_id(group_id)
        group = self._groups.get(group_id) or Group(group_id)
        soft = self._soft_of(group, now)
        change = Change(self._context, group, soft, now, decision)
        if isinstance(command, Join | Heartbeat | Leave | Disconnected):
            _follow(change, command)
            change.finish()
        else:
            rest = rest or answers.begin(command, change, group)
            answer = answers.go_on(rest, change, group)
            if answer is None:
                decision.rest = rest
            else:
                decision.effects.append(Send(command.to, answer))
        if decision.records:
            self._soft[group_id] = soft

    def at_once(self, command: Command, now: Now) -> group_pb2.GroupResponse | None:
        """Return the answer of a heartbeat that says nothing new; see `membership.echo`."""
        if not isinstance(command, Heartbeat):
            return None
        group, soft = self._groups.get(command.group_id), self._soft.get(command.group_id)
        if group is None or soft is None:
            return None
        return membership.echo(group, soft, command, now, self._context.config.session_timeout_ms)

    # Time

    def next_deadline_ms(self) -> float | None:
        """Return when `on_time` has something to do, in monotonic ms; it may be over already. None: never."""
        return self._timers.next_ms()

    def on_time(self, now: Now) -> Decision:
        """Do what is due. May leave some for the next call: `next_deadline_ms` is not later than `now` then."""
        decision = Decision()
        work = _Work(now, decision)
        while not work.is_enough and (due := self._timers.take(now.monotonic_ms)) is not None:
            deadline_ms, kind, group_id, member_id = due
            if kind is Kind.EXPIRY:
                self._expire(now)
                continue
            group = self._groups.get(group_id)
            if group is None:
                continue
            change = self._changing(group, work)
            work.done += 1
            if kind is Kind.MEMBER:
                membership.on_deadline(change, member_id, deadline_ms)
            else:
                work.done += self._group_is_due(change)
        self._each(self._beginning, self._begin, work)
        self._each(self._changed, self._topics_of, work)
        self._each(self._cleaning, self._clean, work)
        self._each(self._expiring, self._expire_in, work)
        if self._beginning or self._changed or self._cleaning or self._expiring:
            self._timers.at(now.monotonic_ms, Kind.GROUP)
        for change in work.changes.values():
            change.finish()
        return decision

    def _changing(self, group: Group, work: _Work) -> Change:
        """Return the change of a group: one for each in a decision."""
        change = work.changes.get(group.group_id)
        if change is None:
            soft = self._soft.setdefault(group.group_id, self._soft_of(group, work.now))
            change = work.changes[group.group_id] = Change(self._context, group, soft, work.now, work.decision)
        return change

    def _group_is_due(self, change: Change) -> float:
        """Go on with a group; return how much work that was."""
        work = 0.0
        if change.soft.check:
            change.soft.check = False
            rebalance.after_load(change)
            work += len(change.group.members) * MEMBER_WORK
        if change.soft.assign_due_ms <= change.now.monotonic_ms:
            rebalance.assign(change)
        elif change.soft.to_reconcile:
            rebalance.reconcile_some(change)
        return work

    def _each(self, group_ids: list[str], visit: Callable[[Group, _Work], bool], work: _Work) -> None:
        """Look at groups until there is enough done; `visit` returns whether there is more to do in one."""
        while group_ids and not work.is_enough:
            work.done += GROUP_WORK
            group = self._groups.get(group_ids[-1])
            if group is not None and visit(group, work):
                return
            group_ids.pop()

    def _begin(self, group: Group, work: _Work) -> bool:
        if group.group_id not in self._soft:
            self._soft_of(group, work.now)
            work.done += len(group.members) * MEMBER_WORK
        return False

    def _topics_of(self, group: Group, work: _Work) -> bool:
        work.done += 1
        rebalance.on_topics(self._changing(group, work), self._watched.names_of(group.group_id))
        return False

    def _clean(self, group: Group, work: _Work) -> bool:
        work.done += 1 + len(group.offsets) * OFFSET_WORK
        return offsets.forget_topics(self._changing(group, work), MAX_RECORDS)

    def _expire_in(self, group: Group, work: _Work) -> bool:
        config, wall_ms = self._context.config, work.now.wall_ms
        more = False
        if offsets.may_expire(group, config.offsets_retention_ms, wall_ms):
            work.done += 1 + len(group.offsets) * OFFSET_WORK
            more = offsets.expired(self._changing(group, work), MAX_RECORDS)
        if transactional.may_forget(group, config.producer_id_expiration_ms, wall_ms):
            work.done += 1 + len(group.fences) * OFFSET_WORK
            more |= transactional.forget(self._changing(group, work), MAX_RECORDS)
        return more

    def _expire(self, now: Now) -> None:
        """Look through all groups."""
        self._expiring = list(self._groups)
        self._timers.at(now.monotonic_ms + self._context.config.offsets_retention_check_interval_ms, Kind.EXPIRY)

    # Topics

    def on_topics(self, topics: TopicsView, now: Now) -> Decision:
        """Metadata has changed: subscribed topics may have come, gone or grown, others been deleted.

        What that means for groups comes of `on_time`.
        """
        self._context.topics = topics
        self._add(self._changed, self._watched.look(topics), now)
        self._add(self._cleaning, self._committed.take_deleted(topics), now)
        return Decision()

    def _add(self, waiting: list[str], group_ids: Iterable[str], now: Now) -> None:
        waiting[:] = dict.fromkeys((*group_ids, *waiting))  # none twice, and who waits already stays in front
        if waiting:
            self._timers.at(now.monotonic_ms, Kind.GROUP)


def _group_id(command: _OfStreams | OfCalls) -> str:
    match command:
        case Join() | CommitOffsets() | CommitTransactionOffsets() | FetchOffsets() | DeleteOffsets():
            return command.request.group_id
        case _:
            return command.group_id


def _follow(change: Change, command: _OfStreams) -> None:
    """Take what becomes of a stream."""
    match command:
        case Join():
            membership.join(change, command)
        case Heartbeat():
            membership.heartbeat(change, command)
        case Leave():
            membership.leave(change, command)
        case Disconnected():
            membership.disconnected(change, command.to, command.member_id)
        case _:
            assert_never(command)


def _refused(command: CommitInSession, error: RaftlogError) -> group_pb2.GroupResponse:
    result = group_pb2.SessionCommitResult(correlation_id=command.request.correlation_id, error=to_wire(error))
    return group_pb2.GroupResponse(commit=result)
