"""Kafka's clients, unmodified, against a cluster of three: librdkafka, kafka-python and aiokafka.

None of them is ours, so they judge the listener: what one writes, another reads, and raftlog's own clients read as
columns. One cluster serves all tests; each has a topic of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka
import confluent_kafka.admin
import kafka
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic
from kafka.admin import KafkaAdminClient

import raftlog
from broker.kafka import messages
from broker.kafka.codec import Fields
from raftlog.testing import Cluster
from tests.support.batches import batch_of
from tests.support.kafka_batches import to_kafka
from tests.support.up_to_date import heard_everywhere, up_to_date

PARTITIONS = 3
TIMEOUT_S = 60.0
ADMIN: Any = confluent_kafka.admin
"""Its types leave most of its names out."""
QUIET: dict[str, Any] = {"log_level": 0}
CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
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


def produce(cluster: Cluster, topic: str, values: list[bytes], **settings: Any) -> None:
    """Produce with librdkafka, and wait for every delivery."""
    failed: list[Any] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET, **settings})
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % PARTITIONS, on_delivery=lambda error, _: failed.append(error))
    assert producer.flush(TIMEOUT_S) == 0
    assert failed == [None] * len(values)


def consume(cluster: Cluster, topic: str, count: int, **settings: Any) -> list[confluent_kafka.Message]:
    """Consume with librdkafka from all partitions until there are `count` records."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.kafka_bootstrap, "group.id": "unused", **QUIET, **settings}
    )
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        found: list[confluent_kafka.Message] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(found) < count and time.monotonic() < deadline_s:
            message = consumer.poll(1.0)
            if message is not None:
                assert message.error() is None, message.error()
                found.append(message)
        assert len(found) == count
        return found
    finally:
        consumer.close()


def values_of(messages: list[confluent_kafka.Message]) -> list[bytes]:
    return sorted(each.value() or b"" for each in messages)


def read_by_raftlog(cluster: Cluster, topic: str, count: int, within_s: float = TIMEOUT_S) -> list[bytes | None]:
    """Return the values that `poll_arrow` gives."""
    found: list[bytes | None] = []
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([raftlog.TopicPartition(topic, number) for number in range(PARTITIONS)])
        deadline_s = time.monotonic() + within_s
        while len(found) < count and time.monotonic() < deadline_s:
            table = consumer.poll_arrow(timeout=1.0)
            if table is not None and table.num_rows:
                found += table.column("value").to_pylist()
    return found


# librdkafka


@pytest.mark.parametrize("codec", CODECS)
def test_librdkafka_writes_and_reads(cluster: Cluster, topic: str, codec: str) -> None:
    values = [b"%d " % number * 20 for number in range(150)]
    produce(cluster, topic, values, **{"compression.type": codec, "enable.idempotence": True, "linger.ms": 20})
    assert values_of(consume(cluster, topic, len(values))) == sorted(values)
    assert sorted(map(bytes, filter(None, read_by_raftlog(cluster, topic, len(values))))) == sorted(values)


