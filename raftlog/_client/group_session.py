"""A member's stream to its coordinator: opened, kept alive, found again after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog._client.coordinators import Coordinators
from raftlog._client.fetcher import monotonic_ms
from raftlog._core.backoff import Pauses
from raftlog._core.membership import Membership, MemberState
from raftlog.errors import (
    AuthorizationError,
    BrokerUnavailable,
    CoordinatorNotAvailable,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    from_wire,
)
from raftlog.v1 import group_pb2, group_pb2_grpc

logger = logging.getLogger(__name__)

LEAVE_S: Final = 2.0
"""How long the coordinator may take to hear of a leave; after that its session timeout says so."""
_LONGEST_TICK_MS: Final = 500.0


class GroupSession:
    """Runs a `Membership` against the coordinator. Everything here is on the event loop.

    `on_change` is called after everything that the membership has learned; `is_overdue` says whether the application
    has been away from `poll` for too long, upon which the member leaves and `on_overdue` is told.
    """

    def __init__(
        self,
        membership: Membership,
        coordinators: Coordinators,
        connections: Connections,
        pauses: Pauses,
        *,
        on_change: Callable[[], None],
        is_overdue: Callable[[float], bool],
        on_overdue: Callable[[], None],
    ) -> None:
        self.membership = membership
        self._coordinators = coordinators
        self._connections = connections
        self._pauses = pauses
        self._on_change = on_change
        self._is_overdue = is_overdue
        self._on_overdue = on_overdue
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._call: Any = None
        self._given_up: RaftlogError | None = None
        """Why this side has ended the stream."""
        self._leaving: asyncio.Event | None = None
        """Set when the stream has ended over which the leave went."""
        self._heard = False
        """Whether the stream brought anything but word that this user may not: those who ask again and again after that
        do it ever more seldom."""
        self._closed = False
        self._out: deque[group_pb2.GroupRequest] = deque()
        self._ready = asyncio.Event()
        self._commits: dict[int, asyncio.Future[group_pb2.SessionCommitResult]] = {}
        self._next_correlation_id = 0

    def wake(self) -> None:
        """Do what the membership wants now: it has been changed."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        self._wake.set()
        self.tick()

    async def commit(self, offsets: Sequence[group_pb2.CommitOffset]) -> list[RaftlogError | None]:
        """Commit as this member, over its stream; return what became of each.

        Raises:
            CoordinatorNotAvailable: there is no stream at the moment, or it broke: nobody knows.
            RaftlogError: the coordinator refuses all of them.
        """
        if self._call is None or self._leaving is not None or self.membership.state is not MemberState.MEMBER:
            raise CoordinatorNotAvailable("there is no connection to the group's coordinator at the moment")
        self._next_correlation_id += 1
        correlation_id = self._next_correlation_id
        answer = self._commits[correlation_id] = asyncio.get_running_loop().create_future()
        self._send(
            group_pb2.GroupRequest(
                commit=group_pb2.SessionCommit(
                    correlation_id=correlation_id, member_epoch=self.membership.member_epoch, offsets=offsets
                )
            )
        )
        try:
            result = await answer
        finally:
            self._commits.pop(correlation_id, None)
        return commit_errors(result.error if result.HasField("error") else None, result.results, len(offsets))

    async def leave(self) -> None:
        """Stop being a member, and tell the coordinator so, if it is there."""
        ended = self._start_leaving()
        if ended is not None:
            await ended.wait()

    def _start_leaving(self) -> asyncio.Event | None:
        request = self.membership.leave()
        ended = self._leaving
        if request is not None and self._call is not None and ended is None:
            ended = self._leaving = asyncio.Event()
            self._send(request)
            asyncio.get_running_loop().call_later(LEAVE_S, self._end_stream, self._call, RequestTimedOut("no answer"))
        elif ended is None:
            self._end_stream(self._call, CoordinatorNotAvailable("the consumer is no member any more"))
        self._on_change()
        return ended

    async def close(self) -> None:
        """Leave, and stop."""
        try:
            await self.leave()
        finally:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    # Time

    def tick(self) -> None:
        """Look whether something is due, and when to look next."""
        now_ms = monotonic_ms()
        membership = self.membership
        if membership.wants_stream and self._is_overdue(now_ms):
            self._on_overdue()
            self._start_leaving()
        if membership.expire(now_ms):
            lost = RequestTimedOut("no answer from the coordinator within the session timeout")
            logger.warning(
                "group %s: %s; partitions that were read: %d; joining anew",
                membership.identity.group_id, lost, len(membership.lost),
            )  # fmt: skip
            self._end_stream(self._call, lost)
            self._on_change()
        elif membership.is_silent(now_ms):
            self._end_stream(self._call, RequestTimedOut("the group's coordinator does not answer"))
        elif (heartbeat := membership.heartbeat(now_ms)) is not None:
            self._send(heartbeat)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if membership.wants_stream:
            pause_ms = min(_LONGEST_TICK_MS, max(1.0, membership.next_ms() - now_ms))
            self._timer = asyncio.get_running_loop().call_later(pause_ms / 1000, self.tick)

    # The stream

    async def _run(self) -> None:
        group_id = self.membership.identity.group_id
        failures = 0
        while not self._closed:
            while not self.membership.wants_stream:
                self._wake.clear()
                await self._wake.wait()
            self._heard = False
            error = await self._one_stream(group_id)
            state = self.membership.state
            failures = 1 if self._heard else failures + 1
            self._coordinators.forget(group_id)
            self.membership.closed()
            if not self._left():
                self.membership.on_error(error)
                level = logging.WARNING if self.membership.error is not None else logging.DEBUG
                logger.log(level, "group %s: session (%s) ended: %s", group_id, state.value, error)
            self._on_change()
            self.tick()
            await asyncio.sleep(self._pauses.after_ms(error, failures) / 1000)

    def _left(self) -> bool:
        """Whether the stream that has ended was one over which the member left."""
        if self._leaving is None:
            return False
        self._leaving.set()
        self._leaving = None
        return True

    async def _one_stream(self, group_id: str) -> RaftlogError:
        """Open a stream and read it; return why it ended."""
        address = "the cluster"
        self._given_up = None
        try:
            address = (await self._coordinators.find_once(group_id)).address
            if not self.membership.wants_stream:
                return CoordinatorNotAvailable("the consumer is no member any more")
            return await self._stream(address)
        except asyncio.CancelledError:
            if (why := self._why()) is None:
                raise
            return why
        except (grpc.RpcError, asyncio.InvalidStateError, RaftlogError) as broke:
            return self._why() or from_grpc(broke, address)
        except Exception as bug:  # one of ours: it must not end the membership for ever
            logger.exception("group %s: session failed", group_id)
            return from_grpc(bug, address)

    def _why(self) -> RaftlogError | None:
        """Return why this side has ended the stream, if it has and goes on."""
        return None if self._closed else self._given_up

    async def _stream(self, address: str) -> RaftlogError:
        stub = group_pb2_grpc.GroupStub(self._connections.channel(address))
        call: Any = stub.Session()
        self._call = call
        self._out.clear()
        writer = asyncio.get_running_loop().create_task(self._write(call))
        self._send(self.membership.opened(monotonic_ms()))
        self.tick()
        try:
            while True:
                try:
                    response = await call.read()
                except grpc.RpcError as broke:
                    if not _is_final(broke.code(), broke.details()):
                        raise
                    return self._ended(broke.code(), broke.details())
                if response is grpc.aio.EOF:
                    code = await call.code()
                    if code is grpc.StatusCode.OK:
                        return BrokerUnavailable(f"{address} closed the group's session")
                    return self._ended(code, await call.details())
                error = self._on_response(response)
                self._heard = self._heard or not isinstance(error, AuthorizationError)
                if error is not None:
                    return error
        finally:
            self._call = None
            call.cancel()
            writer.cancel()
            self._fail_commits()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await writer

    def _on_response(self, response: group_pb2.GroupResponse) -> RaftlogError | None:
        kind = response.WhichOneof("response")
        if kind == "commit":
            answer = self._commits.get(response.commit.correlation_id)
            if answer is not None and not answer.done():
                answer.set_result(response.commit)
        elif kind == "error":
            return from_wire(response.error)
        elif self._leaving is None:
            if kind == "assignment":
                self.membership.on_assignment(response.assignment, monotonic_ms())
            elif kind == "heartbeat":
                self.membership.on_heartbeat(response.heartbeat)
            self._on_change()
            self.tick()
        return None

    def _ended(self, code: grpc.StatusCode, details: str | None) -> RaftlogError:
        """Return why the coordinator's side has ended the stream.

        What cannot be read there cannot be the next time either. If it may have been a commit, that one fails, and the
        membership goes on; else it was the join, or a heartbeat.
        """
        said = f"the group's session ended: {code.name}: {details}"
        if not _is_final(code, details):
            return BrokerUnavailable(said)
        if not self._commits:
            return InvalidRequestError(said)
        self._fail_commits(InvalidRequestError(said))
        return BrokerUnavailable(said)

    def _fail_commits(self, error: RaftlogError | None = None) -> None:
        for answer in self._commits.values():
            if not answer.done():
                answer.set_exception(error or CoordinatorNotAvailable("the stream to the group's coordinator broke"))
        self._commits.clear()

    async def _write(self, call: Any) -> None:
        while True:
            while self._out:
                await call.write(self._out.popleft())
            self._ready.clear()
            await self._ready.wait()

    def _send(self, request: group_pb2.GroupRequest) -> None:
        self._out.append(request)
        self._ready.set()

    def _end_stream(self, call: Any, why: RaftlogError) -> None:
        if call is not None and call is self._call:
            self._given_up = self._given_up or why
            call.cancel()


def _is_final(code: grpc.StatusCode, details: str | None) -> bool:
    """Whether what was sent can never be taken."""
    return code is grpc.StatusCode.INVALID_ARGUMENT or "larger than max" in (details or "")


def commit_errors(
    error_of_all: Any, results: Sequence[group_pb2.CommitOffsetResult], count: int
) -> list[RaftlogError | None]:
    """Return what became of each offset of a commit.

    Raises:
        RaftlogError: all were refused.
    """
    if error_of_all is not None and error_of_all.code:
        raise from_wire(error_of_all)
    errors = [from_wire(result.error) if result.HasField("error") and result.error.code else None for result in results]
    assert len(errors) == count, "one result for each offset"
    return errors
