"""Consumer groups: time to join, time to recover from a death, and the cost of commits and of reading in a group.

Members speak the protocol of `Group.Session` and nothing else, many in one event loop. They take and give up partitions
at once, so that only the coordinator is measured.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Iterable
from statistics import median
from typing import Any, Final

import pyarrow as pa
from grpc import aio

from bench.report import Report
from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.errors import CoordinatorLoadInProgress, from_wire
from raftlog.testing import Cluster
from raftlog.v1 import group_pb2, group_pb2_grpc

MAX_STREAMS: Final = 10_000
CHANNEL_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_concurrent_streams", MAX_STREAMS))
Partition = tuple[str, int]


class Coordinators:
    """Finds the coordinators of groups, with one channel to each."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap.split(",")[0]
        self._channels: dict[str, aio.Channel] = {}

    def stub(self, address: str) -> Any:
        """Return the Group service at an address."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return group_pb2_grpc.GroupStub(channel)

    async def of(self, group_id: str) -> Any:
        """Wait for a group's coordinator, and return its Group service."""
        while True:
            found = await self.stub(self._bootstrap).FindCoordinator(
                group_pb2.FindCoordinatorRequest(group_id=group_id)
            )
            if not found.HasField("error"):
                return self.stub(f"{found.host}:{found.port}")
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()


class Member:
    """One member. `lost_partitions` counts the partitions that it had to give up."""

    def __init__(self, coordinators: Coordinators, group_id: str, topics: Iterable[str]) -> None:
        self.group_id = group_id
        self.partitions: frozenset[Partition] = frozenset()
        self.epoch = 0
        self.lost_partitions = 0
        self.changed_s = 0.0
        self.commits = 0
        self._coordinators = coordinators
        self._topics = list(topics)
        self._member_id = uuid.uuid4().hex
        self._ids: dict[str, bytes] = {}
        self._outbox: asyncio.Queue[group_pb2.GroupRequest] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._beat_s = 3.0
        self._committed: asyncio.Event = asyncio.Event()

    def start(self) -> None:
        """Join."""
        self._task = asyncio.create_task(self._run())

    def check(self) -> None:
        """Raise the error that has ended it, if any."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def die(self) -> None:
        """Disappear without leaving the group."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            stub = await self._coordinators.of(self.group_id)
            join = group_pb2.JoinGroup(
                group_id=self.group_id,
                member_id=self._member_id,
                client_id="bench",
                subscription=group_pb2.Subscription(topics=self._topics),
            )
            self._outbox = asyncio.Queue()
            self._outbox.put_nowait(group_pb2.GroupRequest(join=join))
            beating = asyncio.create_task(self._beat())
            call = stub.Session()
            writing = asyncio.create_task(self._write(call))
            try:
                while (response := await call.read()) is not aio.EOF:
                    self._take(response)
            except CoordinatorLoadInProgress:  # the topic has just been made
                await asyncio.sleep(0.05)
            finally:
                beating.cancel()
                writing.cancel()
                call.cancel()

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            heartbeat = group_pb2.GroupHeartbeat(member_epoch=self.epoch)
            self._outbox.put_nowait(group_pb2.GroupRequest(heartbeat=heartbeat))

    def _take(self, response: group_pb2.GroupResponse) -> None:
        match response.WhichOneof("response"):
            case "assignment":
                self._assigned(response.assignment)
            case "heartbeat":
                self.epoch = max(self.epoch, response.heartbeat.member_epoch)
            case "commit":
                if response.commit.HasField("error") or any(r.HasField("error") for r in response.commit.results):
                    raise AssertionError(f"the group refused a commit: {response.commit}")
                self.commits += len(response.commit.results)
                self._committed.set()
            case "error":
                raise from_wire(response.error)

    def _assigned(self, assignment: group_pb2.GroupAssignment) -> None:
        self.epoch = assignment.member_epoch
        self._beat_s = assignment.heartbeat_interval_ms / 1000 or self._beat_s
        wanted = frozenset((topic.topic, number) for topic in assignment.topics for number in topic.partitions)
        self._ids.update({topic.topic: topic.topic_id for topic in assignment.topics})
        if wanted == self.partitions:
            return
        self.lost_partitions += len(self.partitions - wanted)
        self.partitions = wanted
        self.changed_s = time.monotonic()
        owned = group_pb2.Owned(
            partitions=[
                group_pb2.TopicPartitions(topic_id=topic.topic_id, topic=topic.topic, partitions=topic.partitions)
                for topic in assignment.topics
            ]
        )
        heartbeat = group_pb2.GroupHeartbeat(member_epoch=self.epoch, owned=owned)
        self._outbox.put_nowait(group_pb2.GroupRequest(heartbeat=heartbeat))

    async def commit_for(self, seconds: float, in_flight: int) -> None:
        """Commit one offset after the other, with `in_flight` unanswered."""
        offset = sent = 0
        end_s = time.monotonic() + seconds
        parts = sorted(self.partitions)
        while time.monotonic() < end_s:
            while sent - self.commits < in_flight:
                topic, number = parts[sent % len(parts)]
                commit = group_pb2.SessionCommit(
                    correlation_id=sent,
                    member_epoch=self.epoch,
                    offsets=[
                        group_pb2.CommitOffset(
                            topic_id=self._ids[topic], topic=topic, partition=number, offset=offset, leader_epoch=-1
                        )
                    ],
                )
                self._outbox.put_nowait(group_pb2.GroupRequest(commit=commit))
                sent += 1
                offset += 1
            self._committed.clear()
            await self._committed.wait()
        self.check()


async def settled(members: Iterable[Member], partitions: int) -> float:
    """Wait until each group's members have every partition once; return the time of the last change."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.group_id, []).append(member)
    while True:
        if all(_whole(group, partitions) for group in groups.values()):
            return max(member.changed_s for group in groups.values() for member in group)
        for group in groups.values():
            for member in group:
                member.check()
        await asyncio.sleep(0.02)


def _whole(group: list[Member], partitions: int) -> bool:
    owned = [part for member in group for part in member.partitions]
    if len(owned) != partitions or len(set(owned)) != partitions:
        return False
    shares = [len(member.partitions) for member in group]
    return max(shares) - min(shares) <= 1


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
    """Use three servers and replication factor 3; members do no work."""
    config = {
        "group.consumer.session.timeout.ms": SESSION_TIMEOUT_MS,
        "group.consumer.heartbeat.interval.ms": HEARTBEAT_MS,
        "max.streams.per.connection": MAX_STREAMS,  # all members share a process and an address
        "max.streams.per.ip": MAX_STREAMS,
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
    await coordinators.of("warm-up")  # creates __consumer_offsets
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
    """Return the records per second after the first poll."""
    rows: int = consumer.poll_arrow(30.0).num_rows
    first = rows
    start_s = time.perf_counter()
    while rows < ROWS:
        rows += consumer.poll_arrow(5.0).num_rows
    return (rows - first) / (time.perf_counter() - start_s)