def test_the_first_example_of_its_page(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text()
    assert "raftlog topic create events" in page.partition("```python\n")[0]
    code = page.partition("```python\n")[2].partition("```")[0].replace("127.0.0.1:9192", cluster.kafka_bootstrap)
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("events")
    heard_everywhere(cluster)
    exec(compile(code, "kafka.md", "exec"), {})
    assert capsys.readouterr().out == "at offset 0 of events-0\n"


@pytest.mark.parametrize("acks", ["0", "1"])
def test_weaker_acknowledgements(cluster: Cluster, topic: str, acks: str) -> None:
    """Which promise nothing where leaders change, as they may on a busy machine: so it sends until some are read."""
    deadline_s = time.monotonic() + TIMEOUT_S
    found: list[bytes | None] = []
    while not found and time.monotonic() < deadline_s:
        produce(cluster, topic, [b"value"] * 30, acks=acks)
        found = read_by_raftlog(cluster, topic, 1, within_s=5.0)
    assert set(found) == {b"value"}


def test_compression_is_kept_on_disk(cluster: Cluster, topic: str) -> None:
    """Were Produce not advertised from version 0, librdkafka would send everything uncompressed."""
    produce(cluster, topic, [bytes(100_000)] * 3, **{"compression.type": "zstd"})
    with raftlog.Admin(cluster.bootstrap) as admin:
        logs = [log for each in admin.describe_log_dirs() for log in each.partitions if log.topic == topic]
    assert 0 < sum(each.size_bytes for each in logs) < 20_000


def test_keys_headers_nulls_and_times(cluster: Cluster, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    headers: list[tuple[str, str | bytes | None]] = [("trace", b"1"), ("trace", b"2"), ("none", None)]
    producer.produce(topic, b"value", b"key", partition=0, headers=headers, timestamp=1_234)
    producer.produce(topic, None, b"", partition=0)
    assert producer.flush(TIMEOUT_S) == 0
    first, second = consume(cluster, topic, 2)
    assert (first.key(), first.value(), first.headers()) == (b"key", b"value", headers)
    assert first.timestamp() == (confluent_kafka.TIMESTAMP_CREATE_TIME, 1_234)
    assert (second.key(), second.value(), second.headers()) == (b"", None, None)
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([raftlog.TopicPartition(topic, 0)])
        records: list[Any] = []
        while len(records) < 2:
            records += consumer.poll(timeout=5.0)
    assert [(each.key, each.value) for each in records] == [(b"key", b"value"), (b"", None)]
    assert list(records[0].headers) == headers
    assert records[0].timestamp_ms == 1_234


def test_the_append_time_of_a_topic(cluster: Cluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    name = f"kafka-{next(_numbers)}"
    made = NewTopic(name, PARTITIONS, 1, config={"message.timestamp.type": "LogAppendTime"})
    admin.create_topics([made])[name].result(TIMEOUT_S)
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    producer.produce(name, b"value", partition=0, timestamp=1_234)
    assert producer.flush(TIMEOUT_S) == 0
    kind, timestamp_ms = consume(cluster, name, 1)[0].timestamp()
    assert kind == confluent_kafka.TIMESTAMP_LOG_APPEND_TIME
    assert abs(timestamp_ms / 1_000 - time.time()) < 600


def test_what_raftlog_writes_kafka_clients_read(cluster: Cluster, topic: str) -> None:
    with raftlog.Producer(cluster.bootstrap, compression_type="lz4") as producer:
        for number in range(100):
            producer.send(topic, b"value %d" % number, key=b"key", headers=[("h", b"1")], partition=number % PARTITIONS)
        producer.flush()
    found = consume(cluster, topic, 100)
    assert values_of(found) == sorted(b"value %d" % number for number in range(100))
    assert {(each.key(), tuple(each.headers() or ())) for each in found} == {(b"key", (("h", b"1"),))}


def test_both_protocols_write_and_read_a_topic_at_once(cluster: Cluster, topic: str) -> None:
    """What both see is the same, and each producer's records are in its order."""
    failed: list[Any] = []
    theirs = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.kafka_bootstrap, "enable.idempotence": True, **QUIET}
    )
    with raftlog.Producer(cluster.bootstrap) as ours:
        for number in range(300):
            where = number % PARTITIONS
            theirs.produce(topic, b"theirs %03d" % number, partition=where, on_delivery=lambda e, _: failed.append(e))
            theirs.poll(0)
            ours.send(topic, b"ours %03d" % number, partition=where)
    assert theirs.flush(TIMEOUT_S) == 0
    assert failed == [None] * 300
    by_theirs = sorted((each.partition(), each.offset(), each.value()) for each in consume(cluster, topic, 600))
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([raftlog.TopicPartition(topic, number) for number in range(PARTITIONS)])
        table = consumer.read_to_end(timeout=TIMEOUT_S)
    by_ours = sorted(zip(*(table[name].to_pylist() for name in ("partition", "offset", "value")), strict=True))
    assert by_ours == by_theirs
    for writer in (b"theirs", b"ours"):
        for number in range(PARTITIONS):
            values = [value for partition, _, value in by_ours if partition == number and value.startswith(writer)]
            assert values == [b"%s %03d" % (writer, each) for each in range(number, 300, PARTITIONS)]


def test_records_larger_than_a_fetch(cluster: Cluster, topic: str) -> None:
    values = [bytes([number]) * 300_000 for number in range(9)]
    produce(cluster, topic, values)
    found = consume(cluster, topic, 9, **{"fetch.message.max.bytes": 1_000, "fetch.max.bytes": 1_000_000})
    assert values_of(found) == values


def test_offsets_by_time_and_committed_ones(cluster: Cluster, topic: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    for number in range(10):
        producer.produce(topic, b"%d" % number, partition=0, timestamp=1_000 + number)
    assert producer.flush(TIMEOUT_S) == 0
    group = f"group-{topic}"
    consumer = confluent_kafka.Consumer({"bootstrap.servers": cluster.kafka_bootstrap, "group.id": group, **QUIET})
    try:
        assert consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S) == (0, 10)
        wanted = [TopicPartition(topic, 0, 1_004), TopicPartition(topic, 0, 5_000)]
        assert [consumer.offsets_for_times([each], TIMEOUT_S)[0].offset for each in wanted] == [4, -1]
        assert consumer.committed([TopicPartition(topic, 0)], TIMEOUT_S)[0].offset < 0
        (committed,) = consumer.commit(offsets=[TopicPartition(topic, 0, 7)], asynchronous=False)
        assert committed.error is None
        assert consumer.committed([TopicPartition(topic, 0)], TIMEOUT_S)[0].offset == 7
    finally:
        consumer.close()
    with raftlog.Admin(cluster.bootstrap) as admin:
        assert [each.offset for each in admin.group_offsets(group).values()] == [7]


def test_topics_are_made_extended_and_deleted(cluster: Cluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    name = f"kafka-{next(_numbers)}"
    admin.create_topics([NewTopic(name, 2, 3, config={"retention.ms": "60000"})])[name].result(TIMEOUT_S)
    heard_everywhere(cluster)
    found = admin.list_topics(name, TIMEOUT_S).topics[name]
    assert [sorted(each.replicas) for _, each in sorted(found.partitions.items())] == [[1, 2, 3]] * 2
    with pytest.raises(KafkaException, match="TOPIC_ALREADY_EXISTS"):
        admin.create_topics([NewTopic(name, 2, 3)])[name].result(TIMEOUT_S)
    with pytest.raises(KafkaException, match="INVALID_CONFIG"):
        admin.create_topics([NewTopic(f"{name}x", 2, 3, config={"nonsense": "1"})])[f"{name}x"].result(TIMEOUT_S)
    with pytest.raises(KafkaException, match="INVALID_REPLICATION_FACTOR"):
        admin.create_topics([NewTopic(f"{name}x", 2, 4)])[f"{name}x"].result(TIMEOUT_S)
    admin.create_partitions([NewPartitions(name, 4)])[name].result(TIMEOUT_S)
    heard_everywhere(cluster)
    assert len(admin.list_topics(name, TIMEOUT_S).topics[name].partitions) == 4
    admin.delete_topics([name])[name].result(TIMEOUT_S)
    with pytest.raises(KafkaException, match="UNKNOWN_TOPIC_OR_PART"):
        admin.delete_topics([name])[name].result(TIMEOUT_S)
    described = admin.describe_cluster().result(TIMEOUT_S)
    assert sorted(each.id for each in described.nodes) == [1, 2, 3]


def test_configs_and_deleted_records(cluster: Cluster, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    resource = ADMIN.ConfigResource(ADMIN.ConfigResource.Type.TOPIC, topic)

    def retention() -> tuple[str, int]:
        found = admin.describe_configs([resource])[resource].result(TIMEOUT_S)["retention.ms"]
        return found.value, found.source

    assert retention() == ("604800000", ADMIN.ConfigSource.DEFAULT_CONFIG.value)
    change = ADMIN.ConfigEntry("retention.ms", "60000", incremental_operation=ADMIN.AlterConfigOpType.SET)
    resource.add_incremental_config(change)
    admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)
    heard_everywhere(cluster)
    assert retention() == ("60000", ADMIN.ConfigSource.DYNAMIC_TOPIC_CONFIG.value)
    unknown = ADMIN.ConfigResource(ADMIN.ConfigResource.Type.TOPIC, f"{topic}-absent")
    with pytest.raises(KafkaException, match="UNKNOWN_TOPIC_OR_PART"):
        admin.describe_configs([unknown])[unknown].result(TIMEOUT_S)
    produce(cluster, topic, [b"value"] * 9, **{"enable.idempotence": True})
    wanted = TopicPartition(topic, 0, 2)
    assert admin.delete_records([wanted])[wanted].result(TIMEOUT_S).low_watermark == 2
    beyond = TopicPartition(topic, 1, 99)
    with pytest.raises(KafkaException, match="OFFSET_OUT_OF_RANGE"):
        admin.delete_records([beyond])[beyond].result(TIMEOUT_S)


# kafka-python


def test_kafka_python_writes_and_reads(cluster: Cluster, topic: str) -> None:
    servers = cluster.kafka_bootstrap.split(",")
    producer = kafka.KafkaProducer(
        bootstrap_servers=servers, acks="all", enable_idempotence=True, compression_type="gzip"
    )
    try:
        sent = [producer.send(topic, b"%d" % number, partition=number % PARTITIONS) for number in range(90)]
        producer.flush(TIMEOUT_S)
        offsets = [each.get(TIMEOUT_S).offset for each in sent]
    finally:
        producer.close()
    assert sorted(offsets) == sorted([*range(30)] * PARTITIONS)
    consumer = kafka.KafkaConsumer(bootstrap_servers=servers, auto_offset_reset="earliest", consumer_timeout_ms=60_000)
    try:
        consumer.assign([kafka.TopicPartition(topic, number) for number in range(PARTITIONS)])
        found = [next(consumer).value for _ in range(90)]
        assert consumer.end_offsets([kafka.TopicPartition(topic, 0)]) == {kafka.TopicPartition(topic, 0): 30}
    finally:
        consumer.close()
    assert sorted(found) == sorted(b"%d" % number for number in range(90))


def test_kafka_python_manages_topics(cluster: Cluster) -> None:
    admin = KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap.split(","))
    name = f"kafka-{next(_numbers)}"
    try:
        admin.create_topics([kafka.admin.NewTopic(name, 2, 3)])
        heard_everywhere(cluster)
        assert name in admin.list_topics()
        admin.delete_topics([name])
        heard_everywhere(cluster)
        assert name not in admin.list_topics()
    finally:
        admin.close()


def test_kafka_python_moves_replicas_and_elects_leaders(cluster: Cluster) -> None:
    """Reassignments, elections, log directories, pages of topics."""
    admin = KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap.split(","))
    name = f"kafka-{next(_numbers)}"
    place = kafka.TopicPartition(name, 0)
    try:
        admin.create_topics([kafka.admin.NewTopic(name, -1, -1, replica_assignments={0: [1, 2], 1: [2, 3]})])
        heard_everywhere(cluster)
        assert admin.alter_partition_reassignments({place: [3, 1]}) == {place: None}
        absent = kafka.TopicPartition(name, 7)
        (refused,) = admin.alter_partition_reassignments({absent: [1]}).values()
        assert refused is kafka.errors.UnknownTopicOrPartitionError

        def moved(ours: raftlog.Admin) -> bool:
            found = ours.describe_topic(name).partitions[0]
            return list(found.replicas) == [3, 1] and len(found.isr) == 2

        assert cluster.wait_for(moved, what="the move")
        heard_everywhere(cluster)
        assert name not in {each.topic for each in admin.list_partition_reassignments()}
        (refused,) = admin.alter_partition_reassignments({place: None}).values()
        assert refused is kafka.errors.NoReassignmentInProgressError
        admin.elect_leaders(0, None, raise_errors=False)
        cluster.wait_for(lambda ours: ours.describe_topic(name).partitions[0].leader == 3, what="the preferred leader")
        heard_everywhere(cluster)
        (elected,) = admin.elect_leaders(0, {name: [0]}, raise_errors=False).replica_election_results
        assert [each.error_code for each in elected.partition_result] == [kafka.errors.ElectionNotNeededError.errno]
        first = admin.describe_topic_partitions([name], response_partition_limit=1)
        assert [each["partition_index"] for topic in first["topics"] for each in topic["partitions"]] == [0]
        assert first["next_cursor"] == {"topic_name": name, "partition_index": 1}
        rest = admin.describe_topic_partitions([name], cursor=first["next_cursor"])
        assert [each["replica_nodes"] for topic in rest["topics"] for each in topic["partitions"]] == [[2, 3]]
        assert rest["next_cursor"] is None
        logs = {
            (broker["broker"], part["partition_index"])
            for broker in admin.describe_log_dirs({name: [0, 1]})
            for log_dir in broker["log_dirs"]
            for found in log_dir["topics"]
            for part in found["partitions"]
        }
        assert {(3, 0), (1, 0), (2, 1), (3, 1)} <= logs  # a log that has moved away may still be there
    finally:
        admin.close()


