"""The metadata quorum as the services of one broker see it (`raftmeta.port.MetadataPort`), as far as they ask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raftlog.errors import BrokerUnavailable, RequestTimedOut
from raftlog.v1.common_pb2 import QuorumInfo
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage
from raftmeta.port import Change, HeartbeatStream, Listener, Unsubscribe

if TYPE_CHECKING:
    from tests.simulation.cluster.broker import ClusterBroker

SHOWN_WITHIN_S = 4.0


class BrokerMetadata:
    """One broker's view of the metadata, and its way to the controllers."""

    def __init__(self, broker: ClusterBroker) -> None:
        self._broker = broker
        self._listeners: dict[int, Listener] = {}
        self._number = 0

    @property
    def image(self) -> MetadataImage:
        """The newest committed image this node knows."""
        return self._broker.image

    def changed(self) -> None:
        """There is another image."""
        for listener in list(self._listeners.values()):
            listener(self.image, None)

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """Call `listener` for every change."""
        self._number += 1
        number = self._number
        self._listeners[number] = listener

        def stop() -> None:
            self._listeners.pop(number, None)

        return stop

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """No history is kept: watchers get images."""
        return None

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command, and return its result once the image shows it."""
        result = await self._broker.propose(command)
        await self._shown(result.offset)
        return result

    async def barrier(self) -> int:
        """Return an offset that covers all acknowledged before this call, once the image shows it."""
        offset = (await self._broker.read_image()).offset
        await self._shown(offset)
        return offset

    async def _shown(self, offset: int) -> None:
        changed = asyncio.Event()
        stop = self.subscribe(lambda image, records: changed.set())
        try:
            async with asyncio.timeout(SHOWN_WITHIN_S):
                while self.image.offset < offset:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise RequestTimedOut("this broker has not heard of the change yet") from None
        finally:
            stop()

    def waiting_for(self) -> str:
        """The leader of the quorum is not looked at here."""
        return ""

    async def describe_quorum(self) -> QuorumInfo:
        """Not used here."""
        raise BrokerUnavailable("not simulated")

    async def open_heartbeats(self) -> HeartbeatStream:
        """Heartbeats are those of `tests.simulation.broker`."""
        raise BrokerUnavailable("not simulated")

    async def wait_ready(self) -> None:
        """A broker has an image before it serves."""

    async def start(self) -> None:
        """It is there."""

    async def close(self) -> None:
        """It ends with the process."""
