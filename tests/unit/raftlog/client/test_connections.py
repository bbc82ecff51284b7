"""Looking for brokers: first contact, fresh metadata, large questions, and topics that are made again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from broker.net.interceptors import MAX_REQUEST_BYTES
from broker.net.services.metadata import MAX_NAMED
from broker.partition.fetch_session import MAX_PARTS
from raftlog import Admin, Producer, StagedWriter
from raftlog._client import admin as admin_calls
from raftlog._client import metadata
from raftlog._client import producer as producer_engine
from raftlog._client.connections import Connections, from_grpc
from raftlog._client.consumer import ConsumerEngine, FetchSession
from raftlog._client.metadata import EARLIEST, MetadataCache, NobodyAnswers, OffsetLookup
from raftlog._client.options import AdminOptions, ConsumerOptions
from raftlog.cli import client_config
from raftlog.errors import (
    BrokerUnavailable,
    RaftlogError,
    RequestTimedOut,
    TransactionAbortable,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.types import OffsetAndTimestamp, TopicPartition
from raftlog.v1 import common_pb2, log_pb2, log_pb2_grpc, metadata_pb2
from tests.support.admin_service import AdminServer
from tests.support.fake_broker import FakeCluster
from tests.support.fake_stages import FakeStageCluster
from tests.support.fake_transactions import TransactionCluster

PATIENCE_MS = 120_000
SOON_S = 40.0
"""Far below `PATIENCE_MS`, and far above what it takes, two seconds."""


@pytest.fixture
def refused() -> Iterator[str]:
    """Two addresses without a listener."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))  # so that no other process listens there
        yield ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other))


def admin(bootstrap: str) -> None:
    with client_config.connect_admin(bootstrap) as found:
        found.describe_cluster()


def admin_topics(bootstrap: str) -> None:
    with Admin(bootstrap, default_api_timeout_ms=PATIENCE_MS) as found:
        found.list_topics()


def admin_topic(bootstrap: str) -> None:
    with client_config.connect_admin(bootstrap) as found:
        found.describe_topic("t")


def consumer(bootstrap: str) -> None:
    with client_config.connect_consumer(bootstrap, "earliest") as found:
        found.partitions_for("t")


def producer(bootstrap: str) -> None:
    with client_config.connect_producer(bootstrap, {}) as found:
        found.send_batch("t", [])


@pytest.mark.parametrize("call", [admin, admin_topics, admin_topic, consumer, producer])
def test_refused_connections_fail_soon(
    refused: str, call: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_config, "_PATIENCE_MS", PATIENCE_MS)
    monkeypatch.setattr(admin_calls, "_FIRST_CONTACT_S", PATIENCE_MS / 1000)
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable) as said:
        call(refused)
    assert 1.5 < time.monotonic() - started < SOON_S
    assert "connection refused" in str(said.value)
    assert "failed to connect to all addresses" not in str(said.value)
    assert "ipv4" not in str(said.value)


def test_who_has_been_heard_of_is_waited_for_longer() -> None:
    with FakeCluster() as cluster:
        cluster.create_topic("t")
        with client_config.connect_consumer(cluster.bootstrap, "earliest") as found:
            assert len(found.partitions_for("t")) == 1
            cluster.kill(1)
            engine = found._engine
            engine.options = engine.options.but(default_api_timeout_ms=4_000)
            started = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                found.partitions_for("u")
            assert time.monotonic() - started > 3.5


def test_who_has_answered_that_there_is_no_controller_yet_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_at: list[float] = []
    brokers = 0
    with AdminServer() as server:

        async def barrier() -> int:
            asked_at.append(time.monotonic())
            if asked_at[-1] - asked_at[0] <= 2 * contact_s:
                raise RequestTimedOut("the metadata quorum has no leader")
            return server.image.offset

        monkeypatch.setattr(server.cluster.metadata, "barrier", barrier)
        for contact_s in (0.5, 5.0, 15.0):  # longer, if no server has answered within less
            monkeypatch.setattr(admin_calls, "_FIRST_CONTACT_S", contact_s)
            asked_at.clear()
            with (
                contextlib.suppress(BrokerUnavailable, RequestTimedOut),
                Admin(server.bootstrap, default_api_timeout_ms=PATIENCE_MS) as found,
            ):
                brokers = len(found.describe_cluster(linearizable=True).brokers)
                break
        assert brokers == 4
        assert asked_at[-1] - asked_at[0] > 2 * contact_s