def test_kafka_python_changes_lists_in_configs(cluster: Cluster, topic: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=cluster.kafka_bootstrap.split(","))
    kind = kafka.admin.ConfigResourceType.TOPIC

    def alter(key: str, operation: str, value: str | None) -> None:
        change = {key: (kafka.admin.AlterConfigOp[operation], value)}
        admin.alter_configs([kafka.admin.ConfigResource(kind, topic, change)], incremental=True)

    def policy() -> str:
        with raftlog.Admin(cluster.bootstrap) as ours:
            return up_to_date(ours).describe_configs(topic=topic)["cleanup.policy"].value

    try:
        alter("cleanup.policy", "APPEND", "compact")
        assert policy() == "delete,compact"
        alter("cleanup.policy", "SUBTRACT", "delete")
        assert policy() == "compact"
        alter("cleanup.policy", "DELETE", None)
        assert policy() == "delete"
    finally:
        admin.close()


# aiokafka


@pytest.mark.parametrize("idempotent", [False, True])
def test_aiokafka_writes_and_reads(cluster: Cluster, topic: str, idempotent: bool) -> None:
    async def run() -> set[bytes | None]:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=cluster.kafka_bootstrap, enable_idempotence=idempotent, acks="all"
        )
        await producer.start()
        try:
            for number in range(60):
                await producer.send(topic, b"%d" % number, key=b"k", partition=number % PARTITIONS)
            await producer.flush()
        finally:
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(bootstrap_servers=cluster.kafka_bootstrap, auto_offset_reset="earliest")
        await consumer.start()
        try:
            consumer.assign([aiokafka.TopicPartition(topic, number) for number in range(PARTITIONS)])
            async with asyncio.timeout(TIMEOUT_S):
                found: set[bytes | None] = set()
                while len(found) < 60:  # without idempotence a record may come twice
                    found.add((await consumer.getone()).value)
                return found
        finally:
            await consumer.stop()

    assert asyncio.run(run()) == {b"%d" % number for number in range(60)}


