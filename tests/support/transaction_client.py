"""A client of transactions over raw stubs: what the SDK does, step by step, and what a stranger's could do wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from grpc import aio

from raftlog.errors import NotLeader, RaftlogError, from_wire
from raftlog.format import Attributes, decode_batch, iter_headers
from raftlog.format.control import decode_control
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, log_pb2, log_pb2_grpc, metadata_pb2, metadata_pb2_grpc, transaction_pb2_grpc
from raftlog.v1 import transaction_pb2 as pb
from raftlog.v1.group_pb2 import TopicPartitions
from tests.support.batches import batch_of
from tests.support.raw_client import RawClient

TIMEOUT_S = 90.0
CALL_S = 5.0
CHANGE_S = 20.0
"""A change may have happened whose answer was not waited for, and then it is asked for twice."""
PAUSE_S = 0.02
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
NOT_FOUND_YET = {
    common_pb2.COORDINATOR_LOAD_IN_PROGRESS,
    common_pb2.COORDINATOR_NOT_AVAILABLE,
    common_pb2.NOT_COORDINATOR,
    common_pb2.BROKER_OVERLOADED,
    common_pb2.SHUTTING_DOWN,
}
PASSING = NOT_FOUND_YET | {
    common_pb2.REQUEST_TIMED_OUT,
    common_pb2.CONCURRENT_TRANSACTIONS,
    common_pb2.UNKNOWN_TOPIC_ID,
    common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
}


@dataclass(frozen=True)
class Identity:
    """What a producer is: its transactional id, producer id and epoch, and the next sequence of each partition."""

    transactional_id: str
    producer_id: int
    epoch: int
    sequences: dict[TopicPartition, int] = field(default_factory=dict)


class TransactionClient:
    """Channels to all brokers of a cluster."""

    def __init__(self, bootstrap: str) -> None:
        self.addresses = bootstrap.split(",")
        self._channels: dict[str, aio.Channel] = {}
        self._topic_ids: dict[str, bytes] = {}

    def channel(self, address: str) -> aio.Channel:
        """Return the channel to one broker."""
        if address not in self._channels:
            self._channels[address] = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    def stub(self, address: str) -> Any:
        """Return the Transaction stub of one broker."""
        return transaction_pb2_grpc.TransactionStub(self.channel(address))

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()

    # Who is asked

    async def find(self, key: str) -> pb.FindTransactionCoordinatorResponse:
        """Return who coordinates an id, asked of everyone until somebody knows."""
        until_s = time.monotonic() + TIMEOUT_S
        response: pb.FindTransactionCoordinatorResponse | None = None
        while time.monotonic() < until_s:
            for address in self.addresses:
                try:
                    request = pb.FindTransactionCoordinatorRequest(id=key)
                    response = await self.stub(address).FindCoordinator(request, timeout=CALL_S)
                except aio.AioRpcError:
                    continue
                assert response is not None
                if not response.HasField("error"):
                    return response
                if response.error.code not in PASSING:
                    raise from_wire(response.error)
            await asyncio.sleep(PAUSE_S)
        raise AssertionError(f"nobody coordinates {key}: {response}")

    async def coordinator_of(self, key: str) -> int:
        """Return the node that coordinates an id."""
        return (await self.find(key)).node_id

    async def call(self, key: str, method: str, request: Any, passing: Iterable[int] = PASSING) -> Any:
        """Return what the coordinator answers, once nothing that passes stands in between.

        Raises:
            RaftlogError: what it refuses for good.
        """
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            last: object
            try:
                found = await self.find(key)
                answer = await getattr(self.stub(f"{found.host}:{found.port}"), method)(request, timeout=CHANGE_S)
            except aio.AioRpcError as error:
                last = error
            else:
                if not answer.HasField("error") or answer.error.code == common_pb2.NONE:
                    return answer
                if answer.error.code not in passing:
                    raise from_wire(answer.error)
                last = answer
            assert time.monotonic() < until_s, last
            await asyncio.sleep(PAUSE_S)

    async def _metadata(self, topic: str) -> metadata_pb2.MetadataResponse:
        for address in self.addresses:
            try:
                stub = metadata_pb2_grpc.MetadataStub(self.channel(address))
                response: metadata_pb2.MetadataResponse = await stub.Get(
                    metadata_pb2.MetadataRequest(topics=[topic]), timeout=CALL_S
                )
            except aio.AioRpcError:
                continue
            if not response.topics[0].HasField("error"):
                return response
        raise NotLeader(f"nobody knows {topic}")

    async def topic_id(self, topic: str) -> bytes:
        """Return the id of a topic."""
        if topic not in self._topic_ids:
            self._topic_ids[topic] = (await self._metadata(topic)).topics[0].topic_id
        return self._topic_ids[topic]

    async def leader_channel(self, partition: TopicPartition) -> aio.Channel:
        """Return the channel to the leader of a partition.

        Raises:
            NotLeader: there is none now.
        """
        response = await self._metadata(partition.topic)
        described = next(each for each in response.topics[0].partitions if each.partition == partition.partition)
        broker = next((each for each in response.brokers if each.broker_id == described.leader), None)
        if broker is None:
            raise NotLeader(f"{partition} has no leader")
        return self.channel(f"{broker.host}:{broker.port}")

    async def _at_leader(self, partition: TopicPartition, ask: Callable[[aio.Channel], Any]) -> Any:
        until_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return await ask(await self.leader_channel(partition))
            except (TimeoutError, aio.AioRpcError) as error:
                last: object = error
            except RaftlogError as error:
                if not error.retriable:
                    raise
                last = error
            assert time.monotonic() < until_s, last
            await asyncio.sleep(PAUSE_S)

    async def by_id(self, *partitions: TopicPartition) -> list[TopicPartitions]:
        """Return partitions as requests name them."""
        return [TopicPartitions(topic_id=await self.topic_id(p.topic), partitions=[p.partition]) for p in partitions]

    # A producer

    async def init(self, transactional_id: str, *, timeout_ms: int = 60_000, known: Identity | None = None) -> Identity:
        """Begin with a transactional id, or go on with what `known` says."""
        request = pb.InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=timeout_ms)
        if known is not None:
            request.producer_id, request.producer_epoch = known.producer_id, known.epoch
        answer = await self.call(transactional_id, "InitProducerId", request)
        return Identity(transactional_id, answer.producer_id, answer.producer_epoch)

    async def add(self, who: Identity, *partitions: TopicPartition, groups: Iterable[str] = ()) -> None:
        """Add to the transaction."""
        request = pb.AddToTransactionRequest(
            transactional_id=who.transactional_id,
            producer_id=who.producer_id,
            producer_epoch=who.epoch,
            partitions=await self.by_id(*partitions),
            group_ids=groups,
        )
        await self.call(who.transactional_id, "AddToTransaction", request)

    async def produce(self, who: Identity, partition: TopicPartition, *values: bytes) -> int:
        """Append records of the transaction; return their first offset. Sent again with the same numbers on failure."""
        batch = batch_of(
            *values,
            timestamp_ms=int(time.time() * 1000),
            attributes=int(Attributes.TRANSACTIONAL),
            producer_id=who.producer_id,
            producer_epoch=who.epoch,
            base_sequence=who.sequences.get(partition, 0),
        )
        topic_id = await self.topic_id(partition.topic)

        async def send(channel: aio.Channel) -> int:
            client = RawClient(channel)
            try:
                result = await client.produce(topic_id, batch, partition=partition.partition)
            except AssertionError as error:  # the stream broke
                raise NotLeader(str(error)) from error
            finally:
                await client.close()
            if result.HasField("error") and result.error.code != common_pb2.NONE:
                raise from_wire(result.error)
            return result.base_offset

        offset: int = await self._at_leader(partition, send)
        who.sequences[partition] = who.sequences.get(partition, 0) + len(values)
        return offset

    async def end(self, who: Identity, *, commit: bool = True) -> Identity:
        """Commit, or abort; return who goes on."""
        request = pb.EndTransactionRequest(
            transactional_id=who.transactional_id,
            producer_id=who.producer_id,
            producer_epoch=who.epoch,
            commit=commit,
        )
        answer = await self.call(who.transactional_id, "EndTransaction", request)
        return replace(who, epoch=answer.producer_epoch, sequences={})

    async def transact(
        self, who: Identity, writes: dict[TopicPartition, list[bytes]], *, commit: bool = True
    ) -> Identity:
        """Run one transaction."""
        await self.add(who, *writes)
        for partition, values in writes.items():
            await self.produce(who, partition, *values)
        return await self.end(who, commit=commit)

    # A sink

    async def stage(
        self, sink_id: str, batch_id: int, writes: dict[TopicPartition, list[bytes]], *, timeout_ms: int = 60_000
    ) -> int:
        """Stage records; return the producer id that names the stage."""
        request = pb.InitStageRequest(
            sink_id=sink_id,
            batch_id=batch_id,
            target="t",
            partitions=await self.by_id(*writes),
            timeout_ms=timeout_ms,
            attempt="test",
        )
        answer = await self.call(sink_id, "InitStage", request)
        who = Identity("", answer.producer_id, answer.producer_epoch)
        for partition, values in writes.items():
            await self.produce(who, partition, *values)
        return who.producer_id

    async def commit_batch(
        self, sink_id: str, batch_id: int, *producer_ids: int, target: str = "t"
    ) -> pb.CommitBatchResponse:
        """Commit a batch."""
        request = pb.CommitBatchRequest(sink_id=sink_id, batch_id=batch_id, target=target, producer_ids=producer_ids)
        answer: pb.CommitBatchResponse = await self.call(sink_id, "CommitBatch", request)
        return answer

    async def last_batch(self, sink_id: str) -> pb.LastBatchResponse:
        """Ask for the last batch."""
        answer: pb.LastBatchResponse = await self.call(sink_id, "LastBatch", pb.LastBatchRequest(sink_id=sink_id))
        return answer

    # What is there

    async def end_offset(self, partition: TopicPartition, *, committed: bool = True) -> int:
        """Return the last stable offset, or the high watermark."""
        topic_id = await self.topic_id(partition.topic)
        request = log_pb2.ListOffsetsRequest(
            partitions=[
                log_pb2.ListOffsetsPartition(
                    topic_id=topic_id,
                    partition=partition.partition,
                    leader_epoch=-1,
                    timestamp_ms=-1,
                )
            ],
            isolation_level=common_pb2.READ_COMMITTED if committed else common_pb2.READ_UNCOMMITTED,
        )

        async def ask(channel: aio.Channel) -> int:
            answer = await log_pb2_grpc.LogStub(channel).ListOffsets(request, timeout=CALL_S)
            result = answer.results[0]
            if result.HasField("error") and result.error.code != common_pb2.NONE:
                raise from_wire(result.error)
            return int(result.offset)

        offset: int = await self._at_leader(partition, ask)
        return offset

    async def producers(self, partition: TopicPartition) -> pb.PartitionProducers:
        """Describe the producers of a partition."""
        request = pb.DescribeProducersRequest(partitions=await self.by_id(partition))

        async def ask(channel: aio.Channel) -> pb.PartitionProducers:
            stub: Any = transaction_pb2_grpc.TransactionStub(channel)
            answer = await stub.DescribeProducers(request, timeout=CALL_S)
            described: pb.PartitionProducers = answer.partitions[0]
            if described.HasField("error") and described.error.code != common_pb2.NONE:
                raise from_wire(described.error)
            return described

        described: pb.PartitionProducers = await self._at_leader(partition, ask)
        return described

    async def log(self, partition: TopicPartition) -> bytes:
        """Return all batches of a partition up to its high watermark."""
        topic_id, end_offset = await self.topic_id(partition.topic), await self.end_offset(partition, committed=False)

        async def read(channel: aio.Channel) -> bytes:
            call = RawClient(channel).fetch_call()
            opened = log_pb2.OpenFetchSession(isolation_level=common_pb2.READ_UNCOMMITTED, credit_bytes=1 << 30)
            wanted = log_pb2.FetchPartition(
                subscription_id=1, topic_id=topic_id, partition=partition.partition, leader_epoch=-1
            )
            data, position = b"", 0
            try:
                await call.write(log_pb2.FetchRequest(open=opened))
                await call.write(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[wanted])))
                while position < end_offset:
                    for frame in await RawClient.read_frames(call):
                        if frame.head.HasField("error") and frame.head.error.code != common_pb2.NONE:
                            raise from_wire(frame.head.error)
                        data += bytes(frame.records)
                    position = max((header.next_offset for _, header in iter_headers(data)), default=0)
            finally:
                call.cancel()
            return data

        found: bytes = await self._at_leader(partition, read)
        return found

    async def committed(self, partition: TopicPartition) -> list[bytes]:
        """Return the committed values of a partition, by its markers."""
        return committed_by_markers(await self.log(partition))


def committed_by_markers(data: bytes) -> list[bytes]:
    """Return the values of what the markers in whole batches say is committed, in the order of the log.

    An oracle: it knows nothing of last stable offsets and lists of aborted transactions.
    """
    open_of: dict[int, list[int]] = {}
    values: list[tuple[bytes, bool]] = []
    for position, header in iter_headers(data):
        if header.is_control:
            for marker in decode_control(data, position):
                for index in open_of.pop(marker.producer_id, []):
                    values[index] = (values[index][0], marker.commit)
            continue
        decoded = decode_batch(data, position).columns.column("value").to_pylist()
        is_open = bool(header.attributes & Attributes.TRANSACTIONAL)
        if is_open:
            open_of.setdefault(header.producer_id, []).extend(range(len(values), len(values) + len(decoded)))
        values += [(value, not is_open) for value in decoded]
    return [value for value, is_committed in values if is_committed]


@asynccontextmanager
async def transaction_client(bootstrap: str) -> AsyncIterator[TransactionClient]:
    """Connect to a cluster."""
    client = TransactionClient(bootstrap)
    try:
        yield client
    finally:
        await client.close()


def run_client(bootstrap: str, scenario: Callable[[TransactionClient], Awaitable[None]]) -> None:
    """Run a scenario with a client of its own."""

    async def connected() -> None:
        async with transaction_client(bootstrap) as client:
            await scenario(client)

    asyncio.run(connected())


async def all_ended(client: TransactionClient, *partitions: TopicPartition) -> None:
    """Return once nothing is open on the partitions."""
    for partition in partitions:
        async with asyncio.timeout(TIMEOUT_S):
            while not await _nothing_open(client, partition):  # noqa: ASYNC110 # a broker rings no bell
                await asyncio.sleep(0.05)


async def _nothing_open(client: TransactionClient, partition: TopicPartition) -> bool:
    return await client.end_offset(partition) >= await client.end_offset(partition, committed=False)
