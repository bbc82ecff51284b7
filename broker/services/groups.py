"""The `Group` service: sessions and calls become commands of the shard that their group belongs to.

Errors are values in responses; only a client that breaks the protocol, or does not read, has its stream ended with a
gRPC status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import grpc

from broker.config import BrokerConfig
from broker.group_coordinators import GroupCoordinators, GroupShard, check_group_id
from broker.groups.checks import check_offsets, check_partitions, check_transaction_offsets
from broker.groups.commands import (
    Command,
    CommitOffsets,
    CommitTransactionOffsets,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    FetchOffsets,
    ListGroups,
)
from broker.internal_topics import InternalTopics
from broker.security.caller import caller
from broker.security.identify import host_of
from broker.services.calls import Answer, Call, Context, all_of, ask, longest_wait_s
from broker.services.group_permissions import MemberPermissions, check_described, committed, fetched, shown_groups
from broker.services.group_session import GroupSession
from broker.transaction_verifier import TransactionVerifier
from raftlog.errors import BrokerOverloaded, InvalidRequestError, RaftlogError, to_wire
from raftlog.v1 import group_pb2, group_pb2_grpc

logger = logging.getLogger(__name__)

MAX_GROUPS: Final = 10_000
"""That one request may name."""
SORTED_HERE: Final = 2_000
"""A longer list is put in order by another thread."""

_Context = Context
_R = TypeVar("_R", bound=Answer)
_Q = TypeVar("_Q")


class GroupService(group_pb2_grpc.GroupServicer):
    """Serves the groups that this broker coordinates, and says of others who does."""

    def __init__(
        self,
        coordinators: GroupCoordinators,
        topics: InternalTopics,
        config: BrokerConfig,
        transactions: TransactionVerifier,
    ) -> None:
        self._coordinators = coordinators
        self._transactions = transactions
        self._topics = topics
        self._config = config
        self._sessions = 0

    async def FindCoordinator(
        self, request: group_pb2.FindCoordinatorRequest, context: _Context
    ) -> group_pb2.FindCoordinatorResponse:
        """Return who coordinates a group; the first one to ask has __consumer_offsets made."""
        response = group_pb2.FindCoordinatorResponse(node_id=-1)
        try:
            check_group_id(request.group_id)
            await self._topics.consumer_offsets()
            partition, broker = self._coordinators.named(request.group_id)
            response.partition = partition
            response.node_id, response.host, response.port = broker.broker_id, broker.host, broker.port
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
        return response

    # Members

    async def Session(  # type: ignore[override] # the stub knows generators only; with write() a slow reader shows
        self, request_iterator: AsyncIterator[group_pb2.GroupRequest], context: _Context
    ) -> None:
        """Serve one member."""
        failure = await self._session(request_iterator, context)
        # Outside of any `except`: gRPC may deliver the status only once the client reads again, and until then
        # nothing but this one call must stay behind.
        if failure is not None:
            overloaded = isinstance(failure, BrokerOverloaded)
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if overloaded else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(status, f"{type(failure).__name__}: {failure}")

    async def _session(self, requests: AsyncIterator[group_pb2.GroupRequest], context: _Context) -> RaftlogError | None:
        if self._sessions >= self._config.max_streams:
            return BrokerOverloaded(f"this broker serves max.streams={self._config.max_streams} sessions already")
        self._sessions += 1
        try:
            permissions = MemberPermissions.of(caller.get(), self._coordinators.topic_name)
            await GroupSession(self._shard_of, host_of(context.peer()), permissions).run(requests, context)
        except (InvalidRequestError, BrokerOverloaded) as error:
            return error
        finally:
            self._sessions -= 1
        return None

    def _shard_of(self, group_id: str) -> GroupShard:
        return self._coordinators.shard_of(group_id)[1]

    # Offsets

    async def CommitOffsets(
        self, request: group_pb2.CommitOffsetsRequest, context: _Context
    ) -> group_pb2.CommitOffsetsResponse:
        """Commit offsets; each partition is answered for by itself."""

        def commit(allowed: group_pb2.CommitOffsetsRequest) -> Awaitable[group_pb2.CommitOffsetsResponse]:
            return self._ask(
                request.group_id,
                lambda call: CommitOffsets(call, allowed),
                group_pb2.CommitOffsetsResponse(),
                self._wait_s(context, request.timeout_ms),
            )

        try:
            check_offsets(request.offsets)
        except InvalidRequestError as error:
            return group_pb2.CommitOffsetsResponse(error=to_wire(error))
        return await committed(request, caller.get(), self._coordinators.topic_name, commit)

    async def CommitTransactionOffsets(
        self, request: group_pb2.CommitTransactionOffsetsRequest, context: _Context
    ) -> group_pb2.CommitOffsetsResponse:
        """Take offsets that count once their transaction commits; each partition is answered for by itself."""
        wait_s = self._wait_s(context)
        try:
            check_transaction_offsets(request)
            self._shard_of(request.group_id)  # whoever coordinates the group is to ask
            await self._transactions.check(request, wait_s)
        except RaftlogError as error:
            return group_pb2.CommitOffsetsResponse(error=to_wire(error))
        return await self._ask(
            request.group_id,
            lambda call: CommitTransactionOffsets(call, request),
            group_pb2.CommitOffsetsResponse(),
            wait_s,
        )

    async def FetchOffsets(
        self, request: group_pb2.FetchOffsetsRequest, context: _Context
    ) -> group_pb2.FetchOffsetsResponse:
        """Return committed offsets; with `all`, those of topics that the caller may describe."""

        def fetch(allowed: group_pb2.FetchOffsetsRequest) -> Awaitable[group_pb2.FetchOffsetsResponse]:
            return self._ask(
                request.group_id,
                lambda call: FetchOffsets(call, allowed),
                group_pb2.FetchOffsetsResponse(),
                self._wait_s(context),
            )

        try:
            check_partitions(request.partitions)
        except InvalidRequestError as error:
            return group_pb2.FetchOffsetsResponse(error=to_wire(error))
        return await fetched(request, caller.get(), self._coordinators.topic_name, fetch)

    async def DeleteOffsets(
        self, request: group_pb2.DeleteOffsetsRequest, context: _Context
    ) -> group_pb2.DeleteOffsetsResponse:
        """Forget committed offsets of partitions that no member subscribes to."""
        return await self._ask(
            request.group_id,
            lambda call: DeleteOffsets(call, _checked(request, check_partitions, request.partitions)),
            group_pb2.DeleteOffsetsResponse(),
            self._wait_s(context),
        )

    # Groups

    async def ListGroups(self, request: group_pb2.ListGroupsRequest, context: _Context) -> group_pb2.ListGroupsResponse:
        """Return the groups that this broker coordinates."""
        wait_s = self._wait_s(context)
        shards = self._coordinators.shards()
        answers = await asyncio.gather(
            *(ask(shard, lambda call: ListGroups(call, request), wait_s) for _, shard in shards),
            return_exceptions=True,
        )
        response = group_pb2.ListGroupsResponse()
        response.loading.extend(
            to_wire(self._coordinators.about_to_be_loaded(partition)) for partition in self._coordinators.awaited()
        )
        listed: list[group_pb2.ListedGroup] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                response.loading.append(to_wire(answer))
            else:
                assert isinstance(answer, group_pb2.ListGroupsResponse), "what the command says"
                listed.extend(answer.groups)
        listed = await shown_groups(listed, caller.get())
        if len(listed) > SORTED_HERE:
            await asyncio.to_thread(_add_sorted, response, listed)
        else:
            _add_sorted(response, listed)
        return response

    async def DescribeGroups(
        self, request: group_pb2.DescribeGroupsRequest, context: _Context
    ) -> group_pb2.DescribeGroupsResponse:
        """Return groups with their members."""
        wait_s = self._wait_s(context)
        await _check_ids(request.group_ids, context)
        groups = await all_of(self._describe(group_id, wait_s) for group_id in request.group_ids)
        return group_pb2.DescribeGroupsResponse(groups=groups)

    async def _describe(self, group_id: str, wait_s: float) -> group_pb2.GroupDescription:
        description = group_pb2.GroupDescription(group_id=group_id, coordinator_id=-1, offsets_partition=-1)
        try:
            partition, shard = self._coordinators.shard_of(group_id)
            answer = await ask(shard, lambda call: DescribeGroup(call, group_id), wait_s)
            description.MergeFrom(answer)
            check_described(description, caller.get())
            description.coordinator_id, description.offsets_partition = self._config.node_id, partition
        except RaftlogError as error:
            del description.members[:]
            description.error.CopyFrom(to_wire(error))
        return description

    async def DeleteGroups(
        self, request: group_pb2.DeleteGroupsRequest, context: _Context
    ) -> group_pb2.DeleteGroupsResponse:
        """Forget groups without members, and their offsets."""
        wait_s = self._wait_s(context)
        await _check_ids(request.group_ids, context)
        results = await all_of(self._delete(group_id, wait_s) for group_id in request.group_ids)
        return group_pb2.DeleteGroupsResponse(results=results)

    async def _delete(self, group_id: str, wait_s: float) -> group_pb2.CommitOffsetResult:
        result = group_pb2.CommitOffsetResult()
        try:
            shard = self._shard_of(group_id)
            result.MergeFrom(await ask(shard, lambda call: DeleteGroup(call, group_id), wait_s))
        except RaftlogError as error:
            result.error.CopyFrom(to_wire(error))
        return result

    # How a shard is asked

    async def _ask(self, group_id: str, command: Callable[[Call], Command], response: _R, wait_s: float) -> _R:
        """Return the shard's answer, or `response` with the error."""
        try:
            answer = await ask(self._shard_of(group_id), command, wait_s)
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
            return response
        assert isinstance(answer, type(response)), "what the command says"
        return answer

    def _wait_s(self, context: _Context, timeout_ms: int = 0) -> float:
        return longest_wait_s(context, timeout_ms or self._config.request_timeout_ms)


def _checked(request: _Q, check: Callable[[Any], None], part: object) -> _Q:
    check(part)
    return request


async def _check_ids(group_ids: Sequence[str], context: _Context) -> None:
    if len(group_ids) > MAX_GROUPS:
        failure = f"the request names {len(group_ids)} groups, one may have {MAX_GROUPS}: split it into several"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"InvalidRequestError: {failure}")


def _add_sorted(response: group_pb2.ListGroupsResponse, groups: list[group_pb2.ListedGroup]) -> None:
    response.groups.extend(sorted(groups, key=lambda group: group.group_id))