# Bad input


class Raw:
    """A connection that sends what it is told to."""

    def __init__(self, cluster: Cluster) -> None:
        host, _, port = cluster.kafka_bootstrap.split(",")[0].rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def request(self, key: int, version: int, body: bytes, *, flexible: bool = False) -> bytes:
        """Send a request and return the response after its correlation id."""
        self.send(frame(key, version, body, flexible=flexible))
        (size,) = struct.unpack(">i", self._exactly(4))
        response = self._exactly(size)
        assert struct.unpack_from(">i", response) == (9,)
        return response[4:]

    def is_closed(self) -> bool:
        """Wait until the other end closes the connection."""
        try:
            return self._socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, size: int) -> bytes:
        data = self._socket.recv(size, socket.MSG_WAITALL)
        assert len(data) == size
        return data


def frame(key: int, version: int, body: bytes, *, flexible: bool = False) -> bytes:
    head = struct.pack(">hhih", key, version, 9, 1) + b"c" + (b"\0" if flexible else b"")
    return struct.pack(">i", len(head) + len(body)) + head + body


def api_versions(raw: Raw, version: int) -> Fields:
    body = b"\2c\2c\0" if version >= 3 else b""
    answer = raw.request(messages.API_VERSIONS, version, body, flexible=version >= 3)
    known = 0 if version > 4 else version
    return messages.RESPONSES[messages.API_VERSIONS].decode(memoryview(answer), known)


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4])
def test_api_versions_of_each_version(cluster: Cluster, version: int) -> None:
    with Raw(cluster) as raw:
        answer = api_versions(raw, version)
    assert answer["error_code"] == 0
    assert {each["api_key"]: each["max_version"] for each in answer["api_keys"]} == {
        key: message.last for key, message in messages.REQUESTS.items()
    }


