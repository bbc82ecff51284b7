"""The `Security` service: authentication, users, ACLs, roles.

Changes are metadata commands, answered as the `Admin` service answers its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from broker.net.services.calls import Context, answered, author_of
from broker.net.services.metadata import image_from
from broker.quotas.manager import QuotaManager
from broker.security.audit import changes_noted
from broker.security.caller import caller
from broker.security.scram import FailureDelay
from broker.turns import QUICK_AT_A_TIME, in_turns
from raftlog._core.security.acls import EVERYBODY, ROLE_PREFIX, Acl, field_order, matching
from raftlog.errors import (
    AuthenticationFailed,
    InvalidRequestError,
    RaftlogError,
    SecurityDisabled,
    to_wire,
)
from raftlog.v1 import security_pb2, security_pb2_grpc
from raftlog.v1.records_pb2 import AlterAclsCommand, AlterRolesCommand, AlterUsersCommand, MetadataCommand
from raftlog.v1.security_pb2 import RoleAlteration
from raftmeta.credentials import MECHANISM_NAMES
from raftmeta.decide.security import MAX_SECURITY_CHANGES, parts_of_role
from raftmeta.port import MetadataPort

logger = logging.getLogger(__name__)


class Authenticator(Protocol):
    """Runs SCRAM exchanges, or refuses all of them."""

    def begin(self, mechanism: str, message: bytes, context: Any) -> security_pb2.AuthenticateResponse:
        """Answer a first message. Raises RaftlogError as `ScramExchanges.begin`, or if this broker has no SCRAM."""
        ...

    def finish(self, exchange_id: bytes, message: bytes, context: Any) -> security_pb2.AuthenticateResponse:
        """Answer a final message, with a token. Raises RaftlogError as `ScramExchanges.finish`."""
        ...


class SecurityService(security_pb2_grpc.SecurityServicer):
    """Answers with errors as values. Without `has_authorizer`, this broker refuses all requests about ACLs.

    `wait_applied(metadata_offset)` returns once this broker acts on all changes up to that offset.
    """

    def __init__(
        self,
        metadata: MetadataPort,
        authenticator: Authenticator,
        wait_applied: Callable[[int], Awaitable[None]],
        *,
        has_authorizer: bool,
        quotas: QuotaManager | None = None,
    ) -> None:
        self._metadata = metadata
        self._quotas = quotas
        self._authenticator = authenticator
        self._wait_applied = wait_applied
        self._has_authorizer = has_authorizer
        self._delay = FailureDelay()

    async def Authenticate(
        self, request: security_pb2.AuthenticateRequest, context: Context
    ) -> security_pb2.AuthenticateResponse:
        """Answer one of SCRAM's two messages; a failure is delayed."""
        try:
            if not request.exchange_id:
                return self._authenticator.begin(request.mechanism, request.message, context)
            return self._authenticator.finish(request.exchange_id, request.message, context)
        except RaftlogError as error:
            if isinstance(error, AuthenticationFailed):
                error = await self._delay.of(error)
            return security_pb2.AuthenticateResponse(error=to_wire(error))

    @answered(security_pb2.DescribeUsersResponse)
    async def DescribeUsers(
        self,
        request: security_pb2.DescribeUsersRequest,
        context: Context,
        response: security_pb2.DescribeUsersResponse,
    ) -> None:
        """Return the metadata's users, or the named ones of them; never a salt or a key."""
        image = await image_from(self._metadata, request.min_metadata_offset)
        named = frozenset(request.users)
        async for key in in_turns(sorted(image.credentials), QUICK_AT_A_TIME):
            if not named or key.user in named:
                iterations = image.credentials[key].iterations
                response.users.add(user=key.user, mechanism=key.mechanism, iterations=iterations)

    @answered(security_pb2.AlterUsersResponse)
    async def AlterUsers(
        self, request: security_pb2.AlterUsersRequest, context: Context, response: security_pb2.AlterUsersResponse
    ) -> None:
        """Set and delete credentials, all or none. Streams that were opened with a changed credential end."""
        command = AlterUsersCommand(upsertions=request.upsertions, deletions=request.deletions)
        await self._commit(context, response, MetadataCommand(alter_users=command))

    @answered(security_pb2.DescribeAclsResponse)
    async def DescribeAcls(
        self, request: security_pb2.DescribeAclsRequest, context: Context, response: security_pb2.DescribeAclsResponse
    ) -> None:
        """Return the ACLs that match the filter."""
        self._check_enabled()
        image = await image_from(self._metadata, request.min_metadata_offset)
        found = matching(image.acls, Acl.from_wire(request.filter))
        async for acl in in_turns(found, QUICK_AT_A_TIME):
            response.acls.append(acl.to_wire())

    @answered(security_pb2.CreateAclsResponse)
    async def CreateAcls(
        self, request: security_pb2.CreateAclsRequest, context: Context, response: security_pb2.CreateAclsResponse
    ) -> None:
        """Add ACLs, all or none; existing ones stay."""
        self._check_enabled()
        await self._commit(context, response, MetadataCommand(alter_acls=AlterAclsCommand(additions=request.acls)))

    @answered(security_pb2.DeleteAclsResponse)
    async def DeleteAcls(
        self, request: security_pb2.DeleteAclsRequest, context: Context, response: security_pb2.DeleteAclsResponse
    ) -> None:
        """Delete the ACLs that match any of the filters, and return them; with `validate_only` return them only.

        Deletes MAX_SECURITY_CHANGES at a time: a response with an error also carries the ACLs deleted before it.
        """
        self._check_enabled()
        await self._metadata.barrier()  # other brokers may have acknowledged ACLs that this one has not seen
        if len(request.filters) > MAX_SECURITY_CHANGES:
            raise InvalidRequestError(
                f"the request has {len(request.filters)} filters, at most {MAX_SECURITY_CHANGES} are allowed; split it"
            )
        acls, found = self._metadata.image.acls, set[Acl]()
        for each in request.filters:
            found.update(matching(acls, Acl.from_wire(each)))
            await asyncio.sleep(0)  # a filter may have compared every ACL
        ordered = sorted(found, key=field_order)
        removals = [acl.to_wire() async for acl in in_turns(ordered, QUICK_AT_A_TIME)]
        for start in range(0, len(removals), MAX_SECURITY_CHANGES):
            some = removals[start : start + MAX_SECURITY_CHANGES]
            if not request.validate_only:
                await self._commit(context, response, MetadataCommand(alter_acls=AlterAclsCommand(removals=some)))
            response.deleted.extend(some)

    @answered(security_pb2.DescribeRolesResponse)
    async def DescribeRoles(
        self,
        request: security_pb2.DescribeRolesRequest,
        context: Context,
        response: security_pb2.DescribeRolesResponse,
    ) -> None:
        """Return the roles, the named ones of them, or those of a principal."""
        self._check_enabled()
        roles = (await image_from(self._metadata, request.min_metadata_offset)).roles
        for name in sorted(roles.keys() & set(request.names) if request.names else roles):
            role = roles[name]
            if not request.principal or not role.principals.isdisjoint((request.principal, EVERYBODY)):
                response.roles.append(role.to_wire())

    @answered(security_pb2.AlterRolesResponse)
    async def AlterRoles(
        self, request: security_pb2.AlterRolesRequest, context: Context, response: security_pb2.AlterRolesResponse
    ) -> None:
        """Make, change and delete roles, all or none. Decisions after the answer follow them."""
        self._check_enabled()
        command = AlterRolesCommand(alterations=request.alterations)
        await self._commit(context, response, MetadataCommand(alter_roles=command))

    def _check_enabled(self) -> None:
        if not self._has_authorizer:
            raise SecurityDisabled(
                "this broker has no authorizer, so every client may do everything: set authorizer = acl on all brokers"
            )

    async def _commit(self, context: Context, response: Any, command: MetadataCommand) -> None:
        if self._quotas is not None:
            self._quotas.admit_commands(caller.get(), command)
        principal, host = author_of(context)
        with changes_noted((principal, host, *change) for change in _changes(command)):
            result = await self._metadata.propose(command)
        await self._wait_applied(result.offset)
        response.metadata_offset = result.offset
        kind = command.WhichOneof("command")
        logger.info("metadata command done", extra={"command": kind, "metadata_offset": result.offset})


