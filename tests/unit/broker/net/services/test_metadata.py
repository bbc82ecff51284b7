"""The metadata service over a real gRPC connection; clients get the topics that they may describe."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import grpc
import pytest
from grpc import aio

from broker.net.services import metadata as metadata_module
from broker.net.services.metadata import CREDENTIALS, MAX_NAMED, MetadataService
from broker.security.caller import Caller, caller
from broker.turns import AT_A_TIME, in_turns
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.v1 import common_pb2, metadata_pb2, metadata_pb2_grpc
from raftlog.v1.records_pb2 import (
    MetadataRecord,
    PartitionRef,
    ProducerIdKeyRecord,
    RemoveScramCredentialRecord,
    ScramCredentialRecord,
)
from raftlog.v1.security_pb2 import SCRAM_SHA_512, Acl, ScramCredential
from raftmeta.image import MetadataImage
from raftmeta.port import Change
from raftmeta.quorum import image_feed
from raftmeta.quorum.image_feed import ChangeHistory
from raftmeta.replay import image_from_records, replay, replay_all
from tests.support.broker_parts import Writer
from tests.support.fake_authorizer import FakeAuthorizer
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
from tests.support.turns import counted_turns

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
    """The broker's use of a watch: it builds an image from the responses."""

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
                assert response.metadata_offset > self.image.offset, (
                    f"a delta up to offset {response.metadata_offset} came after {self.image.offset}"
                )
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
        monkeypatch.setattr("broker.net.services.metadata.CATCH_UP_SECONDS", 60.0)
        ahead = metadata.image.offset + 2
        request = metadata_pb2.MetadataRequest(all_topics=True, min_metadata_offset=ahead)
        asking = asyncio.ensure_future(stub.Get(request))
        await stub.Get(metadata_pb2.MetadataRequest())
        assert not asking.done()
        await metadata.propose(create_topic("c", 60))
        assert [topic.name for topic in (await asking).topics] == ["a", "b", "c"]
        monkeypatch.setattr("broker.net.services.metadata.CATCH_UP_SECONDS", 0.05)
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
        while serving not in writes.under_way.values():  # noqa: ASYNC110 - it gets there soon, without an event
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


REFUSED = common_pb2.TOPIC_AUTHORIZATION_FAILED
DESCRIBE_CLUSTER = (Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME)
CREDENTIAL = MetadataRecord(
    scram_credential=ScramCredentialRecord(
        credential=ScramCredential(user="alice", mechanism=SCRAM_SHA_512, stored_key=b"stored"), version=1
    )
)
SECRET = MetadataRecord(producer_id_key=ProducerIdKeyRecord(secret=bytes(32)))
REMOVED = MetadataRecord(remove_scram_credential=RemoveScramCredentialRecord(user="alice", mechanism=SCRAM_SHA_512))


async def cluster() -> MemoryMetadata:
    metadata = MemoryMetadata()
    await metadata.add_broker()
    for number, name in enumerate(["a", "b", "__internal"], 1):
        await metadata.propose(create_topic(name, number))
    return metadata


def got(who: Caller, *, ids_of: Sequence[str] = (), **request: Any) -> metadata_pb2.MetadataResponse:
    """Ask; `ids_of`: topics that are asked for by id, before `topic_ids`."""

    async def main() -> metadata_pb2.MetadataResponse:
        caller.set(who)
        metadata = await cluster()
        service: Any = MetadataService(metadata)
        ids = [*(metadata.image.topic_id_by_name[name] for name in ids_of), *request.pop("topic_ids", ())]
        message = metadata_pb2.MetadataRequest(topic_ids=ids, **request)
        response: metadata_pb2.MetadataResponse = await service.Get(message, None)
        return response

    return asyncio.run(main())


def test_a_list_of_all_leaves_out_what_may_not_be_described() -> None:
    some = FakeAuthorizer((Acl.DESCRIBE, Acl.TOPIC, "b"))
    response = got(some.caller(), all_topics=True, include_internal=True)
    assert [topic.name for topic in response.topics] == ["b"]
    assert some.logged == []
    assert response.brokers
    assert [topic.name for topic in got(Caller(), all_topics=True).topics] == ["a", "b"]


