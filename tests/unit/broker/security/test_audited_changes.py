"""Who changed users and ACLs stands in the audit log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker.security.caller import Caller, caller
from raftlog.errors import NotController
from raftlog.v1 import common_pb2, security_pb2
from raftlog.v1.security_pb2 import SCRAM_SHA_512, Acl, UserMechanism
from raftmeta.decide.security import MAX_SECURITY_CHANGES
from tests.support.scram_parts import credential
from tests.unit.broker.security.test_security_service import ALL, WRITE_ORDERS, World

Fields = tuple[str, str, str, str, str, str]

ALICE = UserMechanism(user="alice", mechanism=SCRAM_SHA_512)
WRITES = "ALLOW User:alice WRITE TOPIC LITERAL 'orders' from *"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Fields]]:
    """What was written since the last time: message, principal, host, operation, type and name of the resource."""
    caplog.set_level(logging.INFO)

    def take() -> list[Fields]:
        names = ("message", "principal", "host", "operation", "resource_type", "resource")
        written = [vars(record) for record in caplog.records if record.name == "raftlog.audit"]
        caplog.clear()
        assert all(record["allowed"] for record in written)
        return [tuple(record[name] for name in names) for record in written]

    return take


def run(work: Callable[[World], Awaitable[None]], who: Caller) -> None:
    async def scenario() -> None:
        caller.set(who)
        await work(World())

    asyncio.run(scenario())


def test_each_change_has_a_line_with_its_author(lines: Callable[[], list[Fields]]) -> None:
    async def work(world: World) -> None:
        upsertions = [credential("alice", "secret").to_wire()]
        await world.done("AlterUsers", security_pb2.AlterUsersRequest(upsertions=upsertions))
        assert lines() == [("changed", "User:root", "10.0.0.1", "ALTER", "USER", "alice SCRAM-SHA-512")]
        await world.done("AlterUsers", security_pb2.AlterUsersRequest(deletions=[ALICE]))
        assert lines() == [("changed", "User:root", "10.0.0.1", "DELETE", "USER", "alice SCRAM-SHA-512")]
        await world.done("CreateAcls", security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS]))
        assert lines() == [("changed", "User:root", "10.0.0.1", "CREATE", "ACL", WRITES)]
        await world.done("DeleteAcls", security_pb2.DeleteAclsRequest(filters=[ALL], validate_only=True))
        await world.done("DescribeAcls", security_pb2.DescribeAclsRequest(filter=ALL))
        assert lines() == []
        await world.done("DeleteAcls", security_pb2.DeleteAclsRequest(filters=[ALL]))
        assert lines() == [("changed", "User:root", "10.0.0.1", "DELETE", "ACL", WRITES)]

    run(work, Caller("User:root", "10.0.0.1"))


def test_many_at_once_have_a_line_each(lines: Callable[[], list[Fields]]) -> None:
    acls = [Acl.FromString(WRITE_ORDERS.SerializeToString()) for _ in range(MAX_SECURITY_CHANGES)]
    for number, acl in enumerate(acls):
        acl.resource_name = f"topic-{number:04}"

    async def work(world: World) -> None:
        await world.done("CreateAcls", security_pb2.CreateAclsRequest(acls=acls))
        assert [line[5].split("'")[1] for line in lines()] == [acl.resource_name for acl in acls]

    run(work, Caller("User:root", "10.0.0.1"))


def test_without_authentication_there_is_still_the_address(lines: Callable[[], list[Fields]]) -> None:
    async def work(world: World) -> None:
        await world.done("CreateAcls", security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS]))
        assert [line[1:3] for line in lines()] == [("User:ANONYMOUS", "10.0.0.7")]

    run(work, Caller())


def test_what_is_refused_changes_nothing_and_what_is_not_heard_of_may(lines: Callable[[], list[Fields]]) -> None:
    async def work(world: World) -> None:
        answer = await world.ask("AlterUsers", security_pb2.AlterUsersRequest(deletions=[ALICE]))
        assert answer.error.code == common_pb2.RESOURCE_NOT_FOUND
        assert lines() == []
        unheard = NotController("no controller answered in time")
        assert unheard.retriable
        world.metadata.refuse_with.append(unheard)
        await world.ask("CreateAcls", security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS]))
        assert [line[0] for line in lines()] == ["may have been changed"]

    run(work, Caller("User:root", "10.0.0.1"))


@pytest.mark.parametrize("request_name", ["CreateAcls", "AlterUsers"])
def test_a_request_that_is_too_long_fills_no_log(lines: Callable[[], list[Fields]], request_name: str) -> None:
    many = MAX_SECURITY_CHANGES + 1
    requests: dict[str, Any] = {
        "CreateAcls": security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS] * many),
        "AlterUsers": security_pb2.AlterUsersRequest(deletions=[ALICE] * many),
    }

    async def work(world: World) -> None:
        world.metadata.refuse_with.append(NotController("no controller answered in time"))
        assert (await world.ask(request_name, requests[request_name])).HasField("error")
        assert lines() == []

    run(work, Caller("User:root", "10.0.0.1"))
