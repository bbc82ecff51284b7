"""The `Security` service: authentication, users, permissions.

Changes are metadata commands, answered once they are committed and in effect on this broker, as those of `Admin` are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol, TypeVar

from grpc import aio

from broker.security.audit import note_change
from broker.security.caller import caller
from broker.security.identify import host_of
from broker.services.deadlines import in_time
from broker.services.metadata import image_from
from raftlog.errors import (
    AuthenticationFailed,
    BrokerOverloaded,
    InvalidRequestError,
    RaftlogError,
    SecurityDisabled,
    to_wire,
)
from raftlog.v1 import common_pb2, security_pb2, security_pb2_grpc
from raftlog.v1.records_pb2 import AlterAclsCommand, AlterUsersCommand, MetadataCommand
from raftmeta.acl_filters import matching
from raftmeta.acls import Acl, field_order
from raftmeta.credentials import MECHANISM_NAMES
from raftmeta.decide.security import MAX_SECURITY_CHANGES
from raftmeta.port import MetadataPort

FAILURE_DELAY_S: Final = 0.1
"""Until who gave a wrong password hears of it."""
MAX_DELAYED: Final = 200
"""Who wait for that at a time; others only hear that there are too many."""

logger = logging.getLogger(__name__)

_Context = aio.ServicerContext[Any, Any]


class Authenticator(Protocol):
    """Who knows passwords, and who does not."""

    def begin(self, mechanism: str, message: bytes, context: Any) -> security_pb2.AuthenticateResponse:
        """Answer a first message. Raises RaftlogError as `ScramExchanges.begin`, or where nobody authenticates here."""
        ...

    def finish(self, exchange_id: bytes, message: bytes, context: Any) -> security_pb2.AuthenticateResponse:
        """Answer a final message, with a token. Raises RaftlogError as `ScramExchanges.finish`."""
        ...


class _Response(Protocol):
    @property
    def error(self) -> common_pb2.Error: ...


_R = TypeVar("_R", bound=_Response)


class SecurityService(security_pb2_grpc.SecurityServicer):
    """Answers with errors as values. `has_authorizer`: this broker goes by ACLs, else it shows none.

    `wait_applied(metadata_offset)` returns once this broker acts on everything up to that offset.
    """

    def __init__(
        self,
        metadata: MetadataPort,
        authenticator: Authenticator,
        wait_applied: Callable[[int], Awaitable[None]],
        *,
        has_authorizer: bool,
    ) -> None:
        self._metadata = metadata
        self._authenticator = authenticator
        self._wait_applied = wait_applied
        self._has_authorizer = has_authorizer
        self._delayed = 0

    async def Authenticate(
        self, request: security_pb2.AuthenticateRequest, context: _Context
    ) -> security_pb2.AuthenticateResponse:
        """Take one of the two messages of SCRAM; who fails waits a little."""
        try:
            if not request.exchange_id:
                return self._authenticator.begin(request.mechanism, request.message, context)
            return self._authenticator.finish(request.exchange_id, request.message, context)
        except RaftlogError as error:
            if isinstance(error, AuthenticationFailed):
                error = await self._delayed_failure(error)
            return security_pb2.AuthenticateResponse(error=to_wire(error))

    async def _delayed_failure(self, error: RaftlogError) -> RaftlogError:
        if self._delayed >= MAX_DELAYED:
            return BrokerOverloaded("too many clients fail to authenticate at the moment; try again")
        self._delayed += 1
        try:
            await asyncio.sleep(FAILURE_DELAY_S)
        finally:
            self._delayed -= 1
        return error

    async def DescribeUsers(
        self, request: security_pb2.DescribeUsersRequest, context: _Context
    ) -> security_pb2.DescribeUsersResponse:
        """Return the users in the metadata, or those of them that are named; never what a password is checked by."""
        response = security_pb2.DescribeUsersResponse()
        return await self._answer(context, response, self._describe_users(request, response))

    async def AlterUsers(
        self, request: security_pb2.AlterUsersRequest, context: _Context
    ) -> security_pb2.AlterUsersResponse:
        """Set and delete credentials, all or none. Streams that came with one of them end."""
        response = security_pb2.AlterUsersResponse()
        command = MetadataCommand(
            alter_users=AlterUsersCommand(upsertions=request.upsertions, deletions=request.deletions)
        )
        return await self._answer(context, response, self._commit(context, response, command))

    async def DescribeAcls(
        self, request: security_pb2.DescribeAclsRequest, context: _Context
    ) -> security_pb2.DescribeAclsResponse:
        """Return the ACLs that match."""
        response = security_pb2.DescribeAclsResponse()
        return await self._answer(context, response, self._describe_acls(request, response))

    async def CreateAcls(
        self, request: security_pb2.CreateAclsRequest, context: _Context
    ) -> security_pb2.CreateAclsResponse:
        """Add ACLs, all or none; what is there already is left as it is."""
        response = security_pb2.CreateAclsResponse()
        return await self._answer(context, response, self._create_acls(request, context, response))

    async def DeleteAcls(
        self, request: security_pb2.DeleteAclsRequest, context: _Context
    ) -> security_pb2.DeleteAclsResponse:
        """Delete the ACLs that match any of the filters, and return them; or only say which they are.

        A thousand at a time: an error may come when some are deleted already; those are returned with it.
        """
        response = security_pb2.DeleteAclsResponse()
        return await self._answer(context, response, self._delete_acls(request, context, response))

    async def _describe_users(
        self, request: security_pb2.DescribeUsersRequest, response: security_pb2.DescribeUsersResponse
    ) -> None:
        image = await image_from(self._metadata, request.min_metadata_offset)
        named = frozenset(request.users)
        for key in sorted(image.credentials):
            if not named or key.user in named:
                iterations = image.credentials[key].iterations
                response.users.add(user=key.user, mechanism=key.mechanism, iterations=iterations)

    async def _describe_acls(
        self, request: security_pb2.DescribeAclsRequest, response: security_pb2.DescribeAclsResponse
    ) -> None:
        self._check_enabled()
        image = await image_from(self._metadata, request.min_metadata_offset)
        found = matching(image.acls, Acl.from_wire(request.filter))
        response.acls.extend(acl.to_wire() for acl in found)

    async def _create_acls(
        self,
        request: security_pb2.CreateAclsRequest,
        context: _Context,
        response: security_pb2.CreateAclsResponse,
    ) -> None:
        self._check_enabled()
        await self._commit(context, response, MetadataCommand(alter_acls=AlterAclsCommand(additions=request.acls)))

    async def _delete_acls(
        self,
        request: security_pb2.DeleteAclsRequest,
        context: _Context,
        response: security_pb2.DeleteAclsResponse,
    ) -> None:
        self._check_enabled()
        await self._metadata.barrier()  # another broker may have acknowledged some of them that this one has to hear of
        if len(request.filters) > MAX_SECURITY_CHANGES:
            raise InvalidRequestError(
                f"the request has {len(request.filters)} filters, at most {MAX_SECURITY_CHANGES} are allowed; split it"
            )
        acls, found = self._metadata.image.acls, set[Acl]()
        for each in request.filters:
            found.update(matching(acls, Acl.from_wire(each)))
            await asyncio.sleep(0)  # each may look at all that there are
        removals = [acl.to_wire() for acl in sorted(found, key=field_order)]
        for start in range(0, len(removals), MAX_SECURITY_CHANGES):
            some = removals[start : start + MAX_SECURITY_CHANGES]
            if not request.validate_only:
                await self._commit(context, response, MetadataCommand(alter_acls=AlterAclsCommand(removals=some)))
            response.deleted.extend(some)

    def _check_enabled(self) -> None:
        if not self._has_authorizer:
            raise SecurityDisabled(
                "this broker does not go by ACLs, everybody may do everything: set authorizer = acl on all brokers"
            )

    async def _commit(self, context: _Context, response: Any, command: MetadataCommand) -> None:
        try:
            result = await self._metadata.propose(command)
        except BaseException as error:
            if not isinstance(error, RaftlogError) or error.retriable:
                _note_changes(context, command, is_certain=False)
            raise
        _note_changes(context, command, is_certain=True)
        await self._wait_applied(result.offset)
        response.metadata_offset = result.offset
        kind = command.WhichOneof("command")
        logger.info("metadata command done", extra={"command": kind, "metadata_offset": result.offset})

    async def _answer(self, context: _Context, response: _R, work: Awaitable[object]) -> _R:
        """Do the work in time; what it raises becomes the response's error."""
        try:
            await in_time(work, context.time_remaining(), self._metadata.waiting_for)
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
        except Exception as error:  # a bug here must reach the client as an answer, not as a broken connection
            logger.exception("a security request failed")
            response.error.CopyFrom(to_wire(error))
        return response


def _note_changes(context: _Context, command: MetadataCommand, *, is_certain: bool) -> None:
    """Write what was changed, and who did, into the audit log."""
    who = caller.get()
    host = who.host or host_of(context.peer())
    for operation, resource_type, resource in _changes(command):
        note_change((who.principal, host, operation, resource_type, resource), is_certain=is_certain)


def _changes(command: MetadataCommand) -> Iterator[tuple[str, str, str]]:
    """Yield (operation, resource type, resource); no more than can be done."""
    users, acls = command.alter_users, command.alter_acls
    if len(users.upsertions) + len(users.deletions) + len(acls.additions) + len(acls.removals) > MAX_SECURITY_CHANGES:
        return
    for operation, credentials in (("ALTER", users.upsertions), ("DELETE", users.deletions)):
        for each in credentials:
            yield operation, "USER", f"{each.user} {MECHANISM_NAMES.get(each.mechanism, '')}".rstrip()
    for operation, changed in (("CREATE", acls.additions), ("DELETE", acls.removals)):
        for acl in changed:
            yield operation, "ACL", str(Acl.from_wire(acl))
