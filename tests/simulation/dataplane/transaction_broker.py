"""A whole broker that coordinates transactions as well: the real services, coordinators and marker sender.

In place of gRPC there are simulated connections: `_MarkerChannel` between brokers, `Rpc` from clients.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import grpc
from grpc import aio

from broker.fetch_session import FetchSession, readable_end
from broker.lease import without_lease
from broker.marker_links import MarkerLinks, _Link
from broker.marker_sender import MarkerSender
from broker.marker_writing import Answer as MarkersAnswer
from broker.marker_writing import LocalMarkers
from broker.producer_ids import ProducerIds
from broker.services.groups import GroupService
from broker.services.markers import METHOD, SERVICE, VERIFY, MarkerService
from broker.services.transactions import TransactionService
from broker.transaction_coordinators import TransactionCoordinators
from broker.transaction_verifier import TransactionVerifier
from broker.transactions.config import TransactionConfig
from raftlog.format.control import Marker
from raftlog.v1 import common_pb2
from raftlog.v1.log_pb2 import FetchRequest
from raftlog.v1.transaction_pb2 import (
    VerifyTransactionRequest,
    VerifyTransactionResponse,
    WriteMarkersRequest,
    WriteMarkersResponse,
)
from raftlog.wire import Frame
from raftmeta.image import MetadataImage
from tests.simulation.dataplane.broker import FETCH_BYTES, DataBroker, _changes
from tests.simulation.dataplane.group_broker import GroupBroker, StreamEnded
from tests.simulation.dataplane.messages import Answer, FetchedStable, FetchStable, Replied, Request, Rpc
from tests.simulation.network import Connection
from tests.simulation.parts import Violation
from tests.simulation.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.clock import Clock
    from broker.config import BrokerConfig
    from broker.internal_topics import InternalTopics
    from broker.partition import Partition
    from tests.simulation.dataplane.transaction_schedule import TransactionSimulation

TRANSACTION_CONFIG = TransactionConfig(max_timeout_ms=60_000)
REQUEST_TIMEOUT_MS = 2_000
CLIENT_WAITS_S = 2.0
FRAME_BYTES = 4_096


class _Context:
    """What services ask of a gRPC context."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wait_s: float) -> None:
        self._loop = loop
        self._end_s = loop.time() + wait_s

    def time_remaining(self) -> float:
        """How long the caller waits."""
        return max(0.0, self._end_s - self._loop.time())


class _Topics:
    """The internal topics are there from the start, or soon."""

    async def consumer_offsets(self) -> None:
        """Nothing has to be made."""

    async def transaction_state(self) -> None:
        """Nothing has to be made."""


# Markers from broker to broker, and questions about transactions


class _Asked(NamedTuple):
    number: int
    method: str
    payload: bytes


_REQUESTS: dict[str, Any] = {METHOD: WriteMarkersRequest, VERIFY: VerifyTransactionRequest}
_RESPONSES: dict[str, Any] = {METHOD: WriteMarkersResponse, VERIFY: VerifyTransactionResponse}


class _MarkerChannel:
    """The service `Markers` of another broker: a simulated connection for as long as it holds."""

    def __init__(self, broker: TransactionBroker, peer_id: int) -> None:
        self._broker = broker
        self._peer_id = peer_id
        self._connection: Connection | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    def unary_unary(self, path: str, **serializers: object) -> Callable[..., asyncio.Future[Any]]:
        """Return the call, as a channel of gRPC does."""
        service, method = path[1:].split("/")
        assert service == SERVICE
        assert method in _REQUESTS
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
        connection.send(_Asked(self._number, method, request.SerializeToString()))
        loop.call_later(timeout, self._fail, future, grpc.StatusCode.DEADLINE_EXCEEDED)
        return future

    def _connected(self) -> Connection | None:
        if self._connection is None:
            peer = transaction_broker(self._broker.simulation.data_broker(self._peer_id))
            acceptor = None if peer is None else peer.process
            connection = self._broker.simulation.network.connect(self._broker.process, acceptor)
            if connection is not None and peer is not None:
                self._connection = connection
                connection.opener_hears(self._heard, self._lost)
                peer.accept_markers(connection)
        return self._connection

    def _heard(self, answered: _Asked) -> None:
        self._broker.touched = True
        future = self._waiting.pop(answered.number, None)
        if future is not None and not future.done():
            future.set_result(_RESPONSES[answered.method].FromString(answered.payload))

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
    def __init__(self, broker: TransactionBroker, peer_id: int) -> None:
        super().__init__(peer_id, lambda broker_id: "simulated")
        self._simulated = _MarkerChannel(broker, peer_id)

    def _connected(self) -> aio.Channel:
        return cast(aio.Channel, self._simulated)


