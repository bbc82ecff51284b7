"""The asynchronous admin client's part that deals with transactions, staged batches, and producers."""

from __future__ import annotations

from collections.abc import Iterable

from raftlog._client.admin import AdminEngine
from raftlog._transaction_descriptions import (
    MAX_TRANSACTION_TIMEOUT_MS,
    HangingTransaction,
    PartitionProducers,
    SinkDescription,
    SinkListing,
    StageDescription,
    TransactionDescription,
    TransactionListing,
)
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition


class TransactionAdmin:
    """As `raftlog.Admin` has it, awaitable."""

    _engine: AdminEngine

    async def list_transactions(
        self,
        states: Iterable[str] | None = None,
        *,
        producer_ids: Iterable[int] | None = None,
        running_longer_than_ms: int = 0,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[TransactionListing]:
        """As `raftlog.Admin.list_transactions`."""
        return await self._engine.list_transactions(states, producer_ids, running_longer_than_ms, missing, timeout)

    async def describe_transaction(
        self, transactional_id: str, *, timeout: float | None = None
    ) -> TransactionDescription:
        """As `raftlog.Admin.describe_transaction`."""
        return (await self._engine.describe_transactions([transactional_id], timeout))[transactional_id]

    async def describe_transactions(
        self, transactional_ids: Iterable[str], *, timeout: float | None = None
    ) -> dict[str, TransactionDescription]:
        """As `raftlog.Admin.describe_transactions`."""
        return await self._engine.describe_transactions(transactional_ids, timeout)

    async def abort_transaction(self, transactional_id: str, *, timeout: float | None = None) -> None:
        """As `raftlog.Admin.abort_transaction`."""
        await self._engine.abort_transaction(transactional_id, timeout)

    async def list_sinks(
        self, *, missing: list[RaftlogError] | None = None, timeout: float | None = None
    ) -> list[SinkListing]:
        """As `raftlog.Admin.list_sinks`."""
        return await self._engine.list_sinks(missing, timeout)

    async def describe_sink(self, sink_id: str, *, timeout: float | None = None) -> SinkDescription:
        """As `raftlog.Admin.describe_sink`."""
        return await self._engine.describe_sink(sink_id, timeout)

    async def abort_stages(
        self, sink_id: str, batch_id: int | None = None, *, timeout: float | None = None
    ) -> list[StageDescription]:
        """As `raftlog.Admin.abort_stages`."""
        return await self._engine.abort_stages(sink_id, batch_id, timeout)

    async def describe_producers(
        self, topic: str, partition: int | None = None, *, timeout: float | None = None
    ) -> dict[TopicPartition, PartitionProducers]:
        """As `raftlog.Admin.describe_producers`."""
        return await self._engine.describe_producers(topic, partition, timeout)

    async def find_hanging_transactions(
        self,
        topics: Iterable[str] | None = None,
        *,
        max_transaction_timeout_ms: int = MAX_TRANSACTION_TIMEOUT_MS,
        missing: list[RaftlogError] | None = None,
        timeout: float | None = None,
    ) -> list[HangingTransaction]:
        """As `raftlog.Admin.find_hanging_transactions`."""
        return await self._engine.find_hanging_transactions(topics, max_transaction_timeout_ms, missing, timeout)

    async def abort_hanging(
        self, topic: str, partition: int, start_offset: int, *, force: bool = False, timeout: float | None = None
    ) -> HangingTransaction:
        """As `raftlog.Admin.abort_hanging`."""
        return await self._engine.abort_hanging(TopicPartition(topic, partition), start_offset, force, timeout)
