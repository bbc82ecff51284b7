"""Consumer groups of a `FakeCluster`, for admin clients; `fake_members` has sessions.

Groups are put there by the test. Every group has its coordinator; `move` gives it another one, of which the nodes hear
at once but for those in `misled`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from raftlog.errors import (
    CoordinatorNotAvailable,
    GroupIdNotFound,
    GroupSubscribedToTopic,
    NonEmptyGroup,
    NotCoordinator,
    RaftlogError,
    UnknownMemberId,
    UnknownTopicOrPartition,
    UnstableOffsetCommit,
    to_wire,
)
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2, group_pb2_grpc

if TYPE_CHECKING:
    from tests.support.fake_broker import FakeCluster
    from tests.support.fake_members import FakeMembers


@dataclass
class FakeGroup:
    """One group."""

    coordinator: int
    state: group_pb2.GroupState.ValueType = group_pb2.EMPTY
    members: list[group_pb2.GroupMember] = field(default_factory=list)
    offsets: dict[TopicPartition, group_pb2.CommitOffset] = field(default_factory=dict)
    pending: set[TopicPartition] = field(default_factory=set)
    """What an open transaction is to commit."""


class FakeGroups:
    """All groups of a cluster, the faults to inject, and the requests."""

    def __init__(self) -> None:
        self.groups: dict[str, FakeGroup] = {}
        self.misled: dict[int, int] = {}
        """By node: the node that it names as coordinator of everything."""
        self.unavailable: dict[str, RaftlogError] = {}
        """By group: what every node says instead of its coordinator."""
        self.loading: dict[int, RaftlogError] = {}
        """By node: what it adds to its list of groups."""
        self.refuse: list[RaftlogError] = []
        """Errors of coordinators for the next calls, one each."""
        self.mislaid_answers = 0
        """So many calls to come break after they have done their work."""
        self.tells_committed = True
        """Whether brokers are new enough to tell committed offsets together with a group."""
        self.found = 0
        """How often a coordinator was looked up."""
        self.calls: list[tuple[int, str]] = []
        """(node, method) of each call of a coordinator."""
        self.sizes: list[int] = []
        """Bytes of each request that commits offsets, or asks for them."""
        self.members: FakeMembers | None = None
        """The members that join, in tests with members."""

    def add(
        self,
        group_id: str,
        coordinator: int = 1,
        offsets: Mapping[TopicPartition, int] | None = None,
        members: Iterable[group_pb2.GroupMember] = (),
    ) -> FakeGroup:
        """Put a group there; stable if it has members."""
        group = self.groups[group_id] = FakeGroup(coordinator)
        group.members = list(members)
        group.state = group_pb2.STABLE if group.members else group_pb2.EMPTY
        for part, offset in (offsets or {}).items():
            group.offsets[part] = group_pb2.CommitOffset(
                topic=part.topic, partition=part.partition, offset=offset, leader_epoch=-1
            )
        return group

    def move(self, group_id: str, coordinator: int) -> None:
        """Give a group another coordinator."""
        self.groups[group_id].coordinator = coordinator

    def coordinator_of(self, group_id: str) -> int:
        """Return a group's coordinator; node 1 for an unknown group."""
        group = self.groups.get(group_id)
        return group.coordinator if group is not None else 1


def member(member_id: str, assigned: Mapping[str, Iterable[int]], **values: Any) -> group_pb2.GroupMember:
    """Return a member that is connected and reads what it is to have."""
    parts = [group_pb2.TopicPartitions(topic=topic, partitions=numbers) for topic, numbers in assigned.items()]
    return group_pb2.GroupMember(
        member_id=member_id,
        member_epoch=3,
        subscription=group_pb2.Subscription(topics=sorted(assigned)),
        assigned=parts,
        target=parts,
        connected=True,
        **values,
    )


