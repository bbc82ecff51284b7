"""The `Group` service: a session or call becomes commands of its group's shard.

Errors are values in responses; a gRPC status ends only the stream of a client that breaks the protocol or does not
read. A `Group.Session` stream is one member of a group, for as long as the stream lasts.

A member needs READ on the group for each request of its session, READ on the topics whose offsets it commits, and
DESCRIBE on the topics it subscribes to. As in Kafka (KIP-848), a subscription that names a topic without DESCRIBE is
refused with TOPIC_AUTHORIZATION_FAILED, whether the topic exists or not; topics that a pattern matched are left out
instead. A commit is answered for each partition. A revoked permission takes effect with the session's next request. A
topic that lost DESCRIBE stays assigned until the member subscribes anew; its leader refuses the fetches.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import Message

from broker.config.config import BrokerConfig
from broker.coordinator.core import Reply
from broker.coordinator.groups.checks import (
    check_offsets,
    check_partitions,
    check_topic_count,
    check_transaction_offsets,
)
from broker.coordinator.groups.commands import (
    Command,
    CommitInSession,
    CommitOffsets,
    CommitTransactionOffsets,
    DeleteGroup,
    DeleteOffsets,
    DescribeGroup,
    DescriptionRoom,
    DescriptionShare,
    Disconnected,
    FetchOffsets,
    Heartbeat,
    Join,
    Leave,
    ListGroups,
)
from broker.coordinator.groups.coordinators import GroupCoordinators, GroupShard, check_group_id
from broker.coordinator.internal_topics import InternalTopics
from broker.coordinator.transactions.verifier import TransactionVerifier
from broker.net.calls import CallLimits
from broker.net.interceptors import host_of
from broker.net.services.calls import Answer, Call, Context, all_of, ask, end_stream, longest_wait_s
from broker.partition.produce_session import ResponseWriter
from broker.security.caller import Caller, Decisions, allowed_of, authorized_operations, caller
from broker.security.permissions import NameOf
from broker.turns import in_turns
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import (
    AuthorizationError,
    BrokerOverloaded,
    GroupIdNotFound,
    InternalError,
    InvalidRequestError,
    RaftlogError,
    TopicAuthorizationFailed,
    to_wire,
)
from raftlog.v1 import group_pb2, group_pb2_grpc
from raftlog.v1.common_pb2 import Error
from raftlog.v1.group_pb2 import (
    CommitOffset,
    CommitOffsetResult,
    CommitOffsetsRequest,
    CommitOffsetsResponse,
    FetchOffsetsRequest,
    FetchOffsetsResponse,
    GroupDescription,
    GroupRequest,
    GroupResponse,
    JoinGroup,
    ListedGroup,
    SessionCommit,
    SessionCommitResult,
    Subscription,
    TopicPartitions,
)
from raftlog.v1.security_pb2 import Acl


class MemberPermissions:
    """The permissions of one session; `MemberPermissions.of` returns None if there is no authorizer."""

    def __init__(self, groups: Decisions, reads: Decisions, describes: Decisions, name_of: NameOf) -> None:
        self._groups = groups
        self._reads = reads
        self._describes = describes
        self._name_of = name_of
        self._refused: dict[int, Sequence[Error | None]] = {}
        """By correlation id of a commit under way: each partition's refusal, None for a committed one."""

    @classmethod
    def of(cls, who: Caller, name_of: NameOf) -> MemberPermissions | None:
        """Return the caller's permissions as a member; None allows everything."""
        groups = Decisions.of(who, Acl.READ, Acl.GROUP)
        reads, describes = Decisions.of(who, Acl.READ, Acl.TOPIC), Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC)
        if groups is None or reads is None or describes is None:
            return None
        return cls(groups, reads, describes, name_of)

    def check_group(self, group_id: str) -> None:
        """Check that the caller may join this group.

        Raises:
            GroupAuthorizationFailed: it may not.
        """
        self._groups.check(group_id)

    async def check_subscription(self, subscription: Subscription) -> None:
        """Check a subscription, and remove the topics that a pattern matched and that the caller may not describe.

        Raises:
            InvalidRequestError: it has too many topics.
            TopicAuthorizationFailed: it names a topic that the caller may not describe.
        """
        check_topic_count(subscription)
        visible = []
        async for topic in in_turns(subscription.topics):
            if not subscription.pattern:
                self._describes.check(topic)
            elif self._describes.allow(topic):
                visible.append(topic)
        if subscription.pattern:
            del subscription.topics[:]
            subscription.topics.extend(visible)

    async def admit(self, commit: SessionCommit) -> SessionCommitResult | None:
        """Remove the refused partitions from a commit; return the answer if none is left."""
        errors = await _refusals(commit.offsets, self._reads, self._name_of)
        if not any(errors):
            return None
        allowed = [offset for offset, error in zip(commit.offsets, errors, strict=True) if error is None]
        if not allowed:
            results = [CommitOffsetResult(error=error) for error in errors]
            return SessionCommitResult(correlation_id=commit.correlation_id, results=results)
        self._refused[commit.correlation_id] = errors
        del commit.offsets[:]
        commit.offsets.extend(allowed)
        return None

    def complete(self, result: SessionCommitResult) -> None:
        """Add the refused partitions to the answer of their commit."""
        errors = self._refused.pop(result.correlation_id, None)
        if errors is not None:
            _complete(result, errors)


