"""The commands about replicas against three real servers: where partitions are, how far, and moving them with data."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

import raftlog
from raftlog import TopicPartition
from raftlog.testing import Cluster

RECORDS = 2_000


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


def run(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raftlog", *arguments, "--bootstrap", cluster.bootstrap]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def described(cluster: Cluster, topic: str) -> list[dict[str, Any]]:
    ran = run(cluster, "topic", "describe", topic, "-o", "json")
    assert ran.returncode == 0, ran.stderr
    [found] = json.loads(ran.stdout)
    parts: list[dict[str, Any]] = found["partitions"]
    return parts


def fill(cluster: Cluster, topic: str, partitions: int = 1) -> None:
    with raftlog.Producer(cluster.bootstrap) as producer:
        for number in range(RECORDS):
            producer.send(topic, str(number).encode(), partition=number % partitions)


def values_of(cluster: Cluster, topic: str) -> list[int]:
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(topic)
        found: list[int] = []
        deadline = time.monotonic() + 30
        while len(found) < RECORDS and time.monotonic() < deadline:
            found += [int(record.value or b"-1") for record in consumer.poll(1.0)]
    return sorted(found)


def test_every_replica_is_shown_with_its_lag(three: Cluster) -> None:
    assert run(three, "topic", "create", "shown", "-r", "3", "-p", "3").returncode == 0
    fill(three, "shown", partitions=3)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        parts = described(three, "shown")
        if all(replica["lag"] == 0 for part in parts for replica in part["replica_lags"]):
            break
        time.sleep(0.2)
    for part in parts:
        assert sorted(part["isr"]) == [1, 2, 3]
        assert part["high_watermark"] == part["log_end_offset"] > 0
        assert [replica["lag"] for replica in part["replica_lags"]] == [0, 0, 0]
        assert part["replica_lags"][0]["broker_id"] == part["leader"]
    assert run(three, "topic", "describe", "--under-replicated").stdout.count("\n") == 1, "the header alone"


def test_a_partition_moves_with_its_records(three: Cluster) -> None:
    assert run(three, "topic", "create", "moved", "--replica-assignment", "1").returncode == 0
    fill(three, "moved")
    moved = run(three, "partition", "reassign", "moved-0=2,3", "--wait", "--timeout", "60")
    assert moved.returncode == 0, moved.stderr
    [part] = described(three, "moved")
    assert (part["replicas"], sorted(part["isr"]), part["removing_replicas"]) == ([2, 3], [2, 3], [])
    assert part["leader"] in (2, 3)
    assert values_of(three, "moved") == list(range(RECORDS))


def test_a_held_back_move_is_cancelled(three: Cluster) -> None:
    assert run(three, "topic", "create", "held", "--replica-assignment", "1").returncode == 0
    with raftlog.Producer(three.bootstrap) as producer:
        for _ in range(200):
            producer.send("held", b"x" * 50_000, partition=0)
    begun = run(three, "partition", "reassign", "held-0=2", "--throttle", "10KiB")
    assert begun.returncode == 0, begun.stderr
    time.sleep(1.0)
    verified = run(three, "partition", "reassign", "held-0=2", "--verify")
    assert verified.returncode == 1
    assert "1 of 1 move is not done" in verified.stderr
    assert run(three, "partition", "reassign", "held-0", "--cancel").returncode == 0
    with raftlog.Admin(three.bootstrap) as admin:
        assert TopicPartition("held", 0) not in admin.list_reassignments()
        assert admin.describe_topic("held").partitions[0].replicas == [1]
        assert admin.describe_configs(broker=1)["leader.replication.throttled.rate"].source == "default"


def test_the_preferred_replica_is_elected(three: Cluster) -> None:
    assert run(three, "topic", "create", "preferred", "--replica-assignment", "1:2:3").returncode == 0
    fill(three, "preferred")
    turned = run(three, "partition", "reassign", "preferred-0=3,2,1", "--wait")
    assert turned.returncode == 0, turned.stderr
    assert run(three, "partition", "elect", "preferred").returncode == 0
    deadline = time.monotonic() + 20
    while (leader := described(three, "preferred")[0]["leader"]) != 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert leader == 3
    assert values_of(three, "preferred") == list(range(RECORDS))


def test_a_partition_added_later_is_read_by_who_follows(three: Cluster) -> None:
    assert run(three, "topic", "create", "growing", "-p", "1").returncode == 0
    reading = [sys.executable, "-m", "raftlog", "consume", "growing", "--timeout", "20", "--bootstrap", three.bootstrap]
    with subprocess.Popen(reading, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        time.sleep(3)
        assert run(three, "topic", "add-partitions", "growing", "2").returncode == 0
        with raftlog.Producer(three.bootstrap) as to:
            to.send("growing", b"newest", partition=1).result(20)
        ready, _, _ = select.select([reader.stdout], [], [], 15)
        assert ready, "the partition was never read"
        assert reader.stdout.readline() == "newest\n"
        reader.terminate()


def test_who_cannot_reach_a_leader_says_so(three: Cluster) -> None:
    assert run(three, "topic", "create", "alone", "--replica-assignment", "3").returncode == 0
    assert run(three, "topic", "create", "both", "--replica-assignment", "1,3").returncode == 0
    idle = run(three, "consume", "alone", "--timeout", "1")
    assert (idle.returncode, idle.stderr) == (0, "")
    command = [sys.executable, "-m", "raftlog", "consume", "both", "--timeout", "15", "--bootstrap", three.bootstrap]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as reading:
        time.sleep(3)
        three.kill(3)
        _, said = reading.communicate(timeout=60)
    assert reading.returncode == 1
    assert "waiting for both-1" in said
    assert said.count("waiting for") <= 2, "once, and on change"
    assert said.splitlines()[-1].startswith("error: nothing came for 15 s; there was no contact with ")
    late = run(three, "consume", "alone", "--timeout", "6")
    assert late.returncode == 1
    assert "waiting for alone-0: alone-0 has no leader (replicas 3; in sync 3)" in late.stderr
    assert late.stderr.splitlines()[-1].startswith("error: ")
    settings = ("-c", "delivery.timeout.ms=5000", "-c", "request.timeout.ms=1000", "-c", "linger.ms=0")
    sent = subprocess.run(
        [sys.executable, "-m", "raftlog", "produce", "alone", *settings, "-b", three.bootstrap],
        input="v\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert sent.returncode == 1
    assert "waiting for acknowledgements of alone-0 has no leader (replicas 3; in sync 3)" in sent.stderr
    assert "certainly not in the log" in sent.stderr
    assert "at least 0" not in sent.stderr
    unavailable = run(three, "topic", "describe", "--unavailable", "-o", "json")
    assert [topic["topic"] for topic in json.loads(unavailable.stdout)][:1] == ["alone"]
    three.start(3)
