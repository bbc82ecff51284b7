"""The asynchronous admin client's part that asks single nodes."""

from __future__ import annotations

from raftlog._client.admin import AdminEngine
from raftlog._node_descriptions import NodeDescription


class NodeAdmin:
    """As `raftlog._admin_nodes.NodeAdmin`, awaitable."""

    _engine: AdminEngine

    async def describe_node(self, node_id: int, *, timeout: float | None = None) -> NodeDescription:
        """As `raftlog.Admin.describe_node`."""
        return await self._engine.describe_node(node_id, timeout)