async def _refusals(
    parts: Iterable[CommitOffset | TopicPartitions], topics: Decisions, name_of: NameOf
) -> list[Error | None]:
    """Return each part's refusal, None for an allowed part or an unknown topic, which the group refuses itself."""
    errors: list[Error | None] = []
    async for part in in_turns(parts):
        name = name_of(part.topic_id) if part.topic_id else part.topic
        errors.append(None if not name or topics.allow(name) else to_wire(topics.refusal(name, part.topic_id)))
    return errors


def _complete(answer: SessionCommitResult | CommitOffsetsResponse, errors: Sequence[Error | None]) -> None:
    """Insert the refusals among the results of the allowed parts, in request order.

    An answer with an error of its own stays as it is. An answer with another number of results becomes InternalError.
    """
    if answer.HasField("error"):
        return
    results, asked = list(answer.results), errors.count(None)
    del answer.results[:]
    if len(results) != asked:
        answer.error.CopyFrom(_misfit(len(results), asked))
        return
    answered = iter(results)
    answer.results.extend(next(answered) if error is None else CommitOffsetResult(error=error) for error in errors)


def _misfit(answered: int, asked: int) -> Error:
    return to_wire(InternalError(f"the group's coordinator answered for {answered} of {asked} partitions"))


# Calls: the allowed parts go to the shard, and the refusals are inserted into its answer


async def committed(
    request: CommitOffsetsRequest,
    who: Caller,
    name_of: NameOf,
    commit: Callable[[CommitOffsetsRequest], Awaitable[CommitOffsetsResponse]],
) -> CommitOffsetsResponse:
    """Commit the offsets of topics that the caller may read, and answer for each partition."""
    topics = Decisions.of(who, Acl.READ, Acl.TOPIC)
    errors = [] if topics is None else await _refusals(request.offsets, topics, name_of)
    if not any(errors):
        return await commit(request)
    allowed = [offset for offset, error in zip(request.offsets, errors, strict=True) if error is None]
    response = CommitOffsetsResponse()
    if allowed:
        rest = CommitOffsetsRequest()
        rest.CopyFrom(request)
        del rest.offsets[:]
        rest.offsets.extend(allowed)
        response = await commit(rest)
    _complete(response, errors)
    return response


