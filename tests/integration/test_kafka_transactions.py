"""Transactions of Kafka's clients, unmodified, against a cluster of three.

librdkafka, aiokafka and kafka-python keep one epoch over all transactions; readers of all kinds judge what they see.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka import KafkaException, TopicPartition
from kafka.admin._transactions import AbortTransactionSpec

import raftlog
from raftlog.testing import Cluster
from tests.support.up_to_date import heard_everywhere

PARTITIONS = 3
TIMEOUT_S = 60.0
QUIET: dict[str, Any] = {"log_level": 0}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3, kafka=True) as started:
        yield started


@pytest.fixture
def topic(cluster: Cluster) -> str:
    name = f"kafka-{next(_numbers)}"
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=PARTITIONS, replication_factor=3)
    heard_everywhere(cluster)
    return name


def transactional(cluster: Cluster, transactional_id: str, **settings: Any) -> confluent_kafka.Producer:
    """Return librdkafka's producer, ready to begin."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.kafka_bootstrap, "transactional.id": transactional_id, **QUIET, **settings}
    )
    producer.init_transactions(TIMEOUT_S)
    return producer


def read_by_librdkafka(cluster: Cluster, topic: str, *, committed: bool = True) -> list[bytes]:
    """Return all values of a topic that are there now, sorted."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            **QUIET,
        }
    )
    found: list[bytes] = []
    ended: set[int] = set()
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(ended) < PARTITIONS and time.monotonic() < deadline_s:
            message = consumer.poll(1.0)
            if message is None:
                continue
            error = message.error()
            if error is None:
                found.append(message.value() or b"")
            else:
                assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                number = message.partition()
                assert number is not None
                ended.add(number)
    finally:
        consumer.close()
    assert len(ended) == PARTITIONS
    return sorted(found)


def read_by_raftlog(cluster: Cluster, topic: str, count: int) -> list[bytes]:
    """Return committed values of a topic, sorted, as soon as there are `count`."""
    found: list[bytes] = []
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([raftlog.TopicPartition(topic, number) for number in range(PARTITIONS)])
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(found) < count and time.monotonic() < deadline_s:
            found += [each.value or b"" for each in consumer.poll(timeout=1.0)]
    return sorted(found)


def test_librdkafka_commits_and_aborts(cluster: Cluster, topic: str) -> None:
    producer = transactional(cluster, f"id-{topic}")
    kept = []
    for number in range(9):
        producer.begin_transaction()
        values = [b"%d-%d" % (number, each) for each in range(6)]
        for each, value in enumerate(values):
            producer.produce(topic, value, partition=(number + each) % PARTITIONS if number % 2 else 0)
        if number % 3 == 2:
            producer.abort_transaction(TIMEOUT_S)
        else:
            producer.commit_transaction(TIMEOUT_S)
            kept += values
    assert read_by_librdkafka(cluster, topic) == sorted(kept)
    assert len(read_by_librdkafka(cluster, topic, committed=False)) >= len(kept)
    assert read_by_raftlog(cluster, topic, len(kept)) == sorted(kept)


def test_librdkafka_commits_offsets_with_its_records(cluster: Cluster, topic: str) -> None:
    group = f"group-{topic}"
    settings = {"bootstrap.servers": cluster.kafka_bootstrap, "group.id": group, **QUIET}
    consumer = confluent_kafka.Consumer(settings)
    producer = transactional(cluster, f"id-{topic}")

    def committed() -> list[int]:
        partitions = [TopicPartition(topic, number) for number in range(2)]
        return [each.offset for each in consumer.committed(partitions, TIMEOUT_S)]

    try:
        for offset, commit in ((3, True), (4, False), (5, True)):
            producer.begin_transaction()
            producer.produce(topic, b"%d" % offset, partition=2)
            offsets = [TopicPartition(topic, number, offset + number) for number in range(2)]
            producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), TIMEOUT_S)
            if commit:
                producer.commit_transaction(TIMEOUT_S)
            else:
                producer.abort_transaction(TIMEOUT_S)
            last = offset if commit else offset - 1
            assert committed() == [last, last + 1]
    finally:
        consumer.close()
    assert read_by_raftlog(cluster, topic, 2) == [b"3", b"5"]
    with raftlog.Admin(cluster.bootstrap) as admin:
        assert sorted(each.offset for each in admin.group_offsets(group).values()) == [5, 6]


def test_a_transactional_id_has_one_owner_whatever_it_speaks(cluster: Cluster, topic: str) -> None:
    """The last producer to begin fences the others, whose open transactions are aborted; each error is final."""
    name = f"id-{topic}"
    first = transactional(cluster, name)
    first.begin_transaction()
    first.produce(topic, b"left open", partition=0)
    first.flush(TIMEOUT_S)
    with raftlog.Producer(cluster.bootstrap, transactional_id=name) as second:
        second.begin_transaction()
        second.send(topic, b"raftlog", partition=0)
        second.commit_transaction()
        with pytest.raises(KafkaException) as refused:
            first.commit_transaction(TIMEOUT_S)
        assert refused.value.args[0].fatal()
        second.begin_transaction()
        second.send(topic, b"left open too", partition=0)
        second.flush()
        third = transactional(cluster, name)
        third.begin_transaction()
        third.produce(topic, b"librdkafka", partition=0)
        third.commit_transaction(TIMEOUT_S)
        with pytest.raises(raftlog.errors.RaftlogError):
            second.commit_transaction()
    assert read_by_librdkafka(cluster, topic) == [b"librdkafka", b"raftlog"]


def until_aborted(admin: raftlog.Admin, transactional_id: str) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while admin.describe_transaction(transactional_id).state != "complete_abort":
        assert time.monotonic() < deadline_s, "the coordinator must abort a transaction that was open for too long"
        time.sleep(0.1)


def test_a_transaction_that_timed_out_is_aborted_and_its_producer_goes_on(cluster: Cluster, topic: str) -> None:
    producer = transactional(cluster, f"id-{topic}", **{"transaction.timeout.ms": 1_500})
    producer.begin_transaction()
    producer.produce(topic, b"kept", partition=0)
    producer.commit_transaction(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"late", partition=0)
    producer.flush(TIMEOUT_S)
    with raftlog.Admin(cluster.bootstrap) as admin:
        until_aborted(admin, f"id-{topic}")
    with pytest.raises(KafkaException) as refused:
        producer.commit_transaction(TIMEOUT_S)
    assert refused.value.args[0].txn_requires_abort()
    producer.abort_transaction(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"after", partition=0)
    producer.commit_transaction(TIMEOUT_S)
    assert read_by_librdkafka(cluster, topic) == [b"after", b"kept"]


def test_a_batch_for_a_transaction_that_timed_out_ends_librdkafka_and_nothing_of_it_is_read(
    cluster: Cluster, topic: str
) -> None:
    """As with Kafka's brokers: INVALID_PRODUCER_EPOCH is final to librdkafka if a partition answers it."""
    producer = transactional(cluster, f"id-{topic}", **{"transaction.timeout.ms": 1_500})
    producer.begin_transaction()
    producer.produce(topic, b"late", partition=0)
    producer.flush(TIMEOUT_S)
    with raftlog.Admin(cluster.bootstrap) as admin:
        until_aborted(admin, f"id-{topic}")
    producer.produce(topic, b"later", partition=0)
    with pytest.raises(KafkaException) as refused:  # by whichever call is under way when the answer comes
        producer.flush(TIMEOUT_S)
        producer.commit_transaction(TIMEOUT_S)
    assert refused.value.args[0].fatal()
    successor = transactional(cluster, f"id-{topic}")
    successor.begin_transaction()
    successor.produce(topic, b"after", partition=0)
    successor.commit_transaction(TIMEOUT_S)
    assert read_by_librdkafka(cluster, topic) == [b"after"]


