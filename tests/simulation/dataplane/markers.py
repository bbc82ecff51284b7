"""The service `Markers` between simulated brokers: the real links and the real verifier over simulated connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import grpc
from grpc import aio

from broker.coordinator.transactions.coordinators import TransactionCoordinators
from broker.coordinator.transactions.marker_links import MarkerLinks, _Link
from broker.coordinator.transactions.marker_sender import Answer as MarkersAnswer
from broker.coordinator.transactions.marker_sender import LocalMarkers
from broker.coordinator.transactions.verifier import TransactionVerifier
from broker.net.services.markers import METHOD, SERVICE, VERIFY
from raftlog.format.control import Marker
from raftlog.v1.transaction_pb2 import (
    VerifyTransactionRequest,
    VerifyTransactionResponse,
    WriteMarkersRequest,
    WriteMarkersResponse,
)
from tests.simulation.network import Connection

if TYPE_CHECKING:
    from broker.clock import Clock
    from tests.simulation.dataplane.broker import DataBroker


class MarkerCall(NamedTuple):
    number: int
    method: str
    payload: bytes


REQUESTS: dict[str, Any] = {METHOD: WriteMarkersRequest, VERIFY: VerifyTransactionRequest}
RESPONSES: dict[str, Any] = {METHOD: WriteMarkersResponse, VERIFY: VerifyTransactionResponse}


class _MarkerChannel:
    """The service `Markers` of another broker: a simulated connection for as long as it holds."""

    def __init__(self, broker: DataBroker, peer_id: int) -> None:
        self._broker = broker
        self._peer_id = peer_id
        self._connection: Connection | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    def unary_unary(self, path: str, **serializers: object) -> Callable[..., asyncio.Future[Any]]:
        """Return the call, as a channel of gRPC does."""
        service, method = path[1:].split("/")
        assert service == SERVICE
        assert method in REQUESTS
        return partial(self._call, method)

    def _call(self, method: str, request: Any, timeout: float) -> asyncio.Future[Any]:
        self._broker.touched = True  # what it tells of has to be committed by now
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        connection = self._connected()
        if connection is None:
            loop.call_later(0.001, self._fail, future, grpc.StatusCode.UNAVAILABLE)
            return future
        self._number += 1
        self._waiting[self._number] = future
        connection.send(MarkerCall(self._number, method, request.SerializeToString()))
        loop.call_later(timeout, self._fail, future, grpc.StatusCode.DEADLINE_EXCEEDED)
        return future

    def _connected(self) -> Connection | None:
        if self._connection is None:
            peer = self._broker.simulation.data_broker(self._peer_id)
            acceptor = None if peer is None else peer.process
            connection = self._broker.simulation.network.connect(self._broker.process, acceptor)
            if connection is not None and peer is not None:
                self._connection = connection
                connection.opener_hears(self._heard, self._lost)
                peer.accept_markers(connection)
        return self._connection

    def _heard(self, answered: MarkerCall) -> None:
        self._broker.touched = True
        future = self._waiting.pop(answered.number, None)
        if future is not None and not future.done():
            future.set_result(RESPONSES[answered.method].FromString(answered.payload))

    def _lost(self) -> None:
        self._connection = None
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            self._fail(future, grpc.StatusCode.UNAVAILABLE)

    @staticmethod
    def _fail(future: asyncio.Future[Any], code: grpc.StatusCode) -> None:
        if not future.done():
            future.set_exception(aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details="simulated"))


class _SimLink(_Link):
    def __init__(self, broker: DataBroker, peer_id: int) -> None:
        super().__init__(peer_id, lambda broker_id: "simulated")
        self._simulated = _MarkerChannel(broker, peer_id)

    def _connected(self) -> aio.Channel:
        return cast(aio.Channel, self._simulated)


class SimMarkerLinks(MarkerLinks):
    """The real links, over simulated connections."""

    def __init__(self, broker: DataBroker) -> None:
        super().__init__(lambda broker_id: "simulated")
        self._broker = broker

    def put(self, broker_id: int, target: Any, markers: Sequence[Marker], answer: MarkersAnswer) -> None:
        """Have markers sent with the next `flush`."""
        if broker_id not in self._links:
            self._links[broker_id] = _SimLink(self._broker, broker_id)
        super().put(broker_id, target, markers, answer)


class SimVerifier(TransactionVerifier):
    """The real one, over simulated connections."""

    def __init__(self, broker: DataBroker, coordinators: TransactionCoordinators, clock: Clock) -> None:
        super().__init__(broker.broker_id, coordinators, lambda broker_id: "simulated", clock)
        self._broker = broker
        self._simulated: dict[int, _MarkerChannel] = {}

    def _channel(self, broker_id: int) -> aio.Channel:
        if broker_id not in self._simulated:
            self._simulated[broker_id] = _MarkerChannel(self._broker, broker_id)
        return cast(aio.Channel, self._simulated[broker_id])


class CheckedMarkers(LocalMarkers):
    """Writes no marker whose decision is not committed."""

    def __init__(self, broker: DataBroker) -> None:
        super().__init__(broker.registry.find, broker.coordinators)
        self._broker = broker

    def write(self, topic_id: bytes, partition: int, markers: Sequence[Marker], answer: MarkersAnswer) -> None:
        """Append the markers of a partition."""
        self._broker.check_decided(markers)
        super().write(topic_id, partition, markers, answer)

    def write_group(self, group_id: str, markers: Sequence[Marker], answer: MarkersAnswer) -> None:
        """Tell a group."""
        self._broker.check_decided(markers)
        super().write_group(group_id, markers, answer)
