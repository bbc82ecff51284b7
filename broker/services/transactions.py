"""The `Transaction` service: producer ids, transactions and staged batches.

Calls about a transactional id or a sink become commands of the shard that it belongs to; errors are values in
responses. `transaction_tools.py` has what tools ask.
"""

from __future__ import annotations

from broker.services.calls import Context
from broker.services.transaction_tools import TransactionTools
from broker.services.transaction_topics import name_topics
from broker.transactions.checks import check_id
from broker.transactions.commands import (
    AbortStages,
    AddTo,
    AddToStage,
    CommitBatch,
    End,
    InitProducer,
    InitStage,
    LastBatch,
)
from raftlog.errors import RaftlogError, to_wire
from raftlog.v1 import transaction_pb2 as pb


class TransactionService(TransactionTools):
    """All of the service."""

    # Producers

    async def InitProducerId(self, request: pb.InitProducerIdRequest, context: Context) -> pb.InitProducerIdResponse:
        """Give out a producer id that nobody has had, or the next epoch of a transactional id."""
        response = pb.InitProducerIdResponse(producer_id=-1, producer_epoch=-1)
        if request.transactional_id:
            return await self._ask(
                request.transactional_id,
                lambda call: InitProducer(call, request),
                response,
                context,
                with_id=lambda call, producer_id: InitProducer(call, request, producer_id),
            )
        try:
            response.producer_id = await self._producer_ids.take()
            response.producer_epoch = 0
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
        return response

    async def FindCoordinator(
        self, request: pb.FindTransactionCoordinatorRequest, context: Context
    ) -> pb.FindTransactionCoordinatorResponse:
        """Return who coordinates an id; the first one to ask has __transaction_state made."""
        response = pb.FindTransactionCoordinatorResponse(node_id=-1, partition=-1)
        try:
            check_id("transactional id or sink id", request.id)
            await self._topics.transaction_state()
            response.partition, broker = self._coordinators.named(request.id)
            response.node_id, response.host, response.port = broker.broker_id, broker.host, broker.port
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
        return response

    async def AddToTransaction(
        self, request: pb.AddToTransactionRequest, context: Context
    ) -> pb.AddToTransactionResponse:
        """Begin a transaction, or add partitions and groups to it."""
        response = pb.AddToTransactionResponse()
        if request.group_ids:  # else a marker for a group might have nobody to go to
            try:
                await self._topics.consumer_offsets()
            except RaftlogError as error:
                response.error.CopyFrom(to_wire(error))
                return response
        return await self._ask(
            request.transactional_id,
            lambda call: AddTo(call, request),
            response,
            context,
            partitions=request.partitions,
        )

    async def EndTransaction(self, request: pb.EndTransactionRequest, context: Context) -> pb.EndTransactionResponse:
        """Commit or abort a transaction."""
        response = pb.EndTransactionResponse(producer_epoch=-1)
        return await self._ask(request.transactional_id, lambda call: End(call, request), response, context)

    # Staged batches

    async def InitStage(self, request: pb.InitStageRequest, context: Context) -> pb.InitStageResponse:
        """Begin a stage of a sink's batch."""
        return await self._ask(
            request.sink_id,
            lambda call: InitStage(call, request),
            pb.InitStageResponse(producer_id=-1, producer_epoch=-1, last_batch_id=-1),
            context,
            partitions=request.partitions,
            with_id=lambda call, producer_id: InitStage(call, request, producer_id),
        )

    async def AddToStage(self, request: pb.AddToStageRequest, context: Context) -> pb.AddToStageResponse:
        """Add partitions to a stage."""
        return await self._ask(
            request.sink_id,
            lambda call: AddToStage(call, request),
            pb.AddToStageResponse(),
            context,
            partitions=request.partitions,
        )

    async def AbortStages(self, request: pb.AbortStagesRequest, context: Context) -> pb.AbortStagesResponse:
        """Abort stages of a sink."""
        response = pb.AbortStagesResponse()
        return await self._ask(request.sink_id, lambda call: AbortStages(call, request), response, context)

    async def CommitBatch(self, request: pb.CommitBatchRequest, context: Context) -> pb.CommitBatchResponse:
        """Commit a batch: its winners, and no other stage."""
        response = pb.CommitBatchResponse(last_batch_id=-1)
        return await self._ask(request.sink_id, lambda call: CommitBatch(call, request), response, context)

    async def LastBatch(self, request: pb.LastBatchRequest, context: Context) -> pb.LastBatchResponse:
        """Return which batch a sink has committed last, and its open stages."""
        response = pb.LastBatchResponse(last_batch_id=-1)
        answer = await self._ask(request.sink_id, lambda call: LastBatch(call, request), response, context)
        for stage in answer.stages:
            name_topics(self._image(), stage.partitions)
        return answer
