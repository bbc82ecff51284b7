"""The compose file, run: three nodes, one of them killed while records flow, and all begun again with their data.

Clients of raftlog and Kafka clients (librdkafka) write the same topic at once, and both read all of it. Runs only with
`--long`: Compose is built from its Go module where it is not installed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

import raftlog
from tests.support.patience import until
from tools.docker import Image
from tools.environment import ROOT
from tools.go_programs import COMPOSE
from tools.progress import StepFailed

pytestmark = pytest.mark.long

FILE = ROOT / "deploy" / "docker" / "compose.yaml"
HOST = "127.0.0.92"
"""A loopback address that nothing else uses, as the ports are fixed."""
BOOTSTRAP = ",".join(f"{HOST}:{port}" for port in (9092, 9093, 9094))
KAFKA_BOOTSTRAP = ",".join(f"{HOST}:{port}" for port in (9192, 9193, 9194))
TOPIC = "events"
PARTITIONS = 3
PATIENCE_S = 120.0


class Stack:
    """The services of the compose file, as a project of their own."""

    def __init__(self, compose: Path, image: Image) -> None:
        self._command = [str(compose), "--project-name", f"raftlog-test-{os.getpid()}", "--file", str(FILE)]
        self._variables = {"RAFTLOG_IMAGE": image.tag, "RAFTLOG_ADVERTISED": HOST, "RAFTLOG_PUBLISH": HOST}

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            env={**os.environ, **self._variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr or done.stdout}"
        return done.stdout

    def up(self) -> None:
        """Start all nodes, and return when each is a broker of the cluster."""
        self("up", "--detach")
        until(_all_serve, "three brokers serve", within_s=PATIENCE_S)


def _all_serve() -> bool:
    try:
        with raftlog.Admin(BOOTSTRAP) as admin:
            brokers = admin.describe_cluster(linearizable=True).brokers
    except raftlog.RaftlogError:
        return False
    return len(brokers) == 3 and not any(broker.fenced for broker in brokers)


@pytest.fixture(scope="module")
def stack(image: Image) -> Iterator[Stack]:
    try:
        found = Stack(COMPOSE.find_or_build(), image)
    except StepFailed as error:
        pytest.skip(f"THE COMPOSE FILE IS NOT RUN: {error}")
    try:
        yield found
    finally:
        found("down", "--volumes", "--timeout", "60")


class Writer(threading.Thread):
    """Sends numbers with acks=all, one after the other, until told to stop.

    `acknowledged` are the values that the cluster promised to keep. The name says which client sends: `raftlog` or
    `kafka`.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.acknowledged: list[str] = []
        self.errors: list[BaseException] = []
        self._told_to_end = threading.Event()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.errors.append(error)

    def _write(self) -> None:
        with contextlib.ExitStack() as stack:
            send = {"raftlog": _raftlog_sender, "kafka": _kafka_sender}[self.name](stack)
            number = 0
            while not self._told_to_end.is_set():
                value = f"{self.name} {number}"
                send(value.encode(), number % PARTITIONS)
                self.acknowledged.append(value)
                number += 1

    def reaches(self, more: int) -> None:
        """Return when that many more records have been acknowledged."""
        wanted = len(self.acknowledged) + more
        until(
            lambda: self.errors or len(self.acknowledged) >= wanted,
            f"{wanted} records of {self.name} acknowledged",
            within_s=PATIENCE_S,
        )
        assert self.errors == []

    def end(self) -> list[str]:
        """Stop, and return the acknowledged records."""
        self._told_to_end.set()
        self.join(PATIENCE_S)
        assert not self.is_alive(), f"{self.name} still waits for an acknowledgement"
        assert self.errors == []
        return self.acknowledged


Send = Callable[[bytes, int], None]
"""Sends a value to a partition, and returns once it is acknowledged."""


def _raftlog_sender(stack: contextlib.ExitStack) -> Send:
    producer = stack.enter_context(raftlog.Producer(BOOTSTRAP, enable_idempotence=True))

    def send(value: bytes, partition: int) -> None:
        producer.send(TOPIC, value, partition=partition).result(PATIENCE_S)

    return send


