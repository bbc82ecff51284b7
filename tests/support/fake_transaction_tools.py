"""A `FakeCluster` that answers what tools ask about transactions: what it says is put there by the test."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import grpc

from raftlog.errors import (
    InvalidTxnState,
    NotCoordinator,
    NotLeader,
    RaftlogError,
    TransactionalIdNotFound,
    to_wire,
)
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2, transaction_pb2
from tests.support.fake_broker import FakeCluster
from tests.support.fake_services import TransactionNode

_Context = grpc.aio.ServicerContext[Any, Any]


class FakeTools:
    """The state of coordinators and partitions, the faults, and the requests so far."""

    def __init__(self, cluster: ToolCluster) -> None:
        self._cluster = cluster
        self.coordinator: dict[str, int] = {}
        """By id; 1 if it is not there."""
        self.transactions: dict[str, transaction_pb2.TransactionDescription] = {}
        self.sinks: dict[str, transaction_pb2.LastBatchResponse] = {}
        self.producers: dict[TopicPartition, transaction_pb2.PartitionProducers] = {}
        self.loading: dict[int, RaftlogError] = {}
        self.refuse: list[RaftlogError] = []
        """Errors of coordinators and leaders for the next calls, one each."""
        self.mislaid_answers = 0
        """So many calls to come break after they have done their work."""
        self.calls: list[tuple[int, str]] = []

    def transaction(
        self,
        transactional_id: str,
        producer: tuple[int, int],
        state: transaction_pb2.TransactionState.ValueType = transaction_pb2.TRANSACTION_ONGOING,
        partitions: Mapping[str, Iterable[int]] | None = None,
        *,
        pending: Mapping[str, Iterable[int]] | None = None,
        coordinator: int = 1,
        open_for_s: float = 0.0,
        **values: Any,
    ) -> None:
        """Put a transaction there."""
        self.coordinator[transactional_id] = coordinator
        self.transactions[transactional_id] = transaction_pb2.TransactionDescription(
            transactional_id=transactional_id,
            producer_id=producer[0],
            producer_epoch=producer[1],
            state=state,
            timeout_ms=60_000,
            started_ms=int((time.time() - open_for_s) * 1000) if open_for_s else 0,
            partitions=self._parts(partitions or {}),
            pending=self._parts(pending or {}),
            coordinator_id=coordinator,
            state_partition=7,
            **values,
        )

    def _parts(self, parts: Mapping[str, Iterable[int]]) -> list[group_pb2.TopicPartitions]:
        topics = self._cluster.topics
        return [
            group_pb2.TopicPartitions(topic_id=topics[name].topic_id, topic=name, partitions=numbers)
            for name, numbers in parts.items()
        ]

    def sink(self, sink_id: str, last_batch_id: int, target: str, coordinator: int = 1) -> None:
        """Put a sink there."""
        self.coordinator[sink_id] = coordinator
        self.sinks[sink_id] = transaction_pb2.LastBatchResponse(
            last_batch_id=last_batch_id, target=target, updated_ms=int(time.time() * 1000) - 90_000
        )

    def stage(
        self,
        sink_id: str,
        producer_id: int,
        batch_id: int,
        parts: Mapping[str, Iterable[int]],
        state: transaction_pb2.TransactionState.ValueType = transaction_pb2.TRANSACTION_ONGOING,
    ) -> None:
        """Put a stage there that stands."""
        self.sinks[sink_id].stages.add(
            producer_id=producer_id,
            batch_id=batch_id,
            state=state,
            started_ms=int(time.time() * 1000) - 5_000,
            timeout_ms=60_000,
            attempt=f"task {producer_id}",
            partitions=self._parts(parts),
        )

    def writes(
        self, part: TopicPartition, producer: tuple[int, int], start_offset: int = -1, open_for_s: float = 0.0
    ) -> None:
        """Let a partition know a producer, with a transaction open at `start_offset`."""
        known = self.producers.setdefault(
            part, transaction_pb2.PartitionProducers(last_stable_offset=100, high_watermark=120)
        )
        now_ms = int(time.time() * 1000)
        known.producers.add(
            producer_id=producer[0],
            producer_epoch=producer[1],
            last_sequence=-1 if start_offset < 0 else 9,
            last_append_ms=now_ms - 1_000,
            transaction_start_offset=start_offset,
            transaction_started_ms=int(now_ms - open_for_s * 1000) if start_offset >= 0 else 0,
        )


class ToolNode(TransactionNode):
    """The transaction service of one node."""

    cluster: ToolCluster

    async def _begin(self, method: str, id_: str = "") -> None:
        await self.cluster.awake(self.node)
        tools = self.cluster.tools
        tools.calls.append((self.node, method))
        if tools.refuse:
            raise tools.refuse.pop(0)
        if id_ and tools.coordinator.get(id_, 1) != self.node:
            raise NotCoordinator(f"broker {tools.coordinator.get(id_, 1)} coordinates {id_!r}")

    async def _end(self, context: _Context) -> None:
        if self.cluster.tools.mislaid_answers:
            self.cluster.tools.mislaid_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    async def FindCoordinator(
        self, request: transaction_pb2.FindTransactionCoordinatorRequest, context: _Context
    ) -> transaction_pb2.FindTransactionCoordinatorResponse:
        await self.cluster.awake(self.node)
        node = self.cluster.tools.coordinator.get(request.id, 1)
        return transaction_pb2.FindTransactionCoordinatorResponse(
            node_id=node, host="127.0.0.1", port=self.cluster.ports[node], partition=7
        )

    async def ListTransactions(
        self, request: transaction_pb2.ListTransactionsRequest, context: _Context
    ) -> transaction_pb2.ListTransactionsResponse:
        response = transaction_pb2.ListTransactionsResponse()
        tools = self.cluster.tools
        try:
            await self._begin("ListTransactions")
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
            return response
        now_ms = time.time() * 1000

        def add(state: Any, producer_id: int, started_ms: int, **names: str) -> None:
            longer_ms = request.running_longer_than_ms
            if (
                (not request.states or state in request.states)
                and (not request.producer_ids or producer_id in request.producer_ids)
                and (not longer_ms or (started_ms and now_ms - started_ms > longer_ms))
            ):
                response.transactions.add(producer_id=producer_id, state=state, started_ms=started_ms, **names)

        for id_, each in tools.transactions.items():
            if tools.coordinator[id_] == self.node:
                add(each.state, each.producer_id, each.started_ms, transactional_id=id_)
        for id_, sink in tools.sinks.items():
            if tools.coordinator[id_] == self.node:
                for stage in sink.stages:
                    add(stage.state, stage.producer_id, stage.started_ms, sink_id=id_)
                if not request.states and not request.producer_ids:
                    response.sinks.add(
                        sink_id=id_,
                        target=sink.target,
                        last_batch_id=sink.last_batch_id,
                        updated_ms=sink.updated_ms,
                        open_stages=sum(each.state == transaction_pb2.TRANSACTION_ONGOING for each in sink.stages),
                    )
        if self.node in tools.loading:
            response.loading.append(to_wire(tools.loading[self.node]))
        return response

    async def DescribeTransactions(
        self, request: transaction_pb2.DescribeTransactionsRequest, context: _Context
    ) -> transaction_pb2.DescribeTransactionsResponse:
        response = transaction_pb2.DescribeTransactionsResponse()
        for id_ in request.transactional_ids:
            try:
                await self._begin("DescribeTransactions", id_)
                response.transactions.append(self._transaction(id_))
            except RaftlogError as error:
                response.transactions.add(transactional_id=id_, error=to_wire(error))
        return response

    def _transaction(self, id_: str) -> transaction_pb2.TransactionDescription:
        found = self.cluster.tools.transactions.get(id_)
        if found is None:
            raise TransactionalIdNotFound(f"there is no transactional id {id_!r}")
        return found

    async def AbortTransaction(
        self, request: transaction_pb2.AbortTransactionRequest, context: _Context
    ) -> transaction_pb2.AbortTransactionResponse:
        try:
            await self._begin("AbortTransaction", request.transactional_id)
            found = self._transaction(request.transactional_id)
            if found.state != transaction_pb2.TRANSACTION_ONGOING:
                raise InvalidTxnState(f"{request.transactional_id!r} has no open transaction")
            found.state = transaction_pb2.COMPLETE_ABORT
        except RaftlogError as error:
            return transaction_pb2.AbortTransactionResponse(error=to_wire(error))
        return transaction_pb2.AbortTransactionResponse()

    async def LastBatch(
        self, request: transaction_pb2.LastBatchRequest, context: _Context
    ) -> transaction_pb2.LastBatchResponse:
        try:
            await self._begin("LastBatch", request.sink_id)
        except RaftlogError as error:
            return transaction_pb2.LastBatchResponse(error=to_wire(error))
        return self.cluster.tools.sinks.get(request.sink_id, transaction_pb2.LastBatchResponse(last_batch_id=-1))

    async def AbortStages(
        self, request: transaction_pb2.AbortStagesRequest, context: _Context
    ) -> transaction_pb2.AbortStagesResponse:
        try:
            await self._begin("AbortStages", request.sink_id)
        except RaftlogError as error:
            return transaction_pb2.AbortStagesResponse(error=to_wire(error))
        for stage in self.cluster.tools.sinks[request.sink_id].stages:
            if stage.producer_id in request.producer_ids and stage.state == transaction_pb2.TRANSACTION_ONGOING:
                stage.state = transaction_pb2.PREPARE_ABORT
        await self._end(context)
        return transaction_pb2.AbortStagesResponse()

    def _led(self, topic_id: bytes, number: int) -> TopicPartition:
        part = TopicPartition(self.cluster.named(topic_id, ""), number)
        leader = self.cluster.topics[part.topic].partitions[number].leader
        if leader != self.node:
            raise NotLeader(f"broker {leader} leads {part}")
        return part

    async def DescribeProducers(
        self, request: transaction_pb2.DescribeProducersRequest, context: _Context
    ) -> transaction_pb2.DescribeProducersResponse:
        response = transaction_pb2.DescribeProducersResponse()
        for topic in request.partitions:
            for number in topic.partitions:
                found = transaction_pb2.PartitionProducers(last_stable_offset=0, high_watermark=0)
                try:
                    await self._begin("DescribeProducers")
                    found = self.cluster.tools.producers.get(self._led(topic.topic_id, number), found)
                except RaftlogError as error:
                    found = transaction_pb2.PartitionProducers(error=to_wire(error))
                response.partitions.append(found)
        return response

    async def AbortHanging(
        self, request: transaction_pb2.AbortHangingRequest, context: _Context
    ) -> transaction_pb2.AbortHangingResponse:
        try:
            await self._begin("AbortHanging")
            part = self._led(request.topic_id, request.partition)
            for each in self.cluster.tools.producers[part].producers:
                if (each.producer_id, each.producer_epoch) == (request.producer_id, request.producer_epoch):
                    if each.transaction_start_offset != request.start_offset:
                        raise InvalidTxnState(f"no transaction begins at {request.start_offset}")
                    each.transaction_start_offset = -1
        except RaftlogError as error:
            return transaction_pb2.AbortHangingResponse(error=to_wire(error))
        await self._end(context)
        return transaction_pb2.AbortHangingResponse()


class ToolCluster(FakeCluster):
    """`with ToolCluster(nodes=2) as cluster: cluster.tools.transaction("billing", (7, 0))`."""

    transaction_node = ToolNode

    def __init__(self, nodes: int = 1) -> None:
        super().__init__(nodes)
        self.tools = FakeTools(self)
