"""MirrorMaker 2, of Kafka 4.3, as docs/kafka.md configures it: from one cluster into another, exactly once.

It needs Java, and Maven or Kafka's jars (`tests/support/kafka_java.py`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import confluent_kafka
import pytest

import raftlog
from raftlog.testing import Cluster
from tests.support.kafka_java import JVM, jars_or_skip
from tests.support.patience import until

pytestmark = pytest.mark.long

PAGE: Final = Path(__file__).parents[2] / "docs" / "kafka.md"
TOPIC, GROUP = "orders", "billing"
PARTITIONS: Final = 2
TIMEOUT_S: Final = 240.0
QUICKLY: Final = {
    "emit.checkpoints.interval.seconds": 1,
    "sync.group.offsets.interval.seconds": 1,
    "refresh.topics.interval.seconds": 1,
    "refresh.groups.interval.seconds": 1,
    "sync.topic.configs.interval.seconds": 1,
}


@contextmanager
def mirror_maker(old: Cluster, new: Cluster, directory: Path) -> Iterator[Callable[[str, Callable[[], bool]], None]]:
    """Run it with the properties of the page, except for addresses, the sizes of the clusters, and intervals.

    Yields a function that waits until a condition holds while it runs. It is killed at the end.
    """
    (properties,) = re.findall(r"```properties\n# mm2\.properties\n(.*?)```", PAGE.read_text(), re.S)
    ends = {"old.bootstrap.servers": old.kafka_bootstrap, "new.bootstrap.servers": new.kafka_bootstrap}
    for key, value in {**ends, "listeners": "http://127.0.0.1:0"}.items():
        properties, found = re.subn(rf"^{re.escape(key)} = .*$", f"{key} = {value}", properties, flags=re.M)
        assert found == 1, key
    properties = re.sub(r"(replication\.factor) = 3", r"\1 = 1", properties)
    file = directory / "mm2.properties"
    file.write_text(properties + "".join(f"{key} = {value}\n" for key, value in QUICKLY.items()))
    main = "org.apache.kafka.connect.mirror.MirrorMaker"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*JVM, "-cp", f"{jars_or_skip()}/*", main, str(file), "--clusters", "new"], stdout=log, stderr=log
        )

    def wait(what: str, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            assert process.poll() is None, (directory / "log").read_text()[-4_000:]
            return condition()

        until(holds, what, within_s=TIMEOUT_S, pause_s=0.3)

    try:
        yield wait
    finally:
        process.kill()
        process.wait()


def records(cluster: Cluster) -> list[list[tuple[bytes, bytes, int, object]]]:
    """Return the committed records of each partition: key, value, timestamp and headers."""
    found = []
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        for number in range(PARTITIONS):
            consumer.assign([raftlog.TopicPartition(TOPIC, number)])
            table = consumer.read_to_end(timeout=TIMEOUT_S)
            columns = (table[name].to_pylist() for name in ("key", "value", "timestamp", "headers"))
            found.append([*zip(*columns, strict=True)])
    return found


def produce(cluster: Cluster, numbers: range) -> None:
    """Write records, and an aborted transaction between them."""
    config = {"bootstrap.servers": cluster.kafka_bootstrap, "transactional.id": "orders", "log_level": 0}
    producer = confluent_kafka.Producer(config)
    producer.init_transactions(TIMEOUT_S)
    for commits in (False, True):
        producer.begin_transaction()
        for number in numbers:
            producer.produce(
                TOPIC, b"v%d" % number, b"k%d" % number, number % PARTITIONS, headers=[("number", b"%d" % number)]
            )
        producer.flush(TIMEOUT_S)
        (producer.commit_transaction if commits else producer.abort_transaction)(TIMEOUT_S)


def read(cluster: Cluster, count: int) -> set[int]:
    """Read so many records as a member of the group, commit, and return their numbers."""
    config = {"bootstrap.servers": cluster.kafka_bootstrap, "group.id": GROUP, "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer({**config, "enable.auto.commit": False, "log_level": 0})
    consumer.subscribe([TOPIC])
    numbers: list[int] = []
    while len(numbers) < count:
        message = consumer.poll(TIMEOUT_S)
        assert message is not None
        assert message.error() is None, message.error()
        numbers.append(int((message.value() or b"")[1:]))
    consumer.commit(asynchronous=False)
    consumer.close()
    assert len({*numbers}) == len(numbers)
    return {*numbers}


def test_mirror_maker_moves_topics_configs_and_groups_to_another_cluster(tmp_path: Path) -> None:
    """It is killed while it copies, and each record is there once."""
    jars_or_skip()
    config = {"group.initial.rebalance.delay.ms": 100}
    configs = {"retention.ms": "7200000", "max.message.bytes": "2000000"}
    with (
        Cluster(kafka=True, config=config) as old,
        Cluster(kafka=True, config=config) as new,
        raftlog.Admin(old.bootstrap) as source,
        raftlog.Admin(new.bootstrap) as target,
    ):

        def own_configs() -> dict[str, str]:
            described = target.describe_configs(TOPIC)
            return {key: each.value for key, each in described.items() if each.source == "dynamic_topic"}

        def has_moved() -> bool:
            offsets = target.group_offsets(GROUP)
            return len(offsets) == PARTITIONS and all(each.offset >= 200 / PARTITIONS for each in offsets.values())

        source.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=1, configs=configs)
        produce(old, range(200))
        assert read(old, 200) == {*range(200)}
        with mirror_maker(old, new, tmp_path) as wait:
            wait("the topic is there", lambda: TOPIC in target.list_topics())
            wait("the records are there", lambda: records(new) == records(old))
            assert own_configs() == configs
            wait("the group is behind what it has read", has_moved)
            produce(old, range(200, 300))
        with mirror_maker(old, new, tmp_path) as wait:
            wait("the further records are there", lambda: records(new) == records(old))
            source.alter_configs(TOPIC, set={"retention.ms": "3600000"}, unset=["max.message.bytes"])
            wait("the changed configs are there", lambda: own_configs() == {"retention.ms": "3600000"})
        assert read(new, 100) == {*range(200, 300)}, "the group must go on where it was"
