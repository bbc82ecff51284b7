"""The `Transaction` service: producer ids, transactions and staged batches.

A call about a transactional id or a sink becomes a command of its coordinator's shard. Errors are values in responses.
Tools list, describe and abort transactions (KIP-664).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, MutableSequence
from typing import Any, Final, TypeVar

from broker.config.config import BrokerConfig
from broker.coordinator.internal_topics import InternalTopics, refuse_internal
from broker.coordinator.transactions.checks import MAX_NAMED, MAX_PARTITIONS, check_id, check_named
from broker.coordinator.transactions.commands import (
    Abort,
    AbortStages,
    AddTo,
    AddToStage,
    Command,
    CommitBatch,
    Describe,
    End,
    InitProducer,
    InitStage,
    LastBatch,
    List,
    NeedsProducerId,
)
from broker.coordinator.transactions.coordinators import TransactionCoordinators
from broker.coordinator.transactions.marker_sender import MarkerSender
from broker.coordinator.transactions.producer_ids import ProducerIds
from broker.coordinator.transactions.records import partition_messages
from broker.net.services.calls import Answer, Call, Context, all_of, ask, longest_wait_s
from broker.partition.partition import Partition
from broker.security.caller import Caller, Decisions, allowed_of, authorized_operations, caller
from broker.turns import in_turns
from raftlog.errors import (
    BrokerOverloaded,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    UnknownTopicId,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.v1 import transaction_pb2 as pb
from raftlog.v1 import transaction_pb2_grpc
from raftlog.v1.group_pb2 import TopicPartitions
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage
from raftmeta.producer_ids import ProducerOwner


def check_partitions(image: MetadataImage, topics: Collection[TopicPartitions]) -> None:
    """Check that a transaction may write to these partitions, and that its markers can reach them.

    Raises:
        InvalidTopic: a topic is internal.
        UnknownTopicId, UnknownTopicOrPartition: this broker's metadata has no such topic or partition.
        InvalidRequestError: there are too many.
    """
    count = sum(len(topic.partitions) for topic in topics)
    if max(count, len(topics)) > MAX_PARTITIONS:
        raise InvalidRequestError(f"the request names {count} partitions, a transaction may have {MAX_PARTITIONS}")
    for topic in topics:
        known = image.topics.get(topic.topic_id)
        if known is None:
            raise UnknownTopicId(
                f"topic id {topic.topic_id.hex()} is not in this broker's metadata: deleted or new; refresh metadata"
            )
        refuse_internal(known.name, "has no transactions")
        wrong = [number for number in topic.partitions if not 0 <= number < len(known.partitions)]
        if wrong:
            raise UnknownTopicOrPartition(
                f"topic {known.name!r} has no partition {wrong[0]}, it has {len(known.partitions)} in this broker's "
                "metadata; refresh metadata"
            )


def name_topics(image: MetadataImage, topics: Iterable[TopicPartitions]) -> None:
    """Fill in the names of the topics that still exist."""
    for topic in topics:
        known = image.topics.get(topic.topic_id)
        if known is not None:
            topic.topic = known.name


def leave_out_topics(topics: MutableSequence[TopicPartitions], who: Caller) -> None:
    """Remove the topics that the caller may not describe, and deleted topics, whose ACLs cannot be checked."""
    if who.authorizer is not None:
        shown = [topic for topic in topics if topic.topic and who.may(Acl.DESCRIBE, Acl.TOPIC, topic.topic, log=False)]
        del topics[:]
        topics.extend(shown)


MAX_DESCRIBED: Final = 1_000
"""Partitions that one request may name; each may have a hundred thousand producers."""
MAX_PRODUCERS: Final = 250_000
"""Producers in one answer: 10 MB, and several times as much while it is made."""
PRODUCERS_AT_A_TIME: Final = 1_000
"""After so many an answer counts as a long one (`broker/net/answers.py`)."""

_R = TypeVar("_R", bound=Answer)
CommandWithId = Callable[[Call, int], Command]


class TransactionService(transaction_pb2_grpc.TransactionServicer):
    """Answers with errors as values. `find` returns a partition on this broker, or raises RaftlogError."""

    def __init__(
        self,
        coordinators: TransactionCoordinators,
        markers: MarkerSender,
        producer_ids: ProducerIds,
        topics: InternalTopics,
        config: BrokerConfig,
        image: Callable[[], MetadataImage],
        find: Callable[[bytes, int], Partition],
    ) -> None:
        self._coordinators = coordinators
        self._markers = markers
        self._producer_ids = producer_ids
        self._topics = topics
        self._config = config
        self._image = image
        self._find = find

    # Producers

    async def InitProducerId(self, request: pb.InitProducerIdRequest, context: Context) -> pb.InitProducerIdResponse:
        """Return an unused producer id, or the next epoch of a transactional id."""
        response = pb.InitProducerIdResponse(producer_id=-1, producer_epoch=-1)
        if request.transactional_id:
            try:
                key = await self._producer_ids.key()
            except RaftlogError as error:
                response.error.CopyFrom(to_wire(error))
                return response
            user = caller.get().user
            return await self._ask(
                request.transactional_id,
                lambda call: InitProducer(call, request, key=key, user=user),
                response,
                context,
                with_id=lambda call, producer_id: InitProducer(call, request, producer_id, key, user),
                owner=ProducerOwner.transactional(request.transactional_id),
            )
        try:
            owner = ProducerOwner.principal(caller.get().principal)
            response.producer_id = await self._producer_ids.take(owner)
            response.producer_epoch = 0
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
        return response

    async def FindCoordinator(
        self, request: pb.FindTransactionCoordinatorRequest, context: Context
    ) -> pb.FindTransactionCoordinatorResponse:
        """Return the coordinator of a transactional id; the first call creates __transaction_state."""
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
        if request.group_ids:  # a marker for a group needs the group's coordinator
            try:
                await self._topics.consumer_offsets()
            except RaftlogError as error:
                response.error.CopyFrom(to_wire(error))
                return response
        user = caller.get().user
        return await self._ask(
            request.transactional_id,
            lambda call: AddTo(call, request, user),
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
        user = caller.get().user
        return await self._ask(
            request.sink_id,
            lambda call: InitStage(call, request, user=user),
            pb.InitStageResponse(producer_id=-1, producer_epoch=-1, last_batch_id=-1),
            context,
            partitions=request.partitions,
            with_id=lambda call, producer_id: InitStage(call, request, producer_id, user),
            owner=ProducerOwner.sink(request.sink_id),
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
        response, user = pb.AbortStagesResponse(), caller.get().user
        return await self._ask(request.sink_id, lambda call: AbortStages(call, request, user), response, context)

    async def CommitBatch(self, request: pb.CommitBatchRequest, context: Context) -> pb.CommitBatchResponse:
        """Commit a batch: the winning stages, and no others."""
        response, user = pb.CommitBatchResponse(last_batch_id=-1), caller.get().user
        return await self._ask(request.sink_id, lambda call: CommitBatch(call, request, user), response, context)

    async def LastBatch(self, request: pb.LastBatchRequest, context: Context) -> pb.LastBatchResponse:
        """Return the last batch that a sink has committed, and its open stages."""
        response = pb.LastBatchResponse(last_batch_id=-1)
        answer = await self._ask(request.sink_id, lambda call: LastBatch(call, request), response, context)
        for stage in answer.stages:
            name_topics(self._image(), stage.partitions)
        return answer

    # Tools: coordinators

    async def ListTransactions(
        self, request: pb.ListTransactionsRequest, context: Context
    ) -> pb.ListTransactionsResponse:
        """Return the transactions and sinks that this broker coordinates."""
        try:
            check_named("producer ids", len(request.producer_ids), MAX_NAMED)
        except InvalidRequestError as error:
            return pb.ListTransactionsResponse(error=to_wire(error))
        wait_s = self._wait_s(context)
        answers = await asyncio.gather(
            *(ask(shard, lambda call: List(call, request), wait_s) for _, shard in self._coordinators.shards()),
            return_exceptions=True,
        )
        response = pb.ListTransactionsResponse()
        awaited = self._coordinators.awaited()
        response.loading.extend(to_wire(self._coordinators.about_to_be_loaded(partition)) for partition in awaited)
        response.loading.extend(to_wire(answer) for answer in answers if isinstance(answer, BaseException))
        listed = [answer for answer in answers if not isinstance(answer, BaseException)]
        transactions, sinks = await asyncio.to_thread(_parts, listed)
        ids = Decisions.of(caller.get(), Acl.DESCRIBE, Acl.TRANSACTIONAL_ID, log=False)
        transactions = await allowed_of(ids, transactions, lambda each: each.transactional_id or each.sink_id)
        sinks = await allowed_of(ids, sinks, lambda each: each.sink_id)
        await asyncio.to_thread(_add_sorted, response, transactions, sinks)
        return response

    async def DescribeTransactions(
        self, request: pb.DescribeTransactionsRequest, context: Context
    ) -> pb.DescribeTransactionsResponse:
        """Return the state of the named transactional ids."""
        ids = request.transactional_ids
        why = ""
        if len(ids) > MAX_NAMED:
            why = f"the request names {len(ids)} ids, one may have {MAX_NAMED}"
        elif len(set(ids)) < len(ids):
            why = "the request names an id twice; name each once"
        if why:
            refusal = to_wire(InvalidRequestError(why))
            described = [pb.TransactionDescription(error=refusal, transactional_id=key) for key in ids]
        else:
            wait_s = self._wait_s(context)
            described = await all_of(self._describe(key, wait_s) for key in ids)
        if request.include_authorized_operations:
            for each in described:
                if not each.error.code:
                    each.authorized_operations = authorized_operations(
                        caller.get(), Acl.TRANSACTIONAL_ID, each.transactional_id
                    )
        return pb.DescribeTransactionsResponse(transactions=described)

    async def _describe(self, key: str, wait_s: float) -> pb.TransactionDescription:
        try:
            partition, shard = self._coordinators.shard_of(key)
            answer = await ask(shard, lambda call: Describe(call, key), wait_s)
        except RaftlogError as error:
            return pb.TransactionDescription(
                error=to_wire(error),
                transactional_id=key,
                producer_id=-1,
                producer_epoch=-1,
                coordinator_id=-1,
                state_partition=-1,
            )
        assert isinstance(answer, pb.TransactionDescription), "each command has one type of answer"
        answer.coordinator_id, answer.state_partition = self._config.node_id, partition
        left = self._markers.left_of(key)
        if left is not None:
            del answer.pending[:]
            answer.pending.extend(partition_messages(target for target in left if not isinstance(target, str)))
        name_topics(self._image(), answer.partitions)
        name_topics(self._image(), answer.pending)
        leave_out_topics(answer.partitions, caller.get())
        leave_out_topics(answer.pending, caller.get())
        return answer

    async def AbortTransaction(
        self, request: pb.AbortTransactionRequest, context: Context
    ) -> pb.AbortTransactionResponse:
        """Abort a producer's open transaction, and fence the producer."""
        key = request.transactional_id
        return await self._ask(key, lambda call: Abort(call, key), pb.AbortTransactionResponse(), context)

    # Tools: leaders of partitions

    async def DescribeProducers(
        self, request: pb.DescribeProducersRequest, context: Context
    ) -> pb.DescribeProducersResponse:
        """Return the producers of partitions that this broker leads, or has, and their open transactions.

        Partitions whose producers do not fit into MAX_PRODUCERS, with those before, get BROKER_OVERLOADED.
        """
        keys = [(topic.topic_id, number) for topic in request.partitions for number in topic.partitions]
        response = pb.DescribeProducersResponse()
        refusal: RaftlogError | None = None
        if len(keys) > MAX_DESCRIBED:
            refusal = InvalidRequestError(f"the request names {len(keys)} partitions, one may have {MAX_DESCRIBED}")
        elif len(set(keys)) < len(keys):
            refusal = InvalidRequestError("the request names a partition twice; name each once")
        told = 0

        def described_now(key: tuple[bytes, int]) -> int:
            return 1 + len(response.partitions[-1].producers)

        async for topic_id, number in in_turns(keys, PRODUCERS_AT_A_TIME, described_now):
            described = pb.PartitionProducers(topic_id=topic_id, partition=number)
            try:
                if refusal is not None:
                    raise refusal
                partition = self._find(topic_id, number)
                if not request.any_replica:
                    partition.check_serving()
                count = len(partition.log.producers)
                if told + count > MAX_PRODUCERS:
                    raise BrokerOverloaded(
                        f"{partition.topic_partition} has {count} producers and the answer {told}, {MAX_PRODUCERS} at "
                        "most: describe it in another request"
                    )
                told += count
                described.last_stable_offset = partition.last_stable_offset
                described.high_watermark = partition.high_watermark
                await asyncio.to_thread(_add_producers, described, partition)
            except RaftlogError as error:
                described.error.CopyFrom(to_wire(error))
            response.partitions.append(described)
        return response

    async def AbortHanging(self, request: pb.AbortHangingRequest, context: Context) -> pb.AbortHangingResponse:
        """Write an abort marker for a transaction that no coordinator knows."""
        response = pb.AbortHangingResponse()
        aborted = asyncio.get_running_loop().create_future()

        def answer(error: RaftlogError | None) -> None:
            if not aborted.done():
                aborted.set_result(error)

        wait_s = self._wait_s(context)
        try:
            partition = self._find(request.topic_id, request.partition)
            partition.abort_hanging(request.producer_id, request.producer_epoch, request.start_offset, answer)
            await asyncio.wait((aborted,), timeout=wait_s)
            if not aborted.done():
                raise RequestTimedOut(
                    f"{partition.topic_partition}: the marker was not committed within {wait_s * 1000:.0f} ms; it may "
                    "still be"
                )
            if (error := aborted.result()) is not None:
                raise error
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
        return response

    # Commands to a shard

    async def _ask(
        self,
        key: str,
        command: Callable[[Call], Command],
        response: _R,
        context: Context,
        *,
        partitions: Collection[TopicPartitions] = (),
        with_id: CommandWithId | None = None,
        owner: ProducerOwner | None = None,
    ) -> _R:
        """Return the shard's answer, or `response` with the error.

        `partitions`: checked first, as partitions of the transaction. `with_id`: makes the command with a new producer
        id of `owner`, if the shard refuses it without one.
        """
        wait_s = self._wait_s(context)
        try:
            check_partitions(self._image(), partitions)
            shard = self._coordinators.shard_of(key)[1]
            try:
                answer = await ask(shard, command, wait_s)
            except NeedsProducerId:
                assert with_id is not None, "this command needs no producer id"
                assert owner is not None, "and an id has an owner"
                make, producer_id = with_id, await self._producer_ids.take(owner)
                answer = await ask(shard, lambda call: make(call, producer_id), wait_s)
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
            return response
        assert isinstance(answer, type(response)), "each command has one type of answer"
        return answer

    def _wait_s(self, context: Context) -> float:
        return longest_wait_s(context, self._config.request_timeout_ms)


def _parts(answers: Iterable[Any]) -> tuple[list[pb.ListedTransaction], list[pb.ListedSink]]:
    transactions: list[pb.ListedTransaction] = []
    sinks: list[pb.ListedSink] = []
    for answer in answers:
        transactions += answer.transactions
        sinks += answer.sinks
    return transactions, sinks


def _add_sorted(
    response: pb.ListTransactionsResponse, transactions: list[pb.ListedTransaction], sinks: list[pb.ListedSink]
) -> None:
    transactions.sort(key=lambda each: (each.transactional_id, each.sink_id, each.producer_id))
    response.transactions.extend(transactions)
    response.sinks.extend(sorted(sinks, key=lambda each: each.sink_id))


def _add_producers(described: pb.PartitionProducers, partition: Partition) -> None:
    for producer in partition.describe_producers():
        described.producers.add(
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            last_sequence=producer.last_sequence,
            last_append_ms=producer.last_append_ms,
            transaction_start_offset=producer.transaction_start_offset,
            transaction_started_ms=producer.transaction_started_ms,
        )