def _kafka_sender(stack: contextlib.ExitStack) -> Send:
    settings: dict[str, Any] = {"bootstrap.servers": KAFKA_BOOTSTRAP, "enable.idempotence": True, "log_level": 0}
    producer = confluent_kafka.Producer(settings)
    outcomes: list[Any] = []

    def send(value: bytes, partition: int) -> None:
        outcomes.clear()
        producer.produce(TOPIC, value, partition=partition, on_delivery=lambda error, _: outcomes.append(error))
        assert producer.flush(PATIENCE_S) == 0, f"not every record was acknowledged within {PATIENCE_S:g} s"
        assert outcomes == [None]

    return send


def by_raftlog() -> dict[int, list[str]]:
    """Return the records of each partition as raftlog's consumer reads them."""
    found: dict[int, list[str]] = {partition: [] for partition in range(PARTITIONS)}
    with raftlog.Consumer(BOOTSTRAP) as consumer:
        places = [raftlog.TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
        consumer.assign(places)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(places)
        deadline_s = time.monotonic() + PATIENCE_S
        while any(consumer.position(place) < ends[place] for place in places):
            assert time.monotonic() < deadline_s, (
                f"only {sum(map(len, found.values()))} records were read within the time allowed"
            )
            for record in consumer.poll(1.0):
                found[record.partition].append((record.value or b"").decode())
    return found


def by_kafka_group(count: int) -> dict[int, list[str]]:
    """Return the next `count` records of each partition that a group of one Kafka consumer reads and commits."""
    found: dict[int, list[str]] = {partition: [] for partition in range(PARTITIONS)}
    settings: dict[str, Any] = {"bootstrap.servers": KAFKA_BOOTSTRAP, "group.id": "readers", "log_level": 0}
    consumer = confluent_kafka.Consumer(
        {**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False, "enable.partition.eof": False}
    )
    try:
        consumer.subscribe([TOPIC])
        deadline_s = time.monotonic() + PATIENCE_S
        while (read := sum(map(len, found.values()))) < count:
            assert time.monotonic() < deadline_s, f"only {read} of {count} records were read within the time allowed"
            for message in consumer.consume(1_000, 1.0):
                assert message.error() is None, message.error()
                found[message.partition() or 0].append((message.value() or b"").decode())
        consumer.commit(asynchronous=False)
    finally:
        consumer.close()
    return found


def in_order(of: str, records: dict[int, list[str]]) -> list[str]:
    """Return a writer's records in the order of their numbers.

    Raises:
        AssertionError: they are not in that order within each partition.
    """
    numbers = {
        each: [int(value.split()[1]) for value in values if value.startswith(of)] for each, values in records.items()
    }
    assert all(each == sorted(each) for each in numbers.values()), (
        f"the records that begin with {of!r} must be in the order in which they were sent, but are not: {numbers}"
    )
    return [f"{of} {number}" for number in sorted(number for each in numbers.values() for number in each)]


def test_a_node_is_killed_and_all_are_begun_again_with_their_data(stack: Stack) -> None:
    stack.up()
    with raftlog.Admin(BOOTSTRAP) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=3, configs={"min.insync.replicas": 2})
    writers = [Writer("raftlog"), Writer("kafka")]
    for writer in writers:
        writer.start()

    def all_reach(more: int) -> None:
        for each in writers:
            each.reaches(more)

    all_reach(200)
    stack("kill", "--signal", "SIGKILL", "node-2")
    all_reach(200)
    stack("start", "node-2")
    all_reach(200)
    acknowledged = {writer.name: writer.end() for writer in writers}
    stored = by_raftlog()
    for name, values in acknowledged.items():
        assert in_order(name, stored) == values, (
            f"{name} must have every acknowledged record once, in order, and no other"
        )
    count = sum(map(len, acknowledged.values()))
    assert by_kafka_group(count) == stored, "a Kafka client must read the same records as a raftlog client"
    stack("down", "--timeout", "60")
    stack.up()
    assert by_raftlog() == stored, "the records must still be there after `down`, which keeps the volumes"
    with contextlib.ExitStack() as client:
        _kafka_sender(client)(b"kafka later", 0)
    assert by_kafka_group(1) == {0: ["kafka later"], 1: [], 2: []}, "the group must continue where it had committed"
