"""The coordinator of the groups of one partition of __consumer_offsets. Pure.

decide, on_time, on_topics ─▶ Decision(records, effects)     one `Change` for each group; hard state stays
replay ─▶ Group                                              hard state changes

Work on many groups, or on large ones, is done in pieces of a few milliseconds: `Decision.rest`, and `on_time`.
`WatchedTopics` finds the groups whose subscribed topics have changed, `CommittedTopics` those with offsets of deleted
topics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, assert_never

from google.protobuf.message import Message

from broker.coordinator.groups import describe, membership, offsets, rebalance, records, transactional
from broker.coordinator.groups.assignors import Assignor
from broker.coordinator.groups.change import Change, Context
from broker.coordinator.groups.checks import check_group_id
from broker.coordinator.groups.classic import calls as classic
from broker.coordinator.groups.classic import embedded
from broker.coordinator.groups.classic.commands import (
    ClassicCommand,
    HeartbeatClassic,
    JoinClassic,
    LeaveClassic,
    SyncClassic,
)
from broker.coordinator.groups.commands import (
    Command,
    CommitInSession,
    CommitOffsets,
    CommitTransactionOffsets,
    Decision,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    Disconnected,
    EndTransactionOffsets,
    FetchOffsets,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    ListGroups,
    Now,
    Send,
    user_of,
)
from broker.coordinator.groups.group import ASSIGNED_BYTES, Group, Member
from broker.coordinator.groups.sessions import GroupSessions, Kind, Session, Timers
from broker.coordinator.groups.topics import TopicsView
from broker.coordinator.user_bound import NO_AMOUNT_BOUND, NO_BOUND, AmountBound, Amounts, Made, UserBound
from raftlog.errors import RaftlogError, to_wire
from raftlog.v1 import group_pb2


class WatchedTopics:
    """Subscribed names by group, with their number of subscribers, and the metadata of the last look.

    A change of metadata costs two look-ups for each subscribed name.
    """

    def __init__(self, topics: TopicsView) -> None:
        self._names: dict[str, Counter[str]] = {}
        self._counts: Counter[str] = Counter()
        """How many names the members of a group have together, each member's counted by themselves."""
        self._partitions: Counter[str] = Counter()
        """How many partitions the topics of a group have together, as of the last `look`; each topic counts once."""
        self._groups: dict[str, dict[str, None]] = {}
        self._topics = topics

    def changed(self, group_id: str, before: Member | None, after: Member | None) -> None:
        """A member has come, changed or gone."""
        old = before.subscription.topics if before is not None else ()
        new = after.subscription.topics if after is not None else ()
        if old == new:
            return
        names = self._names.setdefault(group_id, Counter())
        for name in new:
            names[name] += 1
            if names[name] == 1:
                self._groups.setdefault(name, {})[group_id] = None
                self._partitions[group_id] += _partitions(self._topics, name)
        for name in old:
            names[name] -= 1
            if not names[name]:
                self._forget(group_id, names, name)
        self._counts[group_id] += len(new) - len(old)
        if not names:
            del self._names[group_id], self._counts[group_id], self._partitions[group_id]

    def _forget(self, group_id: str, names: Counter[str], name: str) -> None:
        del names[name]
        groups = self._groups[name]
        groups.pop(group_id, None)
        self._partitions[group_id] -= _partitions(self._topics, name)
        if not groups:
            del self._groups[name]

    def look(self, topics: TopicsView) -> list[str]:
        """Look at all of them; return the groups for which something is different."""
        before, self._topics = self._topics, topics
        groups: dict[str, None] = {}
        for name, readers in self._groups.items():
            if before.by_name(name) != topics.by_name(name):
                groups |= readers
                more = _partitions(topics, name) - _partitions(before, name)
                for group_id in readers if more else ():
                    self._partitions[group_id] += more
        return list(groups)

    def is_read(self, group_id: str, name: str) -> bool:
        """Whether a member of a group subscribes to a topic."""
        return group_id in self._groups.get(name, ())

    def count_of(self, group_id: str) -> int:
        """Return how many names the members of a group subscribe to together, each member's counted by themselves."""
        return self._counts[group_id]

    def partitions_of(self, group_id: str) -> int:
        """Return how many partitions the topics have that the members of a group subscribe to."""
        return self._partitions[group_id]

    def names_of(self, group_id: str) -> list[str]:
        """Return the names that the members of a group subscribe to, each once, in ascending order."""
        return sorted(self._names.get(group_id, ()))