def test_an_unknown_version_of_api_versions_is_answered_in_version_0(cluster: Cluster) -> None:
    with Raw(cluster) as raw:
        assert api_versions(raw, 99)["error_code"] == 35
        assert api_versions(raw, 4)["error_code"] == 0


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">i", (1 << 31) - 1) + struct.pack(">hhih", messages.PRODUCE, 9, 9, 1),
        struct.pack(">i", 2 << 20) + struct.pack(">hhih", messages.METADATA, 9, 9, 1),
        struct.pack(">i", -1) + bytes(10),
        struct.pack(">i", 3) + bytes(10),
        frame(9_999, 0, b""),
        frame(messages.FETCH, 3, b""),
        frame(messages.PRODUCE, 2, b""),
        frame(messages.METADATA, 99, b""),
        frame(messages.METADATA, 1, struct.pack(">i", 1 << 30)),
        frame(messages.METADATA, 1, b""),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    ],
    ids=["2GB", "2MB", "negative", "short", "api", "old", "old-produce", "new", "claim", "empty", "http", "tls"],
)
def test_what_is_no_request_closes_the_connection(cluster: Cluster, data: bytes) -> None:
    with Raw(cluster) as bad, Raw(cluster) as good:
        bad.send(data)
        assert bad.is_closed()
        assert api_versions(good, 0)["error_code"] == 0


