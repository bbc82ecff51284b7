"""The admin client's part that deals with consumer groups: who they are, how far they have read, and changing that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import grpc

from raftlog._client.admin_calls import names_of
from raftlog._client.admin_replicas import ReplicaAdmin
from raftlog._client.commit_arguments import checked
from raftlog._client.connections import from_grpc
from raftlog._client.coordinators import Coordinator, Coordinators
from raftlog._client.group_offsets import Entry, in_pieces, to_commit
from raftlog._client.offsets import OffsetLookup
from raftlog._client.options import AdminOptions
from raftlog._client.trace_metadata import call_metadata
from raftlog._core.cluster import BrokerView
from raftlog._group_descriptions import (
    STATES,
    GroupDescription,
    GroupListing,
    describe_group,
    state_name,
)
from raftlog.errors import (
    CoordinatorNotAvailable,
    GroupIdNotFound,
    InvalidGroupId,
    InvalidRequestError,
    NonEmptyGroup,
    NotCoordinator,
    RaftlogError,
    UnknownMemberId,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.types import OffsetAndMetadata, TopicPartition
from raftlog.v1 import group_pb2, group_pb2_grpc

OFFSETS_TOPIC: Final = "__consumer_offsets"
_ADDRESS_TIMEOUT_S: Final = 5.0
_MAX_GROUP_ID: Final = 255


class GroupAdmin(ReplicaAdmin):
    """Consumer groups."""

    def __init__(self, bootstrap: list[str], options: AdminOptions) -> None:
        super().__init__(bootstrap, options)
        self._coordinators = Coordinators(self._metadata, self._connections, options, counted=self._counted)
        self._offsets = OffsetLookup(self._metadata, self._connections, options)

    # Who they are

    async def list_groups(
        self, states: Iterable[str] | None, missing: list[RaftlogError] | None, timeout: float | None
    ) -> list[GroupListing]:
        """Return all groups, by id; why some may be missing goes to `missing`, without which it is an error."""
        wanted = [_state(name) for name in names_of(states or ())]

        async def attempt(deadline: float) -> list[GroupListing]:
            self._metadata.wanted.add(OFFSETS_TOPIC)
            await self._metadata.refresh()
            brokers = [each for each in self._metadata.view.brokers.values() if not each.fenced]
            answers = await asyncio.gather(
                *(self._listed(broker, wanted, deadline) for broker in brokers), return_exceptions=True
            )
            reasons: list[RaftlogError] = []
            found: dict[str, GroupListing] = {}
            for broker, answer in zip(brokers, answers, strict=True):
                if isinstance(answer, RaftlogError):
                    reasons.append(type(answer)(f"broker {broker.broker_id}: {answer}"))
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                reasons += [from_wire(error) for error in answer.loading]
                for group in answer.groups:
                    self._coordinators.learn(group.group_id, Coordinator(broker.broker_id, broker.address, -1))
                    found[group.group_id] = GroupListing(
                        group.group_id, state_name(group.state), group.members, broker.broker_id
                    )
            reasons += self._leaderless(OFFSETS_TOPIC)
            if reasons and (missing is None or (not found and len(reasons) >= len(brokers))):
                raise reasons[0]
            if missing is not None:
                missing[:] = reasons
            return [found[group_id] for group_id in sorted(found)]

        return await self._retried(attempt, timeout)

    def _leaderless(self, topic: str) -> list[RaftlogError]:
        """Return an error when parts of a coordinators' topic are led by nobody; who is kept there is not listed."""
        view = self._metadata.view.topics.get(topic)
        alone = [part.partition for part in view.partitions if part.leader < 0] if view is not None else []
        if not alone:
            return []
        named = ", ".join(map(str, alone[:5])) + (", ..." if len(alone) > 5 else "")
        return [CoordinatorNotAvailable(f"{topic} has partitions without a leader: {named}")]

    async def _listed(
        self, broker: BrokerView, states: list[group_pb2.GroupState.ValueType], deadline: float
    ) -> group_pb2.ListGroupsResponse:
        response: group_pb2.ListGroupsResponse = await self._ask_group_service(
            broker.address, "ListGroups", group_pb2.ListGroupsRequest(states=states), deadline
        )
        if response.HasField("error") and response.error.code:
            raise from_wire(response.error)
        return response

    async def _ask_group_service(self, address: str, method: str, request: Any, deadline: float) -> Any:
        left_s = max(0.1, deadline - asyncio.get_running_loop().time())
        stub = group_pb2_grpc.GroupStub(self._connections.channel(address))
        try:
            with self._counted():
                return await getattr(stub, method)(
                    request,
                    timeout=min(_ADDRESS_TIMEOUT_S, self._options.request_timeout_ms / 1000, left_s),
                    metadata=call_metadata(),
                )
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None

    async def describe_groups(self, group_ids: Iterable[str], timeout: float | None) -> dict[str, GroupDescription]:
        """Return what groups consist of, asking each coordinator once for all of its groups."""
        wanted = _checked(group_ids)
        found: dict[str, GroupDescription] = {}

        async def attempt(deadline: float) -> dict[str, GroupDescription]:
            left = [group_id for group_id in wanted if group_id not in found]
            failed: RaftlogError | None = None
            for group_id, answer in (await self._of_groups("DescribeGroups", left, deadline)).items():
                if isinstance(answer, RaftlogError):
                    failed = failed or answer
                elif answer.state == group_pb2.DEAD:
                    failed = failed or GroupIdNotFound(f"there is no group {group_id!r}")
                else:
                    found[group_id] = describe_group(answer)
            if failed is not None:
                raise failed
            return {group_id: found[group_id] for group_id in wanted}

        return await self._retried(attempt, timeout)

    async def delete_groups(self, group_ids: Iterable[str], timeout: float | None) -> None:
        """Delete groups and their offsets; raises once all were tried, if some were refused."""
        wanted = _checked(group_ids)
        done: dict[str, RaftlogError | None] = {}
        in_doubt: set[str] = set()

        async def attempt(deadline: float) -> None:
            left = [group_id for group_id in wanted if group_id not in done]
            failed: RaftlogError | None = None
            for group_id, answer in (await self._of_groups("DeleteGroups", left, deadline)).items():
                if not isinstance(answer, RaftlogError):
                    done[group_id] = None
                elif isinstance(answer, GroupIdNotFound) and group_id in in_doubt:
                    done[group_id] = None  # an attempt before has done it, and its answer was lost
                elif answer.retriable:
                    failed = answer
                    in_doubt.add(group_id)
                else:
                    done[group_id] = answer
            if failed is not None:
                raise failed

        await self._retried(attempt, timeout)
        _raise_first([error for error in done.values() if error is not None], len(wanted))

    async def _of_groups(self, method: str, group_ids: Sequence[str], deadline: float) -> dict[str, Any]:
        """Return by group what its coordinator answers to a method that takes many groups, or the error."""
        found: dict[str, Any] = {}
        by_coordinator: dict[Coordinator, list[str]] = {}
        for group_id in group_ids:
            try:
                known = await self._coordinators.find_once(group_id)
            except RaftlogError as error:
                found[group_id] = error
            else:
                by_coordinator.setdefault(known._replace(partition=-1), []).append(group_id)
        request = getattr(group_pb2, f"{method}Request")
        answers = await asyncio.gather(
            *(
                self._ask_group_service(coordinator.address, method, request(group_ids=part), deadline)
                for coordinator, part in by_coordinator.items()
            ),
            return_exceptions=True,
        )
        for part, answer in zip(by_coordinator.values(), answers, strict=True):
            if isinstance(answer, RaftlogError):
                found |= dict.fromkeys(part, answer)
                for group_id in part:
                    self._coordinators.forget(group_id)
                continue
            if isinstance(answer, BaseException):
                raise answer
            results = answer.groups if method == "DescribeGroups" else answer.results
            for group_id, result in zip(part, results, strict=True):
                found[group_id] = from_wire(result.error) if result.error.code else result
                if isinstance(found[group_id], (NotCoordinator, CoordinatorNotAvailable)):
                    self._coordinators.forget(group_id)
        return found

    # How far they have read

    async def group_offsets(self, group_id: str, timeout: float | None) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return all offsets that a group has committed, in order; none for a group that there is not."""
        return {
            part: OffsetAndMetadata(found.offset, found.metadata, found.leader_epoch)
            for part, found in (await self._committed(group_id, timeout)).items()
        }

    async def _committed(self, group_id: str, timeout: float | None) -> dict[TopicPartition, group_pb2.CommittedOffset]:
        request = group_pb2.FetchOffsetsRequest(group_id=_checked([group_id])[0], member_epoch=-1, all=True)
        try:
            response: group_pb2.FetchOffsetsResponse = await self._of_group("FetchOffsets", group_id, request, timeout)
        except GroupIdNotFound:
            return {}
        found = {
            TopicPartition(each.topic, each.partition): each
            for each in response.offsets
            if not each.error.code and each.offset >= 0
        }
        return dict(sorted(found.items()))

    async def _of_group(self, method: str, group_id: str, request: Any, timeout: float | None) -> Any:
        """Call a method about one group; what `results` of the response refuse and may pass is retried as well."""

        async def attempt(deadline: float) -> Any:
            left_s = max(0.1, deadline - asyncio.get_running_loop().time())
            limit_s = min(left_s, self._options.request_timeout_ms / 1000)
            response = await self._coordinators.call(group_id, method, request, limit_s)
            for result in getattr(response, "results", ()):
                error = from_wire(result.error) if result.error.code else None
                if error is not None and error.retriable:
                    if isinstance(error, (NotCoordinator, CoordinatorNotAvailable)):
                        self._coordinators.forget(group_id)
                    raise error
            return response

        return await self._retried(attempt, timeout)

    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], timeout: float | None
    ) -> None:
        """Commit offsets for a group that has no members; raises if some were refused."""
        _checked([group_id])
        wanted = checked(offsets)
        ids = await self._topic_ids(wanted, timeout)
        refused: list[RaftlogError] = []
        for piece in in_pieces(to_commit((part, Entry(offset, ids[part.topic])) for part, offset in wanted.items())):
            request = group_pb2.CommitOffsetsRequest(
                group_id=group_id,
                member_epoch=-1,
                offsets=piece,
                timeout_ms=int(min(self._options.request_timeout_ms, self._limit_s(timeout) * 1000)),
            )
            try:
                response: group_pb2.CommitOffsetsResponse = await self._of_group(
                    "CommitOffsets", group_id, request, timeout
                )
            except UnknownMemberId as error:
                raise _not_empty(group_id) from error
            refused += [from_wire(each.error) for each in response.results if each.error.code]
            if refused and isinstance(refused[0], UnknownMemberId):
                raise _not_empty(group_id)
        _raise_first(refused, len(wanted))

    async def _topic_ids(self, parts: Iterable[TopicPartition], timeout: float | None) -> dict[str, bytes]:
        """Return the topics' ids.

        Raises:
            UnknownTopicOrPartition: one of the partitions is not there.
        """
        views = {view.name: view for view in await self._topics(sorted({topic for topic, _ in parts}), True, timeout)}
        for topic, partition in parts:
            if not 0 <= partition < len(views[topic].partitions):
                count = len(views[topic].partitions)
                raise UnknownTopicOrPartition(f"topic {topic} has no partition {partition}; it has {count}, from 0")
        return {name: view.topic_id for name, view in views.items()}

    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | TopicPartition, timeout: float | None
    ) -> None:
        """Forget committed offsets; raises if some were refused."""
        by_topic: dict[str, list[int]] = {}
        if isinstance(partitions, TopicPartition):  # one, not its two fields
            partitions = [partitions]
        for topic, partition in sorted(set(partitions)):
            by_topic.setdefault(topic, []).append(partition)
        request = group_pb2.DeleteOffsetsRequest(group_id=_checked([group_id])[0])
        for topic, numbers in by_topic.items():
            request.partitions.add(topic=topic, partitions=numbers)
        response: group_pb2.DeleteOffsetsResponse = await self._of_group("DeleteOffsets", group_id, request, timeout)
        refused = [from_wire(each.error) for each in response.results if each.error.code]
        _raise_first(refused, len(response.results))

    async def close(self) -> None:
        """Close the connections."""
        await self._coordinators.close()
        await super().close()


def _state(name: str) -> group_pb2.GroupState.ValueType:
    if name.lower() not in STATES:
        raise InvalidRequestError(f"there is no state {name!r} of a group; there are {', '.join(STATES)}")
    return group_pb2.GroupState.Value(name.upper())


def _checked(group_ids: Iterable[str]) -> list[str]:
    """Return the ids, each once.

    Raises:
        InvalidGroupId: not one to 255 characters.
    """
    wanted = names_of(group_ids)
    for group_id in wanted:
        if not 1 <= len(group_id) <= _MAX_GROUP_ID:
            raise InvalidGroupId(f"a group's name has 1 to {_MAX_GROUP_ID} characters, this one has {len(group_id)}")
    return wanted


def _not_empty(group_id: str) -> NonEmptyGroup:
    return NonEmptyGroup(f"group {group_id!r} has members, which know better how far they are; stop them first")


def _raise_first(refused: Sequence[RaftlogError], total: int) -> None:
    if refused:
        were = "was refused" if len(refused) == 1 else "were refused, this is the first"
        more = f"; {len(refused)} of {total} {were}" if total > 1 else ""
        raise type(refused[0])(f"{refused[0]}{more}")