async def fetched(
    request: FetchOffsetsRequest,
    who: Caller,
    name_of: NameOf,
    fetch: Callable[[FetchOffsetsRequest], Awaitable[FetchOffsetsResponse]],
) -> FetchOffsetsResponse:
    """Fetch the offsets of topics that the caller may describe.

    Answers for each named partition; with `all`, leaves the other topics out.
    """
    topics = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC)
    if topics is None:
        return await fetch(request)
    errors = [] if request.all else await _refusals(request.partitions, topics, name_of)
    if not any(errors):
        response = await fetch(request)
        if request.all:
            await leave_out_offsets(response, who)
        return response
    response = FetchOffsetsResponse()
    if not all(errors):
        rest = FetchOffsetsRequest()
        rest.CopyFrom(request)
        del rest.partitions[:]
        rest.partitions.extend(part for part, error in zip(request.partitions, errors, strict=True) if error is None)
        response = await fetch(rest)
        if response.HasField("error"):
            return response
    asked = sum(len(part.partitions) for part, error in zip(request.partitions, errors, strict=True) if error is None)
    if len(response.offsets) != asked:
        return FetchOffsetsResponse(error=_misfit(len(response.offsets), asked))
    by_topic = zip(request.partitions, errors, strict=True)
    named = ((part, number, error) for part, error in by_topic for number in part.partitions)
    answered = iter(response.offsets)
    complete = FetchOffsetsResponse()
    async for topic, number, error in in_turns(named):
        if error is None:
            complete.offsets.append(next(answered))
        else:
            complete.offsets.add(
                topic_id=topic.topic_id, topic=topic.topic, partition=number, error=error, offset=-1, leader_epoch=-1
            )
    return complete


# Answers without the parts that the caller may not see


async def shown_groups(groups: list[ListedGroup], who: Caller) -> list[ListedGroup]:
    """Return the groups that the caller may list: all with DESCRIBE on the cluster, else those with DESCRIBE."""
    if who.may(Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME, log=False):
        return groups
    return await allowed_of(Decisions.of(who, Acl.DESCRIBE, Acl.GROUP, log=False), groups, lambda each: each.group_id)


async def leave_out_offsets(response: FetchOffsetsResponse, who: Caller) -> None:
    """Remove the offsets of topics that the caller may not describe."""
    topics = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC, log=False)
    if topics is not None:
        shown = await allowed_of(topics, list(response.offsets), lambda each: each.topic)
        del response.offsets[:]
        response.offsets.extend(shown)


def check_described(group: GroupDescription, who: Caller) -> None:
    """Check that the caller may see a group, which is shown with all its members' topics or not at all (KIP-848).

    Raises:
        TopicAuthorizationFailed: the caller may not describe one of the topics; the error does not name it.
    """
    topics = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC, log=False)
    if topics is None:
        return
    for member in group.members:
        parts = chain(member.assigned, member.target, member.pending_revocation)
        if not all(map(topics.allow, chain(member.subscription.topics, (part.topic for part in parts)))):
            raise TopicAuthorizationFailed(
                f"group {group.group_id!r} reads topics that {who.principal} may not DESCRIBE; its members are hidden"
            )


MAX_UNANSWERED: Final = 256
"""Heartbeats and commits of a member under way; at this number its stream is not read until some are answered."""
MAX_OUTBOX: Final = 1_000
"""Unread responses of a member; with more, the session fails."""
WRITE_TIMEOUT_S: Final = 30.0


