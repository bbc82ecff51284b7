"""A group session with a scripted stream: what it does with answers of a session that is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from raftlog import TopicPartition
from raftlog._client.groups import GroupSession
from raftlog._core.backoff import Backoff, Pauses
from raftlog._core.membership import Identity, Membership, MemberState
from raftlog.v1 import group_pb2, group_pb2_grpc
from tests.support.quorum import eventually

PART = TopicPartition("t", 0)


class Call:
    """A stream whose read, once answered, cannot be taken back by `cancel`, as gRPC's."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[group_pb2.GroupResponse] = asyncio.Queue()
        self.cancelled = False

    async def read(self) -> group_pb2.GroupResponse:
        return await self.responses.get()

    async def write(self, request: group_pb2.GroupRequest) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True


def assignment(epoch: int) -> group_pb2.GroupResponse:
    return group_pb2.GroupResponse(
        assignment=group_pb2.GroupAssignment(
            member_epoch=epoch,
            session_timeout_ms=60_000,
            heartbeat_interval_ms=10_000,
            topics=[group_pb2.AssignedTopic(topic="t", topic_id=bytes(16), partitions=[0])],
        )
    )


class Scripted:
    """A session whose stream is open, with the changes that it reported: the assigned partitions of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.call = Call()
        self.seen: list[list[TopicPartition]] = []
        self.assigned = asyncio.Event()
        self.membership = Membership(Identity("g", "m"))
        self.membership.join()
        stub = SimpleNamespace(Session=lambda: self.call)
        monkeypatch.setattr(group_pb2_grpc, "GroupStub", lambda _channel: stub)
        connections: Any = SimpleNamespace(channel=lambda _address: None)
        self.session = GroupSession(
            self.membership,
            SimpleNamespace(),  # type: ignore[arg-type] # the stream is opened without a look-up
            connections,
            Pauses(Backoff(100, 1000, lambda: 0.0), Backoff(100, 1000, lambda: 0.0)),
            on_change=self._changed,
            is_overdue=lambda _now_ms: False,
            on_overdue=lambda: None,
        )

    def _changed(self) -> None:
        self.seen.append(self.membership.to_take())
        self.assigned.set()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[asyncio.Task[Any]]:
        """Run the stream until it has its first assignment."""
        task = asyncio.create_task(self.session._stream("broker:1"))
        self.call.responses.put_nowait(assignment(1))
        await self.assigned.wait()
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.session.close()


async def test_an_assignment_of_an_expired_session_does_not_answer_the_next_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = Scripted(monkeypatch)
    async with scripted.stream() as task:
        scripted.membership.session_deadline_ms = 0  # the process was paused
        scripted.call.responses.put_nowait(assignment(2))
        scripted.session.tick()
        await asyncio.wait([task], timeout=10)
        assert scripted.call.cancelled
        assert (scripted.membership.state, scripted.membership.to_take()) == (MemberState.JOINING, [])


async def test_an_assignment_that_is_read_before_the_session_is_seen_to_be_over_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = Scripted(monkeypatch)
    async with scripted.stream() as task:
        assert scripted.seen.pop() == [PART]
        scripted.seen.clear()
        scripted.membership.session_deadline_ms = 0
        scripted.call.responses.put_nowait(assignment(2))
        await eventually(scripted.call.responses.empty, "the assignment is read")
        await asyncio.wait([task], timeout=0.1)  # what it would report, it would report now
        assert all(partitions == [] for partitions in scripted.seen)
        assert scripted.membership.state is MemberState.JOINING