def _partitions(topics: TopicsView, name: str) -> int:
    topic = topics.by_name(name)
    return 0 if topic is None else topic.partitions


class CommittedTopics:
    """Topic id -> group id -> how many of the topic's partitions the group has offsets of, if any."""

    def __init__(self) -> None:
        self._counts: dict[bytes, dict[str, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._counts.values()))

    def changed(self, group_id: str, topic_id: bytes, had: bool, has: bool) -> None:
        """An offset was committed or forgotten."""
        if had == has:
            return
        if has:
            groups = self._counts.setdefault(topic_id, {})
            groups[group_id] = groups.get(group_id, 0) + 1
            return
        groups = self._counts.get(topic_id, {})
        if groups.get(group_id, 0) > 1:
            groups[group_id] -= 1
            return
        groups.pop(group_id, None)
        if not groups:
            self._counts.pop(topic_id, None)

    def take_deleted(self, topics: TopicsView) -> list[str]:
        """Return the groups that have offsets of topics which are no more; they are not returned again for those."""
        deleted = [topic_id for topic_id in self._counts if topics.by_id(topic_id) is None]
        groups: dict[str, None] = {}
        for topic_id in deleted:
            groups |= dict.fromkeys(self._counts.pop(topic_id))
        return list(groups)


PIECE: Final = 100
"""Offsets that are committed, read or deleted in one go: a millisecond or two."""
PIECE_ENDED: Final = PIECE // 2
"""Offsets in a piece when a transaction ends: two records each."""
PIECE_MEMBERS: Final = 20
PIECE_BYTES: Final = 64 << 10
"""Of described members: some thousand names."""
PIECE_GROUPS: Final = 200
MEMBERS_OF_A_GROUP: Final = 50
"""Members of the groups listed that cost as much as one more group."""

OfCommits: TypeAlias = CommitInSession | CommitOffsets | CommitTransactionOffsets
OfCalls: TypeAlias = OfCommits | EndTransactionOffsets | FetchOffsets | DeleteOffsets | DescribeGroup | DeleteGroup


@dataclass(slots=True)
class Rest:
    """A command that is decided in pieces: `command`, the items left (from `at` on), and the answer so far."""

    command: OfCalls | ListGroups
    about: Sequence[Any] = ()
    at: int = 0
    answer: Any = None
    results: list[Any] = field(default_factory=list)

    def take(self, most: int) -> Sequence[Any]:
        """Take the next piece."""
        piece = self.about[self.at : self.at + most]
        self.at += len(piece)
        return piece

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        return self.at >= len(self.about)


def begin(command: OfCalls, change: Change, group: Group) -> Rest:
    """Begin a command: collect its items."""
    match command:
        case CommitInSession() | CommitOffsets() | CommitTransactionOffsets():
            return Rest(command, command.request.offsets)
        case EndTransactionOffsets():
            return Rest(command, transactional.ended(group, command))
        case FetchOffsets():
            return offsets_asked(command, group)
        case DeleteOffsets():
            offsets.check_delete(change)
            return Rest(command, _each(command.request.partitions))
        case DescribeGroup():
            about = describe.member_ids(change, group)
            return Rest(command, about, answer=describe.describe(change, group))
        case DeleteGroup():
            return Rest(command, list(group.offsets))
        case _:
            assert_never(command)


def offsets_asked(command: FetchOffsets, group: Group) -> Rest:
    """Return which offsets are asked for."""
    request = command.request
    about: Sequence[Any] = _each(request.partitions)
    if request.all:
        about = sorted({*group.offsets, *group.pending_at} if request.require_stable else group.offsets)
    return Rest(command, about, answer=group_pb2.FetchOffsetsResponse())


def _each(topics: Iterable[group_pb2.TopicPartitions]) -> list[tuple[group_pb2.TopicPartitions, int]]:
    return [(topic, number) for topic in topics for number in topic.partitions]