class Failed(grpc.RpcError):
    """What gRPC raises."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Return the code."""
        return self._code

    def details(self) -> str:
        """Return the text."""
        return self._details


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: Connection refused",
            "no connection to h:1: connection refused",
        ),
        (
            "errors resolving h:1: [field:hostname lookup error:address lookup failed for h:1: Domain name not found]",
            "no connection to h:1: the host name is not known",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:1: No route to host",
            "no connection to h:1: no route to host",
        ),
        ("Socket closed", "no connection to h:1: the connection was closed"),
        ("recvmsg:Connection reset by peer", "no connection to h:1: the connection was reset"),
        ("something else", "no connection to h:1: something else"),
    ],
)
def test_failures_of_connections_are_put_into_words(details: str, words: str) -> None:
    error = from_grpc(Failed(grpc.StatusCode.UNAVAILABLE, details), "h:1")
    assert isinstance(error, BrokerUnavailable)
    assert str(error) == words


def test_a_call_that_took_too_long_has_no_text_of_grpc() -> None:
    error = from_grpc(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"), "h:1")
    assert isinstance(error, RequestTimedOut)
    assert str(error) == "h:1 did not answer in time"


OLD, NEW = b"o" * 16, b"n" * 16


def answer(topic_id: bytes, metadata_offset: int) -> metadata_pb2.MetadataResponse:
    response = metadata_pb2.MetadataResponse(cluster_id="c", metadata_offset=metadata_offset)
    response.topics.add(name="t", topic_id=topic_id).partitions.add()
    return response


class Asked:
    """A cache whose questions the test answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.questions: asyncio.Queue[asyncio.Future[metadata_pb2.MetadataResponse]] = asyncio.Queue()
        pauses = AdminOptions.make({}, {"retry_backoff_ms": 1, "retry_backoff_max_ms": 2}).pauses
        self.cache = MetadataCache(
            Connections(), ["127.0.0.1:1"], max_age_ms=60_000, request_timeout_ms=30_000, pauses=pauses
        )
        monkeypatch.setattr(self.cache._inquiry, "ask", self._ask)

    async def _ask(self, *arguments: Any, **options: Any) -> metadata_pb2.MetadataResponse:
        question: asyncio.Future[metadata_pb2.MetadataResponse] = asyncio.get_running_loop().create_future()
        self.questions.put_nowait(question)
        return await question


def run(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Asked], Any]) -> None:
    async def main() -> None:
        asked = Asked(monkeypatch)
        try:
            async with asyncio.timeout(60):
                first = asyncio.create_task(asked.cache.topic("t", 60_000))
                (await asked.questions.get()).set_result(answer(OLD, 5))
                assert (await first).topic_id == OLD
                await scenario(asked)
        finally:
            await asked.cache.close()
            await asked.cache._connections.close()

    asyncio.run(main())


def test_an_answer_to_an_earlier_question_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(asked: Asked) -> None:
        before = asyncio.create_task(asked.cache.refresh())
        late = await asked.questions.get()
        fresh = asyncio.create_task(asked.cache.topic("t", 60_000, fresh=True))
        await asyncio.sleep(0.05)
        late.set_result(answer(OLD, 5))
        await before
        (await asked.questions.get()).set_result(answer(NEW, 6))
        assert (await fresh).topic_id == NEW

    run(monkeypatch, scenario)


def test_what_was_known_is_no_answer_when_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(asked: Asked) -> None:
        fresh = asyncio.create_task(asked.cache.topic("t", 60_000, fresh=True))
        (await asked.questions.get()).set_exception(NobodyAnswers(["127.0.0.1:1: refused"]))
        (await asked.questions.get()).set_result(answer(NEW, 6))
        assert (await fresh).topic_id == NEW
        fresh = asyncio.create_task(asked.cache.topic("t", 1, fresh=True))
        (await asked.questions.get()).set_exception(NobodyAnswers(["127.0.0.1:1: refused"]))
        while not fresh.done():
            await asyncio.sleep(0.01)
            while not asked.questions.empty():
                asked.questions.get_nowait().set_exception(NobodyAnswers(["127.0.0.1:1: refused"]))
        assert isinstance(fresh.exception(), BrokerUnavailable)

    run(monkeypatch, scenario)


def test_an_outage_is_told_once_and_so_is_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("raftlog._client.metadata._TOLD_AFTER_S", 0.1)

    async def scenario(asked: Asked) -> None:
        async def fail_until_told(outages: int) -> None:
            more = 5
            while more:
                (await asked.questions.get()).set_exception(NobodyAnswers(["127.0.0.1:1: it refused the connection"]))
                more -= sum("no broker answers" in text for text in told()) >= outages

        asked.cache.request_refresh()
        await fail_until_told(1)
        (await asked.questions.get()).set_result(answer(OLD, 6))
        asked.cache.request_refresh()
        await fail_until_told(2)

    def told() -> list[str]:
        mine = threading.get_ident()  # other clients of this process have a thread of their own
        return [each.getMessage() for each in caplog.records if (each.levelname, each.thread) == ("WARNING", mine)]

    run(monkeypatch, scenario)
    assert [text.partition(" at ")[0] for text in told()] == [
        "no broker answers",
        "brokers answer again",
        "no broker answers",
    ]
    assert "127.0.0.1:1: it refused the connection); retrying for " in told()[0]


async def test_who_asks_for_a_topic_shares_the_answers_of_who_asks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(AdminOptions.make({}, {"retry_backoff_ms": 1, "retry_backoff_max_ms": 2}))
    now_s = 1_000.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    asked: list[list[str] | None] = []

    async def ask(
        addresses: Any, request: metadata_pb2.MetadataRequest, **options: Any
    ) -> metadata_pb2.MetadataResponse:
        asked.append(None if request.all_topics else list(request.topics))
        return answer(OLD, 5)

    monkeypatch.setattr(cache._inquiry, "ask", ask)
    try:
        for _ in range(10):  # a page about all topics, and half an age later one about a topic
            await cache.refresh(all_topics=True, max_age_s=2.0)
            now_s += 1.5
            await cache.refresh(max_age_s=2.0)
            await cache.topic("t", 60_000, fresh=True, max_age_s=2.0)
            now_s += 1.5
            await cache.topic("t", 60_000, fresh=True, max_age_s=2.0)
        assert set(map(str, asked)) == {"None"}
        assert len(asked) <= 1 + 10 * 3.0 / 2.0
        asked.clear()
        for _ in range(4):  # nobody asks for all any more
            now_s += 2.5
            await cache.topic("t", 60_000, fresh=True, max_age_s=2.0)
        assert asked == [["t"]] * 4
        await cache.refresh(all_topics=True)
        now_s += 2.5
        cache.expire()
        await cache.refresh(max_age_s=2.0)
        assert asked[-1] == ["t"], (
            "the topic must be asked for by name, as the answer for all topics does not tell its error"
        )
    finally:
        await cache.close()
        await cache._connections.close()


MANY = 25_000


def cache_of(options: AdminOptions) -> MetadataCache:
    return MetadataCache(
        Connections(), ["127.0.0.1:1"], max_age_ms=60_000, request_timeout_ms=1_000, pauses=options.pauses
    )


@pytest.mark.parametrize("all_topics", [False, True])
async def test_topics_are_asked_for_in_pieces(monkeypatch: pytest.MonkeyPatch, *, all_topics: bool) -> None:
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
    assert all(request.ByteSize() <= MAX_REQUEST_BYTES for request in asked), (
        f"a request must be at most {MAX_REQUEST_BYTES} bytes long, even with the longest names"
    )
    assert all(isinstance(error, UnknownTopicOrPartition) for error in cache.view.missing.values())
    assert told[-1] == len(cache.view.missing) == len(names)


async def test_a_question_under_way_is_joined_only_if_it_asks_for_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(AdminOptions.make({}, {}))
    asked: asyncio.Queue[tuple[metadata_pb2.MetadataRequest, asyncio.Event]] = asyncio.Queue()

    async def ask(
        addresses: Any, request: metadata_pb2.MetadataRequest, **options: Any
    ) -> metadata_pb2.MetadataResponse:
        await asyncio.sleep(0)
        answered = asyncio.Event()
        asked.put_nowait((request, answered))
        await answered.wait()
        there = ["a", "b", "c"] if request.all_topics else request.topics
        topics = [metadata_pb2.TopicInfo(name=name, topic_id=16 * name.encode()) for name in there]
        return metadata_pb2.MetadataResponse(cluster_id="c", metadata_offset=request.min_metadata_offset, topics=topics)

    async def refreshed(*names: str, all_topics: bool = False) -> set[str]:
        cache.wanted.update(names)
        await cache.refresh(all_topics=all_topics)
        return set(cache.view.topics)

    monkeypatch.setattr(cache._inquiry, "ask", ask)
    try:
        async with asyncio.timeout(60):
            first = asyncio.create_task(refreshed("a"))
            request, answered = await asked.get()
            another = asyncio.create_task(refreshed("a", "b"))
            everything = [asyncio.create_task(refreshed(all_topics=True)) for _ in range(2)]
            same = asyncio.create_task(refreshed())
            await asyncio.sleep(0.01)
            assert asked.empty(), "a second request was sent before the first was answered"
            assert list(request.topics) == ["a"]
            answered.set()
            assert await first == {"a"}
            while not all(task.done() for task in (another, same, *everything)):
                with contextlib.suppress(TimeoutError):
                    (_, answered) = await asyncio.wait_for(asked.get(), 0.05)
                    answered.set()
            assert {"a", "b"} <= another.result()
            assert all(task.result() >= {"a", "b", "c"} for task in everything)
            cache.min_offset = 7
            before = asyncio.create_task(refreshed())
            request, answered = await asked.get()
            cache.min_offset = 8
            later = asyncio.create_task(refreshed())
            answered.set()
            await before
            request, answered = await asked.get()
            assert request.min_metadata_offset == 8, (
                "the request must ask for metadata from offset 8 on, which the earlier answer may lack"
            )
            answered.set()
            await later
    finally:
        await cache.close()
        await cache._connections.close()


async def test_without_topics_there_is_one_question_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_partitions_are_subscribed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = ConsumerEngine(["127.0.0.1:1"], ConsumerOptions.make({}, {}), asyncio.get_running_loop())
    session = FetchSession(fetcher, 1, "127.0.0.1:1")
    sent: list[log_pb2.FetchRequest] = []
    monkeypatch.setattr(session, "send", sent.append)
    parts = [
        log_pb2.FetchPartition(subscription_id=each, topic_id=b"i" * 16, partition=each, offset=1 << 50, leader_epoch=9)
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


FAST: dict[str, Any] = {"linger_ms": 0.5, "retry_backoff_ms": 1, "retry_backoff_max_ms": 20}
GRACE_S = 120.0


def test_a_transaction_goes_to_the_topic_that_has_taken_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (metadata, producer_engine, producer_engine):
        monkeypatch.setattr(module, "UNKNOWN_TOPIC_GRACE_S", GRACE_S)
    with TransactionCluster(nodes=2) as cluster:
        cluster.create_topic("t", 2)
        with Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:
            with producer.transaction():
                producer.send("t", b"old", partition=0)
            cluster.delete_topic("t")
            cluster.create_topic("t", 2)
            started = time.monotonic()
            with producer.transaction():
                producer.send("t", b"new", partition=0)
                producer.send("t", b"new", partition=1)
            assert time.monotonic() - started < SOON_S, (
                "the transaction must not wait for metadata.max.age.ms, nor for the grace"
            )
        assert cluster.committed("t") == [b"new", b"new"]
        assert cluster.transactions.violations == []


def test_a_transaction_into_a_topic_that_is_gone_says_so() -> None:
    with TransactionCluster() as cluster:
        cluster.create_topic("t")
        cluster.create_topic("other")
        with Producer(cluster.bootstrap, transactional_id="x", **FAST) as producer:
            with producer.transaction():
                producer.send("t", b"old")
            cluster.delete_topic("t")
            with pytest.raises(TransactionAbortable) as failed, producer.transaction():
                producer.send("t", b"nowhere")
            assert isinstance(failed.value.__cause__, UnknownTopicOrPartition)
            with producer.transaction():
                producer.send("other", b"a")
        assert cluster.committed("other") == [b"a"]


def test_a_stage_goes_to_the_topic_that_has_taken_the_place_of_another() -> None:
    with FakeStageCluster(nodes=2) as cluster:
        cluster.create_topic("t", 2)

        def refuse(method: str, request: Any) -> RaftlogError | None:
            known = {each.topic_id for each in cluster.topics.values()}
            asked = {each.topic_id for each in request.partitions} if method in ("InitStage", "AddToStage") else set()
            return UnknownTopicId("not known here") if asked - known else None

        cluster.stages.refuse = refuse
        with StagedWriter(cluster.bootstrap, "sink", "t", **FAST) as writer:
            for number in range(2):
                with writer.stage(number) as stage:
                    stage.send("t", b"%d" % number, partition=0)
                    token = stage.finish(30)
                writer.commit(number, [token])
                if not number:
                    cluster.delete_topic("t")
                    cluster.create_topic("t", 2)
        assert cluster.committed("t") == [b"1"]
