"""The compose file, run: three nodes, one of them killed while records flow, and all begun again with their data.

Runs only with `--long`: Compose is built from its Go module where it is not installed.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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
    """Produces numbers with acks=all until told to stop; `acknowledged` are those that the cluster promised to keep."""

    def __init__(self) -> None:
        super().__init__(name="writer", daemon=True)
        self.acknowledged: list[int] = []
        self.errors: list[BaseException] = []
        self._told_to_end = threading.Event()

    def run(self) -> None:
        try:
            with raftlog.Producer(BOOTSTRAP, enable_idempotence=True) as producer:
                number = 0
                while not self._told_to_end.is_set():
                    producer.send(TOPIC, str(number).encode(), partition=number % PARTITIONS).result(PATIENCE_S)
                    self.acknowledged.append(number)
                    number += 1
        except BaseException as error:
            self.errors.append(error)

    def reaches(self, more: int) -> None:
        """Return when that many more records have been acknowledged."""
        wanted = len(self.acknowledged) + more
        until(
            lambda: self.errors or len(self.acknowledged) >= wanted,
            f"{wanted} records acknowledged",
            within_s=PATIENCE_S,
        )
        assert self.errors == []

    def end(self) -> list[int]:
        """Stop and return what was acknowledged."""
        self._told_to_end.set()
        self.join(PATIENCE_S)
        assert self.errors == []
        return self.acknowledged


def stored() -> list[int]:
    """Return all records of the topic, sorted."""
    with raftlog.Consumer(BOOTSTRAP) as consumer:
        places = [raftlog.TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
        consumer.assign(places)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(places)
        found: list[int] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while any(consumer.position(place) < ends[place] for place in places):
            assert time.monotonic() < deadline_s, f"{len(found)} records read"
            found += [int(record.value or b"") for record in consumer.poll(1.0)]
    return sorted(found)


def test_a_node_is_killed_and_all_are_begun_again_with_their_data(stack: Stack) -> None:
    stack.up()
    with raftlog.Admin(BOOTSTRAP) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=3, configs={"min.insync.replicas": 2})
    writer = Writer()
    writer.start()
    writer.reaches(200)
    stack("kill", "--signal", "SIGKILL", "node-2")
    writer.reaches(200)
    stack("start", "node-2")
    writer.reaches(200)
    acknowledged = writer.end()
    assert stored() == acknowledged, "every acknowledged record is there once, and no other"
    stack("down", "--timeout", "60")
    stack.up()
    assert stored() == acknowledged, "the data is in volumes, which `down` keeps"
