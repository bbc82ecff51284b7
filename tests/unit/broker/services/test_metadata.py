"""The metadata service over a real gRPC connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

import grpc
import pytest
from grpc import aio

from broker.services import metadata as metadata_module
from broker.services.metadata import MetadataService
from raftlog.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from raftlog.v1.records_pb2 import MetadataRecord, PartitionRef
from raftmeta.history import ChangeHistory
from raftmeta.image import MetadataImage
from raftmeta.quorum import image_feed
from raftmeta.replay import image_from_records, replay_all
from tests.support.held_timeouts import hold_timeouts
from tests.support.memory_metadata import MemoryMetadata
from tests.support.metadata import (
    alter,
    broker_epoch,
    create_partitions,
    create_topic,
    delete_topic,
    elect,
    fence,
    offline_replicas,
    reassign,
    uuid_of,
)

Stub: TypeAlias = "metadata_pb2_grpc.MetadataAsyncStub"  # known to the stubs only
Work: TypeAlias = "Callable[[MemoryMetadata, Stub], Awaitable[None]]"
WAIT_SECONDS = 60.0
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 65_536), ("grpc.http2.bdp_probe", 0)]
"""The client's side takes little ahead of what is read, so that a test needs little data to be slow."""


@asynccontextmanager
async def served(options: dict[str, float]) -> AsyncIterator[tuple[MemoryMetadata, Stub]]:
    """A node with one broker and the topics a, b and __internal, behind the service."""
    metadata = MemoryMetadata()
    await metadata.add_broker(rack="r1")
    for number, name in enumerate(["b", "a", "__internal"], 1):
        await metadata.propose(create_topic(name, number, partitions=2))
    server = aio.server()
    metadata_pb2_grpc.add_MetadataServicer_to_server(MetadataService(metadata, **options), server)  # type: ignore[arg-type] # the tests' options
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=SMALL_WINDOW) as channel:
        yield metadata, metadata_pb2_grpc.MetadataStub(channel)
    await server.stop(0)


def run(work: Work, **options: float) -> None:
    async def main() -> None:
        async with served(options) as (metadata, stub):
            async with asyncio.timeout(WAIT_SECONDS):
                await work(metadata, stub)

    asyncio.run(main())


# Get


def test_get_describes_the_cluster() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        response = await stub.Get(metadata_pb2.MetadataRequest())
        assert (response.cluster_id, response.controller_id, response.controller_epoch) == ("test", 1, 1)
        assert response.metadata_offset == metadata.image.offset
        [broker] = response.brokers
        assert (broker.broker_id, broker.host, broker.port, broker.rack) == (1, "127.0.0.1", 9092, "r1")
        assert not broker.fenced
        assert broker.broker_epoch == metadata.image.brokers[1].broker_epoch
        assert not response.topics
        assert not response.HasField("error")

    run(work)


def test_get_tells_where_a_partition_is_moved_and_what_is_not_there() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        for broker_id in (2, 3, 4):
            await metadata.add_broker(broker_id, port=9090 + broker_id)
        configs = {"min.insync.replicas": "3"}
        await metadata.propose(create_topic("c", 9, replication_factor=3, configs=configs))

        async def described() -> metadata_pb2.PartitionInfo:
            [topic] = (await stub.Get(metadata_pb2.MetadataRequest(topics=["c"]))).topics
            return topic.partitions[0]

        whole = await described()
        assert not whole.offline_replicas
        assert not whole.eligible_leader_replicas
        leader, second, third = whole.replicas
        partition = PartitionRef(topic_id=metadata.image.topic_id_by_name["c"], partition=0)
        [fourth] = {1, 2, 3, 4} - set(whole.replicas)
        await metadata.propose(reassign("c", 0, [leader, second, fourth]))
        await metadata.propose(offline_replicas(metadata.image, second, [partition]))
        await metadata.propose(fence(third, broker_epoch(metadata.image, third)))
        await metadata.propose(elect([partition]))
        found = await described()
        assert (list(found.replicas), list(found.isr)) == ([leader, second, fourth, third], [leader])
        assert list(found.adding_replicas) == [fourth]
        assert list(found.removing_replicas) == [third]
        assert list(found.offline_replicas) == [second, third]
        assert list(found.eligible_leader_replicas) == [third]

    run(work)


