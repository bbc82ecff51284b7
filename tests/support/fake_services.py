"""The services of a `FakeCluster`'s nodes: what of the wire contract clients depend on."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import grpc

from raftlog.errors import (
    InvalidRequestError,
    MessageTooLarge,
    NotLeader,
    OffsetOutOfRange,
    RaftlogError,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.format import decode_batch, parse_header
from raftlog.format.wire import MANY_REQUESTS
from raftlog.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    log_pb2,
    log_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
    transaction_pb2,
    transaction_pb2_grpc,
)

if TYPE_CHECKING:
    from tests.support.fake_broker import FakeCluster, Partition


Broken = dict[tuple[bytes, int, int], int]
"""Broken chains of a stream, by topic id, partition and lane."""


class Node(log_pb2_grpc.LogServicer):
    """The data path of one node."""

    def __init__(self, cluster: FakeCluster, node: int) -> None:
        self.cluster = cluster
        self.node = node

    async def Produce(  # type: ignore[override] # the generated class asks for an iterator, aio takes writes too
        self, requests: AsyncIterator[log_pb2.ProduceRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        faults = self.cluster.faults
        broken: Broken = {}
        answering: set[asyncio.Task[None]] = set()
        writing = asyncio.Lock()  # gRPC takes one write at a time

        async def answer(response: log_pb2.ProduceResponse) -> None:
            await asyncio.sleep(faults.ack_delay_s())
            await self.cluster.acks_released()
            await self.cluster.awake(self.node)
            async with writing:
                await context.write(response)
            self.cluster.answered += 1

        self.cluster.produce_calls.append(self.node)
        if faults.refuse_produce_calls:
            faults.refuse_produce_calls -= 1
            await self.cluster.acks_released()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        if self.cluster.serves_many and MANY_REQUESTS in tuple(context.invocation_metadata() or ()):
            await self.cluster.awake(self.node)
            if faults.late_headers:
                await self.cluster.acks_released()
            await context.send_initial_metadata((MANY_REQUESTS,))
        async for message in requests:
            await self.cluster.awake(self.node)
            self.cluster.messages.append(1 + len(message.more))
            self.cluster.left_lanes.extend(message.left_lanes)
            for request in (message, *message.more):
                self.cluster.requests.append((self.node, len(request.partitions)))
                if faults.drop_produce_before_append:
                    faults.drop_produce_before_append -= 1
                    if not faults.drop_produce_before_append:
                        await writing.acquire()
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped before")
                response = self._append_all(request, broken)
                if faults.drop_produce_after_append:
                    faults.drop_produce_after_append -= 1
                    if not faults.drop_produce_after_append:
                        await writing.acquire()
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "dropped after")
                is_refused = any(result.HasField("error") for result in response.results)
                if request.acks == log_pb2.NO_ACK and not is_refused:
                    continue
                if faults.swallow_acks:
                    faults.swallow_acks -= 1
                    continue
                task = asyncio.ensure_future(answer(response))
                answering.add(task)
                task.add_done_callback(answering.discard)
        await asyncio.gather(*answering)

    def _append_all(self, request: log_pb2.ProduceRequest, broken: Broken) -> log_pb2.ProduceResponse:
        response = log_pb2.ProduceResponse(correlation_id=request.correlation_id)
        for part in request.partitions:
            result = response.results.add()
            key = (part.topic_id, part.partition, request.lane)
            try:
                if part.chain <= broken.get(key, -1):
                    result.error.code = common_pb2.CHAIN_BROKEN
                    continue
                result.base_offset = self._append(part)
                result.log_append_time_ms = -1
            except RaftlogError as error:
                result.error.CopyFrom(to_wire(error))
                if isinstance(error, NotLeader) and error.leader_id > 0:
                    result.error.leader.host = "127.0.0.1"
                    result.error.leader.port = self.cluster.ports[error.leader_id]
                broken[key] = part.chain
        return response

    def _append(self, part: log_pb2.ProducePartition) -> int:
        faults = self.cluster.faults
        topic, partition = self.cluster.find(self.node, part.topic_id, part.partition, part.leader_epoch)
        partition.asked += 1
        if faults.refuse:
            raise faults.refuse.pop(0)
        refusal = faults.refuse_when(topic.name, part.partition, partition.asked)
        if refusal is not None:
            raise refusal
        if len(part.records) > faults.max_message_bytes:
            raise MessageTooLarge(f"{len(part.records)} bytes, max.message.bytes={faults.max_message_bytes}")
        return partition.append(part.records)

    async def OffsetForLeaderEpoch(
        self, request: log_pb2.OffsetForLeaderEpochRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> log_pb2.OffsetForLeaderEpochResponse:
        raise NotImplementedError

    async def Fetch(  # type: ignore[override] # as Produce
        self, requests: AsyncIterator[log_pb2.FetchRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        session = FetchSession(self.cluster, self.node, context)
        try:
            async for request in requests:
                await self.cluster.awake(self.node)
                session.handle(request)
        finally:
            session.stop()

    async def ListOffsets(
        self, request: log_pb2.ListOffsetsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> log_pb2.ListOffsetsResponse:
        response = log_pb2.ListOffsetsResponse()
        faults = self.cluster.faults
        await asyncio.sleep(faults.offsets_delay_s.get(self.node, 0.0))
        await self.cluster.awake(self.node)
        for part in request.partitions:
            result = response.results.add()
            try:
                _, partition = self.cluster.find(self.node, part.topic_id, part.partition, part.leader_epoch)
                if part.partition in faults.refuse_offsets:
                    raise faults.refuse_offsets[part.partition]
            except RaftlogError as error:
                result.error.CopyFrom(to_wire(error))
                continue
            at = part.at_offset if part.HasField("at_offset") else None
            result.offset, result.timestamp_ms = _offset_for(partition, part.timestamp_ms, at)
            result.leader_epoch = partition.leader_epoch
        return response

    async def DeleteRecords(
        self, request: log_pb2.DeleteRecordsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> log_pb2.DeleteRecordsResponse:
        response = log_pb2.DeleteRecordsResponse()
        for part in request.partitions:
            result = response.results.add()
            try:
                _, partition = self.cluster.find(self.node, part.topic_id, part.partition, -1)
            except RaftlogError as error:
                result.error.CopyFrom(to_wire(error))
                continue
            partition.start = partition.end if part.before_offset == -1 else part.before_offset
            partition.touch()
            result.log_start_offset = partition.start
        return response


def _offset_for(partition: Partition, timestamp_ms: int, at_offset: int | None) -> tuple[int, int]:
    if at_offset is not None:
        timestamp_ms = 0
    if timestamp_ms == -1:
        return partition.end, -1
    if timestamp_ms == -2:
        return partition.start, -1
    for batch in partition.batches:
        decoded = decode_batch(batch)
        rows = decoded.columns
        times = (
            rows.column("timestamp_ms").to_pylist()
            if "timestamp_ms" in rows.schema.names
            else [decoded.header.base_timestamp_ms] * rows.num_rows
        )
        for index, at in enumerate(times):
            if at >= timestamp_ms and decoded.header.base_offset + index >= max(partition.start, at_offset or 0):
                return decoded.header.base_offset + index, at
    return -1, -1


class FetchSession:
    """One fetch stream: a task for each subscription, sharing the credit."""

    def __init__(self, cluster: FakeCluster, node: int, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.cluster = cluster
        self.node = node
        self.context = context
        self.credit = 0
        self.credited = asyncio.Event()
        self.highest_id = -1
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.frames: asyncio.Queue[log_pb2.FetchFrame] = asyncio.Queue()
        self.writer = asyncio.ensure_future(self._write_frames())

    def handle(self, request: log_pb2.FetchRequest) -> None:
        match request.WhichOneof("request"):
            case "open":
                self.credit = request.open.credit_bytes
                self.rack = request.open.rack
                self.max_frame_bytes = request.open.max_frame_bytes or 1 << 20
            case "subscribe":
                for part in request.subscribe.partitions:
                    if part.subscription_id <= self.highest_id:
                        raise InvalidRequestError("ids only grow")
                    self.highest_id = part.subscription_id
                    self.cluster.subscribed.append((self.node, part))
                    self.tasks[part.subscription_id] = asyncio.ensure_future(self._push(part))
            case "unsubscribe":
                for subscription_id in request.unsubscribe.subscription_ids:
                    task = self.tasks.pop(subscription_id, None)
                    if task is not None:
                        task.cancel()
            case "credit":
                self.credit += request.credit.bytes
                self.credited.set()

    def stop(self) -> None:
        for task in (*self.tasks.values(), self.writer):
            task.cancel()

    def _write(self, frame: log_pb2.FetchFrame) -> None:
        self.credit -= len(frame.records)
        self.cluster.least_credit = min(self.cluster.least_credit, self.credit)
        self.frames.put_nowait(frame)

    async def _write_frames(self) -> None:
        """One writer: a write that is cancelled half-way would break the stream."""
        faults = self.cluster.faults
        while True:
            frame = await self.frames.get()
            await self.cluster.awake(self.node)
            await self.context.write(
                log_pb2.FetchResponse(frames=[frame, frame] if faults.duplicate_frames else [frame])
            )
            if faults.drop_fetch_after_frames:
                faults.drop_fetch_after_frames -= 1
                if not faults.drop_fetch_after_frames:
                    await self.context.abort(grpc.StatusCode.UNAVAILABLE, "dropped")

    def _nearer(self, part: log_pb2.FetchPartition) -> int | None:
        if part.from_follower or not self.rack or self.cluster.racks.get(self.node) == self.rack:
            return None
        return next((node for node, rack in self.cluster.racks.items() if rack == self.rack), None)

    async def _push(self, part: log_pb2.FetchPartition) -> None:
        position = part.offset
        announced = False
        while True:
            try:
                _, partition = self.cluster.find(
                    self.node, part.topic_id, part.partition, part.leader_epoch, from_follower=part.from_follower
                )
                if part.from_follower and self.cluster.faults.refuse_followers:
                    raise self.cluster.faults.refuse_followers.pop(0)
                if (nearer := self._nearer(part)) is not None:
                    self._write(log_pb2.FetchFrame(subscription_id=part.subscription_id, preferred_read_replica=nearer))
                    return
                changed = partition.changed
                if partition.truncated is not None and not announced:
                    epoch, end = partition.truncated
                    if 0 <= part.last_fetched_epoch <= epoch and position > end:
                        error = OffsetOutOfRange(f"offset {position}: it was truncated")
                        self._write(
                            log_pb2.FetchFrame(
                                subscription_id=part.subscription_id, error=to_wire(error), diverging_offset=end
                            )
                        )
                        return
                if not partition.start <= position <= partition.end:
                    raise OffsetOutOfRange(f"offset {position}, the log has {partition.start} to {partition.end}")
            except RaftlogError as error:
                self._write(log_pb2.FetchFrame(subscription_id=part.subscription_id, error=to_wire(error)))
                return
            while self.credit <= 0:
                self.credited.clear()
                await self.credited.wait()
            first = bisect_right(partition.batches, position, key=lambda batch: parse_header(batch).next_offset)
            taken: list[bytes] = []
            room = self.max_frame_bytes
            for batch in islice(partition.batches, first, None):
                if taken and len(batch) > room:
                    break
                taken.append(batch)
                room -= len(batch)
            records = b"".join(taken)
            next_position = parse_header(taken[-1]).next_offset if taken else position
            faults = self.cluster.faults
            damaged = part.partition in faults.corrupt_partitions
            if (faults.corrupt_frames or damaged) and records:
                faults.corrupt_frames -= not damaged
                records = records[:-1] + bytes([records[-1] ^ 0xFF])
            if records or not announced:
                announced = True
                self._write(
                    log_pb2.FetchFrame(
                        subscription_id=part.subscription_id,
                        high_watermark=partition.end,
                        last_stable_offset=partition.end,
                        log_start_offset=partition.start,
                        records=records,
                    )
                )
            position = next_position
            if position >= partition.end:
                await changed.wait()


class MetadataNode(metadata_pb2_grpc.MetadataServicer):
    """Metadata as any node knows it."""

    Watch = None  # type: ignore[assignment] # unused: clients ask
    ApiVersions = None  # type: ignore[assignment] # unused: the SDK does not ask

    def __init__(self, cluster: FakeCluster, node: int) -> None:
        self.cluster = cluster
        self.node = node

    async def Get(
        self, request: metadata_pb2.MetadataRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> metadata_pb2.MetadataResponse:
        cluster = self.cluster
        if cluster.faults.metadata_down:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "metadata is down")
        await cluster.awake(self.node)
        cluster.metadata_asked.append(self.node)
        cluster.topics_asked.append(sorted(request.topics))
        offset, leaders = cluster.metadata_of(self.node)
        response = metadata_pb2.MetadataResponse(
            cluster_id="fake", controller_id=1, controller_epoch=1, metadata_offset=offset
        )
        for node, port in cluster.ports.items():
            response.brokers.add(broker_id=node, host="127.0.0.1", port=port, rack=cluster.racks.get(node, ""))
        for name in cluster.topics if request.all_topics else request.topics:
            info = response.topics.add(name=name)
            topic = cluster.topics.get(name)
            if topic is None or name not in leaders:
                info.error.CopyFrom(to_wire(UnknownTopicOrPartition(f"there is no topic {name!r}")))
                continue
            info.topic_id = topic.topic_id
            for index, (leader, leader_epoch) in enumerate(leaders[name]):
                info.partitions.add(
                    partition=index,
                    leader=leader,
                    leader_epoch=leader_epoch,
                    replicas=cluster.node_ids,
                    isr=cluster.node_ids,
                )
        return response


class AdminNode(admin_pb2_grpc.AdminServicer):
    """Supports topics only; tests with the real broker cover the rest."""

    AlterReassignments = DescribeReplicas = AlterClientQuotas = DescribeClientQuotas = None  # type: ignore[assignment] # unused
    AlterConfigs = CreatePartitions = DescribeConfigs = DescribeTopicConfigs = DescribeLogDirs = None  # type: ignore[assignment] # unused
    DescribeCluster = DescribeQuorum = ElectLeaders = UnregisterBroker = None  # type: ignore[assignment] # as well
    AlterBroker = UpdateFeature = None  # type: ignore[assignment] # as well

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    async def CreateTopic(
        self, request: admin_pb2.CreateTopicRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.CreateTopicResponse:
        if request.name in self.cluster.topics:
            return admin_pb2.CreateTopicResponse(error=to_wire(TopicAlreadyExists(f"topic {request.name!r} exists")))
        topic = self.cluster.new_topic(request.name, request.partitions or 1)
        if not request.validate_only:
            self.cluster.topics[request.name] = topic
        return admin_pb2.CreateTopicResponse(topic_id=topic.topic_id)

    async def DeleteTopic(
        self, request: admin_pb2.DeleteTopicRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DeleteTopicResponse:
        if self.cluster.topics.pop(request.name, None) is None:
            return admin_pb2.DeleteTopicResponse(error=to_wire(UnknownTopicOrPartition(request.name)))
        return admin_pb2.DeleteTopicResponse()


class TransactionNode(transaction_pb2_grpc.TransactionServicer):
    """Producer ids."""

    def __init__(self, cluster: FakeCluster, node: int) -> None:
        self.cluster = cluster
        self.node = node

    async def InitProducerId(
        self, request: transaction_pb2.InitProducerIdRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> transaction_pb2.InitProducerIdResponse:
        faults = self.cluster.faults
        await self.cluster.awake(self.node)
        await asyncio.sleep(faults.producer_ids_delay_s.get(self.node, 0.0))
        if faults.refuse_producer_ids:
            error = faults.refuse_producer_ids.pop(0)
            return transaction_pb2.InitProducerIdResponse(error=to_wire(error), producer_id=-1, producer_epoch=-1)
        self.cluster.last_producer_id += 1
        return transaction_pb2.InitProducerIdResponse(producer_id=self.cluster.last_producer_id, producer_epoch=0)