class GroupSession:
    """One member's stream: a recipient (`broker.coordinator.core.Recipient`) of many answers.

    States: joining -> open -> ending (an error or None was delivered; the outbox is still written) -> over.
    """

    is_stream = True

    def __init__(
        self,
        find_shard: Callable[[str], GroupShard],
        host: str,
        permissions: MemberPermissions | None = None,
        pace_ms: Callable[[int], float] | None = None,
        user: str = "",
    ) -> None:
        """`pace_ms`: counts a message of so many bytes, and returns for how many ms the next one is not to be read.

        `user`: for which a new group counts.
        """
        self._pace_ms = pace_ms
        self._user = user
        self._find_shard = find_shard
        self._host = host
        self._permissions = permissions
        self._outbox: deque[GroupResponse] = deque()
        self._unanswered = 0
        self._commits: set[int] = set()
        """Correlation ids of commits under way."""
        self._ending = False
        self._failure: RaftlogError | None = None
        self._news = asyncio.Event()
        self._room = asyncio.Event()

    def deliver(self, message: Message | Reply | RaftlogError | None) -> None:
        """Take a response; an error or None is the last one."""
        if self._ending:
            return
        if message is None or isinstance(message, RaftlogError):
            self._ending = True
            if message is not None:
                self._outbox.append(GroupResponse(error=to_wire(message)))
        else:
            assert isinstance(message, GroupResponse), "a session takes GroupResponses only"
            self._outbox.append(message)
            if message.HasField("commit"):
                self._commits.discard(message.commit.correlation_id)
                if self._permissions is not None:
                    self._permissions.complete(message.commit)
            if message.WhichOneof("response") in ("heartbeat", "commit"):
                self._unanswered -= 1
                self._room.set()
        if len(self._outbox) > MAX_OUTBOX:
            self._fail(BrokerOverloaded(f"the client left {MAX_OUTBOX} responses of this session unread; join again"))
        self._news.set()

    def _fail(self, error: RaftlogError) -> None:
        self._ending, self._failure = True, self._failure or error
        self._outbox.clear()
        self._news.set()

    async def run(self, requests: AsyncIterator[GroupRequest], writer: ResponseWriter[GroupResponse]) -> None:
        """Serve the stream until the member leaves, is refused, or the client ends the stream.

        Raises:
            InvalidRequestError: the client breaks the protocol.
            BrokerOverloaded: the client does not read.
        """
        first = await anext(aiter(requests), None)
        if first is None:
            return
        if first.WhichOneof("request") != "join":
            raise InvalidRequestError("the first request of a session is `join`")
        join = first.join
        try:
            await self._check_permissions(first, join)
            shard = self._find_shard(join.group_id)
        except RaftlogError as error:
            await writer.write(GroupResponse(error=to_wire(error)))
            return
        shard.submit(Join(self, join, self._host, self._user), self)
        reader = asyncio.ensure_future(self._read(requests, shard, join))
        try:
            await self._write_all(writer, reader)
        finally:
            reader.cancel()
            self._ending = True
            shard.detach(self)
            shard.submit(Disconnected(self, join.group_id, join.member_id))

    async def _write_all(self, writer: ResponseWriter[GroupResponse], reader: asyncio.Future[None]) -> None:
        while True:
            self._news.clear()
            while self._outbox:
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await writer.write(self._outbox.popleft())
                except TimeoutError:
                    raise BrokerOverloaded(
                        f"the client read nothing from this session for {WRITE_TIMEOUT_S:g} s; join again"
                    ) from None
            if self._failure is not None:
                raise self._failure
            if self._ending:
                return
            if reader.done():
                reader.result()
                return
            await self._news.wait()

    async def _read(self, requests: AsyncIterator[GroupRequest], shard: GroupShard, join: JoinGroup) -> None:
        try:
            async for request in requests:
                if self._ending:
                    return
                try:
                    await self._check_permissions(request, join)
                except (AuthorizationError, InvalidRequestError) as error:
                    self.deliver(error)
                    return
                delay_ms = 0.0 if self._pace_ms is None else self._pace_ms(request.ByteSize())
                command = self._command(request, join)
                if isinstance(command, CommitInSession) and (refusal := await self._refusal(command)) is not None:
                    self.deliver(refusal)
                else:
                    shard.submit(command, self)
                if delay_ms > 0:
                    await asyncio.sleep(delay_ms / 1_000)
                while self._unanswered >= MAX_UNANSWERED:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._news.set()

    def _command(self, request: GroupRequest, join: JoinGroup) -> Command:
        match request.WhichOneof("request"):
            case "heartbeat":
                self._unanswered += 1
                return Heartbeat(self, join.group_id, join.member_id, request.heartbeat)
            case "commit":
                correlation_id = request.commit.correlation_id
                if correlation_id in self._commits:  # the answers could not be told apart
                    raise InvalidRequestError(
                        f"the commit with correlation_id {correlation_id} is still under way; give each its own"
                    )
                self._commits.add(correlation_id)
                self._unanswered += 1
                return CommitInSession(self, join.group_id, join.member_id, request.commit)
            case "leave":
                return Leave(self, join.group_id, join.member_id, request.leave)
            case "join":
                raise InvalidRequestError("the session has joined already; open another stream")
            case _:
                raise InvalidRequestError("the request is empty; it needs a heartbeat, a commit or a leave")

    async def _check_permissions(self, request: GroupRequest, join: JoinGroup) -> None:
        if self._permissions is None:
            return
        match request.WhichOneof("request"):
            case "leave":
                return  # leaving needs no permission
            case "join":
                subscription = request.join.subscription
            case _:
                subscription = request.heartbeat.subscription  # empty, except in a heartbeat that changes it
        self._permissions.check_group(join.group_id)
        await self._permissions.check_subscription(subscription)

    async def _refusal(self, commit: CommitInSession) -> GroupResponse | None:
        """Return the answer to a commit with too many offsets or with none that is allowed; else None."""
        try:
            check_offsets(commit.request.offsets)
        except InvalidRequestError as error:
            result = SessionCommitResult(correlation_id=commit.request.correlation_id, error=to_wire(error))
            return GroupResponse(commit=result)
        refused = None if self._permissions is None else await self._permissions.admit(commit.request)
        return None if refused is None else GroupResponse(commit=refused)


