"""Produce and fetch streams of clients that may not do everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from broker.config.config import BrokerConfig
from broker.coordinator.transactions.verifier import ProducerChecks, TransactionVerifier
from broker.net.services import log as log_service
from broker.net.services.log import LogService
from broker.partition import fetch_session, produce_session
from broker.partition.fetch_session import FetchSession
from broker.partition.produce_session import TURN_BYTES, ProduceSession
from broker.quotas.disk_reads import DiskReads
from broker.quotas.heavy_work import HeavyWork
from broker.security.caller import caller
from broker.turns import SharedTurns
from raftlog.format import Attributes, wire
from raftlog.v1 import common_pb2, log_pb2
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import MetadataImage
from tests.support.batches import batch_of
from tests.support.broker_parts import (
    TOPIC_ID,
    FetchWriter,
    Parts,
    ProduceWriter,
    Requests,
    image_with,
    records_of,
)
from tests.support.fake_authorizer import FakeAuthorizer, Permission
from tests.support.raw_client import RawClient
from tests.support.replica_link import settle
from tests.support.turns import counted_turns

READ, WRITE = (Acl.READ, Acl.TOPIC, "t"), (Acl.WRITE, Acl.TOPIC, "t")
WRITE_ID = (Acl.WRITE, Acl.TRANSACTIONAL_ID, "tx")
STRANGE_ID = b"another-id-bytes"


class Streams:
    """One broker with topic `t`, and a client's two streams."""

    def __init__(self, parts: Parts, authorizer: FakeAuthorizer) -> None:
        self.parts = parts
        self.authorizer = authorizer
        self.produce, self.answers = Requests[wire.Produce](), ProduceWriter()
        self.fetch, self.frames = Requests[log_pb2.FetchRequest](), FetchWriter()

    async def answer_to(
        self, *batches: bytes, topic_id: bytes = TOPIC_ID, partition: int = 0, transactional_id: str = ""
    ) -> list[int]:
        """Send one batch after the other, each in a request and chain of its own; return the codes of the answers."""
        before = len(self.answers.written)
        for number, batch in enumerate(batches, before + 1):
            request = RawClient.request(number, [(topic_id, partition, 3, number, batch)], log_pb2.ALL)
            request.head.transactional_id = transactional_id
            self.produce.send(request)
        answers = await self.answers.wait_for(before + len(batches))
        return [answer.results[0].error.code for answer in answers[before:]]

    def subscribe(
        self, subscription_id: int, *, topic_id: bytes = TOPIC_ID, partition: int = 0, offset: int = 0
    ) -> None:
        part = log_pb2.FetchPartition(
            subscription_id=subscription_id, topic_id=topic_id, partition=partition, offset=offset, leader_epoch=3
        )
        self.fetch.send(log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part])))

    def append(self, value: bytes) -> None:
        """Write with permission."""
        self.parts.registry.find(TOPIC_ID, 0).append(batch_of(value), 3, lambda error: None)

    def refusals(self) -> list[tuple[int, int]]:
        """Return (subscription id, error code) of the subscriptions that the broker has dropped."""
        heads = [frame.head for message in self.frames.written for frame in message]
        return [(head.subscription_id, head.error.code) for head in heads if head.HasField("error")]


PARTITIONS = 10


@asynccontextmanager
async def streams(path: Path, *allowed: Permission) -> AsyncIterator[Streams]:
    async with Parts(path, partitions=PARTITIONS) as parts:
        authorizer = FakeAuthorizer(*allowed)
        made = Streams(parts, authorizer)
        who = authorizer.caller()
        running = [
            asyncio.ensure_future(
                ProduceSession(
                    parts.registry,
                    SharedTurns(TURN_BYTES),
                    HeavyWork(parts.disk),
                    max_in_flight=5,
                    default_timeout_ms=30_000,
                    who=who,
                    producers=ProducerChecks(who, MetadataImage, cast(TransactionVerifier, None)),
                ).run(aiter(made.produce), made.answers)
            ),
            asyncio.ensure_future(
                FetchSession(
                    parts.registry, DiskReads(parts.disk), max_frame_bytes=1 << 20, max_subscriptions=10, who=who
                ).run(aiter(made.fetch), made.frames)
            ),
        ]
        made.fetch.send(log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 30)))
        try:
            yield made
            made.produce.end()
            made.fetch.end()
            async with asyncio.timeout(60):
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()