def test_a_topic_that_is_named_is_refused_whether_it_is_there_or_not() -> None:
    response = got(FakeAuthorizer((Acl.DESCRIBE, Acl.TOPIC, "b")).caller(), topics=["a", "b", "nobody's"])
    found = {topic.name: topic for topic in response.topics}
    assert [found[name].error.code for name in ("a", "b", "nobody's")] == [REFUSED, 0, REFUSED]
    assert not found["a"].topic_id
    assert not found["a"].partitions
    assert found["b"].partitions


async def test_a_misspelt_name_gets_a_hint_of_what_the_caller_may_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = await cluster()
    for number, name in enumerate(["orders", "order-s", "__ordersz"], 50):
        await metadata.propose(create_topic(name, number, partitions=1))

    async def message(name: str, who: Caller) -> str:
        caller.set(who)
        service: Any = MetadataService(metadata)
        response = await service.Get(metadata_pb2.MetadataRequest(topics=[name]), None)
        found: str = response.topics[0].error.message
        return found

    everybody = Caller()
    hinted = "there is no topic 'orderz'; did you mean 'orders'? If not, create it first"
    assert await message("orderz", everybody) == hinted
    assert await message("payments", everybody) == "there is no topic 'payments'; create it first"
    assert "__ordersz" not in await message("__ordersy", everybody)
    for internal, made in {
        "__audit": "brokers with audit.topic.enable=true make it",
        "__consumer_offsets": "brokers make it for the first consumer group",
        "__transaction_state": "brokers make it for the first transaction",
    }.items():
        assert await message(internal, everybody) == f"there is no topic {internal!r}; {made}"
    one = FakeAuthorizer((Acl.DESCRIBE, Acl.TOPIC, "orderz"), (Acl.DESCRIBE, Acl.TOPIC, "order-s"))
    assert "did you mean 'order-s'?" in await message("orderz", one.caller())
    assert one.logged == []
    monkeypatch.setattr(metadata_module, "HINT_TOPICS", 3)
    assert "did you mean" not in await message("orderz", everybody)


def test_an_id_does_not_tell_the_name() -> None:
    some = FakeAuthorizer((Acl.DESCRIBE, Acl.TOPIC, "b")).caller()
    hidden, shown, unknown = got(some, ids_of=["a", "b"], topic_ids=[uuid_of(9)]).topics
    assert (hidden.error.code, hidden.name, len(hidden.partitions)) == (REFUSED, "", 0)
    assert "'a'" not in hidden.error.message
    assert (shown.error.code, shown.name) == (0, "b")
    assert unknown.error.code == common_pb2.UNKNOWN_TOPIC_ID


@pytest.mark.parametrize("authorized", [True, False])
@pytest.mark.parametrize(("names", "ids"), [(MAX_NAMED + 1, 0), (0, MAX_NAMED + 1), (MAX_NAMED, 1)])
def test_a_question_about_too_much_is_refused_before_anything_is_decided(
    names: int, ids: int, *, authorized: bool
) -> None:
    authorizer = FakeAuthorizer()
    who = authorizer.caller() if authorized else Caller()
    response = got(who, topics=[f"t{number}" for number in range(names)], topic_ids=[uuid_of(1)] * ids)
    assert response.error.code == common_pb2.INVALID_REQUEST
    assert f"at most {MAX_NAMED}" in response.error.message
    assert not response.topics
    assert authorizer.asked == []


async def test_a_question_about_as_much_as_may_be_leaves_others_their_turns() -> None:
    service: Any = MetadataService(await cluster())
    for who in (FakeAuthorizer().caller(), Caller()):
        caller.set(who)
        request = metadata_pb2.MetadataRequest(topics=[f"t{number}" for number in range(MAX_NAMED)])
        async with counted_turns() as turns:
            assert len((await service.Get(request, None)).topics) == MAX_NAMED
            assert turns.count >= MAX_NAMED // AT_A_TIME - 1


