"""A broker's end of a heartbeat stream: over gRPC, or to the active controller in the same process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc

from raftlog._client.connections import from_grpc
from raftlog.errors import BrokerUnavailable, RaftlogError, from_wire
from raftlog.v1.common_pb2 import NONE
from raftlog.v1.controller_pb2 import HeartbeatRequest, HeartbeatResponse

ANSWER_TIMEOUT_S: Final = 1.0
"""A controller that lets a heartbeat wait for so long is asked no more: another one may be active by now."""
MAX_UNANSWERED: Final = 16

OnResponse = Callable[[HeartbeatResponse], None]


class HeartbeatTaker(Protocol):
    """The active controller, as far as heartbeats go."""

    def heartbeat(self, request: HeartbeatRequest, stream: object) -> asyncio.Future[HeartbeatResponse]:
        """Take a heartbeat; the future never fails."""
        ...

    def stream_closed(self, stream: object) -> None:
        """The stream ended."""
        ...


def checked(response: HeartbeatResponse) -> HeartbeatResponse:
    """Return the answer, or raise the error it carries."""
    if response.error.code != NONE:
        raise from_wire(response.error)
    return response


class RemoteHeartbeats:
    """A `HeartbeatStream` to a controller elsewhere."""

    def __init__(
        self, call: Any, where: str, on_response: OnResponse, on_broken: Callable[[RaftlogError], None]
    ) -> None:
        self._call = call
        self._where = where
        self._on_response = on_response
        self._on_broken = on_broken
        self._sent_s: deque[float] = deque()
        self._error: RaftlogError | None = None

    async def send(self, request: HeartbeatRequest) -> None:
        """Send a heartbeat."""
        now_s = time.monotonic()
        if self._sent_s and now_s - self._sent_s[0] > ANSWER_TIMEOUT_S:
            raise self._break(BrokerUnavailable(f"{self._where} has not answered for {ANSWER_TIMEOUT_S:g} s"))
        if self._error is not None:
            raise self._error
        self._sent_s.append(now_s)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._call.write(request)
        except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError) as error:
            raise self._break(self._why(error)) from None
        except asyncio.CancelledError:
            raise self._unless_cancelled() from None

    async def receive(self) -> HeartbeatResponse:
        """Return the next answer."""
        try:
            response = await self._call.read()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise self._break(self._why(error)) from None
        except asyncio.CancelledError:
            raise self._unless_cancelled() from None
        if response is None:
            raise self._break(BrokerUnavailable(f"{self._where} sends what is no answer to a heartbeat"))
        if response is grpc.aio.EOF:
            raise self._break(BrokerUnavailable(f"{self._where} ended the stream"))
        if self._sent_s:
            self._sent_s.popleft()
        self._on_response(response)
        return checked(response)

    def _unless_cancelled(self) -> BaseException:
        """Return what a cancellation means: the end of this task, or of the call, which another task cancelled."""
        task = asyncio.current_task()
        if task is None or task.cancelling():
            return asyncio.CancelledError()
        return self._break(BrokerUnavailable(f"the heartbeat stream to {self._where} was cancelled"))

    def _why(self, error: BaseException) -> RaftlogError:
        if self._error is not None:
            return self._error
        if isinstance(error, grpc.aio.AioRpcError):
            return from_grpc(error, self._where)
        return BrokerUnavailable(f"the heartbeat stream to {self._where} broke")

    def _break(self, error: RaftlogError) -> RaftlogError:
        if self._error is None:
            self._error = error
            self._call.cancel()
            self._on_broken(error)
        return self._error

    async def close(self) -> None:
        """End the stream."""
        self._error = self._error or BrokerUnavailable("this stream was closed")
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._call.done_writing()
        self._call.cancel()


class LocalHeartbeats:
    """A `HeartbeatStream` to the active controller in this process."""

    def __init__(self, controller: HeartbeatTaker, on_response: OnResponse) -> None:
        self._controller = controller
        self._on_response = on_response
        self._answers: asyncio.Queue[asyncio.Future[HeartbeatResponse] | None] = asyncio.Queue()
        self._closed = False

    async def send(self, request: HeartbeatRequest) -> None:
        """Hand a heartbeat over."""
        if self._closed:
            raise BrokerUnavailable("this stream was closed")
        if self._answers.qsize() >= MAX_UNANSWERED:
            raise BrokerUnavailable("the controller has not answered the last heartbeats")
        copy = HeartbeatRequest()
        copy.CopyFrom(request)
        self._answers.put_nowait(self._controller.heartbeat(copy, self))

    async def receive(self) -> HeartbeatResponse:
        """Return the next answer."""
        answer = await self._answers.get()
        if answer is None:
            raise BrokerUnavailable("this stream was closed")
        response = await answer
        self._on_response(response)
        return checked(response)

    async def close(self) -> None:
        """End the stream."""
        if not self._closed:
            self._closed = True
            self._controller.stream_closed(self)
            self._answers.put_nowait(None)
