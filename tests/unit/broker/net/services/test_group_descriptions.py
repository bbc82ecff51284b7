"""Descriptions of groups: each group once, and few bytes for one user at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from broker.config.config import BrokerConfig
from broker.coordinator.groups.commands import DescribeGroup
from broker.coordinator.groups.coordinators import GroupCoordinators
from broker.coordinator.internal_topics import InternalTopics
from broker.coordinator.transactions.verifier import TransactionVerifier
from broker.net.services import groups
from broker.net.services.groups import GroupService
from broker.security.caller import Caller, caller
from raftlog.errors import BrokerOverloaded, RaftlogError
from raftlog.v1 import common_pb2, group_pb2

MEMBER_BYTES = 1_000


class Ended(Exception):
    """The exception that a context raises."""


class Context:
    """A call's context; `over` ends the call, once its answer is read."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[object], None]] = []

    def time_remaining(self) -> float | None:
        return None

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callbacks.append(callback)

    def over(self) -> None:
        for callback in self._callbacks:
            callback(self)

    async def abort(self, status: grpc.StatusCode, details: str, trailing_metadata: object = ()) -> None:
        raise Ended(status, details)


class Coordinators:
    """Coordinates every group; each has one member, of MEMBER_BYTES."""

    def __init__(self) -> None:
        self.partition = self
        self.topic_partition = "__consumer_offsets-0"
        self.described: list[str] = []

    def shard_of(self, group_id: str) -> tuple[int, Any]:
        return 0, self

    def submit(self, command: DescribeGroup, call: Any) -> None:
        self.described.append(command.group_id)
        try:
            command.share.take(MEMBER_BYTES)
        except RaftlogError as error:
            call.deliver(error)
        else:
            call.deliver(group_pb2.GroupDescription(group_id=command.group_id, state=group_pb2.STABLE))


@pytest.fixture
def coordinators() -> Coordinators:
    return Coordinators()


@pytest.fixture
def service(tmp_path: Path, coordinators: Coordinators, monkeypatch: pytest.MonkeyPatch) -> GroupService:
    monkeypatch.setattr(groups, "MAX_DESCRIBED_BYTES", 3 * MEMBER_BYTES)
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": [str(tmp_path)]})
    return GroupService(
        cast(GroupCoordinators, coordinators), cast(InternalTopics, None), config, cast(TransactionVerifier, None)
    )


def codes(service: GroupService, context: Context, user: str, *group_ids: str) -> list[int]:
    async def describe() -> group_pb2.DescribeGroupsResponse:
        caller.set(Caller(f"User:{user}"))
        return await service.DescribeGroups(group_pb2.DescribeGroupsRequest(group_ids=group_ids), cast(Any, context))

    return [group.error.code for group in asyncio.run(describe()).groups]


@pytest.mark.parametrize("method", ["DescribeGroups", "DeleteGroups"])
def test_a_request_names_each_group_once(service: GroupService, coordinators: Coordinators, method: str) -> None:
    request = getattr(group_pb2, f"{method}Request")(group_ids=["a", "b", "a"])
    with pytest.raises(Ended, match="names a group twice"):
        asyncio.run(getattr(service, method)(request, Context()))
    assert coordinators.described == []


def test_descriptions_of_a_user_have_room_until_they_are_read(service: GroupService) -> None:
    first, second, other = Context(), Context(), Context()
    overloaded = common_pb2.BROKER_OVERLOADED
    assert codes(service, first, "a", "1", "2") == [0, 0]
    assert codes(service, second, "a", "3", "4") == [0, overloaded]
    assert codes(service, other, "b", "5", "6") == [0, 0], "another user has room of its own"
    first.over()
    assert codes(service, first, "a", "7", "8", "9") == [0, 0, overloaded]


def test_a_room_is_forgotten_with_its_last_call(service: GroupService) -> None:
    context = Context()
    codes(service, context, "a", "1")
    assert len(service._rooms) == 1
    context.over()
    del context
    assert len(service._rooms) == 0


def test_the_refusal_is_one_that_clients_repeat() -> None:
    assert BrokerOverloaded("").retriable
