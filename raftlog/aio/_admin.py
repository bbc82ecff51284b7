"""The asynchronous admin client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from raftlog._client.admin import AdminEngine
from raftlog._client.options import AdminOptions
from raftlog._core.bootstrap import parse_bootstrap
from raftlog._descriptions import (
    ClusterDescription,
    ConfigDescription,
    LogDirDescription,
    PartitionReplicas,
    QuorumDescription,
    Reassignment,
    TopicDescription,
)
from raftlog.aio._admin_groups import GroupAdmin
from raftlog.aio._admin_nodes import NodeAdmin
from raftlog.aio._admin_security import SecurityAdmin
from raftlog.aio._admin_transactions import TransactionAdmin
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition


class Admin(GroupAdmin, TransactionAdmin, NodeAdmin, SecurityAdmin):
    """As `raftlog.Admin`, awaitable. Belongs to the event loop that runs when it is first used.

    >>> import asyncio
    >>> from raftlog import aio
    >>> async def leaders():
    ...     async with aio.Admin(cluster.bootstrap) as admin:
    ...         topic = await admin.create_topic("invoices", partitions=2)
    ...         return [partition.leader for partition in topic.partitions]
    >>> asyncio.run(leaders())
    [1, 1]
    """

    def __init__(
        self, bootstrap: str | Sequence[str], *, config: Mapping[str, object] | None = None, **options: object
    ) -> None:
        self._engine = AdminEngine(parse_bootstrap(bootstrap), AdminOptions.make(config, options))

    def metrics(self) -> dict[str, dict[str, float]]:
        """As `raftlog.Admin.metrics`; does not wait."""
        return self._engine.metrics()

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int = 1,
        configs: Mapping[str, Any] | None = None,
        *,
        replica_assignment: Sequence[Sequence[int]] | None = None,
        validate_only: bool = False,
        timeout: float | None = None,
    ) -> TopicDescription | None:
        """As `raftlog.Admin.create_topic`."""
        return await self._engine.create_topic(
            name, partitions, replication_factor, configs or {}, replica_assignment, validate_only, timeout
        )

    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """As `raftlog.Admin.delete_topic`."""
        await self._engine.delete_topic(name, timeout)

    async def list_topics(self, *, internal: bool = False, timeout: float | None = None) -> list[str]:
        """As `raftlog.Admin.list_topics`."""
        return await self._engine.list_topics(internal, timeout)

    async def describe_topic(self, name: str, *, timeout: float | None = None) -> TopicDescription:
        """As `raftlog.Admin.describe_topic`."""
        return await self._engine.describe_topic(name, timeout)

    async def describe_topics(
        self, names: Iterable[str] | None = None, *, internal: bool = False, timeout: float | None = None
    ) -> list[TopicDescription]:
        """As `raftlog.Admin.describe_topics`."""
        return await self._engine.describe_topics(names, internal, timeout)

    async def describe_replicas(
        self,
        topics: Iterable[str] | None = None,
        *,
        silent: dict[int, RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> dict[TopicPartition, PartitionReplicas]:
        """As `raftlog.Admin.describe_replicas`."""
        return await self._engine.describe_replicas(topics, silent, timeout)

    async def alter_reassignments(
        self, wanted: Mapping[TopicPartition, Sequence[int] | None], *, timeout: float | None = None
    ) -> None:
        """As `raftlog.Admin.alter_reassignments`."""
        await self._engine.alter_reassignments(wanted, timeout)

    async def list_reassignments(self, *, timeout: float | None = None) -> dict[TopicPartition, Reassignment]:
        """As `raftlog.Admin.list_reassignments`."""
        return await self._engine.list_reassignments(timeout)

    async def create_partitions(self, topic: str, total: int, *, timeout: float | None = None) -> None:
        """As `raftlog.Admin.create_partitions`."""
        await self._engine.create_partitions(topic, total, timeout)

    async def describe_cluster(self, *, linearizable: bool = False, timeout: float | None = None) -> ClusterDescription:
        """As `raftlog.Admin.describe_cluster`."""
        return await self._engine.describe_cluster(linearizable, timeout)

    async def describe_quorum(self, *, timeout: float | None = None) -> QuorumDescription:
        """As `raftlog.Admin.describe_quorum`."""
        return await self._engine.describe_quorum(timeout)

    async def elect_leaders(
        self, topic: str, partitions: Iterable[int] = (), *, unclean: bool = False, timeout: float | None = None
    ) -> None:
        """As `raftlog.Admin.elect_leaders`."""
        await self._engine.elect_leaders(topic, partitions, unclean, timeout)

    async def unregister_broker(self, broker_id: int, *, timeout: float | None = None) -> None:
        """As `raftlog.Admin.unregister_broker`."""
        await self._engine.unregister_broker(broker_id, timeout)

    async def alter_broker(
        self,
        broker_id: int,
        *,
        cordoned: bool | None = None,
        drained: bool | None = None,
        until_restart: bool = False,
        timeout: float | None = None,
    ) -> None:
        """As `raftlog.Admin.alter_broker`."""
        await self._engine.alter_broker(broker_id, cordoned, drained, until_restart, timeout)

    async def update_feature(
        self, name: str, level: int, *, validate_only: bool = False, timeout: float | None = None
    ) -> None:
        """As `raftlog.Admin.update_feature`."""
        await self._engine.update_feature(name, level, validate_only, timeout)

    async def describe_configs(
        self,
        topic: str | None = None,
        broker: int | str | None = None,
        *,
        broker_logger: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, ConfigDescription]:
        """As `raftlog.Admin.describe_configs`."""
        return await self._engine.describe_configs(topic, broker, broker_logger, timeout)

    async def alter_configs(
        self,
        topic: str | None = None,
        broker: int | str | None = None,
        *,
        broker_logger: int | None = None,
        set: Mapping[str, Any] | None = None,
        unset: Iterable[str] = (),
        validate_only: bool = False,
        timeout: float | None = None,
    ) -> None:
        """As `raftlog.Admin.alter_configs`."""
        await self._engine.alter_configs(topic, broker, broker_logger, set or {}, unset, validate_only, timeout)

    async def describe_log_dirs(
        self, broker: int | None = None, *, timeout: float | None = None
    ) -> list[LogDirDescription]:
        """As `raftlog.Admin.describe_log_dirs`."""
        return await self._engine.describe_log_dirs(broker, timeout)

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout: float | None = None
    ) -> dict[TopicPartition, int]:
        """As `raftlog.Admin.delete_records`."""
        return await self._engine.delete_records(before, timeout)

    async def close(self) -> None:
        """Close the connections. Closing twice is allowed."""
        if not self._engine.closed:
            await self._engine.close()

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
