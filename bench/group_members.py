"""Many members of groups in one event loop: the wire protocol of `Group.Session` and nothing else.

A member takes what it is assigned at once and lets go at once, so that what is measured is the coordinator.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable
from typing import Any, Final

from grpc import aio

from raftlog.errors import CoordinatorLoadInProgress, from_wire
from raftlog.v1 import group_pb2, group_pb2_grpc

CHANNEL_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_concurrent_streams", 10_000))
Partition = tuple[str, int]


class Coordinators:
    """One channel to each coordinator, and who coordinates what."""

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
        """Return the Group service of a group's coordinator, once there is one."""
        while True:
            found = await self.stub(self._bootstrap).FindCoordinator(
                group_pb2.FindCoordinatorRequest(group_id=group_id)
            )
            if not found.HasField("error"):
                return self.stub(f"{found.host}:{found.port}")
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Let go of all."""
        for channel in self._channels.values():
            await channel.close()


class Member:
    """One member. `partitions` is what it has; `paused` counts the times at which it had to let something go."""

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
        """Raise what has ended it, if something has."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def die(self) -> None:
        """Vanish without a word."""
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
                    raise AssertionError(f"commit refused: {response.commit}")
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
        """Commit one offset after the other, with so many unanswered."""
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
    """Wait until the members of each group have all partitions, none twice; return when the last one changed."""
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