def test_aiokafka_commits_aborts_and_sends_offsets(cluster: Cluster, topic: str) -> None:
    group = f"group-{topic}"

    async def run() -> list[bytes | None]:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=cluster.kafka_bootstrap, transactional_id=f"id-{topic}")
        await producer.start()
        try:
            for number in range(6):
                await producer.begin_transaction()
                for each in range(4):
                    await producer.send(topic, b"%d-%d" % (number, each), partition=each % PARTITIONS)
                offsets = {aiokafka.TopicPartition(topic, 0): number + 1}
                await producer.send_offsets_to_transaction(offsets, group)
                if number % 3 == 2:
                    await producer.abort_transaction()
                else:
                    await producer.commit_transaction()
        finally:
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=cluster.kafka_bootstrap, auto_offset_reset="earliest", isolation_level="read_committed"
        )
        await consumer.start()
        try:
            consumer.assign([aiokafka.TopicPartition(topic, number) for number in range(PARTITIONS)])
            return [(await consumer.getone()).value for _ in range(16)]
        finally:
            await consumer.stop()

    async def in_time() -> list[bytes | None]:
        async with asyncio.timeout(2 * TIMEOUT_S):
            return await run()

    kept = sorted(b"%d-%d" % (number, each) for number in (0, 1, 3, 4) for each in range(4))
    assert sorted(filter(None, asyncio.run(in_time()))) == kept
    assert read_by_librdkafka(cluster, topic) == kept
    with raftlog.Admin(cluster.bootstrap) as admin:
        assert [each.offset for each in admin.group_offsets(group).values()] == [5]


def test_kafka_python_commits_and_aborts(cluster: Cluster, topic: str) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=cluster.kafka_bootstrap.split(","), transactional_id=f"id-{topic}")
    try:
        producer.init_transactions()
        for number in range(4):
            producer.begin_transaction()
            for each in range(4):
                producer.send(topic, b"%d-%d" % (number, each), partition=each % PARTITIONS)
            if number == 1:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
    finally:
        producer.close()
    assert read_by_librdkafka(cluster, topic) == sorted(
        b"%d-%d" % (number, each) for number in (0, 2, 3) for each in range(4)
    )


def test_an_administrator_sees_transactions(cluster: Cluster, topic: str) -> None:
    name = f"id-{topic}"
    producer = transactional(cluster, name)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=1)
    producer.flush(TIMEOUT_S)
    admin = kafka.KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap.split(","))
    place = kafka.TopicPartition(topic, 1)
    try:
        described = admin.describe_transactions([name])[name]
        assert (described.state.value, described.topic_partitions) == ("Ongoing", {place})
        listed = [each for some in admin.list_transactions(state_filters=["Ongoing"]).values() for each in some]
        assert [each.producer_id for each in listed if each.transactional_id == name] == [described.producer_id]
        (found,) = admin.describe_producers([place])[place].active_producers
        assert (found.producer_id, found.current_transaction_start_offset) == (described.producer_id, 0)
        assert found.producer_epoch == described.producer_epoch
        with pytest.raises(kafka.errors.TransactionalIdNotFoundError):
            admin.describe_transactions([f"{name}-absent"])
        spec = AbortTransactionSpec(place, found.producer_id, found.producer_epoch)
        admin.abort_transaction(spec)
        (ended,) = admin.describe_producers([place])[place].active_producers
        assert ended.current_transaction_start_offset == -1
        with pytest.raises(kafka.errors.InvalidTxnStateError):
            admin.abort_transaction(spec)
    finally:
        admin.close()
    producer.abort_transaction(TIMEOUT_S)
    assert read_by_librdkafka(cluster, topic) == []