@pytest.mark.parametrize(
    ("key", "named", "one", "answers"),
    [
        (messages.METADATA, "topics", {"name": "TOPIC", "topic_id": bytes(16)}, "topics"),
        (messages.FIND_COORDINATOR, "coordinator_keys", "group", "coordinators"),
        (messages.DESCRIBE_GROUPS, "groups", "group", "groups"),
        (messages.CONSUMER_GROUP_DESCRIBE, "group_ids", "group", "groups"),
        (messages.OFFSET_FETCH, "groups", {"group_id": "group", "topics": None, "member_epoch": -1}, "groups"),
        (messages.DESCRIBE_TRANSACTIONS, "transactional_ids", "id", "transaction_states"),
        (messages.DESCRIBE_CONFIGS, "resources", {"resource_type": 2, "resource_name": "TOPIC"}, "results"),
    ],
)
def test_what_is_named_often_is_answered_once(
    cluster: Cluster, topic: str, key: int, named: str, one: Any, answers: str
) -> None:
    """Or an answer would be thousands of times as large as its request."""
    thing = (
        {**one, **{field: topic for field, value in one.items() if value == "TOPIC"}} if isinstance(one, dict) else one
    )
    codec = messages.REQUESTS[key]
    with Raw(cluster) as raw:
        body = b"".join(codec.encode({named: [thing] * 5_000}, codec.last))
        answer = raw.request(key, codec.last, body, flexible=codec.is_flexible(codec.last))
    tagged = memoryview(answer)[1:]
    assert len(messages.RESPONSES[key].decode(tagged, codec.last)[answers]) == 1


