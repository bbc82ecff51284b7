"""A sink's coordinator in memory, for staged batches: the rules of `CommitBatch`, and faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from raftlog.errors import (
    BatchAlreadyCommitted,
    NotCoordinator,
    RaftlogError,
    SinkMismatch,
    StageExpired,
    to_wire,
)
from raftlog.format import Attributes, decode_batch
from raftlog.v1 import group_pb2, transaction_pb2
from tests.support.fake_broker import FakeCluster
from tests.support.fake_services import TransactionNode


@dataclass
class FakeStage:
    """One stage, as the coordinator knows it."""

    sink_id: str
    batch_id: int
    attempt: str
    timeout_ms: int
    partitions: set[tuple[bytes, int]] = field(default_factory=set)
    state: str = "open"
    """open, committed or aborted."""


@dataclass
class FakeSink:
    """What is known of one sink."""

    last_batch_id: int = -1
    target: str = ""
    expire_after_ms: int = 0
    fences: list[tuple[int, str]] = field(default_factory=list)
    """(batch id, how attempts begin that were given up)."""


R = TypeVar("R")
Refuse = Callable[[str, Any], RaftlogError | None]


class FakeStages:
    """All sinks and stages of a cluster."""

    def __init__(self) -> None:
        self.sinks: dict[str, FakeSink] = {}
        self.stages: dict[int, FakeStage] = {}
        self.coordinator = 1
        """The node that coordinates all sinks."""
        self.calls: list[str] = []
        """The methods that were called, in order."""
        self.refuse: Refuse = lambda method, request: None
        """(method, request) -> a refusal instead of doing it."""
        self.lose_answers: list[str] = []
        """Methods whose next answer is lost: done, and the connection breaks."""
        self.delay_s: Callable[[str], float] = lambda method: 0.0

    def add(self, stage: FakeStage, partitions: list[group_pb2.TopicPartitions]) -> None:
        stage.partitions.update((each.topic_id, index) for each in partitions for index in each.partitions)

    def init(self, request: transaction_pb2.InitStageRequest, producer_id: int) -> None:
        sink = self.sinks.setdefault(request.sink_id, FakeSink(target=request.target))
        self._check_target(request.sink_id, sink, request.target)
        if request.batch_id <= sink.last_batch_id:
            raise BatchAlreadyCommitted(f"sink {request.sink_id!r} has committed batch {sink.last_batch_id}")
        if any(request.batch_id == batch and request.attempt.startswith(words) for batch, words in sink.fences):
            raise StageExpired(f"batch {request.batch_id} was given up")
        stage = FakeStage(request.sink_id, request.batch_id, request.attempt, request.timeout_ms)
        self.add(stage, list(request.partitions))
        self.stages[producer_id] = stage

    def commit(self, request: transaction_pb2.CommitBatchRequest) -> bool:
        """Decide; return whether the batch was committed before."""
        sink = self.sinks.setdefault(request.sink_id, FakeSink(target=request.target))
        self._check_target(request.sink_id, sink, request.target)
        named = [self.stages.get(each) for each in request.producer_ids]
        if request.batch_id <= sink.last_batch_id:
            if named and all(stage is not None and stage.state == "committed" for stage in named):
                return False  # a retry
            self.abort(list(request.producer_ids))
            return True
        for stage in named:
            if stage is None or stage.state != "open" or stage.batch_id != request.batch_id:
                raise StageExpired(f"a stage of batch {request.batch_id} is gone")
        for producer_id, stage in self.stages.items():
            if stage.sink_id == request.sink_id and stage.state == "open" and stage.batch_id <= request.batch_id:
                stage.state = "committed" if producer_id in request.producer_ids else "aborted"
        sink.last_batch_id, sink.expire_after_ms = request.batch_id, request.expire_after_ms
        return False

    def abort(self, producer_ids: list[int]) -> None:
        for each in producer_ids:
            stage = self.stages.get(each)
            if stage is not None and stage.state == "open":
                stage.state = "aborted"

    def fence(self, request: transaction_pb2.AbortStagesRequest) -> None:
        """Drop the stages of attempts that are given up, and have no other one of them begin."""
        for producer_id, stage in self.stages.items():
            of = stage.sink_id == request.sink_id and stage.batch_id == request.batch_id
            if of and stage.attempt.startswith(request.fenced_attempts):
                self.abort([producer_id])
        sink = self.sinks.setdefault(request.sink_id, FakeSink())
        sink.fences.append((request.batch_id, request.fenced_attempts))

    @staticmethod
    def _check_target(sink_id: str, sink: FakeSink, target: str) -> None:
        sink.target = sink.target or target
        if sink.target != target:
            raise SinkMismatch(f"sink {sink_id!r} writes to {sink.target!r}, not to {target!r}")


class StageNode(TransactionNode):
    """The stages' part of the Transaction service on one node."""

    cluster: FakeStageCluster

    async def FindCoordinator(
        self,
        request: transaction_pb2.FindTransactionCoordinatorRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> transaction_pb2.FindTransactionCoordinatorResponse:
        node = self.cluster.stages.coordinator
        return transaction_pb2.FindTransactionCoordinatorResponse(
            node_id=node, host="127.0.0.1", port=self.cluster.ports[node]
        )

    async def InitStage(
        self, request: transaction_pb2.InitStageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.InitStageResponse:
        def do() -> transaction_pb2.InitStageResponse:
            self.cluster.last_producer_id += 1
            producer_id = self.cluster.last_producer_id
            self.cluster.stages.init(request, producer_id)
            return transaction_pb2.InitStageResponse(producer_id=producer_id)

        return await self._answer("InitStage", request, transaction_pb2.InitStageResponse, do, context)

    async def AddToStage(
        self, request: transaction_pb2.AddToStageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.AddToStageResponse:
        def do() -> transaction_pb2.AddToStageResponse:
            stage = self.cluster.stages.stages.get(request.producer_id)
            if stage is None or stage.state != "open":
                raise StageExpired(f"stage {request.producer_id} is gone")
            self.cluster.stages.add(stage, list(request.partitions))
            return transaction_pb2.AddToStageResponse()

        return await self._answer("AddToStage", request, transaction_pb2.AddToStageResponse, do, context)

    async def AbortStages(
        self, request: transaction_pb2.AbortStagesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.AbortStagesResponse:
        def do() -> transaction_pb2.AbortStagesResponse:
            self.cluster.stages.abort(list(request.producer_ids))
            if request.fenced_attempts:
                self.cluster.stages.fence(request)
            return transaction_pb2.AbortStagesResponse()

        return await self._answer("AbortStages", request, transaction_pb2.AbortStagesResponse, do, context)

    async def CommitBatch(
        self, request: transaction_pb2.CommitBatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.CommitBatchResponse:
        def do() -> transaction_pb2.CommitBatchResponse:
            already = self.cluster.stages.commit(request)
            last = self.cluster.stages.sinks[request.sink_id].last_batch_id
            return transaction_pb2.CommitBatchResponse(last_batch_id=last, already_committed=already)

        return await self._answer("CommitBatch", request, transaction_pb2.CommitBatchResponse, do, context)

    async def LastBatch(
        self, request: transaction_pb2.LastBatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.LastBatchResponse:
        def do() -> transaction_pb2.LastBatchResponse:
            sink = self.cluster.stages.sinks.get(request.sink_id, FakeSink())
            response = transaction_pb2.LastBatchResponse(last_batch_id=sink.last_batch_id, target=sink.target)
            for producer_id, stage in self.cluster.stages.stages.items():
                if stage.sink_id == request.sink_id and stage.state == "open":
                    response.stages.add(
                        producer_id=producer_id,
                        batch_id=stage.batch_id,
                        state=transaction_pb2.TRANSACTION_ONGOING,
                        attempt=stage.attempt,
                    )
            return response

        return await self._answer("LastBatch", request, transaction_pb2.LastBatchResponse, do, context)

    async def _answer(
        self,
        method: str,
        request: Any,
        response: Callable[..., R],
        do: Callable[[], R],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> R:
        stages = self.cluster.stages
        await asyncio.sleep(stages.delay_s(method))
        stages.calls.append(method)
        try:
            if self.node != stages.coordinator:
                raise NotCoordinator(f"node {stages.coordinator} coordinates")
            refusal = stages.refuse(method, request)
            if refusal is not None:
                raise refusal
            answer = do()
        except RaftlogError as error:
            return response(error=to_wire(error))
        if method in stages.lose_answers:
            stages.lose_answers.remove(method)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return answer


class FakeStageCluster(FakeCluster):
    """A `FakeCluster` that knows stages. Its consumers see all records; `committed` has those that they should see."""

    transaction_node = StageNode

    def __init__(self, nodes: int = 1) -> None:
        super().__init__(nodes)
        self.stages = FakeStages()

    def by_stage(self, topic: str) -> dict[int, list[tuple[int, bytes | None]]]:
        """Return (partition, value) of all records, by the producer id of their stage, in the log's order."""
        found: dict[int, list[tuple[int, bytes | None]]] = {}

        def collect() -> None:
            for index, partition in enumerate(self.topics[topic].partitions):
                for batch in partition.batches:
                    decoded = decode_batch(batch)
                    assert decoded.header.attributes & Attributes.TRANSACTIONAL, (
                        "a stage has a batch that is not transactional"
                    )
                    stage = self.stages.stages[decoded.header.producer_id]
                    assert (self.topics[topic].topic_id, index) in stage.partitions, (
                        "a record was sent before its partition was added to the stage"
                    )
                    values = decoded.columns.column("value").to_pylist()
                    found.setdefault(decoded.header.producer_id, []).extend((index, value) for value in values)

        self.call(collect)
        return found

    def committed(self, topic: str) -> list[bytes | None]:
        """Return the values of committed stages."""
        return sorted(
            (
                value
                for producer_id, rows in self.by_stage(topic).items()
                if self.stages.stages[producer_id].state == "committed"
                for _, value in rows
            ),
            key=lambda value: value or b"",
        )