def test_a_list_of_all_leaves_others_their_turns_whatever_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "in_turns", functools.partial(in_turns, at_a_time=1))

    async def main() -> None:
        service: Any = MetadataService(await cluster())
        caller.set(FakeAuthorizer().caller())
        async with counted_turns() as turns:
            request = metadata_pb2.MetadataRequest(all_topics=True, include_internal=True)
            assert not (await service.Get(request, None)).topics
            assert turns.count >= 2

    asyncio.run(main())


async def watched(service: MetadataService, from_offset: int, records: int) -> list[MetadataRecord]:
    """Return the records of a watch until there are that many."""
    writer: Writer[metadata_pb2.WatchResponse] = Writer()
    context: Any = writer
    request = metadata_pb2.WatchRequest(from_offset=from_offset)
    watch = asyncio.ensure_future(service.Watch(request, context))
    try:
        async with asyncio.timeout(60):
            while True:
                found = [record for response in writer.written for record in response.records]
                if len(found) >= records or watch.done():
                    return found
                await asyncio.sleep(0.001)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


class Fixed:
    """Metadata with a credential, that stays as it is until `changed`."""

    def __init__(self, image: MetadataImage) -> None:
        self.image = replay(image, CREDENTIAL, image.offset + 1)
        self.listeners: list[Any] = []

    def subscribe(self, listener: Any) -> Any:
        """Keep the listener."""
        self.listeners.append(listener)
        return lambda: None

    def changes_since(self, offset: int) -> list[Change] | None:
        """Return one change; records of a topic before and after what matters."""
        cluster_record = next(self.image.to_records())
        return [Change(self.image.offset, 1, (cluster_record, CREDENTIAL, REMOVED, SECRET, cluster_record))]

    def changed(self) -> None:
        """Something has changed."""
        self.image = replace(self.image, offset=self.image.offset + 1)
        for listener in self.listeners:
            listener(self.image, None)


def kinds(records: list[MetadataRecord]) -> set[str | None]:
    return {record.WhichOneof("record") for record in records}


async def test_credentials_go_to_nodes_only_whoever_watches() -> None:
    for who in (Caller(), FakeAuthorizer(DESCRIBE_CLUSTER).caller()):
        caller.set(who)
        metadata: Any = Fixed((await cluster()).image)
        count = len(list(metadata.image.to_records()))
        to_clients, to_nodes = MetadataService(metadata), MetadataService(metadata, to_nodes=True)
        before = metadata.image.offset - 1
        assert kinds(await watched(to_clients, before, 2)) == {"cluster"}
        assert kinds(await watched(to_nodes, before, 5)) > CREDENTIALS
        whole = await watched(to_nodes, -1, count)
        assert CREDENTIAL in whole
        assert await watched(to_clients, -1, count - 1) == [record for record in whole if record != CREDENTIAL]


async def test_a_change_of_nothing_but_credentials_is_told_as_one_without_records() -> None:
    """A watcher learns the metadata offset, and no offset twice."""
    metadata: Any = Fixed((await cluster()).image)
    metadata.changes_since = lambda offset: [Change(metadata.image.offset, 1, (CREDENTIAL,))]
    writer: Writer[metadata_pb2.WatchResponse] = Writer()
    request = metadata_pb2.WatchRequest(from_offset=metadata.image.offset - 1)
    context: Any = writer
    watch = asyncio.ensure_future(MetadataService(metadata).Watch(request, context))
    [response] = await writer.wait_for(1)
    assert response == metadata_pb2.WatchResponse(controller_epoch=1, metadata_offset=metadata.image.offset)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_a_watch_ends_when_the_cluster_may_not_be_described_any_more() -> None:
    authorizer = FakeAuthorizer(DESCRIBE_CLUSTER)
    caller.set(authorizer.caller())
    metadata: Any = Fixed((await cluster()).image)
    context: Any = Writer[metadata_pb2.WatchResponse]()
    watch = asyncio.ensure_future(MetadataService(metadata).Watch(metadata_pb2.WatchRequest(from_offset=-1), context))
    await context.wait_for(1)
    authorizer.change()
    metadata.changed()
    async with asyncio.timeout(60):
        await watch
    assert len(context.written) == 1
