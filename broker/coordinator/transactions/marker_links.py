"""Sends markers to other brokers: `Markers.Write` on their inter-node listeners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from grpc import aio

from broker.coordinator.transactions.marker_sender import Answer, Target, to_message
from broker.net.services.markers import METHOD, SERVICE
from broker.net.services.markers import WAIT_MS as ANSWERED_WITHIN_MS
from raftlog._client.connections import Connections, from_grpc
from raftlog._client.security import ChannelTls
from raftlog.errors import BrokerUnavailable, RaftlogError, from_wire
from raftlog.format.control import Marker
from raftlog.v1 import transaction_pb2
from raftlog.v1.common_pb2 import NONE, Error
from raftmeta.image import MetadataImage

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 4
"""Requests to one broker at a time; markers that arrive meanwhile share the next one."""
MAX_MARKERS: Final = 5_000
"""Markers in one request."""
CALL_S: Final = 2.0
"""After this time without an answer the markers are sent again, to the leader of that moment."""

assert ANSWERED_WITHIN_MS < CALL_S * 1_000

AddressOf = Callable[[int], str | None]
"""Returns the inter-node address of a broker as `host:port`, None while it is unknown."""


class _Written(NamedTuple):
    """Markers for one target, and the callback for their outcome."""

    target: Target
    markers: Sequence[Marker]
    answer: Answer


class MarkerLinks:
    """A link to each broker that markers were sent to; on the event loop."""

    def __init__(self, address_of: AddressOf, tls: ChannelTls | None = None) -> None:
        self._address_of = address_of
        self._tls = tls
        self._links: dict[int, _Link] = {}

    def put(self, broker_id: int, target: Target, markers: Sequence[Marker], answer: Answer) -> None:
        """Have markers sent with the next `flush`; `answer` is called once, later."""
        link = self._links.get(broker_id)
        if link is None:
            link = self._links[broker_id] = _Link(broker_id, self._address_of, self._tls)
        link.queue.append(_Written(target, markers, answer))

    def flush(self) -> None:
        """Send what was put, as far as there is room."""
        for link in self._links.values():
            link.pump()

    def on_metadata(self, image: MetadataImage) -> None:
        """Give up what waits for brokers that are fenced, or gone: others lead what they have led."""
        for broker_id, link in self._links.items():
            broker = image.brokers.get(broker_id)
            if broker is None or broker.fenced:
                link.give_up()

    async def close(self) -> None:
        """End all links; no callback is called any more."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links))


class _Link:
    """One broker: a queue, and a few requests under way."""

    def __init__(self, broker_id: int, address_of: AddressOf, tls: ChannelTls | None = None) -> None:
        self.queue: list[_Written] = []
        self._broker_id = broker_id
        self._address_of = address_of
        self._address: str | None = None
        self._tls = tls
        self._connections = Connections(tls)
        self._calls: dict[asyncio.Task[None], Any] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    def pump(self) -> None:
        """Begin requests while there are markers and room."""
        while self.queue and len(self._calls) < MAX_IN_FLIGHT and not self._closed:
            some: list[_Written] = []
            count = 0
            for written in self.queue:
                if some and count + len(written.markers) > MAX_MARKERS:
                    break
                some.append(written)
                count += len(written.markers)
            del self.queue[: len(some)]
            task = asyncio.create_task(self._send(some), name=f"markers-{self._broker_id}")
            self._calls[task] = None
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        del self._calls[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sending markers to broker %d failed", self._broker_id, exc_info=error)
        self.pump()

    async def _send(self, some: list[_Written]) -> None:
        try:
            errors = await self._call(_request(some))
        except RaftlogError as failure:
            errors = [failure] * sum(len(written.markers) for written in some)
        for written, its in zip(some, _in_order(some, errors), strict=True):
            written.answer(its)

    async def _call(self, request: transaction_pb2.WriteMarkersRequest) -> list[RaftlogError | None]:
        task = asyncio.current_task()
        assert task is not None, "runs as one"
        call: Any = self._connected().unary_unary(
            f"/{SERVICE}/{METHOD}",
            request_serializer=transaction_pb2.WriteMarkersRequest.SerializeToString,
            response_deserializer=transaction_pb2.WriteMarkersResponse.FromString,
        )(request, timeout=CALL_S)
        self._calls[task] = call
        try:
            response = await call
        except aio.AioRpcError as error:
            raise from_grpc(error, f"broker {self._broker_id}") from None
        except asyncio.InvalidStateError:  # the channel was closed under the call
            raise BrokerUnavailable("the connection was closed") from None
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            raise BrokerUnavailable(f"broker {self._broker_id} is fenced") from None  # `give_up` cancelled the call
        counts = len(request.partitions), len(request.groups)
        if response is None or (len(response.partitions), len(response.groups)) != counts:
            raise BrokerUnavailable(f"broker {self._broker_id} sent a message that is not a response")
        return [_error_of(error) for error in (*response.partitions, *response.groups)]

    def _connected(self) -> aio.Channel:
        address = self._address_of(self._broker_id)
        if address is None:
            raise BrokerUnavailable(f"it is not known where broker {self._broker_id} listens for other nodes")
        if address != self._address:
            if self._address is not None:
                self._end(self._connections.close())
                self._connections = Connections(self._tls)
            self._address = address
        return self._connections.channel(address)

    def _end(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(closing)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def give_up(self) -> None:
        """End the requests under way; they are answered as unavailable."""
        for call in self._calls.values():
            if call is not None:
                call.cancel()

    async def close(self) -> None:
        """End everything."""
        self._closed = True
        self.queue.clear()
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, *self._ending, return_exceptions=True)
        await self._connections.close()


def _request(some: Sequence[_Written]) -> transaction_pb2.WriteMarkersRequest:
    """Return a request in which each marker stands alone, so that each is answered; the others do not wait for one."""
    request = transaction_pb2.WriteMarkersRequest()
    for written in some:
        for marker in written.markers:
            if isinstance(written.target, str):
                request.groups.add(group_id=written.target, markers=[to_message(marker)])
            else:
                topic_id, partition = written.target
                request.partitions.add(topic_id=topic_id, partition=partition, markers=[to_message(marker)])
    return request


def _in_order(some: Sequence[_Written], errors: Sequence[RaftlogError | None]) -> list[list[RaftlogError | None]]:
    """Return the errors of each of `some`: they came partitions first, then groups."""
    first_group = sum(len(written.markers) for written in some if not isinstance(written.target, str))
    partitions, groups = iter(errors[:first_group]), iter(errors[first_group:])
    return [
        list(islice(groups if isinstance(written.target, str) else partitions, len(written.markers)))
        for written in some
    ]


def _error_of(error: Error) -> RaftlogError | None:
    return None if error.code == NONE else from_wire(error)