def go_on(rest: Rest, change: Change, group: Group) -> Message | None:
    """Do the next piece; return the answer after the last one.

    Raises:
        RaftlogError: it is refused, and nothing of it was done.
    """
    command = rest.command
    match command:
        case CommitInSession() | CommitOffsets() | CommitTransactionOffsets():
            return _commit(rest, command, change)
        case EndTransactionOffsets():
            transactional.end(change, command, rest.take(PIECE_ENDED), is_first=not rest.results)
            rest.results = [group_pb2.CommitOffsetResult()]
            return group_pb2.CommitOffsetResult() if rest.is_done else None
        case FetchOffsets():
            asked = command.request
            offsets.check_member(change, asked.member_id, asked.member_epoch, commits=False)
            show = offsets.show_known if asked.all else offsets.show
            for each in rest.take(PIECE):
                show(change, asked, each, rest.answer)
            return rest.answer if rest.is_done else None
        case DeleteOffsets():
            rest.results += offsets.delete(change, rest.take(PIECE))
            return group_pb2.DeleteOffsetsResponse(results=rest.results) if rest.is_done else None
        case DescribeGroup():
            _describe_members(rest, command, change, group)
            return rest.answer if rest.is_done else None
        case DeleteGroup():
            return describe.delete(change, rest.take(PIECE), is_last=rest.is_done)
        case _:
            raise AssertionError("groups are listed by `list_some`")


def _describe_members(rest: Rest, command: DescribeGroup, change: Change, group: Group) -> None:
    """Describe a few more members: at most PIECE_MEMBERS, fewer if they are long."""
    described_bytes = 0
    for _ in range(PIECE_MEMBERS):
        for member in describe.members(change, group, rest.take(1)):
            size_bytes = member.ByteSize()
            command.share.take(size_bytes)
            described_bytes += size_bytes
            rest.answer.members.append(member)
        if rest.is_done or described_bytes >= PIECE_BYTES:
            return


def _commit(rest: Rest, command: OfCommits, change: Change) -> Message | None:
    """Commit a piece. If the member is removed between pieces, each remaining offset is refused."""
    is_begin = not rest.at
    piece = rest.take(PIECE)
    try:
        if isinstance(command, CommitInSession):
            # One that comes over a stream which the member has given up was sent again over the new one, perhaps with
            # a later offset.
            membership.session_of(change, command.to, command.member_id)
            member_id = command.member_id
        else:
            member_id = command.request.member_id
        if isinstance(command, CommitTransactionOffsets):
            rest.results += transactional.commit(change, command.request, piece)
        else:
            instance_id = command.request.instance_id if isinstance(command, CommitOffsets) else ""
            rest.results += offsets.commit(change, member_id, command.request.member_epoch, piece, instance_id)
    except RaftlogError as error:
        if is_begin:
            raise
        refused = group_pb2.CommitOffsetResult(error=to_wire(error))
        rest.results += [refused] * (len(piece) + len(rest.take(len(rest.about))))
    if not rest.is_done:
        return None
    if isinstance(command, CommitOffsets | CommitTransactionOffsets):
        return group_pb2.CommitOffsetsResponse(results=rest.results)
    result = group_pb2.SessionCommitResult(correlation_id=command.request.correlation_id, results=rest.results)
    return group_pb2.GroupResponse(commit=result)


def list_some(rest: Rest, groups: Mapping[str, Group], soft: Mapping[str, GroupSessions]) -> Message | None:
    """Look at some groups; return the list once all were looked at."""
    assert isinstance(rest.command, ListGroups)
    states, types = set(rest.command.request.states), set(rest.command.request.types)
    work = 0
    while work < PIECE_GROUPS and not rest.is_done:
        group = groups.get(rest.take(1)[0])
        if group is None:
            continue
        work += 1 + len(group.members) // MEMBERS_OF_A_GROUP
        if not group.exists:
            continue
        listed = describe.listed(group, soft.get(group.group_id))
        if (not states or listed.state in states) and (not types or listed.type in types):
            rest.results.append(listed)
    return group_pb2.ListGroupsResponse(groups=rest.results) if rest.is_done else None