class SimMarkerLinks(MarkerLinks):
    """The real links, over simulated connections."""

    def __init__(self, broker: TransactionBroker) -> None:
        super().__init__(lambda broker_id: "simulated")
        self._broker = broker

    def put(self, broker_id: int, target: Any, markers: Sequence[Marker], answer: MarkersAnswer) -> None:
        """Have markers sent with the next `flush`."""
        if broker_id not in self._links:
            self._links[broker_id] = _SimLink(self._broker, broker_id)
        super().put(broker_id, target, markers, answer)


class _SimVerifier(TransactionVerifier):
    """The real one, over simulated connections."""

    def __init__(self, broker: TransactionBroker, coordinators: TransactionCoordinators, clock: Clock) -> None:
        super().__init__(broker.broker_id, coordinators, lambda broker_id: "simulated", clock)
        self._broker = broker
        self._simulated: dict[int, _MarkerChannel] = {}

    def _channel(self, broker_id: int) -> aio.Channel:
        if broker_id not in self._simulated:
            self._simulated[broker_id] = _MarkerChannel(self._broker, broker_id)
        return cast(aio.Channel, self._simulated[broker_id])


class _CheckedMarkers(LocalMarkers):
    """Writes no marker whose decision is not committed."""

    def __init__(self, broker: TransactionBroker) -> None:
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


class _FrameWriter:
    """The server's side of a stream of frames."""

    def __init__(self, broker: TransactionBroker, connection: Connection) -> None:
        self._broker = broker
        self._connection = connection

    async def write(self, message: list[Frame]) -> None:
        """Send."""
        self._broker.touched = True
        for head, records in message:
            self._connection.answer(Frame(head, bytes(records)))
        await asyncio.sleep(0)


