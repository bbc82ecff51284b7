"""A whole broker that coordinates groups as well: the real coordinators and sessions over simulated connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from broker.group_coordinators import GroupCoordinators, GroupShard
from broker.groups.assignors import BUILT_IN
from broker.groups.commands import FetchOffsets
from broker.groups.config import GroupConfig
from broker.services.group_session import GroupSession
from raftlog.errors import InvalidTopic, RaftlogError
from raftlog.v1.group_pb2 import FetchOffsetsRequest, GroupRequest, GroupResponse
from raftmeta.image import MetadataImage
from tests.simulation.dataplane.broker import DataBroker, _changes
from tests.simulation.dataplane.messages import Answer, DeleteRecords, Produce, Request
from tests.simulation.network import Connection
from tests.simulation.process import Process

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP_CONFIG = GroupConfig(
    session_timeout_ms=1_500,
    heartbeat_interval_ms=300,
    rebalance_timeout_ms=2_500,
    offsets_retention_check_interval_ms=5_000,
)


class StreamEnded:
    """The last thing on a connection: the server has ended the stream."""


class _Writer:
    """The server's side of a stream."""

    def __init__(self, broker: GroupBroker, connection: Connection) -> None:
        self._broker = broker
        self._connection = connection

    async def write(self, message: GroupResponse) -> None:
        """Send."""
        self._broker.touched = True
        self._connection.answer(message)


class _Call:
    """A frame's recipient that is answered once."""

    is_stream = False

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def deliver(self, message: Any) -> None:
        """Answer."""
        self._connection.answer(message)


class GroupBroker(DataBroker):
    """One life of a broker with the coordinators of the groups whose partitions it leads."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self.coordinators = GroupCoordinators(
            self.broker_id,
            lambda: self.image,
            GROUP_CONFIG,
            BUILT_IN,
            executor=self.executor,
            clock=self._clock,
            lease=self._serving_lease,
        )
        self.registry.on_term.append(self.coordinators.on_term)

    def sees(self, image: MetadataImage) -> None:
        """Take a committed image."""
        before = self.image
        super().sees(image)
        if image.offset > before.offset:
            self.coordinators.on_metadata(image, list(_changes(before, image)))

    def _serve(self, request: Request, answer: Callable[[Answer], None]) -> None:
        if isinstance(request, Produce | DeleteRecords) and self.registry.find(*request.key).is_internal:
            raise InvalidTopic("clients read internal topics, no more")  # as the services have it
        super()._serve(request, answer)

    def accept_member(self, connection: Connection) -> None:
        """Take the stream of a member, and the calls that it makes beside it."""
        requests: asyncio.Queue[GroupRequest | None] = asyncio.Queue()

        def take(request: GroupRequest | FetchOffsetsRequest) -> None:
            self.touched = True
            if isinstance(request, GroupRequest):
                requests.put_nowait(request)
                return
            call = _Call(connection)
            try:
                self._shard_of(request.group_id).submit(FetchOffsets(call, request), call)
            except RaftlogError as error:
                call.deliver(error)

        connection.acceptor_hears(take, lambda: requests.put_nowait(None))
        self._loop.create_task(self._serve_member(connection, requests))

    async def _serve_member(self, connection: Connection, requests: asyncio.Queue[GroupRequest | None]) -> None:
        session = GroupSession(self._shard_of, "simulated")
        try:
            await session.run(_each(requests), _Writer(self, connection))
        finally:
            connection.answer(StreamEnded())

    def _shard_of(self, group_id: str) -> GroupShard:
        return self.coordinators.shard_of(group_id)[1]


async def _each(requests: asyncio.Queue[GroupRequest | None]) -> AsyncIterator[GroupRequest]:
    while (request := await requests.get()) is not None:
        yield request


def group_broker(broker: DataBroker | None) -> GroupBroker | None:
    """Return a broker of these schedules as what it is."""
    return cast("GroupBroker | None", broker)
