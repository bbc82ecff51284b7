"""The synchronous admin client's part that asks single nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftlog._client.admin import AdminEngine
from raftlog._node_descriptions import NodeDescription

if TYPE_CHECKING:
    from raftlog._client.background import LoopThread


class NodeAdmin:
    """Single nodes: what they say of themselves."""

    _engine: AdminEngine
    _thread: LoopThread

    def describe_node(self, node_id: int, *, timeout: float | None = None) -> NodeDescription:
        """Return what a broker or controller says of itself: version, clock, directories, limits, configuration.

        Controllers, and brokers that are not reached from here, are asked through another broker.

        >>> from raftlog import Admin
        >>> with Admin(cluster.bootstrap) as admin:
        ...     node = admin.describe_node(1)
        >>> node.roles, node.not_ready, node.configs["node.id"].value
        (['broker', 'controller'], '', '1')

        Raises:
            InvalidRequestError: there is no such node.
            BrokerUnavailable, RequestTimedOut: it does not answer, until `timeout`.
            UnsupportedVersion: it runs a version that does not know this question.
        """
        return self._thread.run(self._engine.describe_node(node_id, timeout))
