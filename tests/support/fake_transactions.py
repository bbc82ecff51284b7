"""A `FakeCluster` with a transaction coordinator and partitions that know of transactions, for the client's tests.

The rules of the wire contract that clients depend on, in a few lines each: a transaction's epoch, markers, fencing, and
adding before writing. What a client does against them is noted in `violations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message

from raftlog.errors import (
    ConcurrentTransactions,
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    NotCoordinator,
    OutOfOrderSequence,
    ProducerFenced,
    RaftlogError,
    TransactionAbortable,
    UnknownTopicId,
    to_wire,
)
from raftlog.format import Attributes, Buffer, decode_batch, pack_stamp, parse_batch
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2, transaction_pb2
from tests.support.fake_broker import FakeCluster, Partition, Topic
from tests.support.fake_groups import GroupNode
from tests.support.fake_services import TransactionNode

LAST_EPOCH = 32766
"""Of a transaction; a marker may carry one more."""


class TransactionPartition(Partition):
    """A log with open, committed and aborted transactions."""

    def __init__(self, leader: int, cluster: TransactionCluster, part: TopicPartition) -> None:
        super().__init__(leader)
        self.cluster = cluster
        self.part = part
        self.epochs: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.seen: dict[tuple[int, int, int], int] = {}
        """Base offset by (producer id, epoch, base sequence)."""
        self.outcomes: dict[tuple[int, int], bool | None] = {}
        """By (producer id, epoch) that has written here: whether it is committed; None: it is open."""
        self.written: list[tuple[int, int, list[bytes | None]]] = []

    def append(self, batch: Buffer) -> int:
        header = parse_batch(batch)
        if not header.attributes & Attributes.TRANSACTIONAL:
            return super().append(batch)
        producer_id, epoch = header.producer_id, header.producer_epoch
        known = self.epochs.get(producer_id, -1)
        if epoch < known:
            raise InvalidProducerEpoch(f"epoch {epoch}, but {known} has begun")
        if epoch > known:
            if self.outcomes.get((producer_id, known), False) is None:
                raise InvalidTxnState(f"the transaction of epoch {known} is open")
            self.epochs[producer_id], self.sequences[producer_id] = epoch, 0
        place = (producer_id, epoch, header.base_sequence)
        if place in self.seen:
            self.duplicates += 1
            return self.seen[place]
        if header.base_sequence != self.sequences[producer_id]:
            raise OutOfOrderSequence(f"{header.base_sequence} instead of {self.sequences[producer_id]}")
        if not self.cluster.transactions.is_added(producer_id, epoch, self.part):
            self.cluster.transactions.violations.append(f"{self.part} was not added to epoch {epoch}")
        base = self.seen[place] = self.end
        self.sequences[producer_id] += header.record_count
        self.outcomes[producer_id, epoch] = None
        self.written.append((producer_id, epoch, decode_batch(batch).columns.column("value").to_pylist()))
        self.batches.append(pack_stamp(base, header.batch_length, self.leader_epoch) + bytes(batch[16:]))
        self.end = base + header.last_offset_delta + 1
        self.touch()
        return base

    def mark(self, producer_id: int, epoch: int, *, commit: bool) -> None:
        """Take a marker."""
        known = self.epochs.get(producer_id, -1)
        if epoch <= known:
            return
        if self.outcomes.get((producer_id, known), False) is None:
            self.outcomes[producer_id, known] = commit
        self.epochs[producer_id], self.sequences[producer_id] = epoch, 0
        self.end += 1
        self.touch()

    def committed(self) -> list[bytes | None]:
        """Every value of a committed transaction, in order."""
        return [value for pid, epoch, values in self.written if self.outcomes[pid, epoch] for value in values]


@dataclass
class FakeTransaction:
    """The coordinator's state of a transactional id."""

    producer_id: int
    epoch: int
    timeout_ms: int
    open: bool = False
    partitions: set[TopicPartition] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    offsets: dict[str, dict[TopicPartition, group_pb2.CommitOffset]] = field(default_factory=dict)
    ended_epoch: int = -1
    committed: bool = False
    timed_out: bool = False