def test_get_lists_topics_by_name_without_internal_ones_unless_asked() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        response = await stub.Get(metadata_pb2.MetadataRequest(all_topics=True))
        assert [topic.name for topic in response.topics] == ["a", "b"]
        response = await stub.Get(metadata_pb2.MetadataRequest(all_topics=True, include_internal=True))
        assert [(topic.name, topic.internal) for topic in response.topics] == [
            ("__internal", True),
            ("a", False),
            ("b", False),
        ]

    run(work)


def test_get_answers_each_topic_that_was_asked_for_once_and_says_which_are_missing() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        ids = metadata.image.topic_id_by_name
        response = await stub.Get(
            metadata_pb2.MetadataRequest(topics=["a", "zzz", "a"], topic_ids=[ids["b"], uuid_of(99)])
        )
        a, missing, b, missing_id = response.topics
        assert (a.name, a.topic_id, b.name) == ("a", ids["a"], "b")
        assert [(p.partition, p.leader, p.leader_epoch, list(p.replicas), list(p.isr)) for p in a.partitions] == [
            (0, 1, 0, [1], [1]),
            (1, 1, 0, [1], [1]),
        ]
        assert missing.name == "zzz"
        assert missing.error.code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION
        assert "'zzz'" in missing.error.message
        assert missing_id.topic_id == uuid_of(99)
        assert missing_id.error.code == common_pb2.UNKNOWN_TOPIC_ID

    run(work)


# Watch


class Observer:
    """What a broker does with a watch: builds an image from the responses."""

    def __init__(self, stub: Stub, from_offset: int = -1, image: MetadataImage | None = None) -> None:
        self.call = stub.Watch(metadata_pb2.WatchRequest(from_offset=from_offset))
        self.image = image or MetadataImage()
        self.responses: list[metadata_pb2.WatchResponse] = []
        self._snapshot: list[metadata_pb2.WatchResponse] = []

    async def until(self, offset: int) -> None:
        while self.image.offset < offset:
            response = await self.call.read()
            assert isinstance(response, metadata_pb2.WatchResponse)
            self.responses.append(response)
            if response.snapshot:
                self._snapshot.append(response)
                if not response.more:
                    records = [record for part in self._snapshot for record in part.records]
                    self.image = image_from_records(records, response.metadata_offset)
                    self._snapshot = []
            else:
                assert response.metadata_offset > self.image.offset, "a delta came twice"
                self.image = replay_all(self.image, response.records, response.metadata_offset)


def test_watch_gives_the_image_and_then_every_change() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        observer = Observer(stub)
        await observer.until(metadata.image.offset)
        assert observer.image == metadata.image
        assert [response.snapshot for response in observer.responses] == [True]
        for command in (
            create_partitions("a", 3),
            alter("a", {"retention.ms": "1s"}),
            delete_topic("b"),
        ):
            await metadata.propose(command)
            await observer.until(metadata.image.offset)
            assert observer.image == metadata.image
        assert [response.snapshot for response in observer.responses] == [True, False, False, False]
        assert {response.controller_epoch for response in observer.responses} == {1}

    run(work)


def test_watch_from_an_offset_gives_only_what_came_later() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        known = metadata.image
        await metadata.propose(delete_topic("b"))
        observer = Observer(stub, known.offset, known)
        await observer.until(metadata.image.offset)
        assert observer.image == metadata.image
        assert [response.snapshot for response in observer.responses] == [False]

    run(work)


@pytest.mark.parametrize("from_offset", [-1, -7])
def test_watch_from_an_offset_that_is_not_there_gives_the_image(from_offset: int) -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        observer = Observer(stub, from_offset)
        await observer.until(metadata.image.offset)
        assert observer.image == metadata.image
        assert observer.responses[0].snapshot

    run(work)


def test_a_watcher_that_is_ahead_is_told_nothing_until_this_node_has_caught_up() -> None:
    """A broker that came from another controller must not be taken back in time."""

    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        ahead = metadata.image.offset + 3
        observer = Observer(stub, ahead, replace(metadata.image, offset=ahead))
        reading = asyncio.ensure_future(observer.until(ahead + 1))
        await metadata.propose(create_topic("c", 60))
        await stub.Get(metadata_pb2.MetadataRequest())  # a round trip: what was sent too early would be here too
        assert metadata.image.offset < ahead
        assert not observer.responses
        await metadata.propose(create_topic("d", 61))
        await metadata.propose(create_topic("e", 62))
        await reading
        assert all(response.metadata_offset > ahead for response in observer.responses)

    run(work)


