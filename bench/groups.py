"""Consumer groups: how long it takes to join, to go on after a death, and what commits and group reads cost."""

from __future__ import annotations

import asyncio
import os
import time
from statistics import median
from typing import Final

import pyarrow as pa

from bench.group_members import Coordinators, Member, settled
from bench.report import Report
from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.testing import Cluster

GROUPS: Final = 50
MEMBERS: Final = 1_000
PARTITIONS: Final = 60
LARGE_GROUP: Final = 100
LARGE_PARTITIONS: Final = 200
SESSION_TIMEOUT_MS: Final = 6_000
HEARTBEAT_MS: Final = 2_000
COMMITTERS: Final = 8
COMMITS_IN_FLIGHT: Final = 64
COMMIT_S: Final = 5.0
TOPIC: Final = "work"
LARGE_TOPIC: Final = "large"
READ_TOPIC: Final = "read"
ROWS: Final = 8_000_000
BATCH_ROWS: Final = 100_000
ROUNDS: Final = 3


def run(report: Report) -> None:
    """Three servers, replication factor 3; members that do nothing but belong."""
    config = {
        "group.consumer.session.timeout.ms": SESSION_TIMEOUT_MS,
        "group.consumer.heartbeat.interval.ms": HEARTBEAT_MS,
    }
    with Cluster(nodes=3, config=config) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=3)
            admin.create_topic(LARGE_TOPIC, partitions=LARGE_PARTITIONS, replication_factor=3)
        asyncio.run(_members(cluster.bootstrap, report))
    with Cluster(nodes=1) as cluster:
        _reading(cluster, report)


async def _members(bootstrap: str, report: Report) -> None:
    coordinators = Coordinators(bootstrap)
    await coordinators.of("warm-up")  # makes __consumer_offsets
    await _join(coordinators, report)
    await _death(coordinators, report)
    await _commits(coordinators, report)
    await coordinators.close()


async def _join(coordinators: Coordinators, report: Report) -> None:
    members = [Member(coordinators, f"group-{number % GROUPS}", [TOPIC]) for number in range(MEMBERS)]
    begun_s = time.monotonic()
    for member in members:
        member.start()
    took_s = await settled(members, PARTITIONS) - begun_s
    report.add(
        "groups", f"{MEMBERS} members of {GROUPS} groups joined and stable", f"{took_s:.2f} s", "< 10 s", took_s < 10
    )
    await asyncio.gather(*(member.die() for member in members))


async def _death(coordinators: Coordinators, report: Report) -> None:
    members = [Member(coordinators, "large", [LARGE_TOPIC]) for _ in range(LARGE_GROUP)]
    for member in members:
        member.start()
    await settled(members, LARGE_PARTITIONS)
    await asyncio.sleep(HEARTBEAT_MS / 1000)
    before = sum(member.lost_partitions for member in members)
    begun_s = time.monotonic()
    await members.pop().die()
    after_s = await settled(members, LARGE_PARTITIONS) - begun_s - SESSION_TIMEOUT_MS / 1000
    paused = sum(member.lost_partitions for member in members) - before
    report.add(
        "groups",
        f"a member of {LARGE_GROUP} dies: session timeout and",
        f"{after_s:+.2f} s, {paused} partitions of others paused",
        "< 1 s, 0 paused",
        after_s < 1 and paused == 0,
    )
    await asyncio.gather(*(member.die() for member in members))


async def _commits(coordinators: Coordinators, report: Report) -> None:
    members = [Member(coordinators, f"commit-{number}", [TOPIC]) for number in range(COMMITTERS)]
    for member in members:
        member.start()
    await settled(members, PARTITIONS)
    begun_s = time.monotonic()
    await asyncio.gather(*(member.commit_for(COMMIT_S, COMMITS_IN_FLIGHT) for member in members))
    rate = sum(member.commits for member in members) / (time.monotonic() - begun_s)
    report.add("groups", "offset commits, replication factor 3", f"{rate:.0f} commits/s", ">= 5 000", rate >= 5_000)
    await asyncio.gather(*(member.die() for member in members))


def _reading(cluster: Cluster, report: Report) -> None:
    with Admin(cluster.bootstrap) as admin:
        admin.create_topic(READ_TOPIC)
    values = pa.array([os.urandom(100) for _ in range(BATCH_ROWS)], pa.binary())
    with Producer(cluster.bootstrap) as producer:
        for _ in range(ROWS // BATCH_ROWS):
            producer.send_batch(READ_TOPIC, pa.record_batch([values], names=["value"]))
        producer.flush(60)
    assigned, grouped = [], []
    for number in range(ROUNDS):
        with Consumer(cluster.bootstrap) as consumer:
            consumer.assign([TopicPartition(READ_TOPIC, 0)])
            consumer.seek(TopicPartition(READ_TOPIC, 0), 0)
            assigned.append(_rows_per_s(consumer))
        with Consumer(cluster.bootstrap, group_id=f"readers-{number}", auto_offset_reset="earliest") as consumer:
            consumer.subscribe(READ_TOPIC)
            grouped.append(_rows_per_s(consumer))
    share = median(grouped) / median(assigned)
    report.add(
        "groups",
        "poll_arrow in a group",
        f"{share:.0%} of assign ({median(grouped) / 1e6:.1f} of {median(assigned) / 1e6:.1f} M records/s)",
        ">= 80 %",
        share >= 0.8,
    )


def _rows_per_s(consumer: Consumer) -> float:
    """Return the rate from the first record on."""
    rows: int = consumer.poll_arrow(30.0).num_rows
    first = rows
    start_s = time.perf_counter()
    while rows < ROWS:
        rows += consumer.poll_arrow(5.0).num_rows
    return (rows - first) / (time.perf_counter() - start_s)