class TransactionBroker(GroupBroker):
    """One life of a broker with the coordinators of transactions, and of groups, whose partitions it leads."""

    simulation: TransactionSimulation

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._failures: list[BaseException] = []
        self.producer_ids = ProducerIds(self.broker_id, self._propose)
        local = _CheckedMarkers(self)
        self.markers = MarkerSender(
            self.broker_id,
            lambda: self.image,
            local,
            self.new_marker_links(),
            lambda group_id: self.coordinators.find(group_id).broker.broker_id,
            rng=random.Random(self._random.random()),
        )
        self.transactions = TransactionCoordinators(
            self.broker_id,
            lambda: self.image,
            TRANSACTION_CONFIG,
            self.markers,
            executor=self.executor,
            clock=self._clock,
            lease=self._serving_lease,
        )
        self.registry.on_term.append(self.transactions.on_term)
        self._verifier = self.new_verifier()
        self._local_markers = local
        self._marker_service = MarkerService()
        config, topics = self.new_config(), self.new_topics()
        self._services = (
            TransactionService(
                self.transactions,
                self.markers,
                self.producer_ids,
                topics,
                config,
                lambda: self.image,
                self.registry.find,
            ),
            GroupService(self.coordinators, topics, config, self._verifier),
        )

    def new_marker_links(self) -> MarkerLinks:
        """Make the way of markers to other brokers."""
        return SimMarkerLinks(self)

    def new_verifier(self) -> TransactionVerifier:
        """Make who asks other brokers which transactions are open."""
        return _SimVerifier(self, self.transactions, self._clock)

    def new_config(self) -> BrokerConfig:
        """Make what services go by."""
        known = SimpleNamespace(request_timeout_ms=REQUEST_TIMEOUT_MS, max_streams=100, node_id=self.broker_id)
        return cast("BrokerConfig", known)

    def new_topics(self) -> InternalTopics:
        """Make who makes internal topics."""
        return cast("InternalTopics", _Topics())

    def begin_heartbeats(self) -> None:
        """It is registered."""
        self.producer_ids.serve(self.broker_epoch)
        self._marker_service.open(self._local_markers, self._verifier.verify_here)
        super().begin_heartbeats()

    def sees(self, image: MetadataImage) -> None:
        """Take a committed image."""
        before = self.image
        super().sees(image)
        if image.offset > before.offset:
            self.transactions.on_metadata(image, list(_changes(before, image)))

    def _look(self) -> None:
        super()._look()
        if self._failures:
            failure = self._failures[0]
            raise Violation(f"{self.host}: {type(failure).__name__}: {failure}") from failure

    def check_decided(self, markers: Sequence[Marker]) -> None:
        """A marker is about to be written: its decision has to be committed.

        Raises:
            Violation: it is not.
        """
        self.touched = True
        wrong = self.simulation.transaction_ledger.undecided(self, markers)
        if wrong is not None:
            self._failures.append(Violation(wrong))

    # Calls

    def _serve(self, request: Request, answer: Callable[[Answer], None]) -> None:
        match request:
            case Rpc():
                self._loop.create_task(self._call(request, answer))
            case FetchStable():
                self._fetch_stable(request, answer)
            case _:
                super()._serve(request, answer)

    async def _call(self, request: Rpc, answer: Callable[[Answer], None]) -> None:
        service = next(each for each in self._services if hasattr(each, request.method))
        try:
            context = _Context(self._loop.as_loop, CLIENT_WAITS_S)
            response = await getattr(service, request.method)(request.message, context)
        except Exception as error:  # a service answers with errors as values
            self._failures.append(error)
            return
        self.touched = True
        answer(Replied(response))

    def _fetch_stable(self, request: FetchStable, answer: Callable[[Answer], None]) -> None:
        """What `FetchSession` does for a reader of committed records."""
        partition: Partition = self.registry.find(*request.key)
        partition.check_leader_epoch(request.leader_epoch, from_follower=request.from_follower)
        if not self._serving_lease.valid():
            raise without_lease(str(partition.topic_partition))
        end = readable_end(partition, common_pb2.READ_COMMITTED)
        read = partition.read(request.offset, FETCH_BYTES, end, blocking=True, from_follower=request.from_follower)
        assert read is not None
        records = bytes(read.records)
        aborted = partition.log.aborted_transactions(request.offset, read.next_offset) if records else ()
        self.simulation.ledger.serves(self, request.key, request.offset, records)
        answer(FetchedStable(records, read.next_offset, end, partition.leader_epoch, tuple(aborted)))

    def accept_reader(self, connection: Connection) -> None:
        """Take the stream of a consumer: a real fetch session."""
        requests: asyncio.Queue[FetchRequest | None] = asyncio.Queue()

        def take(request: FetchRequest) -> None:
            self.touched = True
            requests.put_nowait(request)

        connection.acceptor_hears(take, lambda: requests.put_nowait(None))
        self._loop.create_task(self._serve_reader(connection, requests))

    async def _serve_reader(self, connection: Connection, requests: asyncio.Queue[FetchRequest | None]) -> None:
        session = FetchSession(self.registry, self.executor, max_frame_bytes=FRAME_BYTES, max_subscriptions=10)
        try:
            await session.run(_each(requests), _FrameWriter(self, connection))
        except Exception as error:  # refusals are frames
            self._failures.append(error)
        finally:
            connection.answer(StreamEnded())

    def accept_markers(self, connection: Connection) -> None:
        """Take another broker's calls of the service `Markers`."""

        def take(asked: _Asked) -> None:
            self.touched = True
            self._loop.create_task(self._serve_broker(connection, asked))

        connection.acceptor_hears(take, lambda: None)

    async def _serve_broker(self, connection: Connection, asked: _Asked) -> None:
        try:
            context = cast(Any, _Context(self._loop.as_loop, 2.0))
            request = _REQUESTS[asked.method].FromString(asked.payload)
            response = await getattr(self._marker_service, asked.method)(request, context)
        except Exception as error:  # a service answers with errors as values
            self._failures.append(error)
            return
        self.touched = True
        connection.answer(asked._replace(payload=response.SerializeToString()))


async def _each(requests: asyncio.Queue[FetchRequest | None]) -> AsyncIterator[FetchRequest]:
    while (request := await requests.get()) is not None:
        yield request


def transaction_broker(broker: DataBroker | None) -> TransactionBroker | None:
    """Return a broker of these schedules as what it is."""
    return cast("TransactionBroker | None", broker)
