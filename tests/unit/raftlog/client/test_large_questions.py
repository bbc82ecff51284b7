"""What brokers take in one request, clients split."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from broker.fetch_session import MAX_PARTS
from broker.services.bounds import MAX_REQUEST_BYTES
from broker.services.metadata import MAX_NAMED
from raftlog._client.connections import Connections
from raftlog._client.fetch_session import FetchSession
from raftlog._client.fetcher import Fetcher
from raftlog._client.metadata import MetadataCache
from raftlog._client.offsets import EARLIEST, OffsetLookup
from raftlog._client.options import AdminOptions, ConsumerOptions
from raftlog.errors import UnknownTopicOrPartition
from raftlog.types import OffsetAndTimestamp, TopicPartition
from raftlog.v1 import common_pb2, log_pb2, log_pb2_grpc, metadata_pb2

MANY = 25_000


def cache_of(options: AdminOptions) -> MetadataCache:
    return MetadataCache(
        Connections(), ["127.0.0.1:1"], max_age_ms=60_000, request_timeout_ms=1_000, pauses=options.pauses
    )


@pytest.mark.parametrize("all_topics", [False, True])
def test_topics_are_asked_for_in_pieces(monkeypatch: pytest.MonkeyPatch, *, all_topics: bool) -> None:
    async def main() -> None:
        cache = cache_of(AdminOptions.make({}, {}))
        asked: list[metadata_pb2.MetadataRequest] = []
        told: list[int] = []

        async def ask(
            addresses: Any, request: metadata_pb2.MetadataRequest, **options: Any
        ) -> metadata_pb2.MetadataResponse:
            asked.append(request)
            unknown = common_pb2.Error(code=common_pb2.UNKNOWN_TOPIC_OR_PARTITION, message="no")
            topics = [metadata_pb2.TopicInfo(name=name, error=unknown) for name in request.topics]
            return metadata_pb2.MetadataResponse(cluster_id="c", metadata_offset=1, topics=topics)

        monkeypatch.setattr(cache._inquiry, "ask", ask)
        cache.on_change(lambda: told.append(len(cache.view.missing)))
        cache.wanted = {f"{number:0>249}" for number in range(MANY)}
        cache.all_topics = all_topics
        try:
            await cache.refresh()
        finally:
            await cache.close()
            await cache._connections.close()
        names = [name for request in asked for name in request.topics]
        assert names == ([] if all_topics else sorted(cache.wanted))
        assert len(asked) == (1 if all_topics else len(told))
        assert all(len(request.topics) <= MAX_NAMED for request in asked)
        assert all(request.ByteSize() <= MAX_REQUEST_BYTES for request in asked), "with the longest names, too"
        assert all(isinstance(error, UnknownTopicOrPartition) for error in cache.view.missing.values())
        assert told[-1] == len(cache.view.missing) == len(names)

    asyncio.run(main())


def test_without_topics_there_is_one_question_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        cache = cache_of(AdminOptions.make({}, {}))
        asked: list[Any] = []

        async def ask(addresses: Any, request: Any, **options: Any) -> metadata_pb2.MetadataResponse:
            asked.append(request)
            return metadata_pb2.MetadataResponse(cluster_id="c")

        monkeypatch.setattr(cache._inquiry, "ask", ask)
        try:
            await cache.refresh()
        finally:
            await cache.close()
            await cache._connections.close()
        assert len(asked) == 1

    asyncio.run(main())


def test_offsets_are_looked_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[log_pb2.ListOffsetsRequest] = []

    class Stub:
        def __init__(self, channel: object) -> None: ...

        async def ListOffsets(self, request: log_pb2.ListOffsetsRequest, timeout: float) -> log_pb2.ListOffsetsResponse:
            asked.append(request)
            results = [log_pb2.ListOffsetsResult(offset=part.partition) for part in request.partitions]
            return log_pb2.ListOffsetsResponse(results=results)

    monkeypatch.setattr(log_pb2_grpc, "LogStub", Stub)

    async def main() -> None:
        options = ConsumerOptions.make({}, {})
        cache = cache_of(AdminOptions.make({}, {}))
        response = metadata_pb2.MetadataResponse(cluster_id="c", metadata_offset=1)
        response.brokers.add(broker_id=1, host="127.0.0.1", port=1)
        topic = response.topics.add(name="t", topic_id=b"i" * 16)
        topic.partitions.extend(metadata_pb2.PartitionInfo(partition=each, leader=1) for each in range(MANY))
        cache.view.merge(response, all_topics=False)
        wanted = {TopicPartition("t", number): EARLIEST for number in range(MANY)}
        try:
            found = await OffsetLookup(cache, cache._connections, options).ask(1, wanted, common_pb2.READ_UNCOMMITTED)
        finally:
            await cache.close()
            await cache._connections.close()
        assert sum(len(request.partitions) for request in asked) == MANY
        assert all(len(request.partitions) <= MAX_PARTS for request in asked)
        assert all(request.ByteSize() <= MAX_REQUEST_BYTES for request in asked)
        assert found == {part: OffsetAndTimestamp(part.partition, 0, 0) for part in wanted}

    asyncio.run(main())


def test_partitions_are_subscribed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        fetcher = Fetcher(["127.0.0.1:1"], ConsumerOptions.make({}, {}), asyncio.get_running_loop())
        session = FetchSession(fetcher, 1, "127.0.0.1:1")
        sent: list[log_pb2.FetchRequest] = []
        monkeypatch.setattr(session, "send", sent.append)
        parts = [
            log_pb2.FetchPartition(
                subscription_id=each, topic_id=b"i" * 16, partition=each, offset=1 << 50, leader_epoch=9
            )
            for each in range(MANY)
        ]
        try:
            session.subscribe(parts)
        finally:
            await session.close()
            await fetcher.close()
        assert [part for request in sent for part in request.subscribe.partitions] == parts
        assert all(len(request.subscribe.partitions) <= MAX_PARTS for request in sent)
        assert all(request.ByteSize() <= MAX_REQUEST_BYTES for request in sent)

    asyncio.run(main())