MAX_RECORDS: Final = 200
MAX_WORK: Final = 60.0
"""After which `on_time` leaves the rest for its next call. A unit is some 30 us: a group that is looked at closely."""
GROUP_WORK: Final = 0.05
"""To see that there is nothing to do about a group."""
MEMBER_WORK: Final = 0.2
"""To begin a member's session."""
EXPELLED_AT_ONCE: Final = 20
"""Members of one group that are removed at a time when its user is above the bound."""
OFFSET_WORK: Final = 0.005
"""To look at a committed offset."""

_OfStreams: TypeAlias = Join | Heartbeat | Leave | Disconnected


class _Work:
    """The work that one call of `on_time` has done, and may still do."""

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

    `assignors`: by name, in the server's order of preference; the first is the default. `may_upgrade`: whether every
    broker of the cluster knows groups with members of both protocols. `bound`: on the number of a user's
    groups. `kept_bound`, `members_bound`: on the memory for their committed offsets, and for their members.
    """

    def __init__(
        self,
        config: GroupConfig,
        topics: TopicsView,
        assignors: Mapping[str, Assignor],
        may_upgrade: Callable[[], bool] = lambda: True,
        bound: UserBound = NO_BOUND,
        kept_bound: AmountBound = NO_AMOUNT_BOUND,
        members_bound: AmountBound = NO_AMOUNT_BOUND,
    ) -> None:
        assert assignors, "a coordinator needs an assignor"
        self._bound = bound
        self._timers = Timers()
        self._groups: dict[str, Group] = {}
        self._made = Made()
        self._soft: dict[str, GroupSessions] = {}
        self._watched = WatchedTopics(topics)
        watched = self._watched
        self._context = Context(
            config,
            topics,
            assignors,
            self._timers,
            watched.is_read,
            may_upgrade,
            watched.count_of,
            watched.partitions_of,
            kept_bound,
            members_bound,
        )
        self._kept = Amounts()
        self._members = Amounts()
        self._counted: dict[str, tuple[str, int]] = {}
        """Group id -> the user for which its members count, and their bytes."""
        self._committed = CommittedTopics()
        # Groups that are still to be looked at, the next one last:
        self._beginning: list[str] = []
        """Since the load."""
        self._changed: list[str] = []
        """Since topics have changed that their members read."""
        self._grown: set[str] = set()
        """Those of `_changed` whose members read more partitions than at the last look."""
        self._cleaning: list[str] = []
        """Since topics are gone that they have offsets of."""
        self._expiring: list[str] = []
        """Since the last look for offsets that are too old."""

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups by id; not to be changed."""
        return self._groups

    @property
    def made(self) -> Made:
        """How many groups each user has made."""
        return self._made

    @property
    def kept(self) -> Mapping[str, int]:
        """What the committed offsets of each user's groups take, in bytes; not to be changed."""
        return self._kept.counts

    @property
    def members_bytes(self) -> Mapping[str, int]:
        """The memory for the members of each user's groups, in bytes; not to be changed."""
        return self._members.counts

    def _count_members(self, group: Group) -> None:
        """Count the memory of a group's members anew, after a change."""
        size = group.members_bytes
        soft = self._soft.get(group.group_id)
        if soft is not None and soft.classic is not None:
            size += soft.classic.memory_bytes
        if group.head is None or group.head.classic is None:
            size += self._watched.partitions_of(group.group_id) * ASSIGNED_BYTES
        user, before = self._counted.get(group.group_id, ("", 0))
        if (user, before) == (group.user, size):
            return
        self._members.changed(user, -before)
        self._members.changed(group.user, size)
        if group.user and size:
            self._counted[group.group_id] = group.user, size
        else:
            self._counted.pop(group.group_id, None)

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
        user, kept_bytes = group.user, group.kept_bytes
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
        self._made.changed(user, group.user)
        if user == group.user:
            self._kept.changed(user, group.kept_bytes - kept_bytes)
        else:
            self._kept.changed(user, -kept_bytes)
            self._kept.changed(group.user, group.kept_bytes)
        if group.gone:
            self._groups.pop(group.group_id, None)
            self._soft.pop(group.group_id, None)
        else:
            self._groups[group.group_id] = group
        if kind in ("group", "member_id") or user != group.user:
            self._count_members(group)

    def loaded(self, now: Now) -> None:
        """Begin after the replay of the log: sessions begin anew; unfinished work of the former coordinator is found.

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
        head = group.head
        if head is not None and head.classic is not None:
            config = self._context.config.classic
            of_group = classic.loaded(group, config, now.monotonic_ms, self._context.timers)
            soft = self._soft[group.group_id] = GroupSessions(classic=of_group)
            self._count_members(group)
            return soft
        is_over = head is None or head.empty_since_ms or group.group_id not in self._groups
        if is_over and not (group.members or group.targets or group.assignments):
            return GroupSessions()
        soft = self._soft[group.group_id] = GroupSessions(check=True)
        for member_id, member in group.members.items():
            due_ms = now.monotonic_ms + self._context.config.session_timeout_ms_of(member)
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
            assert not decision.records, "a refused command changes nothing"
            if isinstance(asked, CommitInSession):
                decision.effects = [Send(asked.to, _refused(asked, error))]
            elif not isinstance(asked, Disconnected):
                decision.effects = [Send(asked.to, error)]
        return decision

    def _decide(self, command: Command, rest: Rest | None, now: Now, decision: Decision) -> None:
        if isinstance(command, ListGroups):
            rest = rest or Rest(command, sorted(self._groups))
            listed = list_some(rest, self._groups, self._soft)
            if listed is None:
                decision.rest = rest
            else:
                decision.effects.append(Send(command.to, listed))
            return
        group_id = _group_id(command)
        check_group_id(group_id)
        group = self._groups.get(group_id) or Group(group_id)
        user = user_of(command)
        if user and not group.exists:
            self._bound.check(user)
        soft = self._soft_of(group, now)
        change = Change(self._context, group, soft, now, decision, user or "")
        if isinstance(command, Join | Heartbeat | Leave | Disconnected):
            _follow(change, command)
            change.finish()
        elif isinstance(command, JoinClassic | SyncClassic | HeartbeatClassic | LeaveClassic):
            if embedded.is_for(change):
                embedded.follow(change, command)
                change.finish()
            else:
                classic.follow(change, command)
                if group_id in self._groups:  # else the group's first record counts them
                    self._count_members(group)
        else:
            rest = rest or begin(command, change, group)
            answer = go_on(rest, change, group)
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
        """Handle passed deadlines, perhaps not all: then `next_deadline_ms` is not later than `now`."""
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
            if kind is Kind.CLASSIC:
                classic.on_deadline(change, member_id)
                self._count_members(group)
            elif kind is Kind.MEMBER:
                membership.on_deadline(change, member_id, deadline_ms)
            else:
                work.done += self._group_is_due(change)
        self._each(self._beginning, self._begin, work)
        self._each(self._changed, self._topics_of, work)
        if not self._changed:
            self._grown.clear()
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
        change = self._changing(group, work)
        if change.soft.classic is not None:  # the members of a classic group look by themselves
            return False
        if group.group_id in self._grown:
            try:
                self._context.members.check(change.draft.user, 1)
            except RaftlogError as refusal:  # subscribed topics were created, or have grown
                work.done += EXPELLED_AT_ONCE
                return membership.expel_some(change, refusal, EXPELLED_AT_ONCE)
            self._grown.discard(group.group_id)
        rebalance.on_topics(change, self._watched.names_of(group.group_id))
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
        changed = self._watched.look(topics)
        for group_id in changed:
            if (group := self._groups.get(group_id)) is not None:
                _, before = self._counted.get(group_id, ("", 0))
                self._count_members(group)
                if self._counted.get(group_id, ("", 0))[1] > before:
                    self._grown.add(group_id)
        self._add(self._changed, changed, now)
        self._add(self._cleaning, self._committed.take_deleted(topics), now)
        return Decision()

    def _add(self, waiting: list[str], group_ids: Iterable[str], now: Now) -> None:
        waiting[:] = dict.fromkeys((*group_ids, *waiting))  # each once, and those already waiting stay in front
        if waiting:
            self._timers.at(now.monotonic_ms, Kind.GROUP)


def _group_id(command: _OfStreams | OfCalls | ClassicCommand) -> str:
    match command:
        case Join() | CommitOffsets() | CommitTransactionOffsets() | FetchOffsets() | DeleteOffsets():
            return command.request.group_id
        case _:
            return command.group_id


def _follow(change: Change, command: _OfStreams) -> None:
    """Handle a stream's join, heartbeat, leave or end."""
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
