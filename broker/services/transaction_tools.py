"""The part of the `Transaction` service that tools use: what is open, where, and how to end it (KIP-664)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, TypeVar

from broker.config import BrokerConfig
from broker.internal_topics import InternalTopics
from broker.marker_sender import MarkerSender
from broker.partition import Partition
from broker.producer_ids import ProducerIds
from broker.security.caller import caller
from broker.security.decisions import Decisions, allowed_of
from broker.services.calls import Answer, Call, Context, all_of, ask, longest_wait_s
from broker.services.transaction_topics import check_partitions, leave_out_topics, name_topics
from broker.transaction_coordinators import TransactionCoordinators
from broker.transactions.checks import MAX_NAMED, check_named
from broker.transactions.commands import Abort, Command, Describe, List, NeedsProducerId
from broker.transactions.records import partition_messages
from raftlog.errors import InvalidRequestError, RaftlogError, RequestTimedOut, to_wire
from raftlog.v1 import transaction_pb2 as pb
from raftlog.v1 import transaction_pb2_grpc
from raftlog.v1.group_pb2 import TopicPartitions
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage

MAX_DESCRIBED: Final = 1_000
"""Partitions whose producers one request may ask for: each may have a hundred thousand."""

_R = TypeVar("_R", bound=Answer)
CommandWithId = Callable[[Call, int], Command]


class TransactionTools(transaction_pb2_grpc.TransactionServicer):
    """Answers with errors as values. `find` returns a partition that is here, and raises where it is not."""

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

    # What coordinators know

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
        """Return what is known of transactional ids."""
        wait_s = self._wait_s(context)
        ids = request.transactional_ids
        if len(ids) > MAX_NAMED:
            refusal = to_wire(InvalidRequestError(f"the request names {len(ids)} ids, one may have {MAX_NAMED}"))
            described = [pb.TransactionDescription(error=refusal, transactional_id=key) for key in ids]
        else:
            described = await all_of(self._describe(key, wait_s) for key in ids)
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
        assert isinstance(answer, pb.TransactionDescription), "what the command says"
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
        """Abort what a producer has open, and fence it."""
        key = request.transactional_id
        return await self._ask(key, lambda call: Abort(call, key), pb.AbortTransactionResponse(), context)

    # What leaders of partitions know

    async def DescribeProducers(
        self, request: pb.DescribeProducersRequest, context: Context
    ) -> pb.DescribeProducersResponse:
        """Return the producers of partitions that this broker leads, and their open transactions."""
        keys = [(topic.topic_id, number) for topic in request.partitions for number in topic.partitions]
        response = pb.DescribeProducersResponse()
        refusal: RaftlogError | None = None
        if len(keys) > MAX_DESCRIBED:
            refusal = InvalidRequestError(f"the request names {len(keys)} partitions, one may have {MAX_DESCRIBED}")
        for topic_id, number in keys:
            described = pb.PartitionProducers(topic_id=topic_id, partition=number)
            try:
                if refusal is not None:
                    raise refusal
                partition = self._find(topic_id, number)
                partition.check_serving()
                described.last_stable_offset = partition.last_stable_offset
                described.high_watermark = partition.high_watermark
                await asyncio.to_thread(_add_producers, described, partition)
            except RaftlogError as error:
                described.error.CopyFrom(to_wire(error))
            response.partitions.append(described)
        return response

    async def AbortHanging(self, request: pb.AbortHangingRequest, context: Context) -> pb.AbortHangingResponse:
        """Write an abort marker for a transaction that no coordinator knows of."""
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
                    f"{partition.topic_partition}: the marker is not committed within {wait_s * 1000:.0f} ms; it may "
                    "yet be"
                )
            if (error := aborted.result()) is not None:
                raise error
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
        return response

    # How a shard is asked

    async def _ask(
        self,
        key: str,
        command: Callable[[Call], Command],
        response: _R,
        context: Context,
        *,
        partitions: Collection[TopicPartitions] = (),
        with_id: CommandWithId | None = None,
    ) -> _R:
        """Return the shard's answer, or `response` with the error.

        `partitions`: what is to be written to. `with_id`: the command once more, with a producer id of its own, if it
        turns out to need one.
        """
        wait_s = self._wait_s(context)
        try:
            check_partitions(self._image(), partitions)
            shard = self._coordinators.shard_of(key)[1]
            try:
                answer = await ask(shard, command, wait_s)
            except NeedsProducerId:
                assert with_id is not None, "this command needs none"
                make, producer_id = with_id, await self._producer_ids.take()
                answer = await ask(shard, lambda call: make(call, producer_id), wait_s)
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
            return response
        assert isinstance(answer, type(response)), "what the command says"
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
