"""The asynchronous admin client's part that deals with consumer groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raftlog._client.admin import AdminEngine
from raftlog._group_descriptions import GroupDescription, GroupListing, PartitionLag
from raftlog.errors import RaftlogError
from raftlog.types import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition


class GroupAdmin:
    """As `raftlog.Admin` has it, awaitable."""

    _engine: AdminEngine

    async def list_groups(
        self,
        states: Iterable[str] | None = None,
        *,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[GroupListing]:
        """As `raftlog.Admin.list_groups`."""
        return await self._engine.list_groups(states, missing, timeout)

    async def describe_group(self, group_id: str, *, timeout: float | None = None) -> GroupDescription:
        """As `raftlog.Admin.describe_group`."""
        return (await self._engine.describe_groups([group_id], timeout))[group_id]

    async def describe_groups(
        self, group_ids: Iterable[str], *, timeout: float | None = None
    ) -> dict[str, GroupDescription]:
        """As `raftlog.Admin.describe_groups`."""
        return await self._engine.describe_groups(group_ids, timeout)

    async def group_offsets(
        self, group_id: str, *, timeout: float | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """As `raftlog.Admin.group_offsets`."""
        return await self._engine.group_offsets(group_id, timeout)

    async def group_lag(self, group_id: str, *, timeout: float | None = None) -> dict[TopicPartition, PartitionLag]:
        """As `raftlog.Admin.group_lag`."""
        return await self._engine.group_lag(group_id, timeout)

    async def alter_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        *,
        timeout: float | None = None,
    ) -> None:
        """As `raftlog.Admin.alter_group_offsets`."""
        await self._engine.alter_group_offsets(group_id, offsets, timeout)

    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, timeout: float | None = None
    ) -> None:
        """As `raftlog.Admin.delete_group_offsets`."""
        await self._engine.delete_group_offsets(group_id, partitions, timeout)

    async def delete_groups(self, group_ids: Iterable[str], *, timeout: float | None = None) -> None:
        """As `raftlog.Admin.delete_groups`."""
        await self._engine.delete_groups(group_ids, timeout)

    async def list_offsets(
        self, partitions: Mapping[TopicPartition, int | str], *, timeout: float | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """As `raftlog.Admin.list_offsets`."""
        return await self._engine.list_offsets(partitions, timeout)
