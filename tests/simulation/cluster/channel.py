"""A `grpc.aio.Channel` over simulated connections: as much of one as the SDK and brokers use.

    idle --a call--> connecting --Welcome--> ready --the connection breaks--> idle
    connecting --refused, or no answer--> failed --after a pause--> connecting (calls fail at once meanwhile) ...

Calls wait while a channel connects for the first time. Awaiting a cancelled call raises
`CancelledError`, awaiting a failed one `AioRpcError`, and writing to a call that is over `InvalidStateError`, as in
gRPC: `test_transport.py` compares them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc import aio

from tests.simulation.cluster.calls import Call, StreamCall, UnaryCall
from tests.simulation.cluster.frames import (
    Accepted,
    Begin,
    Data,
    End,
    Frame,
    Goodbye,
    Hello,
    Reset,
    Room,
    Welcome,
)
from tests.simulation.network import Connection
from tests.simulation.process import Process

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation

CONNECT_S = 1.0
"""How long a peer may take to answer the first word."""
PAUSE_S = (0.05, 0.25)
"""Between two attempts to connect: the first, and the longest."""
REFUSED = "failed to connect to all addresses; last error: UNKNOWN: ipv4:{}: connection refused"
SILENT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:{}: connection timed out"
BROKEN = "Socket closed"
_STATES = {
    "idle": grpc.ChannelConnectivity.IDLE,
    "connecting": grpc.ChannelConnectivity.CONNECTING,
    "ready": grpc.ChannelConnectivity.READY,
    "failed": grpc.ChannelConnectivity.TRANSIENT_FAILURE,
}


class SimChannel:
    """A channel of one process to one address."""

    def __init__(self, process: Process, simulation: ClusterSimulation, address: str) -> None:
        self.process = process
        self._simulation = simulation
        self._address = address
        self._connection: Connection | None = None
        self._state = "idle"
        self._calls: dict[int, Call] = {}
        self._queue: list[Call] = []
        """Calls that wait for the connection."""
        self._number = 0
        self._pause_s = PAUSE_S[0]
        self._why = ""
        self._closed = False

    # Methods, as stubs ask for them

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., UnaryCall]:
        """Return what makes calls with one request and one response."""

        def begin(request: Any, *, timeout: float | None = None, metadata: Any = None) -> UnaryCall:
            call = UnaryCall(self, method, timeout, metadata, request_serializer, response_deserializer)
            call.start(request)
            return call

        return begin

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., StreamCall]:
        """Return what makes calls with streams in both directions."""

        def begin(*, timeout: float | None = None, metadata: Any = None) -> StreamCall:
            call = StreamCall(self, method, timeout, metadata, request_serializer, response_deserializer)
            self.add(call)
            return call

        return begin

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> Callable[..., StreamCall]:
        """Return what makes calls with one request and a stream of responses."""

        def begin(request: Any, *, timeout: float | None = None, metadata: Any = None) -> StreamCall:
            call = StreamCall(self, method, timeout, metadata, request_serializer, response_deserializer)
            call.queue_request(request)
            self.add(call)
            return call

        return begin

    stream_unary = stream_stream  # generated stubs ask for every kind of call; this kind is never called

    def get_state(self) -> grpc.ChannelConnectivity:
        """Return what gRPC calls the state; it stays a failure while new attempts to connect are made."""
        return _STATES[self._state]

    async def close(self, grace: float | None = None) -> None:
        """End all calls."""
        self._closed = True
        for call in [*self._calls.values(), *self._queue]:
            call.cancel()
        if self._connection is not None:
            self._connection.send(Goodbye())
            self._connection = None
        self._state = "idle"

    # The connection

    def add(self, call: Call) -> None:
        """A call begins: at once, or once there is a connection."""
        if self._closed:
            raise aio.UsageError("Channel is closed.")
        loop = asyncio.get_running_loop()
        if call.timeout_s is not None:
            loop.call_later(max(0.0, call.timeout_s), call.expire)
        if self._state == "ready":
            self._begin(call)
        elif self._state == "failed":
            loop.call_soon(call.finish, grpc.StatusCode.UNAVAILABLE, self._why)
        else:
            self._queue.append(call)
            if self._state == "idle":
                self._connect()

    def _begin(self, call: Call) -> None:
        if call.ended:
            return
        self._number += 1
        call.number = self._number
        self._calls[call.number] = call
        left_s = None if call.timeout_s is None else max(0.0, call.began_s + call.timeout_s - call.loop.time())
        self.send(Begin(call.number, call.method, left_s, call.metadata))
        call.begun()

    def send(self, frame: Frame) -> None:
        """Send."""
        if self._connection is not None:
            self._simulation.touch(self.process)  # what a broker tells others of has to be committed by now
            self._connection.send(frame)

    def forget(self, call: Call, *, reset: bool) -> None:
        """A call is over here; with `reset`, before the server has said so."""
        if self._calls.pop(call.number, None) is not None:
            if reset:
                self.send(Reset(call.number))
        elif call in self._queue:
            self._queue.remove(call)

    def _connect(self) -> None:
        if self._closed:
            return
        if self._state == "idle":
            self._state = "connecting"
        found = self._simulation.listening(self._address)
        if found is None:
            self.process.after(self._simulation.network.base_s, self._failed, REFUSED.format(self._address))
            return
        connection = self._simulation.network.connect(self.process, found.process)
        if connection is None:
            self.process.after(CONNECT_S, self._failed, SILENT.format(self._address))
            return
        opened = connection
        connected: list[bool] = []

        def heard(frame: Frame) -> None:
            if isinstance(frame, Welcome):
                if not connected:
                    connected.append(True)
                    self._ready(opened)
            elif self._connection is opened:
                self._heard(frame)

        def lost() -> None:
            if not connected:
                connected.append(False)
                self._failed(BROKEN)
            elif self._connection is opened:
                self._lost()

        def give_up() -> None:
            if not connected:
                connected.append(False)
                opened.break_now()
                self._failed(SILENT.format(self._address))

        opened.opener_hears(heard, lost)
        found.accept(opened)
        opened.send(Hello())
        self.process.after(CONNECT_S, give_up)

    def _ready(self, connection: Connection) -> None:
        if self._closed:
            connection.send(Goodbye())
            return
        self._state, self._connection = "ready", connection
        self._pause_s = PAUSE_S[0]
        queue, self._queue = self._queue, []
        for call in queue:
            self._begin(call)

    def _failed(self, why: str) -> None:
        if self._closed:
            return
        self._state, self._why = "failed", why
        queue, self._queue = self._queue, []
        for call in queue:
            call.finish(grpc.StatusCode.UNAVAILABLE, why)
        self.process.after(self._pause_s, self._connect)
        self._pause_s = min(PAUSE_S[1], self._pause_s * 1.6)

    def _lost(self) -> None:
        self._state, self._connection = "idle", None
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(grpc.StatusCode.UNAVAILABLE, BROKEN)

    def _heard(self, frame: Frame) -> None:
        assert isinstance(frame, Accepted | Data | Room | End), (
            f"a server sent {type(frame).__name__}, which servers never send"
        )
        call = self._calls.get(frame.call)
        if call is None:
            return
        match frame:
            case Accepted():
                call.accepted(frame.metadata)
            case Data():
                call.received(frame.payload)
            case Room():
                call.has_room(frame.size)
            case End():
                call.finish(frame.code, frame.details)
