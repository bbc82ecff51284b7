"""Exactly one copy of every record on a real cluster: answers lost, leaders killed, requests replayed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from raftlog import Admin, Consumer, Delivery, Producer, Record, TopicPartition
from raftlog.errors import BrokerUnavailable
from raftlog.format import Columns, encode_batch
from raftlog.testing import Cluster
from raftlog.v1 import common_pb2, log_pb2, metadata_pb2, transaction_pb2, transaction_pb2_grpc
from tests.support.raw_client import TIMEOUT_S, RawClient, raw_client
from tests.support.steady import PATIENT
from tests.support.up_to_date import heard_everywhere, up_to_date

PARTITIONS = 2
RETRIABLE = {
    common_pb2.NOT_LEADER_OR_FOLLOWER,
    common_pb2.LEADER_NOT_AVAILABLE,
    common_pb2.FENCED_LEADER_EPOCH,
    common_pb2.UNKNOWN_LEADER_EPOCH,
    common_pb2.NOT_ENOUGH_REPLICAS,
    common_pb2.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    common_pb2.REQUEST_TIMED_OUT,
    common_pb2.UNKNOWN_TOPIC_ID,
    common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=PATIENT) as made:
        with Admin(made.bootstrap) as admin:
            for topic in ("lost-answers", "replayed", "refused"):
                admin.create_topic(
                    topic, PARTITIONS, replication_factor=3, configs={"min.insync.replicas": "2"}, timeout=60
                )
        heard_everywhere(made)
        yield made


def read(cluster: Cluster, topic: str, partition: int) -> list[Record]:
    """Return everything that is committed."""
    at = TopicPartition(topic, partition)
    found: list[Record] = []
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([at])
        end = consumer.end_offsets([at])[at]
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < end and time.monotonic() < deadline:
            found += consumer.poll(0.1)
    assert [record.offset for record in found] == list(range(end))
    return found


# The SDK


def test_lost_answers_and_a_killed_leader_double_nothing(cluster: Cluster) -> None:
    """Every few milliseconds all streams break, with whatever is on its way; the leader is killed meanwhile."""
    chance = random.Random(5)
    over = threading.Event()
    with Producer(cluster.bootstrap, linger_ms=1, batch_size=2000, retry_backoff_ms=5) as producer:
        engine = producer._engine

        def break_off() -> None:
            for stream in engine._streams.values():
                stream._break_off(BrokerUnavailable("the connection broke"))

        def trouble() -> None:
            while not over.wait(chance.uniform(0.005, 0.05)):
                producer._thread.loop.call_soon_threadsafe(break_off)

        troubled = threading.Thread(target=trouble)
        troubled.start()
        sent: list[tuple[bytes, Delivery]] = []
        try:
            until = time.monotonic() + 6.0
            killed = 0
            while time.monotonic() < until or not killed:
                if not killed and len(sent) > 500:
                    killed = cluster.leader("lost-answers", 0)
                    cluster.kill(killed)
                for _ in range(chance.randint(1, 30)):
                    value = b"%07d" % len(sent)
                    sent.append((value, producer.send("lost-answers", value, partition=chance.randrange(PARTITIONS))))
                time.sleep(0.002)
        finally:
            over.set()
            troubled.join()
        cluster.start(killed)
        producer.flush(150)
        answers = {(value, delivery.result(0)) for value, delivery in sent}
    found = {partition: read(cluster, "lost-answers", partition) for partition in range(PARTITIONS)}
    values = [record.value for records in found.values() for record in records]
    assert len(values) == len(set(values)) == len(sent), "each is there, and once"
    for records in found.values():
        assert [record.value for record in records] == sorted(record.value or b"" for record in records)
    for value, answer in answers:
        assert answer.offset >= 0
        assert found[answer.partition][answer.offset].value == value


# Without the SDK


async def producer_id(client: RawClient) -> int:
    stub = transaction_pb2_grpc.TransactionStub(client.channel)  # type: ignore[no-untyped-call,unused-ignore] # generated
    response = await stub.InitProducerId(transaction_pb2.InitProducerIdRequest(), timeout=TIMEOUT_S)
    assert not response.error.code, response.error.message
    assert response.producer_epoch == 0
    return int(response.producer_id)


def numbered(producer: int, epoch: int, base_sequence: int, *values: bytes) -> bytes:
    columns = Columns(pa.array(values, pa.binary()))
    return encode_batch(columns, 1000, producer_id=producer, producer_epoch=epoch, base_sequence=base_sequence)


async def leader_of(client: RawClient, topic: str) -> tuple[bytes, int, int]:
    """Return topic id, leader and leader epoch of partition 0."""
    view = (await client.metadata(metadata_pb2.MetadataRequest(topics=[topic]))).topics[0]
    return view.topic_id, view.partitions[0].leader, view.partitions[0].leader_epoch


async def answer_to(
    addresses: dict[int, str], asked: int, topic: str, batch: bytes, lost: int = 0
) -> log_pb2.ProduceResult:
    """Send a batch until it is answered for good, `lost` times on streams whose answers nobody waits for."""
    deadline = time.monotonic() + 90
    while True:
        assert time.monotonic() < deadline, "no leader takes it"
        try:
            async with raw_client(addresses[asked]) as client:
                topic_id, leader, epoch = await leader_of(client, topic)
            async with raw_client(addresses[leader]) as client:
                for _ in range(lost):
                    call = client.produce_call()
                    await call.write(client.request(1, [(topic_id, 0, epoch, 0, batch)]))
                    await asyncio.sleep(0)
                    call.cancel()
                result = await client.produce(topic_id, batch, leader_epoch=epoch)
        except Exception:  # killed: gRPC has many words for that
            asked = next(each for each in addresses if each != asked)
            await asyncio.sleep(0.05)
            continue
        if result.error.code not in RETRIABLE:
            return result
        await asyncio.sleep(0.05)


async def replay(addresses: dict[int, str], asked: int, batch: bytes, lost: int) -> int:
    """Send a batch until it is acknowledged, `lost` times on streams whose answers nobody waits for; return where."""
    result = await answer_to(addresses, asked, "replayed", batch, lost)
    assert not result.error.code, result.error.message
    return result.base_offset


def wait_for_isr(cluster: Cluster, topic: str) -> None:
    """Wait until all replicas of partition 0 are in sync, so that each of them may lead."""
    cluster.wait_for(
        lambda admin: len(up_to_date(admin).describe_topic(topic).partitions[0].isr) == 3, what="every replica in sync"
    )


def test_replayed_requests_are_answered_as_the_first_time(cluster: Cluster) -> None:
    """Each batch is sent many times over several streams, the last five again and again, to one leader and the next."""
    addresses = dict(zip(cluster.broker_ids, cluster.bootstrap.split(","), strict=True))
    chance = random.Random(3)

    async def torment() -> list[int]:
        async with raw_client(addresses[1]) as client:
            producer = await producer_id(client)
        batches = [numbered(producer, 0, 2 * each, b"%03d" % each, b"%03d!" % each) for each in range(30)]
        offsets: list[int] = []
        down = 0
        for number, batch in enumerate(batches):
            if number in (10, 20):
                if down:
                    cluster.start(down)
                wait_for_isr(cluster, "replayed")
                down = cluster.leader("replayed", 0)
                cluster.kill(down)
            living = {node: address for node, address in addresses.items() if node != down}
            offsets.append(await replay(living, next(iter(living)), batch, chance.randint(0, 3)))
            for again in range(max(0, number - 4), number + 1):
                if chance.random() < 0.5:
                    found = await replay(living, next(iter(living)), batches[again], chance.randint(0, 2))
                    assert found == offsets[again], f"batch {again} after {number}"
        cluster.start(down)
        return offsets

    offsets = asyncio.run(torment())
    assert offsets == list(range(0, 60, 2))
    values = [record.value for record in read(cluster, "replayed", 0)]
    assert values == [value for each in range(30) for value in (b"%03d" % each, b"%03d!" % each)]


def test_gaps_stale_epochs_and_poisonous_numbers_are_refused_and_harm_nobody(cluster: Cluster) -> None:
    async def ask() -> None:
        addresses = dict(zip(cluster.broker_ids, cluster.bootstrap.split(","), strict=True))
        async with raw_client(addresses[1]) as client:
            producer = await producer_id(client)
            other = await producer_id(client)
            assert producer != other

            async def send(batch: bytes) -> log_pb2.ProduceResult:
                return await answer_to(addresses, 1, "refused", batch)

            assert (await send(numbered(producer, 0, 5, b"x"))).error.code == common_pb2.UNKNOWN_PRODUCER_ID
            assert (await send(numbered(producer, 1, 0, b"a", b"b"))).base_offset == 0
            assert (await send(numbered(producer, 1, 3, b"x"))).error.code == common_pb2.OUT_OF_ORDER_SEQUENCE_NUMBER
            assert (await send(numbered(producer, 0, 2, b"x"))).error.code == common_pb2.INVALID_PRODUCER_EPOCH
            assert (await send(numbered(other, 0, 0, b"c"))).base_offset == 2
            assert (await send(numbered(producer, 2, 0, b"d"))).base_offset == 3
            for poison in ((producer, -1, 0), (producer, 2, -1), (-2, -1, -1), (-1, 0, 0), (-1, -1, 7)):
                result = await send(numbered(*poison, b"x"))
                assert result.error.code == common_pb2.INVALID_RECORD, poison
                assert result.error.message
            assert (await send(numbered(other, 0, 1, b"e"))).base_offset == 4

    asyncio.run(ask())
    assert [record.value for record in read(cluster, "refused", 0)] == [b"a", b"b", b"c", b"d", b"e"]
