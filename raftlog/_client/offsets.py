"""Looks offsets up at the leaders, by time or by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S, MetadataCache
from raftlog._core.backoff import Backoff
from raftlog.errors import (
    BrokerUnavailable,
    FencedError,
    LeaderNotAvailable,
    RaftlogError,
    RetriableError,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.types import OffsetAndTimestamp, TopicPartition
from raftlog.v1 import common_pb2, log_pb2, log_pb2_grpc

LATEST: Final = -1
EARLIEST: Final = -2
LARGEST_TIMESTAMP: Final = -3


class LookupOptions(Protocol):
    """The options that a look-up needs."""

    @property
    def default_api_timeout_ms(self) -> float: ...
    @property
    def request_timeout_ms(self) -> float: ...
    @property
    def backoff(self) -> Backoff: ...


class OffsetLookup:
    """`Log.ListOffsets` to every leader at once, again for what a leader refused, until the timeout."""

    def __init__(self, metadata: MetadataCache, connections: Connections, options: LookupOptions) -> None:
        self._metadata = metadata
        self._connections = connections
        self._options = options

    async def find(
        self, timestamps_ms: Mapping[TopicPartition, int], isolation: common_pb2.IsolationLevel.ValueType
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return for each partition the first offset at or after the time (or LATEST, EARLIEST, LARGEST_TIMESTAMP),
        None when there is no such record.

        Raises:
            RaftlogError: what a partition refused last, when `default.api.timeout.ms` has passed or it is final.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._options.default_api_timeout_ms / 1000
        for topic in {topic_partition.topic for topic_partition in timestamps_ms}:
            await self._metadata.topic(topic, self._options.default_api_timeout_ms)
        found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        failures = 0
        while True:
            error = await self._ask(
                {part: at for part, at in timestamps_ms.items() if part not in found}, isolation, found
            )
            if error is None:
                return found
            if not isinstance(error, (RetriableError, FencedError)) or loop.time() >= deadline:
                raise error
            if isinstance(error, UnknownTopicOrPartition) and loop.time() - started >= UNKNOWN_TOPIC_GRACE_S:
                raise error
            failures += 1
            await asyncio.sleep(self._options.backoff.pause_ms(failures) / 1000)
            try:
                await self._metadata.refresh()
            except RetriableError:
                if loop.time() >= deadline:
                    raise

    async def _ask(
        self,
        wanted: Mapping[TopicPartition, int],
        isolation: common_pb2.IsolationLevel.ValueType,
        found: dict[TopicPartition, OffsetAndTimestamp | None],
    ) -> RaftlogError | None:
        by_node: dict[int, list[TopicPartition]] = {}
        error: RaftlogError | None = None
        for part in wanted:
            topic = self._metadata.view.topics.get(part.topic)
            if topic is None or not 0 <= part.partition < len(topic.partitions):
                return UnknownTopicOrPartition(f"{part} does not exist")
            leader = self._metadata.leader(part)
            if leader is None:
                error = LeaderNotAvailable(f"{part} has no leader at the moment")
                continue
            by_node.setdefault(leader.broker_id, []).append(part)
        answers = await asyncio.gather(
            *(self._ask_node(node, parts, wanted, isolation, found) for node, parts in by_node.items())
        )
        return next((answer for answer in answers if answer is not None), error)

    async def _ask_node(
        self,
        node_id: int,
        parts: list[TopicPartition],
        wanted: Mapping[TopicPartition, int],
        isolation: common_pb2.IsolationLevel.ValueType,
        found: dict[TopicPartition, OffsetAndTimestamp | None],
    ) -> RaftlogError | None:
        address = self._metadata.address(node_id)
        if address is None:
            return BrokerUnavailable(f"broker {node_id} is not part of the cluster any more")
        request = log_pb2.ListOffsetsRequest(isolation_level=isolation)
        for part in parts:
            topic = self._metadata.view.topics[part.topic]
            request.partitions.add(
                topic_id=topic.topic_id,
                partition=part.partition,
                leader_epoch=topic.partitions[part.partition].leader_epoch,
                timestamp_ms=wanted[part],
            )
        stub = log_pb2_grpc.LogStub(self._connections.channel(address))
        try:
            response = await stub.ListOffsets(request, timeout=self._options.request_timeout_ms / 1000)
        except grpc.RpcError as error:
            return from_grpc(error, address)
        refusal: RaftlogError | None = None
        for part, result in zip(parts, response.results, strict=True):
            if result.HasField("error") and result.error.code:
                refusal = from_wire(result.error)
                self._metadata.learn(part.topic, part.partition, result.error)
            elif result.offset < 0:
                found[part] = None
            else:
                found[part] = OffsetAndTimestamp(result.offset, result.timestamp_ms, result.leader_epoch)
        return refusal
