"""Commands that have one answer, decided in pieces: one that is about thousands of things takes several turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, assert_never

from google.protobuf.message import Message

from broker.groups import describe, membership, offsets, transactional
from broker.groups.change import Change
from broker.groups.commands import (
    CommitInSession,
    CommitOffsets,
    CommitTransactionOffsets,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    EndTransactionOffsets,
    FetchOffsets,
    ListGroups,
)
from broker.groups.group import Group
from raftlog.errors import RaftlogError, to_wire
from raftlog.v1 import group_pb2

PIECE: Final = 100
"""Offsets that are committed, read or deleted in one go: a millisecond or two."""
PIECE_ENDED: Final = PIECE // 2
"""Of those that a transaction commits: two records each."""
PIECE_MEMBERS: Final = 20
PIECE_GROUPS: Final = 200
MEMBERS_OF_A_GROUP: Final = 50
"""Members of the groups listed that cost as much as one more group."""

OfCommits: TypeAlias = CommitInSession | CommitOffsets | CommitTransactionOffsets
OfCalls: TypeAlias = OfCommits | EndTransactionOffsets | FetchOffsets | DeleteOffsets | DescribeGroup | DeleteGroup


@dataclass(slots=True)
class Rest:
    """A command that is under way: `command`, what it is about still (from `at` on), and the answer so far."""

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
    """Look what a command is about."""
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
            about = sorted(group.members) if group.exists else []
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
            members = (member_id for member_id in rest.take(PIECE_MEMBERS) if member_id in group.members)
            rest.answer.members.extend(describe.member(change, group, member_id) for member_id in members)
            return rest.answer if rest.is_done else None
        case DeleteGroup():
            return describe.delete(change, rest.take(PIECE), is_last=rest.is_done)
        case _:
            raise AssertionError("groups are listed by `list_some`")


def _commit(rest: Rest, command: OfCommits, change: Change) -> Message | None:
    """Commit a piece. What does away with the member meanwhile refuses the rest, each by itself."""
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
            rest.results += offsets.commit(change, member_id, command.request.member_epoch, piece)
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


def list_some(rest: Rest, groups: Mapping[str, Group]) -> Message | None:
    """Look at some groups; return the list once all were looked at."""
    assert isinstance(rest.command, ListGroups)
    states = set(rest.command.request.states)
    work = 0
    while work < PIECE_GROUPS and not rest.is_done:
        group = groups.get(rest.take(1)[0])
        if group is None:
            continue
        work += 1 + len(group.members) // MEMBERS_OF_A_GROUP
        if not group.exists:
            continue
        listed = describe.listed(group)
        if not states or listed.state in states:
            rest.results.append(listed)
    return group_pb2.ListGroupsResponse(groups=rest.results) if rest.is_done else None
