"""The admin client's part about users and permissions."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import grpc

from raftlog._client.admin_calls import AdminCalls, names_of
from raftlog.errors import InvalidRequestError, ResourceNotFound, UnacceptableCredential
from raftlog.security import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermission,
    PatternType,
    ResourceType,
    ScramMechanism,
    UserScramCredential,
)
from raftlog.v1 import security_pb2, security_pb2_grpc

MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 1_000_000
"""As servers take them."""

B = TypeVar("B", AclBinding, AclFilter)
K = TypeVar("K", bound=enum.IntEnum)


class SecurityAdmin(AdminCalls):
    """Users and permissions."""

    async def create_acls(self, bindings: AclBinding | Iterable[AclBinding], timeout: float | None) -> None:
        """Allow or deny."""
        request = security_pb2.CreateAclsRequest(acls=[_acl(each) for each in _each(bindings, AclBinding)])
        await self._secure("CreateAcls", request, timeout)

    async def describe_acls(self, filter_: AclFilter, timeout: float | None) -> list[AclBinding]:
        """Return the permissions that are meant."""
        request = security_pb2.DescribeAclsRequest(filter=_acl(filter_), min_metadata_offset=self._metadata.min_offset)
        return [_binding(each) for each in (await self._secure("DescribeAcls", request, timeout)).acls]

    async def delete_acls(
        self, filters: AclFilter | Iterable[AclFilter], validate_only: bool, timeout: float | None
    ) -> list[AclBinding]:
        """Delete permissions and return them."""
        request = security_pb2.DeleteAclsRequest(
            filters=[_acl(each) for each in _each(filters, AclFilter)], validate_only=validate_only
        )
        return [_binding(each) for each in (await self._secure("DeleteAcls", request, timeout)).deleted]

    async def alter_user(
        self,
        name: str,
        password: str,
        mechanism: str | ScramMechanism,
        iterations: int,
        only: bool,
        timeout: float | None,
    ) -> None:
        """Create a user, or change its password."""
        chosen = ScramMechanism.of(mechanism)
        request = security_pb2.AlterUsersRequest()
        request.upsertions.append(await asyncio.to_thread(credential, name, password, chosen, iterations))
        if only:
            for each in await self.describe_users(name, timeout):
                if each.mechanism != chosen:
                    request.deletions.append(_user_mechanism(name, each.mechanism))
        await self._secure("AlterUsers", request, timeout, done=ResourceNotFound)

    async def delete_user(self, name: str, mechanism: str | ScramMechanism | None, timeout: float | None) -> None:
        """Delete a user, or one way to log in."""
        if mechanism is not None:
            chosen = [ScramMechanism.of(mechanism)]
        else:
            chosen = [each.mechanism for each in await self.describe_users(name, timeout)]
            if not chosen:
                raise ResourceNotFound(f"there is no user {name!r}")
        request = security_pb2.AlterUsersRequest(deletions=[_user_mechanism(name, each) for each in chosen])
        await self._secure("AlterUsers", request, timeout, done=ResourceNotFound)

    async def describe_users(self, names: str | Iterable[str], timeout: float | None) -> list[UserScramCredential]:
        """Return who can log in, and how."""
        request = security_pb2.DescribeUsersRequest(
            users=names_of(names), min_metadata_offset=self._metadata.min_offset
        )
        response: security_pb2.DescribeUsersResponse = await self._secure("DescribeUsers", request, timeout)
        return sorted(
            UserScramCredential(each.user, ScramMechanism(each.mechanism), each.iterations) for each in response.users
        )

    async def _secure(self, method: str, request: Any, timeout: float | None, **more: Any) -> Any:
        return await self._anyone(method, request, timeout, service=security_stub, **more)


def security_stub(channel: grpc.aio.Channel) -> Any:
    """Return the stub of the service for users and permissions."""
    return security_pb2_grpc.SecurityStub(channel)


def credential(user: str, password: str, mechanism: ScramMechanism, iterations: int) -> security_pb2.ScramCredential:
    """Return what brokers are to keep of a password: a fresh salt and two keys (RFC 5802). Takes some milliseconds.

    Raises:
        UnacceptableCredential: the password is empty or has characters that SASLprep forbids, or the iterations are
            out of bounds.
    """
    import scramp  # here: who has no users needs no time for it

    if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
        raise UnacceptableCredential(
            f"iterations={iterations} of user {user!r}: expected {MIN_ITERATIONS} to {MAX_ITERATIONS}"
        )
    if not password:
        raise UnacceptableCredential(f"the password of user {user!r} is empty")
    try:
        made = scramp.ScramMechanism(mechanism.mechanism_name)
        salt, stored_key, server_key, _ = made.make_auth_info(password, iteration_count=iterations)
    except scramp.ScramException as error:  # names neither the password nor a part of it
        raise UnacceptableCredential(f"user {user!r}: {error}") from None
    return security_pb2.ScramCredential(
        user=user,
        mechanism=security_pb2.ScramMechanism.ValueType(mechanism),
        salt=salt,
        stored_key=stored_key,
        server_key=server_key,
        iterations=iterations,
    )


def _each(given: B | Iterable[B], kind: type[B]) -> list[B]:
    """Return what was given as a list; one alone counts as one."""
    return [given] if isinstance(given, kind) else list(given)  # type: ignore[arg-type] # the other case is left


def _user_mechanism(user: str, mechanism: ScramMechanism) -> security_pb2.UserMechanism:
    return security_pb2.UserMechanism(user=user, mechanism=security_pb2.ScramMechanism.ValueType(mechanism))


def _acl(given: AclBinding | AclFilter) -> security_pb2.Acl:
    """Return what travels. Raises InvalidRequestError: a field is of another kind."""
    wire = security_pb2.Acl
    return wire(
        resource_type=wire.ResourceType.ValueType(_one_of(ResourceType, given.resource_type)),
        resource_name=given.resource_name or "",
        pattern_type=wire.PatternType.ValueType(_one_of(PatternType, given.pattern_type)),
        principal=given.principal or "",
        host=given.host or "",
        operation=wire.Operation.ValueType(_one_of(AclOperation, given.operation)),
        permission=wire.Permission.ValueType(_one_of(AclPermission, given.permission)),
    )


def _one_of(kind: type[K], given: int | None) -> K:
    """Return what a field says; None is any."""
    if given is None:
        return kind["ANY"]
    try:
        return kind(given)
    except ValueError:
        known = ", ".join(kind.__members__)
        raise InvalidRequestError(f"{given!r} is no {kind.__name__}: expected one of {known}") from None


def _binding(wire: security_pb2.Acl) -> AclBinding:
    return AclBinding(
        wire.principal,
        AclOperation(wire.operation),
        ResourceType(wire.resource_type),
        wire.resource_name,
        PatternType(wire.pattern_type),
        AclPermission(wire.permission),
        wire.host,
    )
