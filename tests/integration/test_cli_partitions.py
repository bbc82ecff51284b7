"""The commands about replicas against three real servers: where partitions are, how far, and moving them with data."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import raftlog
from raftlog import TopicPartition
from raftlog.testing import Cluster
from tests.support import patience
from tests.support.command_line import run_here
from tests.support.up_to_date import heard_everywhere

RECORDS = 2_000
WAIT_S = 90.0


def run(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(*arguments, "--bootstrap", cluster.bootstrap)


def create(cluster: Cluster, topic: str, *options: str) -> None:
    """Create a topic; whichever broker is asked next has heard of it."""
    created = run(cluster, "topic", "create", topic, *options)
    assert created.returncode == 0, created.stderr
    heard_everywhere(cluster)


def described(cluster: Cluster, topic: str) -> list[dict[str, Any]]:
    """Return the partitions as the controllers know them."""
    deadline = time.monotonic() + WAIT_S
    while (ran := run(cluster, "topic", "describe", topic, "-o", "json")).returncode != 0:
        assert "may be out of date" in ran.stderr, ran.stderr
        assert time.monotonic() < deadline, ran.stderr
    [found] = json.loads(ran.stdout)
    parts: list[dict[str, Any]] = found["partitions"]
    return parts


until = partial(patience.until, within_s=WAIT_S, pause_s=0.2)


def fill(cluster: Cluster, topic: str, partitions: int = 1) -> None:
    with raftlog.Producer(cluster.bootstrap) as producer:
        for number in range(RECORDS):
            producer.send(topic, str(number).encode(), partition=number % partitions)


def values_of(cluster: Cluster, topic: str) -> list[int]:
    with raftlog.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(topic)
        found: list[int] = []
        deadline = time.monotonic() + WAIT_S
        while len(found) < RECORDS and time.monotonic() < deadline:
            found += [int(record.value or b"-1") for record in consumer.poll(1.0)]
    return sorted(found)


def test_every_replica_is_shown_with_its_lag(three: Cluster) -> None:
    create(three, "shown", "-r", "3", "-p", "3")
    fill(three, "shown", partitions=3)
    parts: list[dict[str, Any]] = []

    def all_in_sync() -> bool:
        parts[:] = described(three, "shown")
        return all(
            sorted(part["isr"]) == [1, 2, 3] and [replica["lag"] for replica in part["replica_lags"]] == [0, 0, 0]
            for part in parts
        )

    until(all_in_sync, "no replica lags")
    for part in parts:
        assert part["high_watermark"] == part["log_end_offset"] > 0
        assert part["replica_lags"][0]["broker_id"] == part["leader"]
    until(
        lambda: run(three, "topic", "describe", "--under-replicated").stdout.count("\n") == 1,
        "nothing is under-replicated, and the header alone is shown",
    )


def test_a_partition_moves_with_its_records(three: Cluster) -> None:
    create(three, "moved", "--replica-assignment", "1")
    fill(three, "moved")
    moved = run(three, "partition", "reassign", "moved-0=2,3", "--wait", "--timeout", "120")
    assert moved.returncode == 0, moved.stderr
    [part] = described(three, "moved")
    assert (part["replicas"], part["removing_replicas"]) == ([2, 3], [])
    assert part["leader"] in (2, 3)
    until(lambda: sorted(described(three, "moved")[0]["isr"]) == [2, 3], "both are in sync")
    assert values_of(three, "moved") == list(range(RECORDS))


def test_a_held_back_move_is_cancelled(three: Cluster) -> None:
    create(three, "held", "--replica-assignment", "1")
    with raftlog.Producer(three.bootstrap) as producer:
        for _ in range(200):
            producer.send("held", b"x" * 50_000, partition=0)
    begun = run(three, "partition", "reassign", "held-0=2", "--throttle", "10KiB")
    assert begun.returncode == 0, begun.stderr
    heard_everywhere(three)
    time.sleep(1.0)
    verified = run(three, "partition", "reassign", "held-0=2", "--verify")
    assert verified.returncode == 1
    assert "1 of 1 move is not done" in verified.stderr
    assert run(three, "partition", "reassign", "held-0", "--cancel").returncode == 0
    with raftlog.Admin(three.bootstrap) as admin:  # which may ask a broker that hears of it a moment later
        until(lambda: TopicPartition("held", 0) not in admin.list_reassignments(), "it does not move any more")
        until(lambda: admin.describe_topic("held").partitions[0].replicas == [1], "it is where it was")
        until(
            lambda: admin.describe_configs(broker=1)["leader.replication.throttled.rate"].source == "default",
            "nothing is held back any more",
        )


def test_the_preferred_replica_is_elected(three: Cluster) -> None:
    create(three, "preferred", "--replica-assignment", "1:2:3")
    fill(three, "preferred")
    turned = run(three, "partition", "reassign", "preferred-0=3,2,1", "--wait")
    assert turned.returncode == 0, turned.stderr
    assert run(three, "partition", "elect", "preferred").returncode == 0
    until(lambda: described(three, "preferred")[0]["leader"] == 3, "the first replica leads")
    assert values_of(three, "preferred") == list(range(RECORDS))


class Reading:
    """`raftlog consume` from the end on, in a process of its own, its output in files."""

    def __init__(self, cluster: Cluster, directory: Path, topic: str, *arguments: str) -> None:
        self._cluster = cluster
        self._out, self._err = directory / f"{topic}.out", directory / f"{topic}.err"
        command = [sys.executable, "-m", "raftlog", "consume", topic, *arguments, "--bootstrap", cluster.bootstrap]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_until_it_reads(self, topic: str, partitions: int) -> None:
        """Write into each partition, again and again, until something of each was read."""
        with raftlog.Producer(self._cluster.bootstrap) as to:

            def reads() -> bool:
                for number in range(partitions):
                    to.send(topic, b"%d" % number, partition=number).result(WAIT_S)
                return set(self.values) == {str(number) for number in range(partitions)}

            until(reads, f"it reads {topic}")

    @property
    def values(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def said(self) -> str:
        return self._err.read_text()


def test_a_partition_added_later_is_read_by_who_follows(three: Cluster, tmp_path: Path) -> None:
    create(three, "growing", "-p", "1")
    with Reading(three, tmp_path, "growing", "--timeout", f"{2 * WAIT_S:g}") as reading:
        reading.wait_until_it_reads("growing", 1)
        assert run(three, "topic", "add-partitions", "growing", "2").returncode == 0
        heard_everywhere(three)
        with raftlog.Producer(three.bootstrap) as to:
            to.send("growing", b"newest", partition=1).result(WAIT_S)
        until(lambda: "newest" in reading.values, "the new partition is read")
        assert reading.values.count("newest") == 1


def test_who_cannot_reach_a_leader_says_so(three: Cluster, tmp_path: Path) -> None:
    create(three, "alone", "--replica-assignment", "3")
    create(three, "both", "--replica-assignment", "1,3")
    until(  # it may be out of reach for a moment
        lambda: (idle := run(three, "consume", "alone", "--timeout", "1")).returncode == 0 and idle.stderr == "",
        "who reaches the leader says nothing",
    )
    with Reading(three, tmp_path, "both", "--timeout", "10") as reading:
        reading.wait_until_it_reads("both", 2)
        three.kill(3)
        assert reading.process.wait(10 + WAIT_S) == 1
    *told, last = reading.said.splitlines()
    assert any(line.startswith("waiting for ") and "both-1" in line for line in told)
    waited_for = [set(re.findall(r"both-\d", line)) for line in told]
    assert all(before != after for before, after in pairwise(waited_for)), (
        "a line must be printed only when the partitions that it names have changed"
    )
    assert last.startswith("error: no record came for 10 s; unreachable leaders: ")
    three.wait_for(lambda asked: asked.describe_topic("alone").partitions[0].leader < 0, what="it is missed")

    def says_that_nobody_leads() -> bool:  # the asked broker may not have heard of it yet
        late = run(three, "consume", "alone", "--timeout", "6")
        assert late.returncode == 1
        assert late.stderr.splitlines()[-1].startswith("error: ")
        return "waiting for alone-0: alone-0 has no leader (replicas 3; in sync 3)" in late.stderr

    until(says_that_nobody_leads, "it says why")
    settings = ("-c", "delivery.timeout.ms=10000", "-c", "request.timeout.ms=1000", "-c", "linger.ms=0")
    sent = run_here("produce", "alone", *settings, "-b", three.bootstrap, stdin="v\n")
    assert sent.returncode == 1
    assert "waiting for acknowledgements: alone-0 has no leader (replicas 3; in sync 3)" in sent.stderr
    assert "certainly not in the log" in sent.stderr
    assert "at least 0" not in sent.stderr
    unavailable = run(three, "topic", "describe", "--unavailable", "-o", "json")
    assert [topic["topic"] for topic in json.loads(unavailable.stdout)][:1] == ["alone"]
    three.start(3)
