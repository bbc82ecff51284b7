"""A `grpc.aio.Server` over simulated connections: as much of one as brokers use. It hosts the real services."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
from grpc import aio

from tests.simulation.cluster.frames import (
    WINDOW_BYTES,
    Accepted,
    Begin,
    Data,
    End,
    Frame,
    Goodbye,
    HalfClose,
    Hello,
    Reset,
    Room,
    Welcome,
)
from tests.simulation.network import Connection
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation


class Watch(Protocol):
    """Sees the messages of one call in both directions as `frames.Data`, parsed."""

    def request(self, message: Any) -> None:
        """A message of the caller was read."""

    def response(self, message: Any) -> None:
        """A message is about to leave."""


class _NoWatch:
    def request(self, message: Any) -> None:
        pass

    def response(self, message: Any) -> None:
        pass


class _Details:
    """`grpc.HandlerCallDetails`."""

    def __init__(self, begin: Begin) -> None:
        self.method = begin.method
        self.invocation_metadata = begin.metadata


class SimServer:
    """The server of one process at one address."""

    def __init__(
        self,
        process: Process,
        simulation: ClusterSimulation,
        interceptors: Sequence[Any] = (),
        watch: Callable[[str], Watch | None] = lambda method: None,
    ) -> None:
        self.process = process
        self.failures: list[BaseException] = []
        """What handlers have raised that were to answer with errors as values."""
        self.touched: Callable[[], None] = lambda: None
        """Called whenever something has come in, is served, or leaves."""
        self.watch = watch
        self._simulation = simulation
        self._interceptors = interceptors
        self._generic: list[Any] = []
        self._addresses: list[str] = []
        self._serves = False

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """As `grpc.aio.Server`."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """As `grpc.aio.Server`; they are among the generic ones as well."""

    def add_insecure_port(self, address: str) -> None:
        """Have an address, from `start` on."""
        self._addresses.append(address)

    def start(self) -> None:
        """Accept connections."""
        self._serves = True
        for address in self._addresses:
            self._simulation.listeners[address] = self

    @property
    def is_there(self) -> bool:
        """Whether connections are accepted; the kernel accepts them for a paused process, too."""
        return self._serves and self.process.alive

    def accept(self, connection: Connection) -> None:
        """Take a connection."""
        _Peer(self, connection)

    async def find(self, begin: Begin) -> Any:
        """Return the handler of a method, None where there is none."""

        async def last(details: Any) -> Any:
            return next(filter(None, (each.service(details) for each in self._generic)), None)

        handler = last
        for interceptor in reversed(self._interceptors):

            async def intercepted(details: Any, one: Any = interceptor, following: Any = handler) -> Any:
                return await one.intercept_service(following, details)

            handler = intercepted
        return await handler(_Details(begin))


class _Peer:
    """One connection, and the calls on it."""

    def __init__(self, server: SimServer, connection: Connection) -> None:
        self.server = server
        self._connection = connection
        self._calls: dict[int, _ServerCall] = {}
        self._gone = False
        connection.acceptor_hears(self._heard, self._lost)

    def send(self, frame: Frame) -> None:
        """Send."""
        self._connection.answer(frame)

    def _heard(self, frame: Frame) -> None:
        self.server.touched()
        if self._gone:
            return
        match frame:
            case Hello():
                self.send(Welcome())
            case Begin():
                call = self._calls[frame.call] = _ServerCall(self, frame)
                call.start()
            case Goodbye():
                self._end()
            case Data() | Room() | HalfClose() | Reset():
                known = self._calls.get(frame.call)
                if known is not None:
                    known.heard(frame)

    def _lost(self) -> None:
        """The connection broke; messages that had arrived before are still read first, even if late."""
        if self._connection.has_more_for_acceptor:
            self.server.process.after(0.01, self._lost)
            return
        self.server.touched()
        self._end()

    def _end(self) -> None:
        self._gone = True
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.abandon()

    def over(self, call: int) -> None:
        """A call has ended."""
        self._calls.pop(call, None)


class _ServerCall:
    """One call: `grpc.aio.ServicerContext`, and the iterator over its requests."""

    def __init__(self, peer: _Peer, begin: Begin) -> None:
        self._peer = peer
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._end_s = None if begin.timeout_s is None else self._loop.time() + begin.timeout_s
        self._requests: deque[bytes] = deque()
        self._half_closed = False
        self._over = False
        self._window = WINDOW_BYTES
        self._read_bytes = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._handler: Any = None
        self._watch: Watch = peer.server.watch(begin.method) or _NoWatch()

    def start(self) -> None:
        """Serve it."""
        self._task = self._loop.create_task(self._serve())
        if self._end_s is not None:
            self._loop.call_later(max(0.0, self._begin.timeout_s or 0.0), self.abandon)

    def heard(self, frame: Data | Room | HalfClose | Reset) -> None:
        """Take a message of the caller."""
        match frame:
            case Data():
                self._requests.append(frame.payload)
            case Room():
                self._window += frame.size
            case HalfClose():
                self._half_closed = True
            case Reset():
                self.abandon()
        self._wake()

    def abandon(self) -> None:
        """The caller is gone, or his deadline has passed."""
        if not self._over:
            self._over = True
            self._peer.over(self._begin.call)
            if self._task is not None:
                self._task.cancel()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _changed(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    # Serving

    async def _serve(self) -> None:
        try:
            code, details = await self._answer()
        except asyncio.CancelledError:
            if self._over:
                return
            raise
        except aio.AbortError as aborted:
            code, details = aborted.args
        except Exception as error:
            self._peer.server.failures.append(error)
            code, details = grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"
        if not self._over:
            self._over = True
            self._peer.over(self._begin.call)
            self._peer.server.touched()
            self._peer.send(End(self._begin.call, code, details))

    async def _answer(self) -> tuple[grpc.StatusCode, str]:
        handler = self._handler = await self._peer.server.find(self._begin)
        if handler is None:
            return grpc.StatusCode.UNIMPLEMENTED, "Method not found!"
        argument: Any = self
        if not handler.request_streaming:
            argument = await anext(self, None)
            if argument is None:
                return grpc.StatusCode.INTERNAL, "no request"
        if not handler.response_streaming:
            behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
            await self.write(await behaviour(argument, self))
            return grpc.StatusCode.OK, ""
        behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
        answered = behaviour(argument, self)
        if inspect.isasyncgen(answered):
            async for message in answered:
                await self.write(message)
        else:
            await answered
        return grpc.StatusCode.OK, ""

    # The iterator

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while not self._requests:
            if self._half_closed or self._over:
                raise StopAsyncIteration
            await self._changed()
        payload = self._requests.popleft()
        self._read_bytes += len(payload)
        if self._read_bytes * 4 >= WINDOW_BYTES:
            self._peer.send(Room(self._begin.call, self._read_bytes))
            self._read_bytes = 0
        message = self._handler.request_deserializer(payload)
        self._watch.request(message)
        self._peer.server.touched()
        return message

    # The context

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        """Tell the caller that the call is served."""
        self._peer.send(Accepted(self._begin.call, metadata))

    async def write(self, message: Any) -> None:
        """Send a message, once the caller has room for it."""
        while self._window <= 0 and not self._over:
            await self._changed()
        if self._over:
            raise asyncio.CancelledError
        self._peer.server.touched()
        self._watch.response(message)
        payload = self._handler.response_serializer(message)
        self._window -= len(payload)
        self._peer.send(Data(self._begin.call, payload))
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> NoReturn:
        """End the call with a status. Its details for programs are lost: clients read the text, as of old brokers."""
        raise aio.AbortError(code, details)

    def time_remaining(self) -> float | None:
        """How long the caller waits; None: for ever."""
        return None if self._end_s is None else max(0.0, self._end_s - self._loop.time())

    def peer(self) -> str:
        """The caller's address."""
        return "ipv4:simulated"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of the call."""
        return self._begin.metadata

    def cancelled(self) -> bool:
        """Whether the caller is gone."""
        return self._over
