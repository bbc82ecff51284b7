"""The security service: users and ACLs become metadata commands, are read from the image, and are audited."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker.net.services.security import SecurityService
from broker.security.caller import Caller, caller
from broker.security.scram import FAILURE_DELAY_S, MAX_DELAYED
from raftlog.errors import AuthenticationFailed, BrokerOverloaded, NotController
from raftlog.v1 import common_pb2, security_pb2
from raftlog.v1.security_pb2 import (
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    Acl,
    AuthenticateRequest,
    RoleAlteration,
    UserMechanism,
)
from raftmeta.decide.security import MAX_SECURITY_CHANGES
from raftmeta.features import ROLES_LEVEL
from tests.support.memory_metadata import MemoryMetadata
from tests.support.metadata import update_feature
from tests.support.scram_parts import credential

WRITE_ORDERS = Acl(
    resource_type=Acl.TOPIC,
    resource_name="orders",
    pattern_type=Acl.LITERAL,
    principal="User:alice",
    host="*",
    operation=Acl.WRITE,
    permission=Acl.ALLOW,
)
ALL = Acl(
    resource_type=Acl.ANY_RESOURCE,
    pattern_type=Acl.ANY_PATTERN,
    operation=Acl.ANY_OPERATION,
    permission=Acl.ANY_PERMISSION,
)


class Context:
    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4321"


class Door:
    """Refuses every login."""

    def __init__(self) -> None:
        self.error: Exception = AuthenticationFailed("no")
        self.asked: list[object] = []

    def begin(self, mechanism: str, message: bytes, context: Any) -> security_pb2.AuthenticateResponse:
        self.asked.append((mechanism, message))
        raise self.error

    def finish(self, exchange_id: bytes, message: bytes, context: Any) -> security_pb2.AuthenticateResponse:
        self.asked.append((exchange_id, message))
        return security_pb2.AuthenticateResponse(token="t")


class World:
    def __init__(self, *, has_authorizer: bool = True) -> None:
        self.metadata = MemoryMetadata()
        self.door = Door()
        self.waited_for: list[int] = []
        self.service = SecurityService(self.metadata, self.door, self._wait, has_authorizer=has_authorizer)

    async def _wait(self, offset: int) -> None:
        self.waited_for.append(offset)

    async def ask(self, name: str, request: Any) -> Any:
        return await getattr(self.service, name)(request, Context())

    async def done(self, name: str, request: Any) -> Any:
        answer = await self.ask(name, request)
        assert not answer.HasField("error"), answer.error
        return answer


def run(work: Callable[[World], Awaitable[None]], *, has_authorizer: bool = True) -> None:
    async def scenario() -> None:
        await work(World(has_authorizer=has_authorizer))

    asyncio.run(scenario())


def test_who_fails_waits_a_little_and_who_is_not_asked_for_a_password_does_not() -> None:
    async def work(world: World) -> None:
        began_s = time.monotonic()
        answer = await world.ask("Authenticate", AuthenticateRequest(mechanism="M", message=b"1"))
        assert time.monotonic() - began_s >= FAILURE_DELAY_S
        assert answer.error.code == common_pb2.SASL_AUTHENTICATION_FAILED
        world.door.error = BrokerOverloaded("later")
        answer = await world.ask("Authenticate", AuthenticateRequest(mechanism="M", message=b"1"))
        assert answer.error.code == BrokerOverloaded.code
        answer = await world.ask("Authenticate", AuthenticateRequest(exchange_id=b"x", message=b"2"))
        assert answer.token == "t"
        assert world.door.asked == [("M", b"1"), ("M", b"1"), (b"x", b"2")]

    run(work)


def test_failures_that_wait_are_bounded() -> None:
    async def work(world: World) -> None:
        request = AuthenticateRequest(mechanism="M", message=b"1")
        answers = await asyncio.gather(*(world.ask("Authenticate", request) for _ in range(MAX_DELAYED + 5)))
        codes = Counter(answer.error.code for answer in answers)
        assert codes == {common_pb2.SASL_AUTHENTICATION_FAILED: MAX_DELAYED, BrokerOverloaded.code: 5}
        assert (await world.ask("Authenticate", request)).error.code == common_pb2.SASL_AUTHENTICATION_FAILED

    run(work)


def test_users_are_made_shown_and_deleted() -> None:
    async def work(world: World) -> None:
        alice, bob = credential("alice", "secret"), credential("bob", "secret", SCRAM_SHA_256)
        asked = security_pb2.AlterUsersRequest(upsertions=[alice.to_wire(), bob.to_wire()])
        answer = await world.done("AlterUsers", asked)
        assert world.waited_for == [answer.metadata_offset]
        kept = world.metadata.image.credential("alice", SCRAM_SHA_512)
        assert kept is not None
        assert kept.stored_key == alice.stored_key
        described = await world.done("DescribeUsers", security_pb2.DescribeUsersRequest())
        assert list(described.users) == [
            UserMechanism(user="alice", mechanism=SCRAM_SHA_512, iterations=4096),
            UserMechanism(user="bob", mechanism=SCRAM_SHA_256, iterations=4096),
        ]
        assert alice.stored_key not in described.SerializeToString()
        named = await world.done("DescribeUsers", security_pb2.DescribeUsersRequest(users=["bob", "carol"]))
        assert [each.user for each in named.users] == ["bob"]
        await world.done("AlterUsers", security_pb2.AlterUsersRequest(deletions=[UserMechanism(user="alice")]))
        assert not world.metadata.image.credentials_of("alice")

    run(work)


def test_what_cannot_be_is_refused_with_nothing_done() -> None:
    async def work(world: World) -> None:
        alice, weak = credential("alice", "secret").to_wire(), credential("bob", "secret").to_wire()
        weak.iterations = 1
        answer = await world.ask("AlterUsers", security_pb2.AlterUsersRequest(upsertions=[alice, weak]))
        assert answer.error.code == common_pb2.UNACCEPTABLE_CREDENTIAL
        assert not world.metadata.image.credentials
        gone = security_pb2.AlterUsersRequest(deletions=[UserMechanism(user="nobody", mechanism=SCRAM_SHA_512)])
        assert (await world.ask("AlterUsers", gone)).error.code == common_pb2.RESOURCE_NOT_FOUND

    run(work)


def test_acls_are_made_shown_and_deleted() -> None:
    async def work(world: World) -> None:
        reads = Acl()
        reads.CopyFrom(WRITE_ORDERS)
        reads.operation = Acl.READ
        answer = await world.done("CreateAcls", security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS, reads]))
        assert world.waited_for == [answer.metadata_offset]
        described = await world.done("DescribeAcls", security_pb2.DescribeAclsRequest(filter=ALL))
        assert list(described.acls) == [reads, WRITE_ORDERS]
        writes = Acl()
        writes.CopyFrom(ALL)
        writes.operation = Acl.WRITE
        described = await world.done("DescribeAcls", security_pb2.DescribeAclsRequest(filter=writes))
        assert list(described.acls) == [WRITE_ORDERS]
        only_said = security_pb2.DeleteAclsRequest(filters=[writes, ALL], validate_only=True)
        assert list((await world.done("DeleteAcls", only_said)).deleted) == [reads, WRITE_ORDERS]
        assert len(world.metadata.image.acls) == 2
        deleted = await world.done("DeleteAcls", security_pb2.DeleteAclsRequest(filters=[writes]))
        assert list(deleted.deleted) == [WRITE_ORDERS]
        assert deleted.metadata_offset == world.metadata.image.offset
        assert [acl.to_wire() for acl in world.metadata.image.acls] == [reads]
        none = await world.done("DeleteAcls", security_pb2.DeleteAclsRequest(filters=[writes]))
        assert not none.deleted

    run(work)


def test_more_are_deleted_than_one_command_takes() -> None:
    async def work(world: World) -> None:
        acls = []
        for number in range(MAX_SECURITY_CHANGES + 1):
            acls.append(Acl())
            acls[-1].CopyFrom(WRITE_ORDERS)
            acls[-1].resource_name = f"topic-{number:04}"
        for some in (acls[:1], acls[1:]):
            await world.done("CreateAcls", security_pb2.CreateAclsRequest(acls=some))
        assert list((await world.done("DeleteAcls", security_pb2.DeleteAclsRequest(filters=[ALL]))).deleted) == acls
        assert not world.metadata.image.acls
        many = await world.ask("DeleteAcls", security_pb2.DeleteAclsRequest(filters=[ALL] * (MAX_SECURITY_CHANGES + 1)))
        assert many.error.code == common_pb2.INVALID_REQUEST

    run(work)


def clerk(action: RoleAlteration.Action.ValueType, **more: Any) -> security_pb2.AlterRolesRequest:
    return security_pb2.AlterRolesRequest(alterations=[RoleAlteration(name="clerk", action=action, **more)])


OF_CLERK = Acl(
    resource_type=Acl.TOPIC,
    resource_name="orders",
    pattern_type=Acl.LITERAL,
    principal="Role:clerk",
    host="*",
    operation=Acl.WRITE,
    permission=Acl.ALLOW,
)


def test_roles_are_made_shown_and_deleted() -> None:
    async def work(world: World) -> None:
        await world.metadata.add_broker()
        await world.metadata.propose(update_feature("metadata.version", ROLES_LEVEL))
        made = await world.done("AlterRoles", clerk(RoleAlteration.CREATE, additions=[OF_CLERK], grants=["User:alice"]))
        assert world.waited_for == [made.metadata_offset]
        again = await world.ask("AlterRoles", clerk(RoleAlteration.CREATE))
        assert again.error.code == common_pb2.DUPLICATE_RESOURCE
        role = security_pb2.Role(name="clerk", permissions=[OF_CLERK], principals=["User:alice"])
        everyone = RoleAlteration(name="all", action=RoleAlteration.CREATE, grants=["User:*"])
        await world.done("AlterRoles", security_pb2.AlterRolesRequest(alterations=[everyone]))
        of_all = security_pb2.Role(name="all", principals=["User:*"])
        for asked, found in (
            ({}, [of_all, role]),
            ({"names": ["clerk", "none"]}, [role]),
            ({"principal": "User:alice"}, [of_all, role]),
            ({"principal": "User:bob"}, [of_all]),
            ({"principal": "User:bob", "names": ["clerk"]}, []),
        ):
            request: Any = security_pb2.DescribeRolesRequest(**asked)
            assert list((await world.done("DescribeRoles", request)).roles) == found
        described = await world.done("DescribeAcls", security_pb2.DescribeAclsRequest(filter=ALL))
        assert not described.acls, "permissions of a role must not be listed as ACLs"
        await world.done("AlterRoles", clerk(RoleAlteration.DELETE))
        assert set(world.metadata.image.roles) == {"all"}

    run(work)


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("DescribeRoles", security_pb2.DescribeRolesRequest()),
        ("AlterRoles", clerk(RoleAlteration.CREATE)),
        ("DescribeAcls", security_pb2.DescribeAclsRequest(filter=ALL)),
        ("CreateAcls", security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS])),
        ("DeleteAcls", security_pb2.DeleteAclsRequest(filters=[ALL])),
    ],
)
def test_without_an_authorizer_there_are_no_acls(name: str, request_: Any) -> None:
    async def work(world: World) -> None:
        answer = await world.ask(name, request_)
        assert answer.error.code == common_pb2.SECURITY_DISABLED
        assert "set authorizer = acl" in answer.error.message

    run(work, has_authorizer=False)


def test_bad_filters_and_acls_are_told() -> None:
    async def work(world: World) -> None:
        for answer in (
            await world.ask("DescribeAcls", security_pb2.DescribeAclsRequest()),
            await world.ask("DeleteAcls", security_pb2.DeleteAclsRequest(filters=[ALL, Acl()])),
            await world.ask("CreateAcls", security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS, ALL])),
        ):
            assert answer.error.code == common_pb2.INVALID_REQUEST
        assert not world.metadata.image.acls

    run(work)


Fields = tuple[str, str, str, str, str, str]

ALICE = UserMechanism(user="alice", mechanism=SCRAM_SHA_512)
WRITES = "ALLOW User:alice WRITE TOPIC LITERAL 'orders' from *"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Fields]]:
    """The audit lines since the last call: message, principal, host, operation, type and name of the resource."""
    caplog.set_level(logging.INFO)

    def take() -> list[Fields]:
        names = ("message", "principal", "host", "operation", "resource_type", "resource")
        written = [vars(record) for record in caplog.records if record.name == "raftlog.audit"]
        caplog.clear()
        assert all(record["allowed"] for record in written)
        return [tuple(record[name] for name in names) for record in written]

    return take


def run_as(work: Callable[[World], Awaitable[None]], who: Caller) -> None:
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

    run_as(work, Caller("User:root", "10.0.0.1"))


def test_each_part_of_a_role_has_a_line(lines: Callable[[], list[Fields]]) -> None:
    async def work(world: World) -> None:
        await world.metadata.add_broker()
        await world.metadata.propose(update_feature("metadata.version", ROLES_LEVEL))
        bare = Acl.FromString(OF_CLERK.SerializeToString())
        bare.principal = ""
        for request, written in (
            (
                clerk(RoleAlteration.CREATE, additions=[bare], grants=["User:alice"]),
                [
                    ("CREATE", "ROLE", "clerk"),
                    ("CREATE", "ROLE_PERMISSION", "ALLOW Role:clerk WRITE TOPIC LITERAL 'orders' from *"),
                    ("CREATE", "ROLE_GRANT", "clerk to User:alice"),
                ],
            ),
            (
                clerk(RoleAlteration.CHANGE, removals=[OF_CLERK], revocations=["User:alice"]),
                [
                    ("DELETE", "ROLE_PERMISSION", "ALLOW Role:clerk WRITE TOPIC LITERAL 'orders' from *"),
                    ("DELETE", "ROLE_GRANT", "clerk to User:alice"),
                ],
            ),
            (clerk(RoleAlteration.DELETE), [("DELETE", "ROLE", "clerk")]),
        ):
            await world.done("AlterRoles", request)
            assert [line[3:] for line in lines()] == written

    run_as(work, Caller("User:root", "10.0.0.1"))


def test_many_at_once_have_a_line_each(lines: Callable[[], list[Fields]]) -> None:
    acls = [Acl.FromString(WRITE_ORDERS.SerializeToString()) for _ in range(MAX_SECURITY_CHANGES)]
    for number, acl in enumerate(acls):
        acl.resource_name = f"topic-{number:04}"

    async def work(world: World) -> None:
        await world.done("CreateAcls", security_pb2.CreateAclsRequest(acls=acls))
        assert [line[5].split("'")[1] for line in lines()] == [acl.resource_name for acl in acls]

    run_as(work, Caller("User:root", "10.0.0.1"))


def test_without_authentication_there_is_still_the_address(lines: Callable[[], list[Fields]]) -> None:
    async def work(world: World) -> None:
        await world.done("CreateAcls", security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS]))
        assert [line[1:3] for line in lines()] == [("User:ANONYMOUS", "10.0.0.7")]

    run_as(work, Caller())


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

    run_as(work, Caller("User:root", "10.0.0.1"))


@pytest.mark.parametrize("request_name", ["CreateAcls", "AlterUsers", "AlterRoles"])
def test_a_request_that_is_too_long_fills_no_log(lines: Callable[[], list[Fields]], request_name: str) -> None:
    many = MAX_SECURITY_CHANGES + 1
    requests: dict[str, Any] = {
        "CreateAcls": security_pb2.CreateAclsRequest(acls=[WRITE_ORDERS] * many),
        "AlterUsers": security_pb2.AlterUsersRequest(deletions=[ALICE] * many),
        "AlterRoles": clerk(RoleAlteration.CHANGE, additions=[OF_CLERK] * many),
    }

    async def work(world: World) -> None:
        world.metadata.refuse_with.append(NotController("no controller answered in time"))
        assert (await world.ask(request_name, requests[request_name])).HasField("error")
        assert lines() == []

    run_as(work, Caller("User:root", "10.0.0.1"))
