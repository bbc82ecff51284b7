"""A session: what a member sends becomes commands, what it is sent leaves in order, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from broker.coordinator.groups.commands import Command, CommitInSession, Disconnected, Heartbeat, Join, Leave
from broker.coordinator.groups.coordinators import GroupShard
from broker.net.services import groups
from broker.net.services.groups import MAX_UNANSWERED, GroupSession
from raftlog.errors import BrokerOverloaded, InvalidRequestError, NotCoordinator, RaftlogError, UnknownMemberId
from raftlog.v1 import common_pb2
from raftlog.v1.group_pb2 import (
    CommitOffset,
    GroupAssignment,
    GroupHeartbeat,
    GroupRequest,
    GroupResponse,
    HeartbeatAnswer,
    JoinGroup,
    LeaveGroup,
    SessionCommit,
    SessionCommitResult,
)
from tests.support import virtual_time
from tests.support.broker_parts import Requests, Writer
from tests.support.replica_link import settle

JOIN = GroupRequest(join=JoinGroup(group_id="g", member_id="m"))
HEARTBEAT = GroupRequest(heartbeat=GroupHeartbeat(member_epoch=1))
ASSIGNMENT = GroupResponse(assignment=GroupAssignment(member_epoch=1))
ANSWER = GroupResponse(heartbeat=HeartbeatAnswer(member_epoch=1))


class KeptCommands:
    """Stands in for a shard."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.detached: list[object] = []

    def submit(self, command: Command, recipient: object = None) -> None:
        self.commands.append(command)

    def detach(self, recipient: object) -> None:
        self.detached.append(recipient)


class Served:
    """A session under way."""

    def __init__(self) -> None:
        self.shard = KeptCommands()
        self.requests: Requests[GroupRequest] = Requests()
        self.writer: Writer[GroupResponse] = Writer()
        self.pace_ms = 0.0
        self.sizes: list[int] = []
        self.session = GroupSession(self._find, "10.0.0.1", pace_ms=self._pace)
        self.refusal: RaftlogError | None = None
        self.task = asyncio.ensure_future(self.session.run(aiter(self.requests), self.writer))

    def _pace(self, size: int) -> float:
        self.sizes.append(size)
        return self.pace_ms

    def _find(self, group_id: str) -> GroupShard:
        if self.refusal is not None:
            raise self.refusal
        return cast(GroupShard, self.shard)

    async def end(self) -> None:
        async with asyncio.timeout(5):
            await self.task


def run(scenario: Callable[[Served], Awaitable[Any]]) -> None:
    async def main() -> None:
        await scenario(Served())

    virtual_time.run(main())


def test_requests_become_commands_of_this_stream_and_responses_leave_in_order() -> None:
    async def scenario(served: Served) -> None:
        commit = SessionCommit(correlation_id=7)
        leave = LeaveGroup(keep_assignment=True)
        served.requests.send(JOIN)
        served.requests.send(HEARTBEAT)
        served.requests.send(GroupRequest(commit=commit))
        served.requests.send(GroupRequest(leave=leave))
        await settle()
        to = served.session
        assert served.shard.commands == [
            Join(to, JOIN.join, "10.0.0.1"),
            Heartbeat(to, "g", "m", HEARTBEAT.heartbeat),
            CommitInSession(to, "g", "m", commit),
            Leave(to, "g", "m", leave),
        ]
        to.deliver(ASSIGNMENT)
        to.deliver(ANSWER)
        to.deliver(None)
        to.deliver(ANSWER)
        await served.end()
        assert served.writer.written == [ASSIGNMENT, ANSWER]
        assert served.shard.commands[-1] == Disconnected(to, "g", "m")
        assert served.shard.detached == [to]

    run(scenario)


def test_an_error_is_the_last_word() -> None:
    async def scenario(served: Served) -> None:
        served.requests.send(JOIN)
        await settle()
        served.session.deliver(ASSIGNMENT)
        served.session.deliver(UnknownMemberId("gone"))
        served.session.deliver(ANSWER)
        await served.end()
        assert served.writer.written[0] == ASSIGNMENT
        assert [each.error.code for each in served.writer.written[1:]] == [common_pb2.UNKNOWN_MEMBER_ID]

    run(scenario)


def test_who_asks_the_wrong_broker_hears_so_in_a_response() -> None:
    async def scenario(served: Served) -> None:
        served.refusal = NotCoordinator("broker 2 does")
        served.requests.send(JOIN)
        await served.end()
        assert [each.error.code for each in served.writer.written] == [common_pb2.NOT_COORDINATOR]
        assert served.shard.commands == []

    run(scenario)