class FakeTransactions:
    """All transactional ids of a cluster, the faults to inject, and the requests."""

    def __init__(self, cluster: TransactionCluster) -> None:
        self.cluster = cluster
        self.known: dict[str, FakeTransaction] = {}
        self.coordinator = 1
        self.refuse: list[RaftlogError | None] = []
        """What is said to the next calls, one each, instead of doing them; None: nothing goes wrong."""
        self.mislaid_answers = 0
        """So many calls to come break after they have done their work."""
        self.delay_s: Callable[[str], float] = lambda method: 0.0
        """By method: how long a call takes before it is looked at."""
        self.calls: list[tuple[str, Message]] = []
        """(method, request) of each call."""
        self.violations: list[str] = []

    def methods(self) -> list[str]:
        """Return the methods that were called, in order."""
        return [method for method, _ in self.calls]

    def is_added(self, producer_id: int, epoch: int, part: TopicPartition) -> bool:
        return any(
            each.producer_id == producer_id and each.epoch == epoch and each.open and part in each.partitions
            for each in self.known.values()
        )

    def init(self, request: transaction_pb2.InitProducerIdRequest) -> transaction_pb2.InitProducerIdResponse:
        known = self.known.get(request.transactional_id)
        if request.HasField("producer_id"):
            if known is None or known.producer_id != request.producer_id:
                raise InvalidProducerIdMapping("it has another producer id")
            goes_on = known.timed_out and request.producer_epoch == known.ended_epoch
            if request.producer_epoch != known.epoch and not goes_on:
                raise ProducerFenced(
                    f"epoch {request.producer_epoch} is over, {known.epoch} has begun: another producer uses this id"
                )
        if known is not None and known.open:
            self.decide(known, commit=False)
            known.ended_epoch = -1
            raise ConcurrentTransactions("what was open is being aborted")
        if known is None or known.epoch >= LAST_EPOCH:
            self.cluster.last_producer_id += 1
            known = FakeTransaction(self.cluster.last_producer_id, -1, 0)
        known.epoch += 1
        known.timeout_ms = request.transaction_timeout_ms
        known.timed_out, known.ended_epoch = False, -1
        self.known[request.transactional_id] = known
        return transaction_pb2.InitProducerIdResponse(producer_id=known.producer_id, producer_epoch=known.epoch)

    def _owned(self, transactional_id: str, producer_id: int, epoch: int) -> FakeTransaction:
        known = self.known.get(transactional_id)
        if known is None or known.producer_id != producer_id:
            raise InvalidProducerIdMapping("it has another producer id")
        if known.timed_out and epoch == known.ended_epoch:
            raise TransactionAbortable(f"the transaction timed out after {known.timeout_ms} ms; abort it")
        if epoch != known.epoch:
            raise ProducerFenced(f"epoch {epoch} is over, {known.epoch} has begun: another producer uses this id")
        return known

    def add(self, request: transaction_pb2.AddToTransactionRequest) -> transaction_pb2.AddToTransactionResponse:
        known = self._owned(request.transactional_id, request.producer_id, request.producer_epoch)
        names = {each.topic_id: name for name, each in self.cluster.topics.items()}
        for topic in request.partitions:
            if topic.topic_id not in names:
                raise UnknownTopicId(f"topic id {topic.topic_id.hex()} is not known here")
        known.open = True
        for topic in request.partitions:
            name = names[topic.topic_id]
            known.partitions |= {TopicPartition(name, number) for number in topic.partitions}
        known.groups |= set(request.group_ids)
        return transaction_pb2.AddToTransactionResponse()

    def end(self, request: transaction_pb2.EndTransactionRequest) -> transaction_pb2.EndTransactionResponse:
        known = self.known.get(request.transactional_id)
        if (
            known is not None
            and known.producer_id == request.producer_id
            and known.ended_epoch == request.producer_epoch >= 0
            and not (known.timed_out and request.commit)
        ):
            if request.commit != known.committed:
                raise InvalidTxnState("the other decision was made")
            return transaction_pb2.EndTransactionResponse(producer_epoch=known.epoch)
        known = self._owned(request.transactional_id, request.producer_id, request.producer_epoch)
        if known.open:
            self.decide(known, commit=request.commit)
        return transaction_pb2.EndTransactionResponse(producer_epoch=known.epoch)

    def decide(self, known: FakeTransaction, *, commit: bool) -> None:
        """Decide, and tell every partition and group at once."""
        known.ended_epoch, known.epoch = known.epoch, known.epoch + 1
        known.committed, known.open = commit, False
        for part in known.partitions:
            topic = self.cluster.topics.get(part.topic)
            if topic is not None:
                partition = topic.partitions[part.partition]
                assert isinstance(partition, TransactionPartition)
                partition.mark(known.producer_id, known.epoch, commit=commit)
        for group_id, offsets in known.offsets.items():
            group = self.cluster.groups.groups[group_id]
            group.pending -= set(offsets)
            if commit:
                group.offsets.update(offsets)
        known.partitions, known.groups, known.offsets = set(), set(), {}

    def time_out(self, transactional_id: str) -> None:
        """Let the coordinator abort what is open."""

        def abort() -> None:
            known = self.known[transactional_id]
            self.decide(known, commit=False)
            known.timed_out = True

        self.cluster.call(abort)

    def offsets(self, group_id: str, request: group_pb2.CommitTransactionOffsetsRequest) -> None:
        known = self.known.get(request.transactional_id)
        if known is None or known.producer_id != request.producer_id or known.epoch != request.producer_epoch:
            raise InvalidProducerEpoch("its transaction is over")
        if group_id not in known.groups:
            self.violations.append(f"group {group_id} was not added to epoch {known.epoch}")
        pending = known.offsets.setdefault(group_id, {})
        for offset in request.offsets:
            part = TopicPartition(self.cluster.named(offset.topic_id, offset.topic), offset.partition)
            pending[part] = offset
            self.cluster.groups.groups[group_id].pending.add(part)


