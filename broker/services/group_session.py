"""One `Group.Session` stream: a member of a group, for as long as the stream lasts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

from google.protobuf.message import Message

from broker.group_coordinators import GroupShard
from broker.groups.checks import check_offsets
from broker.groups.commands import Command, CommitInSession, Disconnected, Heartbeat, Join, Leave
from broker.services.group_permissions import MemberPermissions
from raftlog.errors import AuthorizationError, BrokerOverloaded, InvalidRequestError, RaftlogError, to_wire
from raftlog.v1.group_pb2 import GroupRequest, GroupResponse, JoinGroup, SessionCommitResult

MAX_UNANSWERED: Final = 256
"""Heartbeats and commits that a member may have under way; then its stream is not read until some are answered."""
MAX_OUTBOX: Final = 1_000
"""Responses that may wait for a member that does not read, before it is cut off."""
WRITE_TIMEOUT_S: Final = 30.0


class ResponseWriter(Protocol):
    """The part of a gRPC context that a session needs."""

    async def write(self, message: GroupResponse) -> None:
        """Send one message; returns when the transport has taken it."""
        ...


class GroupSession:
    """A frame's recipient (`broker.coordinator.core.Recipient`) that lives on after an answer.

    States: joining -> open -> ending (an error, or None, was delivered: it is written, and that is all) -> over.
    """

    is_stream = True

    def __init__(
        self, find_shard: Callable[[str], GroupShard], host: str, permissions: MemberPermissions | None = None
    ) -> None:
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

    def deliver(self, message: Message | RaftlogError | None) -> None:
        """Take a response; an error, or None, is the last one."""
        if self._ending:
            return
        if message is None or isinstance(message, RaftlogError):
            self._ending = True
            if message is not None:
                self._outbox.append(GroupResponse(error=to_wire(message)))
        else:
            assert isinstance(message, GroupResponse), "a session is sent GroupResponses"
            self._outbox.append(message)
            if message.HasField("commit"):
                self._commits.discard(message.commit.correlation_id)
                if self._permissions is not None:
                    self._permissions.complete(message.commit)
            if message.WhichOneof("response") in ("heartbeat", "commit"):
                self._unanswered -= 1
                self._room.set()
        if len(self._outbox) > MAX_OUTBOX:
            self._fail(BrokerOverloaded(f"{MAX_OUTBOX} responses of this session were not read; join again"))
        self._news.set()

    def _fail(self, error: RaftlogError) -> None:
        self._ending, self._failure = True, self._failure or error
        self._outbox.clear()
        self._news.set()

    async def run(self, requests: AsyncIterator[GroupRequest], writer: ResponseWriter) -> None:
        """Serve the stream until the member leaves, is refused, or its client ends it.

        Raises:
            InvalidRequestError: the client breaks the protocol.
            BrokerOverloaded: it does not read.
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
        shard.submit(Join(self, join, self._host), self)
        reader = asyncio.ensure_future(self._read(requests, shard, join))
        try:
            await self._write_all(writer, reader)
        finally:
            reader.cancel()
            self._ending = True
            shard.detach(self)
            shard.submit(Disconnected(self, join.group_id, join.member_id))

    async def _write_all(self, writer: ResponseWriter, reader: asyncio.Future[None]) -> None:
        while True:
            self._news.clear()
            while self._outbox:
                try:
                    async with asyncio.timeout(WRITE_TIMEOUT_S):
                        await writer.write(self._outbox.popleft())
                except TimeoutError:
                    raise BrokerOverloaded(
                        f"nothing was read from this session for {WRITE_TIMEOUT_S:g} s; join again"
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
                command = self._command(request, join)
                if isinstance(command, CommitInSession) and (refusal := await self._refusal(command)) is not None:
                    self.deliver(refusal)
                    continue
                shard.submit(command, self)
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
                if correlation_id in self._commits:  # whose answer is whose nobody could tell, the client neither
                    raise InvalidRequestError(
                        f"the commit with correlation_id {correlation_id} is still under way; give each its own"
                    )
                self._commits.add(correlation_id)
                self._unanswered += 1
                return CommitInSession(self, join.group_id, join.member_id, request.commit)
            case "leave":
                return Leave(self, join.group_id, join.member_id, request.leave)
            case "join":
                raise InvalidRequestError("a session is joined once; open another stream")
            case _:
                raise InvalidRequestError("a request without content")

    async def _check_permissions(self, request: GroupRequest, join: JoinGroup) -> None:
        if self._permissions is None:
            return
        match request.WhichOneof("request"):
            case "leave":
                return  # who may not be in the group may go
            case "join":
                subscription = request.join.subscription
            case _:
                subscription = request.heartbeat.subscription  # empty, but in a heartbeat with a new one
        self._permissions.check_group(join.group_id)
        await self._permissions.check_subscription(subscription)

    async def _refusal(self, commit: CommitInSession) -> GroupResponse | None:
        """Return the answer of a commit that is about too much to be looked at, or about nothing that is allowed."""
        try:
            check_offsets(commit.request.offsets)
        except InvalidRequestError as error:
            result = SessionCommitResult(correlation_id=commit.request.correlation_id, error=to_wire(error))
            return GroupResponse(commit=result)
        refused = None if self._permissions is None else await self._permissions.admit(commit.request)
        return None if refused is None else GroupResponse(commit=refused)