@pytest.mark.parametrize("wrong", [[HEARTBEAT], [JOIN, JOIN], [JOIN, GroupRequest()], [GroupRequest()]])
def test_a_client_that_breaks_the_protocol_is_refused(wrong: list[GroupRequest]) -> None:
    async def scenario(served: Served) -> None:
        for request in wrong:
            served.requests.send(request)
        with pytest.raises(InvalidRequestError):
            await served.end()
        assert len(served.shard.commands) == (2 if wrong[0] == JOIN else 0)  # a join is followed by the disconnection

    run(scenario)


def test_a_member_that_says_too_much_is_not_read_for_a_while() -> None:
    """A flood of heartbeats or commits costs the event loop as much as one of calls, which has the same rate."""

    async def scenario(served: Served) -> None:
        served.requests.send(JOIN)
        await settle()
        served.session.deliver(ASSIGNMENT)
        served.pace_ms = 1_000.0
        for _ in range(3):
            served.requests.send(HEARTBEAT)
        await asyncio.sleep(2.5)
        assert len(served.shard.commands) == 4
        served.pace_ms = 0.0
        for _ in range(20):
            served.requests.send(HEARTBEAT)
        await asyncio.sleep(1.5)
        assert len(served.shard.commands) == 24
        served.requests.end()
        await served.end()

    run(scenario)


@pytest.mark.parametrize("how", ["end", "cancel"])
def test_a_stream_that_ends_is_not_a_leave(how: str) -> None:
    async def scenario(served: Served) -> None:
        served.requests.send(JOIN)
        await settle()
        if how == "end":
            served.requests.end()
            await served.end()
        else:
            served.task.cancel()
            await asyncio.gather(served.task, return_exceptions=True)
        assert served.shard.commands == [
            Join(served.session, JOIN.join, "10.0.0.1"),
            Disconnected(served.session, "g", "m"),
        ]
        assert served.shard.detached == [served.session]

    run(scenario)


def test_a_member_that_asks_without_end_is_not_read_until_it_is_answered() -> None:
    async def scenario(served: Served) -> None:
        served.requests.send(JOIN)
        for _ in range(MAX_UNANSWERED + 10):
            served.requests.send(HEARTBEAT)
        await asyncio.sleep(0.05)
        assert len(served.shard.commands) == 1 + MAX_UNANSWERED
        for _ in range(5):
            served.session.deliver(ANSWER)
        await asyncio.sleep(0.05)
        assert len(served.shard.commands) == 1 + MAX_UNANSWERED + 5
        served.task.cancel()

    run(scenario)


def test_a_member_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_OUTBOX", 20)
    monkeypatch.setattr(groups, "WRITE_TIMEOUT_S", 0.1)

    async def scenario(served: Served) -> None:
        served.writer.stalled = True
        served.requests.send(JOIN)
        await settle()
        for _ in range(25):
            served.session.deliver(ASSIGNMENT)
        with pytest.raises(BrokerOverloaded):
            await served.end()
        assert served.shard.detached == [served.session]

    run(scenario)


def test_a_member_whose_connection_takes_nothing_is_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WRITE_TIMEOUT_S", 0.05)

    async def scenario(served: Served) -> None:
        served.writer.stalled = True
        served.requests.send(JOIN)
        await settle()
        served.session.deliver(ASSIGNMENT)
        with pytest.raises(BrokerOverloaded, match="the client read nothing"):
            await served.end()

    run(scenario)


def test_a_commit_of_too_much_is_refused_by_itself_and_never_reaches_the_shard() -> None:
    async def scenario(served: Served) -> None:
        served.requests.send(JOIN)
        await settle()
        commit = SessionCommit(correlation_id=7, offsets=[CommitOffset(topic="t")] * 2)
        served.requests.send(GroupRequest(commit=commit))
        served.requests.send(HEARTBEAT)
        await settle()
        assert [type(command) for command in served.shard.commands] == [Join, Heartbeat]
        (answer,) = served.writer.written
        assert answer.commit.correlation_id == 7
        assert answer.commit.error.code == InvalidRequestError.code
        assert "two offsets of one partition" in answer.commit.error.message
        served.session.deliver(None)
        await served.end()

    run(scenario)


def test_a_correlation_id_names_one_commit_at_a_time() -> None:
    async def scenario(served: Served) -> None:
        commit = GroupRequest(commit=SessionCommit(correlation_id=7, offsets=[CommitOffset(topic="t")]))
        refused = GroupRequest(commit=SessionCommit(correlation_id=7, offsets=[CommitOffset(topic="t")] * 2))
        for request in (JOIN, commit):
            served.requests.send(request)
        await settle()
        served.session.deliver(GroupResponse(commit=SessionCommitResult(correlation_id=7)))
        for request in (refused, commit, commit):  # the first two one after the other, the last one while it is asked
            served.requests.send(request)
        with pytest.raises(InvalidRequestError, match="correlation_id 7 is still under way"):
            await served.end()
        kinds = [type(command) for command in served.shard.commands]
        assert kinds == [Join, CommitInSession, CommitInSession, Disconnected]
        assert len(served.writer.written) == 2

    run(scenario)
