"""Members of a `FakeCluster`'s groups: sessions, a round-robin target, and partitions that move only when let go.

One thread, one loop, no log: enough of a coordinator for clients to be wrong against, with faults on demand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import grpc

from raftlog.errors import (
    NotCoordinator,
    PartitionNotOwned,
    RaftlogError,
    StaleMemberEpoch,
    UnknownMemberId,
    to_wire,
)
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2

if TYPE_CHECKING:
    from tests.support.fake_broker import FakeCluster

Parts = set[TopicPartition]


class Member:
    """The coordinator's state of one member."""

    def __init__(self, member_id: str) -> None:
        self.member_id = member_id
        self.epoch = 0
        self.held: Parts = set()
        """Given to it and not let go."""
        self.sent: Parts | None = None
        self.sent_epoch = -1
        self.subscription = group_pb2.Subscription()
        self.out: asyncio.Queue[group_pb2.GroupResponse | None] = asyncio.Queue()
        self.joins: list[group_pb2.JoinGroup] = []
        self.heartbeats: list[group_pb2.GroupHeartbeat] = []


class FakeMembers:
    """The members of one group, whichever node they are connected to."""

    def __init__(self, cluster: FakeCluster, group_id: str) -> None:
        self.cluster = cluster
        self.group_id = group_id
        self.epoch = 0
        self.members: dict[str, Member] = {}
        self.seen: list[str] = []
        """Member ids in the order in which they came first."""

        self.commits: list[tuple[str, int, dict[TopicPartition, int]]] = []
        """(member, epoch, offsets) of each commit that was taken."""
        self.session_timeout_ms = 60_000
        self.interval_ms = 100
        self.first_new: dict[str, int] = {}
        """By topic; else no partition is new."""
        self.note = ""
        self.mute = False
        """Nothing is answered."""
        self.refuse_joins: list[RaftlogError] = []
        self.refuse_commits: list[RaftlogError] = []
        self.leaves: list[group_pb2.LeaveGroup] = []
        self.break_commits = 0
        """Streams that end at a commit, before it is taken."""
        self.unreadable = ""
        """A kind of request, for which the stream is ended as one that does not keep to the protocol."""

    # What tests do, on the cluster's loop

    def fence(self, member_id: str) -> None:
        """The coordinator has given a member up."""
        self.remove(member_id, UnknownMemberId("you are none of us"))

    def remove(self, member_id: str, error: RaftlogError | None) -> None:
        member = self.members.pop(member_id, None)
        if member is not None:
            if error is not None:
                member.out.put_nowait(group_pb2.GroupResponse(error=to_wire(error)))
            member.out.put_nowait(None)
            self.rebalance()

    def rebalance(self) -> None:
        """Compute a target, and bring members there as far as they are."""
        self.epoch += 1
        self.reconcile()

    def targets(self) -> dict[str, Parts]:
        targets: dict[str, Parts] = {member_id: set() for member_id in self.members}
        turn = 0
        for name, topic in sorted(self.cluster.topics.items()):
            readers = [
                each for each in self.seen if each in self.members and name in self.members[each].subscription.topics
            ]
            for index in range(len(topic.partitions)):
                if readers:
                    targets[readers[turn % len(readers)]].add(TopicPartition(name, index))
                    turn += 1
        return targets

    def reconcile(self) -> None:
        targets = self.targets()
        for member_id, member in self.members.items():
            target = targets[member_id]
            others = {part for other in self.members.values() if other is not member for part in other.held}
            unrevoked = member.held - target
            if unrevoked:
                self._push(member, member.held & target, member.epoch)
            else:
                member.held |= target - others
                member.epoch = self.epoch
                self._push(member, member.held, member.epoch)

    def _push(self, member: Member, parts: Parts, epoch: int) -> None:
        if (member.sent, member.sent_epoch) == (parts, epoch):
            return
        member.sent, member.sent_epoch = set(parts), epoch
        message = group_pb2.GroupAssignment(
            member_epoch=epoch,
            heartbeat_interval_ms=self.interval_ms,
            session_timeout_ms=self.session_timeout_ms,
            note=self.note,
            assignor="roundrobin",
        )
        for name in sorted({part.topic for part in parts}):
            message.topics.add(
                topic=name,
                topic_id=self.cluster.topics[name].topic_id,
                partitions=sorted(part.partition for part in parts if part.topic == name),
                first_new_partition=self.first_new.get(name, 1000),
            )
        member.out.put_nowait(group_pb2.GroupResponse(assignment=message))

    # What members do

    async def session(
        self, requests: AsyncIterator[group_pb2.GroupRequest], context: grpc.aio.ServicerContext[Any, Any], node: int
    ) -> None:
        """Serve a stream whose first request was not read yet."""
        member: Member | None = None
        writer: asyncio.Task[None] | None = None
        try:
            async for request in requests:
                await self.cluster.awake(node)
                if self.cluster.groups.coordinator_of(self.group_id) != node:
                    await context.write(group_pb2.GroupResponse(error=to_wire(NotCoordinator("it is another one"))))
                    return
                if self.unreadable and request.WhichOneof("request") == self.unreadable:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what is that?")
                match request.WhichOneof("request"):
                    case "join":
                        try:
                            member = self._join(request.join)
                        except RaftlogError as error:
                            await context.write(group_pb2.GroupResponse(error=to_wire(error)))
                            return
                        writer = asyncio.ensure_future(self._write(member, context, node))
                        self.reconcile()
                    case "heartbeat" if member is not None:
                        self._heartbeat(member, request.heartbeat)
                    case "commit" if member is not None:
                        if self.break_commits:
                            self.break_commits -= 1
                            return
                        self._commit(member, request.commit)
                    case "leave" if member is not None:
                        self.leaves.append(request.leave)
                        self.remove(member.member_id, None)
                if member is not None and member.member_id not in self.members:
                    assert writer is not None
                    await writer
                    return
        finally:
            if writer is not None:
                writer.cancel()

    async def _write(self, member: Member, context: grpc.aio.ServicerContext[Any, Any], node: int) -> None:
        while (response := await member.out.get()) is not None:
            await self.cluster.awake(node)
            if not self.mute:
                await context.write(response)

    def _join(self, join: group_pb2.JoinGroup) -> Member:
        if self.refuse_joins:
            raise self.refuse_joins.pop(0)
        member = self.members.get(join.member_id)
        if join.member_epoch and member is None:
            raise UnknownMemberId("you are none of us")
        if join.member_id not in self.seen:
            self.seen.append(join.member_id)
        if member is None:
            member = self.members[join.member_id] = Member(join.member_id)
        elif not join.member_epoch:
            member.held = set()
        member.joins.append(join)
        member.out = asyncio.Queue()
        member.sent = None
        changed = member.subscription != join.subscription
        member.subscription.CopyFrom(join.subscription)
        if join.member_epoch:
            member.held = _parts(join.owned)
        if changed or not join.member_epoch:
            self.epoch += 1
        return member

    def _heartbeat(self, member: Member, heartbeat: group_pb2.GroupHeartbeat) -> None:
        member.heartbeats.append(heartbeat)
        if heartbeat.HasField("owned") and member.sent is not None:
            member.held = _parts(heartbeat.owned.partitions) | member.sent
        if heartbeat.HasField("subscription"):
            member.subscription.CopyFrom(heartbeat.subscription)
            self.epoch += 1
        member.out.put_nowait(group_pb2.GroupResponse(heartbeat=group_pb2.HeartbeatAnswer(member_epoch=member.epoch)))
        if heartbeat.HasField("owned") or heartbeat.HasField("subscription"):
            self.reconcile()

    def _commit(self, member: Member, commit: group_pb2.SessionCommit) -> None:
        result = group_pb2.SessionCommitResult(correlation_id=commit.correlation_id)
        offsets: dict[TopicPartition, int] = {}
        if self.refuse_commits:
            result.error.CopyFrom(to_wire(self.refuse_commits.pop(0)))
        elif commit.member_epoch < member.epoch:
            result.error.CopyFrom(to_wire(StaleMemberEpoch(f"epoch {commit.member_epoch} is over")))
        else:
            self.cluster.groups.sizes.append(commit.ByteSize())
            for each in commit.offsets:
                name = self.cluster.named(each.topic_id, each.topic)
                part, answer = TopicPartition(name, each.partition), result.results.add()
                if part not in member.held:
                    answer.error.CopyFrom(to_wire(PartitionNotOwned(f"{part} is not yours")))
                    continue
                offsets[part] = each.offset
                self.cluster.groups.groups[self.group_id].offsets[part] = each
            self.commits.append((member.member_id, commit.member_epoch, offsets))
        member.out.put_nowait(group_pb2.GroupResponse(commit=result))


def _parts(messages: Iterable[group_pb2.TopicPartitions]) -> Parts:
    return {TopicPartition(each.topic, number) for each in messages for number in each.partitions}
