"""Calls over a simulated channel, as `grpc.aio` has them: awaitable ones, and streams; how they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from tests.simulation.cluster.frames import WINDOW_BYTES, Data, HalfClose, Room

if TYPE_CHECKING:
    from tests.simulation.cluster.channel import SimChannel


class Call:
    """What calls have in common: how they end."""

    def __init__(
        self,
        channel: SimChannel,
        method: str,
        timeout_s: float | None,
        metadata: Any,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
    ) -> None:
        self.number = 0
        self.method = method
        self.timeout_s = timeout_s
        self.metadata: tuple[tuple[str, str], ...] = tuple(metadata or ())
        self.loop = asyncio.get_running_loop()
        self.began_s = self.loop.time()
        self._channel = channel
        self._serialize = serialize
        self._parse = parse
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._cancelled = False
        self._over: asyncio.Future[None] = self.loop.create_future()
        self._accepted: asyncio.Future[tuple[tuple[str, str], ...]] = self.loop.create_future()

    @property
    def ended(self) -> bool:
        """Whether the call is over."""
        return self._status is not None

    def begun(self) -> None:
        """There is a connection."""

    def accepted(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """The server has sent its initial metadata, which is empty unless a handler sends some."""
        if not self._accepted.done():
            self._accepted.set_result(metadata)

    async def initial_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the initial metadata: once the server has sent it, its first message, or the end of the call."""
        return await asyncio.shield(self._accepted)

    def received(self, payload: bytes) -> None:
        """A message has come."""
        raise NotImplementedError

    def has_room(self, size: int) -> None:
        """The server has read something."""

    def expire(self) -> None:
        """The deadline has come."""
        self.finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", reset=True)

    def cancel(self) -> bool:
        """End it; False if it has ended already."""
        if self.ended:
            return False
        self._cancelled = True
        self.finish(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", reset=True)
        return True

    def cancelled(self) -> bool:
        """Whether this side has cancelled it."""
        return self._cancelled

    def done(self) -> bool:
        """Whether the call is over."""
        return self.ended

    def finish(self, code: grpc.StatusCode, details: str, *, reset: bool = False) -> None:
        """It is over with this status, unless it was before."""
        if self.ended:
            return
        self._status = code, details
        self.accepted(())
        self._channel.forget(self, reset=reset)
        if not self._over.done():
            self._over.set_result(None)
        self._ended()

    def _ended(self) -> None:
        """Wake every waiter."""

    async def code(self) -> grpc.StatusCode:
        """Return the status, once there is one."""
        await asyncio.shield(self._over)
        assert self._status is not None
        return self._status[0]

    async def details(self) -> str:
        """Return the text that came with the status."""
        await asyncio.shield(self._over)
        assert self._status is not None
        return self._status[1]

    def _raise_for_status(self) -> None:
        assert self._status is not None
        code, details = self._status
        if self._cancelled:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details=details)


class UnaryCall(Call):
    """One request, one response: awaitable."""

    def start(self, request: Any) -> None:
        """Begin it."""
        self._response: list[Any] = []
        self._request = self._serialize(request)
        self._channel.add(self)

    def begun(self) -> None:
        """Send the request."""
        self._channel.send(Data(self.number, self._request))
        self._channel.send(HalfClose(self.number))

    def received(self, payload: bytes) -> None:
        """Keep the response until the status has come."""
        self._response.append(self._parse(payload))

    def __await__(self) -> Generator[Any, None, Any]:
        while not self.ended:
            try:
                yield from asyncio.shield(self._over)
            except asyncio.CancelledError:
                if not self.ended:
                    self.cancel()
                raise
        self._raise_for_status()
        return self._response[0]


class StreamCall(Call):
    """Streams in both directions: `write`, `done_writing`, `read`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._messages: deque[tuple[Any, int]] = deque()
        self._window = WINDOW_BYTES
        self._read_bytes = 0
        self._begun = False
        self._half_closed = False
        self._single: bytes | None = None
        self._waiters: deque[asyncio.Future[None]] = deque()

    def queue_request(self, request: Any) -> None:
        """It is the only one: of a call with one request."""
        self._single = self._serialize(request)

    def begun(self) -> None:
        """Let the writer go on."""
        self._begun = True
        if self._single is not None:
            self._channel.send(Data(self.number, self._single))
            self._channel.send(HalfClose(self.number))
        self._wake()

    def received(self, payload: bytes) -> None:
        """A message has come."""
        self.accepted(())
        self._messages.append((self._parse(payload), len(payload)))
        self._wake()

    def has_room(self, size: int) -> None:
        """The server has read so much."""
        self._window += size
        self._wake()

    def _ended(self) -> None:
        if self._cancelled:
            self._messages.clear()
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _changed(self) -> None:
        waiter = self.loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def write(self, request: Any) -> None:
        """Send a message, once the connection is there and the server has room for it.

        Raises:
            asyncio.InvalidStateError: the call is over, or `done_writing` was called.
            grpc.aio.AioRpcError, asyncio.CancelledError: it has ended meanwhile.
        """
        if self.ended:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        payload = self._serialize(request)
        while not self._begun or self._window <= 0:
            await self._changed()
            self._check_not_over()
        self._window -= len(payload)
        self._channel.send(Data(self.number, payload))
        await asyncio.sleep(0)

    def _check_not_over(self) -> None:
        if self.ended:
            self._raise_for_status()
            raise asyncio.InvalidStateError("RPC already finished.")

    async def done_writing(self) -> None:
        """Send no more."""
        if not self.ended and not self._half_closed:
            self._half_closed = True
            self._channel.send(HalfClose(self.number))

    async def read(self) -> Any:
        """Return the next message, or `grpc.aio.EOF`.

        Raises:
            grpc.aio.AioRpcError, asyncio.CancelledError: the call has ended with another status than OK.
        """
        while not self._messages and not self.ended:
            await self._changed()
        if self._messages:
            message, size = self._messages.popleft()
            self._read_bytes += size
            if not self.ended and self._read_bytes * 4 >= WINDOW_BYTES:
                self._channel.send(Room(self.number, self._read_bytes))
                self._read_bytes = 0
            return message
        self._raise_for_status()
        return aio.EOF
