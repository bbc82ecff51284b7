"""The SDK against a real server process: round trips, restarts, forks, and both faces at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pyarrow as pa
import pytest

from raftlog import Admin, Consumer, Producer, Record, TopicPartition, aio
from raftlog._client.keywords import Acks, Compression
from raftlog.errors import (
    BrokerUnavailable,
    InvalidConfig,
    InvalidTopic,
    MessageTooLarge,
    OffsetOutOfRange,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from raftlog.testing import Cluster
from tests.support.patience import refusal


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name).replace("[", "-").replace("]", "")[:200]
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(name, partitions=3, timeout=60)
    return name


def read_all(cluster: Cluster, topic: str, count: int) -> list[tuple[int, int, bytes | None]]:
    found: list[tuple[int, int, bytes | None]] = []
    with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(topic)
        deadline = time.monotonic() + 60
        while len(found) < count and time.monotonic() < deadline:
            found += [(record.partition, record.offset, record.value) for record in consumer.poll(0.5)]
        found += [(record.partition, record.offset, record.value) for record in consumer.poll(0)]
    return found


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("acks", ["all", 1])
def test_records_come_back_as_they_were_sent(cluster: Cluster, topic: str, codec: Compression, acks: Acks) -> None:
    with Producer(cluster.bootstrap, acks=acks, compression_type=codec) as producer:
        first = producer.send(topic, b"v1", b"k", 1, {"h": b"x", "n": None}, 1234).result(60)
        producer.send(topic, None, b"k", 1).result(60)
        producer.send_batch(topic, pa.table({"value": ["é", "b"], "partition": pa.array([1, 1], pa.int32())})).result(
            60
        )
    assert first == (topic, 1, 0, 1234)
    with Consumer(cluster.bootstrap) as consumer:
        consumer.assign([TopicPartition(topic, 1)])
        consumer.seek_to_beginning()
        records: list[Record] = []
        while len(records) < 4:
            records += consumer.poll(60)
        assert records[0] == (topic, 1, 0, 1234, b"k", b"v1", (("h", b"x"), ("n", None)))
        assert [record.value for record in records] == [b"v1", None, "é".encode(), b"b"]
        assert consumer.poll(0.05) == []


def test_many_threads_share_a_producer(cluster: Cluster, topic: str) -> None:
    per_thread, threads = 5000, 4
    with Producer(cluster.bootstrap, batch_size=4096) as producer:

        def work(thread: int) -> None:
            for number in range(per_thread):
                producer.send(topic, b"%d %d" % (thread, number), b"thread %d" % thread)

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    found = read_all(cluster, topic, per_thread * threads)
    assert len(found) == per_thread * threads
    seen: dict[bytes, int] = {}
    for _, _, value in found:
        assert value is not None
        thread, number = value.split()
        assert int(number) == seen.get(thread, -1) + 1, (
            "records of one key must be in one partition in the order in which they were sent"
        )
        seen[thread] = int(number)


def test_a_killed_server_loses_nothing_that_was_acknowledged(cluster: Cluster, topic: str) -> None:
    with Producer(cluster.bootstrap, retry_backoff_ms=10) as producer:
        deliveries = []
        for number in range(3000):
            deliveries.append(producer.send(topic, b"%d" % number, partition=0))
            if number == 1000:
                cluster.kill(1)
            if number == 2000:
                cluster.start(1)
            if number % 100 == 0:
                time.sleep(0.002)
        producer.flush(timeout=150)
        where = {delivery.result(0).offset: b"%d" % number for number, delivery in enumerate(deliveries)}
    assert len(where) == 3000
    # What was written and not answered before the kill was sent again: there are more records than were sent.
    stored = {offset: value for _, offset, value in read_all(cluster, topic, max(where) + 1)}
    assert where.items() <= stored.items()
    in_order = list(dict.fromkeys(stored[offset] for offset in sorted(stored)))
    assert in_order == [b"%d" % number for number in range(3000)]


def test_a_consumer_lives_through_a_restart(cluster: Cluster, topic: str) -> None:
    with Producer(cluster.bootstrap) as producer, Consumer(cluster.bootstrap, retry_backoff_ms=10) as consumer:
        consumer.subscribe(topic)
        producer.send(topic, b"before").result(60)
        assert consumer.poll(60)[0].value == b"before"
        cluster.stop(1)
        assert consumer.poll(0.2) == []
        cluster.start(1)
        producer.send(topic, b"after").result(60)
        assert consumer.poll(60)[0].value == b"after"


def test_look_ups_and_deleted_records(cluster: Cluster, topic: str) -> None:
    part = TopicPartition(topic, 0)
    with Producer(cluster.bootstrap) as producer:
        for at_ms in (1000, 2000, 3000):
            producer.send(topic, b"v", partition=0, timestamp_ms=at_ms).result(60)
    with Admin(cluster.bootstrap) as admin, Consumer(cluster.bootstrap, auto_offset_reset="none") as consumer:
        found = consumer.offsets_for_times({part: 1500})[part]
        assert found is not None
        assert found[:2] == (1, 2000)
        assert consumer.offsets_for_times({part: 4000}) == {part: None}
        assert consumer.beginning_offsets([part]) == {part: 0}
        assert consumer.end_offsets([part]) == {part: 3}
        assert admin.delete_records({part: 2}) == {part: 2}
        assert consumer.beginning_offsets([part]) == {part: 2}
        consumer.assign([part])
        consumer.seek(part, 0)
        with pytest.raises(OffsetOutOfRange, match=f"{topic}-0"):
            consumer.poll(60)
        consumer.seek_to_beginning()
        assert consumer.poll(60)[0].offset == 2
        with pytest.raises(OffsetOutOfRange):
            admin.delete_records({part: 99})


def test_admin(cluster: Cluster) -> None:
    with Admin(cluster.bootstrap) as admin:
        assert (
            admin.create_topic("admin-a", partitions=2, configs={"max.message.bytes": 50_000}, validate_only=True)
            is None
        )
        assert "admin-a" not in admin.list_topics()
        made = admin.create_topic("admin-a", partitions=2, configs={"max.message.bytes": 50_000})
        assert made == admin.describe_topic("admin-a")
        assert (made.partitions[1].leader, made.partitions[1].replicas, made.partitions[1].isr) == (1, [1], [1])
        with pytest.raises(TopicAlreadyExists):
            admin.create_topic("admin-a")
        with pytest.raises(InvalidTopic):
            admin.create_topic("no/slash")
        with pytest.raises(InvalidConfig, match=r"retention\.ms"):
            admin.create_topic("admin-b", configs={"retention.mss": 1})
        admin.create_partitions("admin-a", 3)
        assert len(admin.describe_topic("admin-a").partitions) == 3
        assert admin.describe_configs(topic="admin-a")["max.message.bytes"].value == "50000"
        admin.alter_configs(topic="admin-a", set={"retention.ms": 5000}, unset=["max.message.bytes"])
        configs = admin.describe_configs(topic="admin-a")
        assert (configs["retention.ms"].value, configs["retention.ms"].source) == ("5000", "dynamic_topic")
        assert configs["max.message.bytes"].value != "50000"
        assert "log.dirs" in admin.describe_configs(broker=1)
        described = admin.describe_cluster()
        assert [broker.broker_id for broker in described.brokers] == [1]
        assert described.controller_id == 1
        dirs = admin.describe_log_dirs()
        assert dirs[0].error is None
        assert {(part.topic, part.partition) for part in dirs[0].partitions} >= {("admin-a", 0), ("admin-a", 2)}
        admin.delete_topic("admin-a")
        assert "admin-a" not in admin.list_topics()
        with pytest.raises(UnknownTopicOrPartition):
            admin.delete_topic("admin-a")
    with Admin("127.0.0.1:1") as lost:
        words = r"127\.0\.0\.1:1.*check"
        refusal(BrokerUnavailable, words, lambda limit_s: lost.list_topics(timeout=limit_s), 0.3, 5.0, 30.0)


def test_a_batch_above_the_limit_of_the_topic_is_halved(cluster: Cluster) -> None:
    with Admin(cluster.bootstrap) as admin, Producer(cluster.bootstrap, linger_ms=50) as producer:
        admin.create_topic("small-batches", configs={"max.message.bytes": 5000}, timeout=60)
        deliveries = [producer.send("small-batches", b"%0100d" % number) for number in range(400)]
        assert [delivery.result(60).offset for delivery in deliveries] == list(range(400))
        with pytest.raises(MessageTooLarge, match=r"max\.message\.bytes=5000"):
            producer.send("small-batches", b"x" * 6000).result(60)


def test_asynchronous_clients(cluster: Cluster, topic: str) -> None:
    async def main() -> None:
        async with (
            aio.Producer(cluster.bootstrap, buffer_memory=200_000, batch_size=10_000) as producer,
            aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer,
            aio.Admin(cluster.bootstrap) as admin,
        ):
            assert topic in await admin.list_topics()
            await consumer.subscribe(topic)
            deliveries = [await producer.send(topic, b"%d" % number, partition=0) for number in range(3000)]
            ranges = await (await producer.send_batch(topic, [b"a", b"b"], partition=1))
            assert [(part.partition, part.record_count) for part in ranges] == [(1, 2)]
            await producer.flush(timeout=60)
            assert (await deliveries[2999]).offset == 2999
            assert deliveries[0].done()
            count = 0
            async for _ in consumer:
                count += 1
                if count == 3002:
                    break
            assert (await consumer.position(TopicPartition(topic, 0)), count) == (3000, 3002)
            await consumer.seek_to_beginning()
            rows = 0
            while rows < 3002:
                rows += (await consumer.poll_arrow(10)).num_rows
            waiting = asyncio.ensure_future(consumer.poll(None))
            await asyncio.sleep(0.05)
            await (await producer.send(topic, b"wakes it"))
            assert (await waiting)[0].value == b"wakes it"

    asyncio.run(main())


SCRIPT = """
import asyncio, os, sys
from raftlog import Admin, Consumer, Producer, aio
bootstrap, topic = sys.argv[1:]
"""


def run_script(cluster: Cluster, topic: str, body: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(body), cluster.bootstrap, topic],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_producer_that_is_not_closed_does_not_keep_the_interpreter(cluster: Cluster, topic: str) -> None:
    done = run_script(
        cluster,
        topic,
        """
        producer = Producer(bootstrap, linger_ms=60_000)
        producer.send(topic, b"a").result(60)
        consumer = Consumer(bootstrap)
        consumer.subscribe(topic)
        producer.send(topic, b"never mind")
        print("end")
        """,
        60,
    )
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert done.stderr == (
        "the program ends with a producer whose records are not all acknowledged, 1 may be lost; "
        "close or flush the producer first\n"
    )


def test_both_faces_in_one_process_make_no_noise(cluster: Cluster, topic: str) -> None:
    """Two event loops share gRPC's poller, and the slower one finds nothing to read: not worth a word."""
    done = run_script(
        cluster,
        topic,
        """
        async def main():
            async with aio.Producer(bootstrap, linger_ms=0) as there:
                with Producer(bootstrap, linger_ms=0) as here:
                    for number in range(300):
                        one = await there.send(topic, b"there")
                        two = here.send(topic, b"here")
                        await one
                        await asyncio.to_thread(two.result, 60)
        asyncio.run(main())
        print("end")
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_a_child_that_was_forked_before_any_client_was_made_works(cluster: Cluster, topic: str) -> None:
    done = run_script(
        cluster,
        topic,
        """
        children = []
        for child in range(3):
            pid = os.fork()
            if pid == 0:
                with Producer(bootstrap) as producer:
                    producer.send(topic, b"%d" % child).result(60)
                os._exit(0)
            children.append(pid)
        print([os.waitpid(pid, 0)[1] for pid in children])
        """,
    )
    assert (done.returncode, done.stdout) == (0, "[0, 0, 0]\n"), done.stderr
    assert {value for _, _, value in read_all(cluster, topic, 3)} == {b"0", b"1", b"2"}


def test_a_producer_taken_over_a_fork_says_so(cluster: Cluster, topic: str) -> None:
    done = run_script(
        cluster,
        topic,
        """
        producer = Producer(bootstrap)
        producer.send(topic, b"a").result(60)
        producer.send(topic, b"open batch")
        pid = os.fork()
        if pid == 0:
            try:
                producer.send(topic, b"b")
            except Exception as error:
                print(type(error).__name__, "one in each process" in str(error), flush=True)
            try:
                Producer(bootstrap)
            except Exception as error:
                print(type(error).__name__, "does not survive a fork" in str(error), flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        producer.close()
        print("parent fine, child", status)
        """,
    )
    assert done.stdout == "ClosedError True\nInvalidRequestError True\nparent fine, child 0\n", done.stderr


def test_waiting_in_a_forked_child_for_what_its_parent_sends_is_refused(cluster: Cluster, topic: str) -> None:
    """The child has no event loop that could ever end a delivery."""
    done = run_script(
        cluster,
        topic,
        """
        producer = Producer(bootstrap, linger_ms=60_000)
        delivery = producer.send(topic, b"open batch")
        several = producer.send_batch(topic, [b"1", b"2"])
        pid = os.fork()
        if pid == 0:
            for wait in (producer.flush, delivery.result, delivery.exception, several.result):
                try:
                    wait()
                except Exception as error:
                    print(type(error).__name__, "one in each process" in str(error), flush=True)
            producer.close()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        producer.close()
        print("parent fine, child", status, delivery.result().offset)
        """,
    )
    assert done.stdout == "ClosedError True\n" * 4 + "parent fine, child 0 0\n", done.stderr


def test_what_is_sent_without_acknowledgement_is_not_cut_off_by_closing(cluster: Cluster, topic: str) -> None:
    rounds = 30
    for number in range(rounds):
        with Producer(cluster.bootstrap, acks=0) as producer:
            for part in range(3):
                producer.send(topic, b"%d-%d" % (number, part), partition=0)
    partition = TopicPartition(topic, 0)
    with Consumer(cluster.bootstrap) as consumer:
        deadline = time.monotonic() + 60
        while (end := consumer.end_offsets([partition])[partition]) < 3 * rounds and time.monotonic() < deadline:
            time.sleep(0.05)
    assert end == 3 * rounds


def test_acks_0_finds_the_new_leader_after_an_orderly_hand_over(three: Cluster) -> None:
    """Only what is on its way when the leader changes may be lost, not all until metadata.max.age.ms (5 minutes)."""
    partition = TopicPartition("handed-over", 0)
    with (
        Admin(three.bootstrap) as admin,
        Producer(three.bootstrap, acks=0, linger_ms=0) as producer,
        Consumer(three.bootstrap) as consumer,
    ):
        admin.create_topic(partition.topic, partitions=1, replication_factor=3)
        producer.send(partition.topic, b"first", partition=0).result(30)
        former = admin.describe_topic(partition.topic).partitions[0]
        others = [each for each in former.replicas if each != former.leader]
        admin.alter_reassignments({partition: [*others, former.leader]})
        three.wait_for(
            lambda admin: admin.describe_topic(partition.topic).partitions[0].replicas[0] == others[0],
            what="the preferred leader is another broker",
        )
        admin.elect_leaders(partition.topic)

        def arrives() -> bool:
            before = consumer.end_offsets([partition])[partition]
            producer.send(partition.topic, b"later", partition=0).result(30)
            time.sleep(0.2)
            return consumer.end_offsets([partition])[partition] > before

        deadline = time.monotonic() + 60
        while not arrives():
            assert time.monotonic() < deadline, "after 60 s the producer still sends to the former leader"
        assert all(arrives() for _ in range(10))


def test_acks_0_finds_the_new_leader_while_the_former_one_is_paused(three: Cluster) -> None:
    """A paused broker refuses nothing, and its socket takes what is sent; metadata.max.age.ms is 5 minutes."""
    partition = TopicPartition("paused", 0)
    with Producer(three.bootstrap, acks=0, linger_ms=0) as producer:
        with Admin(three.bootstrap) as admin:
            admin.create_topic(partition.topic, partitions=1, replication_factor=3)
        producer.send(partition.topic, b"first", partition=0).result(30)
        former = three.leader(partition.topic)
        three.pause(former)
        try:
            three.leader(partition.topic, other_than=former)
            with Consumer(three.bootstrap) as consumer:
                deadline = time.monotonic() + 60
                while consumer.end_offsets([partition])[partition] < 2:
                    assert time.monotonic() < deadline, "after 60 s the producer still sends to the paused leader"
                    producer.send(partition.topic, b"later", partition=0).result(30)
                    time.sleep(0.1)
        finally:
            three.resume(former)


def test_an_interrupt_ends_a_wait(cluster: Cluster, topic: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT + textwrap.dedent("""
            with Consumer(bootstrap) as consumer:
                consumer.subscribe(topic)
                try:
                    print("ready", flush=True)
                    for record in consumer:
                        pass
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
        """), cluster.bootstrap, topic],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "interrupted\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