def run(path: Path, work: Callable[[Streams], Awaitable[None]], *allowed: Permission) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), streams(path, *allowed) as made:
            await work(made)

    asyncio.run(main())


def transactional(value: bytes) -> bytes:
    return batch_of(value, attributes=int(Attributes.TRANSACTIONAL), producer_id=7, producer_epoch=0, base_sequence=0)


def test_each_write_is_looked_at_and_what_was_refused_is_not_in_the_log(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        assert await made.answer_to(batch_of(b"a")) == [common_pb2.TOPIC_AUTHORIZATION_FAILED]
        assert made.parts.registry.find(TOPIC_ID, 0).log.log_end_offset == 0
        made.authorizer.change(WRITE)
        assert await made.answer_to(batch_of(b"b"), batch_of(b"c")) == [0, 0]
        made.authorizer.change()
        assert await made.answer_to(batch_of(b"d")) == [common_pb2.TOPIC_AUTHORIZATION_FAILED]
        assert made.parts.registry.find(TOPIC_ID, 0).log.log_end_offset == 2

    run(tmp_path, work)


def test_a_refusal_names_the_topic_only_to_a_client_that_may_describe_it(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        await made.answer_to(batch_of(b"a"))
        message = made.answers.written[0].results[0].error.message
        assert message.startswith(f"User:alice may not WRITE the topic with id {TOPIC_ID.hex()}, ")
        made.authorizer.change((Acl.DESCRIBE, Acl.TOPIC, "t"))
        await made.answer_to(batch_of(b"b"))
        assert made.answers.written[1].results[0].error.message == "User:alice may not WRITE t"

    run(tmp_path, work)


def test_a_decision_is_asked_for_once(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        assert await made.answer_to(*(batch_of(b"%d" % number) for number in range(5))) == [0] * 5
        assert made.authorizer.asked == [WRITE]

    run(tmp_path, work, WRITE)


def test_nothing_is_appended_with_acks_zero_either(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        made.produce.send(RawClient.request(1, [(TOPIC_ID, 0, 3, 1, batch_of(b"a"))], log_pb2.NO_ACK))
        await settle()
        assert made.parts.registry.find(TOPIC_ID, 0).log.log_end_offset == 0
        (response,) = made.answers.written
        assert response.results[0].error.code == common_pb2.TOPIC_AUTHORIZATION_FAILED

    run(tmp_path, work)


def test_batches_that_take_long_to_check_are_refused_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce_session, "CHECK_ON_LOOP_BYTES", 0)

    async def work(made: Streams) -> None:
        checked: list[bytes] = []
        partition = made.parts.registry.find(TOPIC_ID, 0)
        monkeypatch.setattr(partition, "check", checked.append)
        assert await made.answer_to(batch_of(b"a")) == [common_pb2.TOPIC_AUTHORIZATION_FAILED]
        assert checked == []

    run(tmp_path, work)


def test_a_topic_that_nobody_knows_is_answered_as_ever(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        assert await made.answer_to(batch_of(b"a"), topic_id=STRANGE_ID) == [common_pb2.UNKNOWN_TOPIC_ID]
        made.subscribe(1, topic_id=STRANGE_ID)
        await made.frames.wait_for(1)
        assert made.refusals() == [(1, common_pb2.UNKNOWN_TOPIC_ID)]
        assert made.authorizer.asked == []

    run(tmp_path, work)


def test_who_leads_a_topic_is_for_those_who_may_use_it(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        await made.parts.apply(image_with(1, offset=2, leader_epoch=4, leader=2, replicas=(2,), partition_epoch=1))
        assert await made.answer_to(batch_of(b"a")) == [common_pb2.TOPIC_AUTHORIZATION_FAILED]
        made.subscribe(1)
        await made.frames.wait_for(1)
        assert made.refusals() == [(1, common_pb2.TOPIC_AUTHORIZATION_FAILED)]
        made.authorizer.change(READ, WRITE)
        assert await made.answer_to(batch_of(b"a")) == [common_pb2.NOT_LEADER_OR_FOLLOWER]

    run(tmp_path, work)


def test_transactional_batches_need_a_transactional_id_besides(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        refused = common_pb2.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        assert await made.answer_to(transactional(b"a"), batch_of(b"b")) == [refused, 0]
        made.authorizer.change(WRITE, WRITE_ID)
        assert await made.answer_to(transactional(b"a"), transactional_id="another") == [refused]
        assert await made.answer_to(transactional(b"a"), transactional_id="tx") == [0]
        assert await made.answer_to(transactional(b"a")) == [0], (
            "an older client, which does not name its transactional id, must be served"
        )
        made.authorizer.change(WRITE_ID)
        assert await made.answer_to(transactional(b"b")) == [common_pb2.TOPIC_AUTHORIZATION_FAILED]

    run(tmp_path, work, WRITE)


def test_what_is_no_batch_is_refused_for_that(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        assert await made.answer_to(b"", b"\xff" * 21) == [common_pb2.CORRUPT_MESSAGE] * 2

    run(tmp_path, work, WRITE)


def test_a_subscription_needs_read(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        made.append(b"secret")
        made.subscribe(1)
        await made.frames.wait_for(1)
        assert made.refusals() == [(1, common_pb2.TOPIC_AUTHORIZATION_FAILED)]
        made.authorizer.change(READ)
        made.subscribe(2)
        await made.frames.wait_for(2)
        assert [subscription for subscription, _ in records_of(made.frames.written)] == [2]

    run(tmp_path, work, WRITE)


def test_a_standing_subscription_ends_when_read_is_gone_before_anything_more_leaves(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        made.append(b"a")
        made.subscribe(1)
        await made.frames.wait_for(1)
        made.authorizer.change(READ, WRITE)
        made.append(b"b")
        await made.frames.wait_for(2)
        assert len(records_of(made.frames.written)) == 2, "the subscription must stay if the client may still read"
        made.authorizer.change(WRITE)
        made.append(b"secret")
        await made.frames.wait_for(3)
        assert len(records_of(made.frames.written)) == 2
        assert made.refusals() == [(1, common_pb2.TOPIC_AUTHORIZATION_FAILED)]
        made.append(b"secret, too")
        await settle()
        assert len(made.frames.written) == 3

    run(tmp_path, work, READ)


def test_subscribing_anew_after_a_change_does_not_hide_it_from_what_stands(tmp_path: Path) -> None:
    """The decision about the new one is made with the new permissions; the old one has to be looked at all the same."""

    async def work(made: Streams) -> None:
        made.append(b"a")
        made.subscribe(1)
        await made.frames.wait_for(1)
        made.authorizer.change()
        made.subscribe(2)
        await made.frames.wait_for(2)
        assert sorted(made.refusals()) == [
            (1, common_pb2.TOPIC_AUTHORIZATION_FAILED),
            (2, common_pb2.TOPIC_AUTHORIZATION_FAILED),
        ]

    run(tmp_path, work, READ)


def test_reading_on_asks_nobody(tmp_path: Path) -> None:
    async def work(made: Streams) -> None:
        made.subscribe(1)
        for number in range(5):
            made.append(b"%d" % number)
            await settle()
        assert len(records_of(made.frames.written)) == 5
        assert made.authorizer.asked == [READ]

    run(tmp_path, work, READ)


def test_look_ups_answer_for_each_partition(tmp_path: Path) -> None:
    refused, unknown = common_pb2.TOPIC_AUTHORIZATION_FAILED, common_pb2.UNKNOWN_TOPIC_ID
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": [str(tmp_path)]})
    context = cast(Any, None)

    async def codes(service: LogService) -> list[list[int]]:
        ids = (TOPIC_ID, STRANGE_ID)
        listed = await service.ListOffsets(
            log_pb2.ListOffsetsRequest(
                partitions=[
                    log_pb2.ListOffsetsPartition(topic_id=each, leader_epoch=-1, timestamp_ms=-2) for each in ids
                ]
            ),
            context,
        )
        epochs = await service.OffsetForLeaderEpoch(
            log_pb2.OffsetForLeaderEpochRequest(
                partitions=[log_pb2.EpochPartition(topic_id=each, current_leader_epoch=-1) for each in ids]
            ),
            context,
        )
        deleted = await service.DeleteRecords(
            log_pb2.DeleteRecordsRequest(partitions=[log_pb2.DeleteRecordsPartition(topic_id=each) for each in ids]),
            context,
        )
        answers: tuple[Any, ...] = (listed, epochs, deleted)
        return [[result.error.code for result in answer.results] for answer in answers]

    async def main() -> None:
        async with Parts(tmp_path) as parts:
            service = LogService(parts.registry, config, DiskReads(parts.disk), HeavyWork(parts.disk))
            assert await codes(service) == [[0, unknown]] * 3
            caller.set(FakeAuthorizer().caller())
            assert await codes(service) == [[refused, unknown]] * 3
            caller.set(FakeAuthorizer((Acl.DESCRIBE, Acl.TOPIC, "t")).caller())
            assert await codes(service) == [[0, unknown], [0, unknown], [refused, unknown]]
            caller.set(FakeAuthorizer((Acl.DELETE, Acl.TOPIC, "t")).caller())
            assert await codes(service) == [[refused, unknown], [refused, unknown], [0, unknown]]

    asyncio.run(main())


def test_a_stream_was_used_once_a_partition_was_read_or_a_batch_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it counts as given up (`max.unused.stream.rate`); a refused subscription is no use."""
    used: list[bool] = []
    monkeypatch.setattr(log_service, "note_used_stream", lambda: used.append(True))
    config = BrokerConfig.from_values({"node.id": 1, "log.dirs": [str(tmp_path)]})

    class Call(FetchWriter):
        """What the service asks of a call beside writing."""

        def invocation_metadata(self) -> tuple[()]:
            return ()

    async def served(parts: Parts, method: str, *messages: Any) -> bool:
        used.clear()
        requests = Requests[Any]()
        service = LogService(parts.registry, config, DiskReads(parts.disk), HeavyWork(parts.disk))
        serving = asyncio.ensure_future(getattr(service, method)(aiter(requests), cast(Any, Call())))
        for message in messages:
            requests.send(message)
        await settle()
        requests.end()
        await asyncio.wait_for(serving, 60)
        return bool(used)

    async def main() -> None:
        async with Parts(tmp_path) as parts:
            opening = log_pb2.FetchRequest(open=log_pb2.OpenFetchSession(credit_bytes=1 << 30))
            part = log_pb2.FetchPartition(subscription_id=1, topic_id=TOPIC_ID, offset=0, leader_epoch=3)
            subscribing = log_pb2.FetchRequest(subscribe=log_pb2.Subscribe(partitions=[part]))
            batch = RawClient.request(1, [(TOPIC_ID, 0, 3, 1, batch_of(b"x"))], log_pb2.ALL)
            assert not await served(parts, "Fetch")
            assert not await served(parts, "Fetch", opening)
            assert await served(parts, "Fetch", opening, subscribing), (
                "a read to the end of an empty partition must count as use of the stream"
            )
            assert not await served(parts, "Produce")
            assert await served(parts, "Produce", batch)
            caller.set(FakeAuthorizer().caller())
            assert not await served(parts, "Fetch", opening, subscribing), (
                "a refused subscription must not count as use of the stream"
            )
            assert await served(parts, "Produce", batch), "a refused batch must count as use of the stream"

    asyncio.run(main())


def test_looking_at_what_stands_leaves_others_their_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_session, "AT_A_TIME", 1)

    async def work(made: Streams) -> None:
        for number in range(PARTITIONS):
            made.subscribe(number + 1, partition=number)
        await settle()
        written = len(made.frames.written)
        may = made.authorizer.may

        def change_again(*what: Any, **options: Any) -> bool:
            """Change once more, while what stands is looked at."""
            allowed = may(*what, **options)
            if made.authorizer.changes == 1:
                made.authorizer.change()
            return allowed

        monkeypatch.setattr(made.authorizer, "may", change_again)
        made.authorizer.change(READ, WRITE)
        made.append(b"secret")
        async with counted_turns() as turns:
            await made.frames.wait_for(written + PARTITIONS)
            assert turns.count >= PARTITIONS - 1
        assert len(records_of(made.frames.written)) == 0
        ids = range(1, PARTITIONS + 1)
        assert sorted(made.refusals()) == [(number, common_pb2.TOPIC_AUTHORIZATION_FAILED) for number in ids]

    run(tmp_path, work, READ)
