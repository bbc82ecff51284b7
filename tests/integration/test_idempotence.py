"""Exactly one copy of every record on a real cluster: answers are lost, and a leader is killed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from raftlog import Admin, Consumer, Delivery, Producer, Record, TopicPartition
from raftlog._client.producer import ProduceCall
from raftlog.errors import BrokerUnavailable
from raftlog.testing import Cluster
from tests.support.steady import PATIENT
from tests.support.up_to_date import heard_everywhere

PARTITIONS = 2
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(nodes=3, config=PATIENT) as made:
        with Admin(made.bootstrap) as admin:
            for topic in ("lost-answers", "shared-call"):
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


def test_lost_answers_and_a_killed_leader_double_nothing(cluster: Cluster) -> None:
    """Every few milliseconds all streams break, with the messages on their way; the leader is killed meanwhile."""
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
    assert len(values) == len(set(values)) == len(sent), "each record must be in the log exactly once"
    for records in found.values():
        assert [record.value for record in records] == sorted(record.value or b"" for record in records)
    for value, answer in answers:
        assert answer.offset >= 0
        assert found[answer.partition][answer.offset].value == value


def test_a_killed_leader_under_producers_that_share_a_call_doubles_and_loses_nothing(cluster: Cluster) -> None:
    """Each producer's records are there once and in order; one producer closes amid the others' records."""
    count, sent = 8, [0] * 8
    deliveries: list[Delivery] = []
    with ExitStack() as stack:
        producers = [stack.enter_context(Producer(cluster.bootstrap, linger_ms=0)) for _ in range(count)]

        def send() -> None:
            for name, producer in enumerate(producers):
                if producer is not None:
                    deliveries.append(producer.send("shared-call", b"%d:%06d" % (name, sent[name]), partition=0))
                    sent[name] += 1

        def calls() -> set[ProduceCall | None]:
            return {stream._call for each in producers if each for stream in each._engine._streams.values()} - {None}

        until = time.monotonic() + 4.0
        killed = closed = 0
        while time.monotonic() < until or not killed:
            send()
            if not closed and sum(sent) > 300:
                deliveries[-1].result(TIMEOUT_S)
                assert len(calls()) == 1, "all partitions of a broker must share one call"
                closed = 1
                producers[0].close()
                producers[0] = None  # type: ignore[call-overload] # the others go on
            elif not killed and sum(sent) > 600:
                killed = cluster.leader("shared-call", 0)
                cluster.kill(killed)
            time.sleep(0.002)
        cluster.start(killed)
        for producer in producers[1:]:
            producer.flush(150)
        for delivery in deliveries:
            assert delivery.result(0).offset >= 0
    found: dict[int, list[int]] = {name: [] for name in range(count)}
    for record in read(cluster, "shared-call", 0):
        assert record.value is not None
        name, _, number = record.value.partition(b":")
        found[int(name)].append(int(number))
    assert found == {name: [*range(sent[name])] for name in range(count)}
