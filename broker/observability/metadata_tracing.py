"""The metadata port of a node that traces: what it proposes is a span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raftlog.v1.common_pb2 import QuorumInfo
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import CommandResult
from raftmeta.image import MetadataImage
from raftmeta.port import Change, HeartbeatStream, Listener, Unsubscribe

if TYPE_CHECKING:
    from broker.observability.tracing import NodeTracing
    from broker.quorum_role import NodeMetadata


class TracedMetadata:
    """Implements `broker.quorum_role.NodeMetadata` around another one."""

    def __init__(self, metadata: NodeMetadata, tracing: NodeTracing) -> None:
        self._metadata = metadata
        self._tracing = tracing

    async def propose(self, command: MetadataCommand) -> CommandResult:
        """Commit a command, within a span `quorum commit`; see the port."""
        return await self._tracing.propose(self._metadata.propose, command)

    # As it is

    @property
    def cluster_id(self) -> str:
        """See the port."""
        return self._metadata.cluster_id

    @property
    def image(self) -> MetadataImage:
        """See the port."""
        return self._metadata.image

    def subscribe(self, listener: Listener) -> Unsubscribe:
        """See the port."""
        return self._metadata.subscribe(listener)

    def changes_since(self, offset: int) -> Sequence[Change] | None:
        """See the port."""
        return self._metadata.changes_since(offset)

    async def barrier(self) -> int:
        """See the port."""
        return await self._metadata.barrier()

    async def describe_quorum(self) -> QuorumInfo:
        """See the port."""
        return await self._metadata.describe_quorum()

    async def open_heartbeats(self) -> HeartbeatStream:
        """See the port."""
        return await self._metadata.open_heartbeats()

    async def wait_ready(self) -> None:
        """See the port."""
        await self._metadata.wait_ready()

    def waiting_for(self) -> str:
        """See the port."""
        return self._metadata.waiting_for()

    async def start(self) -> None:
        """See the port."""
        await self._metadata.start()

    async def close(self) -> None:
        """See the port."""
        await self._metadata.close()