logger = logging.getLogger(__name__)

MAX_GROUPS: Final = 10_000
"""Groups that one request may name."""
MAX_DESCRIBED_BYTES: Final = 8 << 20
"""Of descriptions of groups for one user that are being made, or wait to be read."""
MAX_COMMITTED: Final = 100_000
"""Committed offsets in one description of groups."""
COMMITTED_AT_A_TIME: Final = 50
"""Groups whose offsets are fetched at once."""
MAX_SKIPPED: Final = 50
"""The most groups of one description whose offsets are fetched but do not fit into it."""
SORTED_HERE: Final = 2_000
"""A longer list is sorted on another thread."""

_R = TypeVar("_R", bound=Answer)
_Q = TypeVar("_Q")


class GroupService(group_pb2_grpc.GroupServicer):
    """Serves the groups that this broker coordinates, and names the coordinators of the others."""

    def __init__(
        self,
        coordinators: GroupCoordinators,
        topics: InternalTopics,
        config: BrokerConfig,
        transactions: TransactionVerifier,
        calls: CallLimits | None = None,
    ) -> None:
        """`calls`: bounds the messages of members; None: nothing does. A broker always has it."""
        self._calls = calls
        self._coordinators = coordinators
        self._transactions = transactions
        self._topics = topics
        self._config = config
        self._sessions = 0
        self._rooms: WeakValueDictionary[str, DescriptionRoom] = WeakValueDictionary()
        """By user, or by address of clients without a login; as long as they have calls."""

    async def FindCoordinator(
        self, request: group_pb2.FindCoordinatorRequest, context: Context
    ) -> group_pb2.FindCoordinatorResponse:
        """Return the coordinator of a group; the first call creates __consumer_offsets."""
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
        self, request_iterator: AsyncIterator[group_pb2.GroupRequest], context: Context
    ) -> None:
        """Serve one member."""
        failure = await self._session(request_iterator, context)
        # Outside of any `except`: gRPC may deliver the status only when the client reads again, so everything else of
        # this session is released before.
        if failure is not None:
            overloaded = isinstance(failure, BrokerOverloaded)
            status = grpc.StatusCode.RESOURCE_EXHAUSTED if overloaded else grpc.StatusCode.INVALID_ARGUMENT
            await end_stream(context, status, failure)

    async def _session(self, requests: AsyncIterator[group_pb2.GroupRequest], context: Context) -> RaftlogError | None:
        if self._sessions >= self._config.max_streams:
            return BrokerOverloaded(f"this broker serves max.streams={self._config.max_streams} sessions already")
        self._sessions += 1
        try:
            who = caller.get()
            permissions = MemberPermissions.of(who, self._coordinators.topic_name)
            host = host_of(context.peer())
            pace_ms = None if self._calls is None else partial(self._calls.member_said, who, host)
            await GroupSession(self._shard_of, host, permissions, pace_ms, who.user).run(requests, context)
        except (InvalidRequestError, BrokerOverloaded) as error:
            return error
        finally:
            self._sessions -= 1
        return None

    def _shard_of(self, group_id: str) -> GroupShard:
        return self._coordinators.shard_of(group_id)[1]

    # Offsets

    async def CommitOffsets(
        self, request: group_pb2.CommitOffsetsRequest, context: Context
    ) -> group_pb2.CommitOffsetsResponse:
        """Commit offsets; each partition has its own result."""
        who = caller.get()

        def commit(allowed: group_pb2.CommitOffsetsRequest) -> Awaitable[group_pb2.CommitOffsetsResponse]:
            return self._ask(
                request.group_id,
                lambda call: CommitOffsets(call, allowed, who.user),
                group_pb2.CommitOffsetsResponse(),
                self._wait_s(context, request.timeout_ms),
            )

        try:
            check_offsets(request.offsets)
        except InvalidRequestError as error:
            return group_pb2.CommitOffsetsResponse(error=to_wire(error))
        return await committed(request, who, self._coordinators.topic_name, commit)

    async def CommitTransactionOffsets(
        self, request: group_pb2.CommitTransactionOffsetsRequest, context: Context
    ) -> group_pb2.CommitOffsetsResponse:
        """Store offsets that take effect when their transaction commits; each partition has its own result."""
        wait_s, user = self._wait_s(context), caller.get().user
        try:
            check_transaction_offsets(request)
            self._shard_of(request.group_id)  # only the group's coordinator asks the transaction's
            await self._transactions.check(request, wait_s)
        except RaftlogError as error:
            return group_pb2.CommitOffsetsResponse(error=to_wire(error))
        return await self._ask(
            request.group_id,
            lambda call: CommitTransactionOffsets(call, request, user),
            group_pb2.CommitOffsetsResponse(),
            wait_s,
        )

    async def FetchOffsets(
        self, request: group_pb2.FetchOffsetsRequest, context: Context
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
        self, request: group_pb2.DeleteOffsetsRequest, context: Context
    ) -> group_pb2.DeleteOffsetsResponse:
        """Delete committed offsets of partitions that no member subscribes to."""
        return await self._ask(
            request.group_id,
            lambda call: DeleteOffsets(call, _checked(request, check_partitions, request.partitions)),
            group_pb2.DeleteOffsetsResponse(),
            self._wait_s(context),
        )

    # Groups

    async def ListGroups(self, request: group_pb2.ListGroupsRequest, context: Context) -> group_pb2.ListGroupsResponse:
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
                assert isinstance(answer, group_pb2.ListGroupsResponse), "each command has one type of answer"
                listed.extend(answer.groups)
        listed = await shown_groups(listed, caller.get())
        if len(listed) > SORTED_HERE:
            await asyncio.to_thread(_add_sorted, response, listed)
        else:
            _add_sorted(response, listed)
        return response

    async def DescribeGroups(
        self, request: group_pb2.DescribeGroupsRequest, context: Context
    ) -> group_pb2.DescribeGroupsResponse:
        """Return groups with their members.

        Those that do not fit into MAX_DESCRIBED_BYTES, with what other calls of the user have, get BROKER_OVERLOADED.
        """
        wait_s, who = self._wait_s(context), caller.get()
        await _check_ids(request.group_ids, context)
        name = who.user or who.host
        room = self._rooms.setdefault(name, DescriptionRoom(MAX_DESCRIBED_BYTES))
        share = DescriptionShare(room)
        context.add_done_callback(lambda _: share.give_back())  # type: ignore[arg-type] # the stub has a class there
        groups = await all_of(self._describe(group_id, share, wait_s) for group_id in request.group_ids)
        if request.include_authorized_operations:
            for group in groups:
                if not group.error.code:
                    group.authorized_operations = authorized_operations(who, Acl.GROUP, group.group_id)
        if request.include_committed:

            async def fetch(group_id: str) -> group_pb2.FetchOffsetsResponse:
                asked = group_pb2.FetchOffsetsRequest(group_id=group_id, member_epoch=-1, all=True)
                answer = await self.FetchOffsets(asked, context)
                try:
                    share.take(answer.ByteSize())
                except BrokerOverloaded as error:
                    return group_pb2.FetchOffsetsResponse(error=to_wire(error))
                return answer

            await add_committed([group for group in groups if not group.error.code], fetch)
        return group_pb2.DescribeGroupsResponse(groups=groups)

    async def _describe(self, group_id: str, share: DescriptionShare, wait_s: float) -> group_pb2.GroupDescription:
        try:
            partition, shard = self._coordinators.shard_of(group_id)
            answer = await ask(shard, lambda call: DescribeGroup(call, group_id, share), wait_s)
            assert isinstance(answer, group_pb2.GroupDescription), "each command has one type of answer"
            check_described(answer, caller.get())
        except RaftlogError as error:
            return group_pb2.GroupDescription(
                group_id=group_id, coordinator_id=-1, offsets_partition=-1, error=to_wire(error)
            )
        answer.coordinator_id, answer.offsets_partition = self._config.node_id, partition
        return answer

    async def DeleteGroups(
        self, request: group_pb2.DeleteGroupsRequest, context: Context
    ) -> group_pb2.DeleteGroupsResponse:
        """Delete groups without members, and their offsets."""
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

    # Commands to a shard

    def shard_of(self, group_id: str) -> GroupShard:
        """Return the shard of a group for another listener's stream. Raises as `Coordinators.shard_of`."""
        return self._shard_of(group_id)

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of a topic; None if it is unknown here."""
        return self._coordinators.topic_name(topic_id)

    async def ask(self, group_id: str, command: Callable[[Call], Command], wait_s: float) -> Any:
        """Return the coordinator's answer to a command of another listener, which has checked the permissions.

        Raises:
            RaftlogError: it is refused, or this broker is not the group's coordinator.
        """
        return await ask(self._shard_of(group_id), command, wait_s)

    async def _ask(self, group_id: str, command: Callable[[Call], Command], response: _R, wait_s: float) -> _R:
        """Return the shard's answer, or `response` with the error."""
        try:
            answer = await ask(self._shard_of(group_id), command, wait_s)
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
            return response
        assert isinstance(answer, type(response)), "each command has one type of answer"
        return answer

    def _wait_s(self, context: Context, timeout_ms: int = 0) -> float:
        return longest_wait_s(context, timeout_ms or self._config.request_timeout_ms)