def _changes(command: MetadataCommand) -> Iterator[tuple[str, str, str]]:
    """Yield (operation, resource type, resource) of each change; nothing if the quorum refuses so many."""
    users, acls, roles = command.alter_users, command.alter_acls, command.alter_roles.alterations
    of_roles = sum(map(parts_of_role, roles))
    changes = len(users.upsertions) + len(users.deletions) + len(acls.additions) + len(acls.removals) + of_roles
    if changes > MAX_SECURITY_CHANGES:
        return
    for operation, credentials in (("ALTER", users.upsertions), ("DELETE", users.deletions)):
        for each in credentials:
            yield operation, "USER", f"{each.user} {MECHANISM_NAMES.get(each.mechanism, '')}".rstrip()
    for operation, changed in (("CREATE", acls.additions), ("DELETE", acls.removals)):
        for acl in changed:
            yield operation, "ACL", str(Acl.from_wire(acl))
    for role in roles:
        if role.action != RoleAlteration.CHANGE:
            yield RoleAlteration.Action.Name(role.action), "ROLE", role.name
        for operation, changed in (("CREATE", role.additions), ("DELETE", role.removals)):
            for acl in changed:
                permission = replace(Acl.from_wire(acl), principal=ROLE_PREFIX + role.name)
                yield operation, "ROLE_PERMISSION", str(permission)
        for operation, principals in (("CREATE", role.grants), ("DELETE", role.revocations)):
            for principal in principals:
                yield operation, "ROLE_GRANT", f"{role.name} to {principal}"