def test_a_partition_that_is_named_twice_has_one_answer(cluster: Cluster, topic: str) -> None:
    parts = [{"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}] * 2
    codec = messages.REQUESTS[messages.LIST_OFFSETS]
    with Raw(cluster) as raw:
        body = b"".join(codec.encode({"replica_id": -1, "topics": [{"name": topic, "partitions": parts}]}, 5))
        answer = raw.request(messages.LIST_OFFSETS, 5, body)
    (found,) = messages.RESPONSES[messages.LIST_OFFSETS].decode(memoryview(answer), 5)["topics"]
    first, second = (part["error_code"] for part in found["partitions"])
    assert first in (0, 6), "the partition must answer with no error or with NOT_LEADER_OR_FOLLOWER (6)"
    assert second == 42, "the second partition must be refused with INVALID_REQUEST (42), as Kafka does"


def test_a_topic_that_is_named_twice_is_not_created_and_the_others_are(cluster: Cluster, topic: str) -> None:
    """librdkafka takes a second answer for a name for a broken response, and fails all topics of the request."""
    admin = AdminClient({"bootstrap.servers": cluster.kafka_bootstrap, **QUIET})
    twice, other = f"{topic}-twice", f"{topic}-other"
    created = admin.create_topics([NewTopic(twice, 1, 1), NewTopic(other, 1, 1), NewTopic(twice, 2, 1)])
    created[other].result(TIMEOUT_S)
    with pytest.raises(KafkaException, match="is named twice") as refused:
        created[twice].result(TIMEOUT_S)
    assert refused.value.args[0].name() == "INVALID_REQUEST"
    with raftlog.Admin(cluster.bootstrap) as ours:
        heard_everywhere(cluster)
        names = ours.list_topics()
    assert other in names, "a topic that the request names once must be created"
    assert twice not in names, "of two topics with one name neither may be created"


def test_a_refused_batch_is_answered_and_the_others_go_on(cluster: Cluster, topic: str) -> None:
    builder = DefaultRecordBatchBuilder(2, 0, 1, 5, 0, 0, 1_000)  # of a transaction
    builder.append(0, 1, b"k", b"v", [])
    records = bytes(builder.build())
    request = {
        "acks": -1,
        "timeout_ms": 5_000,
        "topic_data": [
            {
                "name": topic,
                "partition_data": [
                    {"index": 0, "records": b"nonsense"},
                    {"index": 1, "records": records},
                    {"index": 99, "records": b""},
                ],
            },
            {"name": "absent", "partition_data": [{"index": 0, "records": b""}]},
            {"name": "__consumer_offsets", "partition_data": [{"index": 0, "records": b""}]},
        ],
    }
    codec, version = messages.REQUESTS[messages.PRODUCE], 8
    with Raw(cluster) as raw:
        answer = raw.request(messages.PRODUCE, version, b"".join(codec.encode(request, version)))
    decoded = messages.RESPONSES[messages.PRODUCE].decode(memoryview(answer), version)
    codes = [part["error_code"] for each in decoded["responses"] for part in each["partition_responses"]]
    assert codes[0] in (2, 6)  # corrupt, or this broker does not lead it
    assert codes[1] in (53, 6)  # transactional, without a transactional id
    assert codes[2:4] == [3, 3]
    assert codes[4] in (3, 17)  # the internal topic may not exist yet


def test_a_producer_id_that_was_never_given_out_is_refused(cluster: Cluster, topic: str) -> None:
    (batch,) = to_kafka(batch_of(b"a", producer_id=1 << 40, producer_epoch=32_767, base_sequence=0))
    part = {"index": 0, "records": batch}
    request = {"acks": -1, "timeout_ms": 5_000, "topic_data": [{"name": topic, "partition_data": [part]}]}
    codec, version = messages.REQUESTS[messages.PRODUCE], 8
    with Raw(cluster) as raw:
        answer = raw.request(messages.PRODUCE, version, b"".join(codec.encode(request, version)))
    decoded = messages.RESPONSES[messages.PRODUCE].decode(memoryview(answer), version)
    (code,) = [part["error_code"] for each in decoded["responses"] for part in each["partition_responses"]]
    assert code in (49, 5, 6)  # INVALID_PRODUCER_ID_MAPPING; before the first id is given out, or on another broker


# Failover, last: it kills servers


def test_a_leader_is_killed_under_an_idempotent_producer(cluster: Cluster, topic: str) -> None:
    """Every record that was acknowledged is there once, in the order in which it was sent."""
    count = 4_000
    delivered: list[bytes] = []
    failed: list[Any] = []

    def on_delivery(error: Any, message: confluent_kafka.Message) -> None:
        if error is None:
            delivered.append(message.value() or b"")
        else:
            failed.append(error)

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": cluster.kafka_bootstrap,
            "enable.idempotence": True,
            "linger.ms": 1,
            "batch.num.messages": 20,
            "message.timeout.ms": 60_000,
            **QUIET,
        }
    )
    killed = threading.Thread(target=_kill_soon, args=(cluster, topic, lambda: len(delivered) >= count // 4))
    killed.start()
    try:
        for number in range(count):
            producer.produce(topic, b"%06d" % number, partition=0, on_delivery=on_delivery)
            producer.poll(0.0005)
        assert producer.flush(60.0) == 0
    finally:
        killed.join()
    assert failed == []
    assert delivered == [b"%06d" % number for number in range(count)]
    assert [each.value() for each in consume(cluster, topic, count)] == delivered


def _kill_soon(cluster: Cluster, topic: str, reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not reached() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    leader = cluster.leader(topic)
    cluster.kill(leader)
    cluster.start(leader)