def _checked(request: _Q, check: Callable[[Any], None], part: object) -> _Q:
    check(part)
    return request


async def add_committed(
    groups: Sequence[group_pb2.GroupDescription], fetch: Callable[[str], Awaitable[group_pb2.FetchOffsetsResponse]]
) -> None:
    """Add the committed offsets of groups, in order, at most MAX_COMMITTED: groups that do not fit are skipped.

    They come without: the client asks for the offsets of each. The rest comes without, and is not fetched, once nothing
    more fits or MAX_SKIPPED groups did not fit.
    """
    count = skipped = 0
    for at in range(0, len(groups), COMMITTED_AT_A_TIME):
        piece = groups[at : at + COMMITTED_AT_A_TIME]
        for group, answer in zip(piece, await all_of(fetch(group.group_id) for group in piece), strict=True):
            if count + len(answer.offsets) > MAX_COMMITTED:
                skipped += 1
                continue
            count += len(answer.offsets)
            if answer.error.code and answer.error.code != GroupIdNotFound.code:
                del group.members[:]
                group.error.CopyFrom(answer.error)
            else:
                group.committed.SetInParent()  # present even if it is empty
                group.committed.offsets.extend(answer.offsets)
        if count == MAX_COMMITTED or skipped >= MAX_SKIPPED:
            return


async def _check_ids(group_ids: Sequence[str], context: Context) -> None:
    if len(group_ids) > MAX_GROUPS:
        failure = f"the request names {len(group_ids)} groups, at most {MAX_GROUPS} are allowed: split it"
        await end_stream(context, grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError(failure))
    if len(set(group_ids)) < len(group_ids):
        failure = "the request names a group twice; name each once"
        await end_stream(context, grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError(failure))


def _add_sorted(response: group_pb2.ListGroupsResponse, groups: list[group_pb2.ListedGroup]) -> None:
    response.groups.extend(sorted(groups, key=lambda group: group.group_id))
