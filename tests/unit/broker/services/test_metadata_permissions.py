"""The metadata that clients get: topics that they may describe, and never a credential."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from broker.security.caller import Caller, caller
from broker.services import metadata as metadata_module
from broker.services.metadata import CREDENTIALS, MAX_NAMED, MetadataService
from raftlog.v1 import common_pb2, metadata_pb2
from raftlog.v1.records_pb2 import MetadataRecord, RemoveScramCredentialRecord, ScramCredentialRecord
from raftlog.v1.security_pb2 import SCRAM_SHA_512, Acl, ScramCredential
from raftmeta.acls import CLUSTER_NAME
from raftmeta.image import MetadataImage
from raftmeta.port import Change
from raftmeta.replay import replay
from tests.support.broker_parts import Writer
from tests.support.fake_authorizer import FakeAuthorizer
from tests.support.memory_metadata import MemoryMetadata
from tests.support.metadata import create_topic, uuid_of
from tests.support.turns import counted_turns

REFUSED = common_pb2.TOPIC_AUTHORIZATION_FAILED
DESCRIBE_CLUSTER = (Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME)
CREDENTIAL = MetadataRecord(
    scram_credential=ScramCredentialRecord(
        credential=ScramCredential(user="alice", mechanism=SCRAM_SHA_512, stored_key=b"stored"), version=1
    )
)
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


def test_a_question_about_as_much_as_may_be_leaves_others_their_turns() -> None:
    async def main() -> None:
        service: Any = MetadataService(await cluster())
        for who in (FakeAuthorizer().caller(), Caller()):
            caller.set(who)
            request = metadata_pb2.MetadataRequest(topics=[f"t{number}" for number in range(MAX_NAMED)])
            async with counted_turns() as turns:
                assert len((await service.Get(request, None)).topics) == MAX_NAMED
                assert turns.count >= MAX_NAMED // 500 - 1

    asyncio.run(main())


def test_a_list_of_all_leaves_others_their_turns_whatever_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_module, "AT_A_TIME", 1)

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
        """Keep who wants to know."""
        self.listeners.append(listener)
        return lambda: None

    def changes_since(self, offset: int) -> list[Change] | None:
        """Return one change; records of a topic before and after what matters."""
        cluster_record = next(self.image.to_records())
        return [Change(self.image.offset, 1, (cluster_record, CREDENTIAL, REMOVED, cluster_record))]

    def changed(self) -> None:
        """Something has changed."""
        self.image = replace(self.image, offset=self.image.offset + 1)
        for listener in self.listeners:
            listener(self.image, None)


def kinds(records: list[MetadataRecord]) -> set[str | None]:
    return {record.WhichOneof("record") for record in records}


def test_credentials_go_to_nodes_only_whoever_watches() -> None:
    async def main() -> None:
        for who in (Caller(), FakeAuthorizer(DESCRIBE_CLUSTER).caller()):
            caller.set(who)
            metadata: Any = Fixed((await cluster()).image)
            count = len(list(metadata.image.to_records()))
            to_clients, to_nodes = MetadataService(metadata), MetadataService(metadata, to_nodes=True)
            before = metadata.image.offset - 1
            assert kinds(await watched(to_clients, before, 2)) == {"cluster"}
            assert kinds(await watched(to_nodes, before, 4)) > CREDENTIALS
            whole = await watched(to_nodes, -1, count)
            assert CREDENTIAL in whole
            assert await watched(to_clients, -1, count - 1) == [record for record in whole if record != CREDENTIAL]

    asyncio.run(main())


def test_a_change_of_nothing_but_credentials_is_told_as_one_without_records() -> None:
    """Who watches learns how far the metadata is, and is not told the same again."""

    async def main() -> None:
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

    asyncio.run(main())


def test_a_watch_ends_when_the_cluster_may_not_be_described_any_more() -> None:
    async def main() -> None:
        authorizer = FakeAuthorizer(DESCRIBE_CLUSTER)
        caller.set(authorizer.caller())
        metadata: Any = Fixed((await cluster()).image)
        context: Any = Writer[metadata_pb2.WatchResponse]()
        watch = asyncio.ensure_future(
            MetadataService(metadata).Watch(metadata_pb2.WatchRequest(from_offset=-1), context)
        )
        await context.wait_for(1)
        authorizer.change()
        metadata.changed()
        async with asyncio.timeout(60):
            await watch
        assert len(context.written) == 1

    asyncio.run(main())