def test_get_waits_for_what_the_asker_knows_already_and_says_so_when_it_does_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        monkeypatch.setattr("broker.services.metadata.CATCH_UP_SECONDS", 60.0)
        ahead = metadata.image.offset + 2
        request = metadata_pb2.MetadataRequest(all_topics=True, min_metadata_offset=ahead)
        asking = asyncio.ensure_future(stub.Get(request))
        await stub.Get(metadata_pb2.MetadataRequest())
        assert not asking.done()
        await metadata.propose(create_topic("c", 60))
        assert [topic.name for topic in (await asking).topics] == ["a", "b", "c"]
        monkeypatch.setattr("broker.services.metadata.CATCH_UP_SECONDS", 0.05)
        response = await stub.Get(metadata_pb2.MetadataRequest(min_metadata_offset=ahead + 99))
        assert response.error.code == common_pb2.REQUEST_TIMED_OUT

    run(work)


def test_a_large_image_comes_in_pieces() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        observer = Observer(stub)
        await observer.until(metadata.image.offset)
        assert observer.image == metadata.image
        assert all(len(response.records) <= 3 for response in observer.responses)
        assert [response.more for response in observer.responses] == [True] * (len(observer.responses) - 1) + [False]

    run(work, max_response_records=3)


def test_a_change_too_large_for_one_response_comes_as_an_image() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        observer = Observer(stub, metadata.image.offset, metadata.image)
        await metadata.propose(create_topic("large", 50, partitions=20))
        await observer.until(metadata.image.offset)
        assert observer.image == metadata.image
        assert all(len(response.records) <= 10 for response in observer.responses)

    run(work, max_response_records=10)


def test_responses_are_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "MAX_RESPONSE_BYTES", 1_000)

    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        known = metadata.image
        await metadata.propose(create_topic("large", 50, partitions=60))
        for observer in (Observer(stub), Observer(stub, known.offset, known)):
            await observer.until(metadata.image.offset)
            assert observer.image == metadata.image
            assert len(observer.responses) > 2
            assert all(sum(map(len, map(bytes_of, each.records))) <= 1_000 for each in observer.responses)

    run(work)


def bytes_of(record: MetadataRecord) -> bytes:
    return record.SerializeToString()


def test_a_watcher_that_falls_behind_the_history_starts_over_with_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_feed, "ChangeHistory", functools.partial(ChangeHistory, max_changes=5))

    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        known = metadata.image
        for number in range(20):
            await metadata.propose(create_topic(f"t{number}", 100 + number))
        observer = Observer(stub, known.offset, known)
        await observer.until(metadata.image.offset)
        assert observer.image == metadata.image
        assert observer.responses[0].snapshot

    run(work)


async def until_there_is_a_place(stub: Stub) -> None:
    while True:
        watch = stub.Watch(metadata_pb2.WatchRequest(from_offset=-1))
        try:
            assert isinstance(await watch.read(), metadata_pb2.WatchResponse)
        except aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(0.01)
        else:
            return


def test_a_watcher_that_does_not_read_is_cut_off_and_others_are_not_harmed(monkeypatch: pytest.MonkeyPatch) -> None:
    writes = hold_timeouts(monkeypatch, metadata_module)

    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        slow = stub.Watch(metadata_pb2.WatchRequest(from_offset=-1))
        await slow.read()  # it is being served, and reads no more
        serving = writes.last_begun_by
        observer = Observer(stub)
        for number in range(3):  # some 300 kB each, more than the connection takes without a reader
            await metadata.propose(create_topic(f"t{number}", 100 + number, partitions=10_000))
        await observer.until(metadata.image.offset)
        assert observer.image == metadata.image
        while serving not in writes.under_way.values():  # noqa: ASYNC110 - it has got so far soon, and tells nobody
            await asyncio.sleep(0.01)
        writes.expire(serving)
        await until_there_is_a_place(stub)
        with contextlib.suppress(aio.AioRpcError):
            while await slow.read() is not aio.EOF:
                pass
        assert await slow.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "nothing was read from this watch for 7 s; start it again" in (await slow.details() or "")

    run(work, write_timeout_seconds=7, max_response_records=100_000, max_watchers=2)


def test_watchers_are_bounded_and_a_place_becomes_free_again() -> None:
    async def work(metadata: MemoryMetadata, stub: Stub) -> None:
        first = Observer(stub)
        await first.until(metadata.image.offset)
        second = stub.Watch(metadata_pb2.WatchRequest(from_offset=-1))
        assert await second.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "serves 1 metadata watchers already" in (await second.details() or "")
        first.call.cancel()
        await until_there_is_a_place(stub)

    run(work, max_watchers=1)