class GroupNode(group_pb2_grpc.GroupServicer):
    """The group service of one node."""

    def __init__(self, cluster: FakeCluster, node: int) -> None:
        self.cluster = cluster
        self.node = node

    @property
    def fakes(self) -> FakeGroups:
        """The cluster's groups."""
        return self.cluster.groups

    async def _begin(self, method: str, group_id: str) -> FakeGroup:
        """Take a call for a group as its coordinator.

        Raises:
            RaftlogError: as scripted; NotCoordinator: somebody else is; GroupIdNotFound: there is no such group.
        """
        await self.cluster.awake(self.node)
        self.fakes.calls.append((self.node, method))
        if self.fakes.refuse:
            raise self.fakes.refuse.pop(0)
        if group_id in self.fakes.unavailable:
            raise self.fakes.unavailable[group_id]
        if self.fakes.coordinator_of(group_id) != self.node:
            raise NotCoordinator(f"{group_id} is coordinated by {self.fakes.coordinator_of(group_id)}")
        group = self.fakes.groups.get(group_id)
        if group is None:
            raise GroupIdNotFound(f"there is no group {group_id!r}")
        return group

    async def _end(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self.fakes.mislaid_answers:
            self.fakes.mislaid_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    async def Session(  # type: ignore[override] # the generated class asks for an iterator, aio takes writes too
        self, requests: AsyncIterator[group_pb2.GroupRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """As the members' group of the test has it; one for all groups."""
        assert self.fakes.members is not None, "a group session was opened, but the test has set no members' group"
        await self.fakes.members.session(requests, context, self.node)

    async def FindCoordinator(
        self, request: group_pb2.FindCoordinatorRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.FindCoordinatorResponse:
        await self.cluster.awake(self.node)
        self.fakes.found += 1
        error = self.fakes.unavailable.get(request.group_id)
        if error is not None:
            return group_pb2.FindCoordinatorResponse(error=to_wire(error))
        node = self.fakes.misled.get(self.node, self.fakes.coordinator_of(request.group_id))
        if node < 0:
            return group_pb2.FindCoordinatorResponse(error=to_wire(CoordinatorNotAvailable("nobody leads it")))
        return group_pb2.FindCoordinatorResponse(
            node_id=node, host="127.0.0.1", port=self.cluster.ports[node], partition=7
        )

    async def ListGroups(
        self, request: group_pb2.ListGroupsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.ListGroupsResponse:
        await self.cluster.awake(self.node)
        response = group_pb2.ListGroupsResponse()
        for group_id, group in sorted(self.fakes.groups.items()):
            if group.coordinator == self.node and (not request.states or group.state in request.states):
                response.groups.add(group_id=group_id, state=group.state, members=len(group.members))
        if self.node in self.fakes.loading:
            response.loading.append(to_wire(self.fakes.loading[self.node]))
        return response

    async def DescribeGroups(
        self, request: group_pb2.DescribeGroupsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.DescribeGroupsResponse:
        response = group_pb2.DescribeGroupsResponse()
        for group_id in request.group_ids:
            described = response.groups.add(group_id=group_id)
            try:
                group = await self._begin("DescribeGroups", group_id)
            except RaftlogError as error:
                described.error.CopyFrom(to_wire(error))
                continue
            described.state = group.state
            described.group_epoch = described.assignment_epoch = 3
            described.assignor = "sticky" if group.members else ""
            described.coordinator_id, described.offsets_partition = self.node, 7
            described.members.extend(group.members)
            if request.include_committed and self.fakes.tells_committed:
                described.committed.SetInParent()
                for part, found in group.offsets.items():
                    committed = described.committed.offsets.add(topic=part.topic, partition=part.partition)
                    committed.offset, committed.leader_epoch = found.offset, found.leader_epoch
        return response

    async def DeleteGroups(
        self, request: group_pb2.DeleteGroupsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.DeleteGroupsResponse:
        response = group_pb2.DeleteGroupsResponse()
        for group_id in request.group_ids:
            result = response.results.add()
            try:
                if (await self._begin("DeleteGroups", group_id)).members:
                    raise NonEmptyGroup(f"group {group_id!r} has members")
                del self.fakes.groups[group_id]
            except RaftlogError as error:
                result.error.CopyFrom(to_wire(error))
        await self._end(context)
        return response

    async def FetchOffsets(
        self, request: group_pb2.FetchOffsetsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.FetchOffsetsResponse:
        assert not request.all or (request.member_id, request.member_epoch) == ("", -1), (
            f"a client outside the group asked for offsets as a member of it: {request.member_id!r} in epoch "
            f"{request.member_epoch}"
        )
        response = group_pb2.FetchOffsetsResponse()
        try:
            group = await self._begin("FetchOffsets", request.group_id)
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
            return response
        nothing = group_pb2.CommitOffset(offset=-1, leader_epoch=-1)
        self.fakes.sizes.append(request.ByteSize())
        asked = [
            TopicPartition(self.cluster.named(each.topic_id, each.topic), number)
            for each in request.partitions
            for number in each.partitions
        ]
        wanted = group.offsets if request.all else {part: group.offsets.get(part, nothing) for part in asked}
        for part, found in wanted.items():
            if request.require_stable and part in group.pending:
                unstable = to_wire(UnstableOffsetCommit(f"an open transaction may replace the offset of {part}"))
                response.offsets.add(topic=part.topic, partition=part.partition, error=unstable, offset=-1)
                continue
            response.offsets.add(
                topic=part.topic,
                partition=part.partition,
                offset=found.offset,
                leader_epoch=found.leader_epoch,
                metadata=found.metadata,
                committed_at_ms=1_700_000_000_000,
            )
        return response

    async def CommitOffsets(
        self, request: group_pb2.CommitOffsetsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.CommitOffsetsResponse:
        assert (request.member_id, request.member_epoch) == ("", -1), (
            f"a client outside the group committed offsets as a member of it: {request.member_id!r} in epoch "
            f"{request.member_epoch}"
        )
        response = group_pb2.CommitOffsetsResponse()
        try:
            try:
                group = await self._begin("CommitOffsets", request.group_id)
            except GroupIdNotFound:
                group = self.fakes.add(request.group_id, self.node)
            if group.members:
                raise UnknownMemberId("the group has members, and you are none of them")
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
            return response
        self.fakes.sizes.append(request.ByteSize())
        for each in request.offsets:
            result = response.results.add()
            name = self.cluster.named(each.topic_id, each.topic)
            if name not in self.cluster.topics:
                result.error.CopyFrom(to_wire(UnknownTopicOrPartition(name)))
                continue
            group.offsets[TopicPartition(name, each.partition)] = each
        await self._end(context)
        return response

    async def DeleteOffsets(
        self, request: group_pb2.DeleteOffsetsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> group_pb2.DeleteOffsetsResponse:
        response = group_pb2.DeleteOffsetsResponse()
        try:
            group = await self._begin("DeleteOffsets", request.group_id)
        except RaftlogError as error:
            response.error.CopyFrom(to_wire(error))
            return response
        read = {each.topic for one in group.members for each in one.assigned}
        for each in request.partitions:
            for number in each.partitions:
                result = response.results.add()
                if each.topic in read:
                    result.error.CopyFrom(to_wire(GroupSubscribedToTopic(f"members read {each.topic}")))
                else:
                    group.offsets.pop(TopicPartition(each.topic, number), None)
        await self._end(context)
        return response