class CoordinatorNode(TransactionNode):
    """The transaction service of one node."""

    @property
    def fakes(self) -> FakeTransactions:
        assert isinstance(self.cluster, TransactionCluster)
        return self.cluster.transactions

    async def FindCoordinator(
        self,
        request: transaction_pb2.FindTransactionCoordinatorRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> transaction_pb2.FindTransactionCoordinatorResponse:
        await self.cluster.awake(self.node)
        node = self.fakes.coordinator
        return transaction_pb2.FindTransactionCoordinatorResponse(
            node_id=node, host="127.0.0.1", port=self.cluster.ports[node], partition=3
        )

    async def _answer(self, method: str, request: Any, work: Callable[[Any], Any], response: Any, context: Any) -> Any:
        await self.cluster.awake(self.node)
        self.fakes.calls.append((method, request))
        await asyncio.sleep(self.fakes.delay_s(method))
        try:
            if self.fakes.coordinator != self.node:
                raise NotCoordinator(f"broker {self.fakes.coordinator} coordinates it")
            if self.fakes.refuse and (refusal := self.fakes.refuse.pop(0)) is not None:
                raise refusal
            answer = work(request)
        except RaftlogError as error:
            return response(error=to_wire(error))
        if self.fakes.mislaid_answers:
            self.fakes.mislaid_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return answer

    async def InitProducerId(
        self, request: transaction_pb2.InitProducerIdRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.InitProducerIdResponse:
        if not request.transactional_id:
            return await super().InitProducerId(request, context)
        response = transaction_pb2.InitProducerIdResponse
        answer = await self._answer("InitProducerId", request, self.fakes.init, response, context)
        assert isinstance(answer, response)
        return answer

    async def AddToTransaction(
        self, request: transaction_pb2.AddToTransactionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.AddToTransactionResponse:
        response = transaction_pb2.AddToTransactionResponse
        answer = await self._answer("AddToTransaction", request, self.fakes.add, response, context)
        assert isinstance(answer, response)
        return answer

    async def EndTransaction(
        self, request: transaction_pb2.EndTransactionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.EndTransactionResponse:
        response = transaction_pb2.EndTransactionResponse
        answer = await self._answer("EndTransaction", request, self.fakes.end, response, context)
        assert isinstance(answer, response)
        return answer


class TransactionGroupNode(GroupNode):
    """The group service of one node, with offsets in transactions."""

    async def CommitTransactionOffsets(
        self, request: group_pb2.CommitTransactionOffsetsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.CommitOffsetsResponse:
        assert isinstance(self.cluster, TransactionCluster)
        try:
            await self._begin("CommitTransactionOffsets", request.group_id)
            self.cluster.transactions.offsets(request.group_id, request)
        except RaftlogError as error:
            return group_pb2.CommitOffsetsResponse(error=to_wire(error))
        await self._end(context)
        return group_pb2.CommitOffsetsResponse(results=[group_pb2.CommitOffsetResult() for _ in request.offsets])


class TransactionCluster(FakeCluster):
    """`with TransactionCluster() as cluster: ... cluster.committed("t")`."""

    transaction_node = CoordinatorNode
    group_node = TransactionGroupNode

    def __init__(self, nodes: int = 1) -> None:
        super().__init__(nodes)
        self.transactions = FakeTransactions(self)

    def create_topic(self, name: str, partitions: int = 1) -> Topic:
        topic = super().create_topic(name, partitions)
        topic.partitions[:] = [
            TransactionPartition(each.leader, self, TopicPartition(name, number))
            for number, each in enumerate(topic.partitions)
        ]
        return topic

    def partitions(self, name: str) -> Iterable[TransactionPartition]:
        """Return the partitions of a topic."""
        for partition in self.topics[name].partitions:
            assert isinstance(partition, TransactionPartition)
            yield partition

    def committed(self, name: str) -> list[bytes | None]:
        """Return every committed value, partition after partition."""
        return self.call(lambda: [value for partition in self.partitions(name) for value in partition.committed()])
