"""The APIs of groups: members of classic groups, and what tools ask. They become commands of a group's coordinator.

The coordinator (`broker/coordinator/groups`) holds every rule. Calls that raftlog's clients have, too, go through the
methods of the `Group` service; those of classic groups are asked of the group's shard directly.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol

from broker.config.config import BrokerConfig
from broker.coordinator.groups.checks import MAX_ID
from broker.coordinator.groups.classic.commands import (
    HeartbeatClassic,
    JoinClassic,
    Joined,
    LeaveClassic,
    Left,
    SyncClassic,
    Synced,
)
from broker.coordinator.groups.commands import Command
from broker.kafka import errors
from broker.kafka import messages as api
from broker.kafka.codec import Fields
from broker.kafka.parts import by_topic, once, parts_of
from broker.net.services.calls import Call
from broker.net.services.groups import GroupService
from broker.security.caller import Caller, authorized_operations
from broker.turns import in_turns
from raftlog.errors import GroupIdNotFound, InvalidRequestError, RaftlogError
from raftlog.v1 import group_pb2
from raftlog.v1.security_pb2 import Acl

Handler = Callable[[Fields, int, Caller], Awaitable[Fields]]

JOIN_MARGIN_S: Final = 600.0
"""How much longer than the rebalance timeout a join or sync may wait; the coordinator ends it before."""
MAX_CLIENT_ID: Final = MAX_ID - 37
"""So that there is room for a UUID in a member id."""
GROUPS_AT_A_TIME: Final = 10
"""Groups between two turns of the event loop: each is a call of the coordinator's."""
REQUIRES_ID_FROM: Final = 4
SKIPS_ASSIGNMENT_FROM: Final = 9
NOT_FOUND_FROM: Final = 6
"""Version of DescribeGroups from which a group that does not exist is an error; before it is Dead."""
MEMBERS_FROM: Final = 3
"""Version of LeaveGroup that names several members."""

STATES: Final[dict[int, str]] = {
    group_pb2.EMPTY: "Empty",
    group_pb2.ASSIGNING: "Assigning",
    group_pb2.RECONCILING: "Reconciling",
    group_pb2.STABLE: "Stable",
    group_pb2.DEAD: "Dead",
    group_pb2.PREPARING_REBALANCE: "PreparingRebalance",
    group_pb2.COMPLETING_REBALANCE: "CompletingRebalance",
}
TYPES: Final[dict[int, str]] = {group_pb2.GROUP_TYPE_CONSUMER: "consumer", group_pb2.GROUP_TYPE_CLASSIC: "classic"}


class CallService(Protocol):
    """Calls a service's method with its permission rule (`Apis`)."""

    def __call__(
        self, method: str, call: Callable[[Any, Any], Awaitable[Any]], request: Any, who: Caller
    ) -> Awaitable[Any]:
        """Return the answer. Raises RaftlogError: the permission is missing, or the answer has an error."""
        ...


class GroupApis:
    """The handlers of one broker, by API key."""

    def __init__(self, service: GroupService, config: BrokerConfig, call: CallService) -> None:
        self._service = service
        self._config = config
        self._call = call
        self.handlers: dict[int, Handler] = {
            api.JOIN_GROUP: self._join,
            api.SYNC_GROUP: self._sync,
            api.HEARTBEAT: self._heartbeat,
            api.LEAVE_GROUP: self._leave,
            api.DESCRIBE_GROUPS: self._describe,
            api.LIST_GROUPS: self._list,
            api.DELETE_GROUPS: self._delete,
            api.OFFSET_COMMIT: self._commit_offsets,
            api.OFFSET_FETCH: self._fetch_offsets,
            api.OFFSET_DELETE: self._delete_offsets,
        }

    async def _ask(self, group_id: str, who: Caller, command: Callable[[Call], Command], wait_s: float) -> Any:
        who.check(Acl.READ, Acl.GROUP, group_id)
        return await self._service.ask(group_id, command, wait_s)

    @property
    def _wait_s(self) -> float:
        return self._config.request_timeout_ms / 1_000

    # Members of classic groups

    async def _join(self, request: Fields, version: int, who: Caller) -> Fields:
        group_id, session_ms = request["group_id"], request["session_timeout_ms"]
        instance_id = request["group_instance_id"] or ""
        client_id = (request["client_id"] or "")[:MAX_CLIENT_ID]
        rebalance_ms = request["rebalance_timeout_ms"] if request["rebalance_timeout_ms"] > 0 else session_ms

        def command(call: Call) -> Command:
            return JoinClassic(
                call,
                group_id,
                request["member_id"],
                f"{(instance_id or client_id)[:MAX_CLIENT_ID]}-{uuid.uuid4()}",
                instance_id,
                client_id,
                who.host,
                request["protocol_type"],
                tuple((each["name"], each["metadata"]) for each in request["protocols"]),
                session_ms,
                rebalance_ms,
                requires_id=version >= REQUIRES_ID_FROM,
                can_skip_assignment=version >= SKIPS_ASSIGNMENT_FROM,
                user=who.user,
            )

        try:
            joined = await self._ask(group_id, who, command, max(rebalance_ms, 0) / 1_000 + JOIN_MARGIN_S)
        except RaftlogError as error:
            return {"error_code": code_of(error), "member_id": request["member_id"], "leader": "", "protocol_name": ""}
        assert isinstance(joined, Joined), "each command has one type of reply"
        return {
            "error_code": errors.NONE if joined.error is None else code_of(joined.error),
            "generation_id": joined.generation,
            "protocol_type": joined.protocol_type or None,
            "protocol_name": joined.protocol,
            "leader": joined.leader,
            "skip_assignment": joined.skip_assignment,
            "member_id": joined.member_id,
            "members": [
                {"member_id": member_id, "group_instance_id": instance or None, "metadata": metadata}
                for member_id, instance, metadata in joined.members
            ],
        }

    async def _sync(self, request: Fields, version: int, who: Caller) -> Fields:
        assignments = {each["member_id"]: each["assignment"] for each in request["assignments"]}

        def command(call: Call) -> Command:
            return SyncClassic(
                call,
                request["group_id"],
                request["member_id"],
                request["group_instance_id"] or "",
                request["generation_id"],
                request["protocol_type"],
                request["protocol_name"],
                assignments,
            )

        try:
            synced = await self._ask(request["group_id"], who, command, JOIN_MARGIN_S)
        except RaftlogError as error:
            return {"error_code": code_of(error), "assignment": b""}
        assert isinstance(synced, Synced), "each command has one type of reply"
        return {
            "error_code": errors.NONE,
            "protocol_type": synced.protocol_type,
            "protocol_name": synced.protocol,
            "assignment": synced.assignment,
        }

    async def _heartbeat(self, request: Fields, version: int, who: Caller) -> Fields:
        group_id, member_id, generation = request["group_id"], request["member_id"], request["generation_id"]
        instance_id = request["group_instance_id"] or ""
        try:
            await self._ask(
                group_id,
                who,
                lambda call: HeartbeatClassic(call, group_id, member_id, instance_id, generation),
                self._wait_s,
            )
        except RaftlogError as error:
            return {"error_code": code_of(error)}
        return {"error_code": errors.NONE}

    async def _leave(self, request: Fields, version: int, who: Caller) -> Fields:
        group_id = request["group_id"]
        named = [(each["member_id"], each["group_instance_id"] or "") for each in request["members"]]
        if version < MEMBERS_FROM:
            named = [(request["member_id"], "")]
        try:
            left = await self._ask(group_id, who, lambda call: LeaveClassic(call, group_id, tuple(named)), self._wait_s)
        except RaftlogError as error:
            return {"error_code": code_of(error), "members": []}
        assert isinstance(left, Left), "each command has one type of reply"
        codes = [errors.NONE if error is None else code_of(error) for error in left.errors]
        return {
            "error_code": codes[0] if version < MEMBERS_FROM else errors.NONE,
            "members": [
                {"member_id": member_id, "group_instance_id": instance_id or None, "error_code": code}
                for (member_id, instance_id), code in zip(named, codes, strict=True)
            ],
        }

    # Tools

    async def _described(self, group_id: str, who: Caller) -> group_pb2.GroupDescription:
        asked = group_pb2.DescribeGroupsRequest(group_ids=[group_id])
        answer = await self._call("Group/DescribeGroups", self._service.DescribeGroups, asked, who)
        described: group_pb2.GroupDescription = answer.groups[0]
        if described.HasField("error"):
            raise errors.error_of(described.error)
        return described

    async def _describe(self, request: Fields, version: int, who: Caller) -> Fields:
        named = await once(request["groups"])
        groups = [await self._classic(group_id, version, who) async for group_id in in_turns(named, GROUPS_AT_A_TIME)]
        if request["include_authorized_operations"]:
            await tell_operations(groups, who)
        return {"groups": groups}

    async def _classic(self, group_id: str, version: int, who: Caller) -> Fields:
        described = {"group_id": group_id, "group_state": "", "protocol_type": "", "protocol_data": "", "members": []}
        try:
            group = await self._described(group_id, who)
            if group.type == group_pb2.GROUP_TYPE_CONSUMER:
                raise GroupIdNotFound(f"the group {group_id!r} is not a classic one")
        except RaftlogError as error:
            code = code_of(error)
            if isinstance(error, GroupIdNotFound):
                code = code if version >= NOT_FOUND_FROM else errors.NONE
                described["group_state"] = "Dead"
            return {**described, "error_code": code, "error_message": str(error)}
        return {
            **described,
            "error_code": errors.NONE,
            "group_state": STATES.get(group.state, ""),
            "protocol_type": group.protocol_type,
            "protocol_data": group.assignor if group.state == group_pb2.STABLE else "",
            "members": [
                {
                    "member_id": each.member_id,
                    "group_instance_id": each.instance_id or None,
                    "client_id": each.client_id,
                    "client_host": f"/{each.host}",
                    "member_metadata": each.classic_metadata,
                    "member_assignment": each.classic_assignment,
                }
                for each in group.members
            ],
        }

    async def _list(self, request: Fields, version: int, who: Caller) -> Fields:
        states = {each.lower() for each in request["states_filter"]}
        types = {each.lower() for each in request["types_filter"]}
        asked = group_pb2.ListGroupsRequest()
        try:
            answer = await self._call("Group/ListGroups", self._service.ListGroups, asked, who)
            loading = [errors.error_of(each) for each in answer.loading]
        except RaftlogError as error:
            return {"error_code": code_of(error), "groups": []}
        codes = [code for each in loading if (code := code_of(each)) == errors.COORDINATOR_LOAD_IN_PROGRESS]
        return {
            "error_code": codes[0] if codes else errors.NONE,
            "groups": [
                {
                    "group_id": each.group_id,
                    "protocol_type": each.protocol_type,
                    "group_state": STATES.get(each.state, ""),
                    "group_type": TYPES.get(each.type, ""),
                }
                for each in answer.groups
                if (not states or STATES.get(each.state, "").lower() in states)
                and (not types or TYPES.get(each.type, "") in types)
            ],
        }

    async def _delete(self, request: Fields, version: int, who: Caller) -> Fields:
        results = []
        async for group_id in in_turns(request["groups_names"], GROUPS_AT_A_TIME):
            asked = group_pb2.DeleteGroupsRequest(group_ids=[group_id])
            code = errors.NONE
            try:
                answer = await self._call("Group/DeleteGroups", self._service.DeleteGroups, asked, who)
                (result,) = answer.results
                if result.HasField("error"):
                    raise errors.error_of(result.error)
            except RaftlogError as error:
                code = code_of(error)
            results.append({"group_id": group_id, "error_code": code})
        return {"results": results}

    # Committed offsets

    async def _commit_offsets(self, request: Fields, version: int, who: Caller) -> Fields:
        call = group_pb2.CommitOffsetsRequest(
            group_id=request["group_id"],
            member_id=request["member_id"],
            member_epoch=request["generation_id_or_member_epoch"],
            timeout_ms=self._config.request_timeout_ms,
            instance_id=request["group_instance_id"] or "",
            offsets=await offsets_in(request),
        )
        codes: list[int]
        try:
            answer = await self._call("Group/CommitOffsets", self._service.CommitOffsets, call, who)
            codes = [errors.code_in(each, of_coordinator=True) async for each in in_turns(answer.results)]
        except RaftlogError as error:
            codes = [errors.code_of(error, of_coordinator=True)] * len(call.offsets)
        return await coded(request, codes)

    async def _fetch_offsets(self, request: Fields, version: int, who: Caller) -> Fields:
        if version < 8:
            found = await self._group_offsets(request, request["require_stable"], who)
            del found["group_id"]
            return found
        groups = await once(request["groups"], lambda group: group["group_id"])
        return {
            "groups": [
                await self._group_offsets(each, request["require_stable"], who)
                async for each in in_turns(groups, GROUPS_AT_A_TIME)
            ]
        }

    async def _group_offsets(self, group: Fields, require_stable: bool, who: Caller) -> Fields:
        topics = group["topics"]
        call = group_pb2.FetchOffsetsRequest(
            group_id=group["group_id"], member_epoch=-1, require_stable=require_stable, all=topics is None
        )
        async for topic in in_turns(topics or ()):
            numbers = sorted({*topic["partition_indexes"]})
            call.partitions.add(topic=topic["name"], partitions=numbers)
        try:
            answer = await self._call("Group/FetchOffsets", self._service.FetchOffsets, call, who)
        except RaftlogError as error:
            code = errors.code_of(error, of_coordinator=True)
            return {"group_id": group["group_id"], "error_code": code, "topics": _none_committed(topics or (), code)}
        found: dict[str, list[Fields]] = {}
        async for each in in_turns(answer.offsets):
            code = errors.code_in(each, of_coordinator=True)
            found.setdefault(each.topic, []).append(
                {
                    "partition_index": each.partition,
                    "committed_offset": -1 if code else each.offset,
                    "committed_leader_epoch": -1 if code else each.leader_epoch,
                    "metadata": each.metadata,
                    # a topic that does not exist has no offsets; clients ask for it and would give up on an error
                    "error_code": errors.NONE if code == errors.UNKNOWN_TOPIC_OR_PARTITION else code,
                }
            )
        return {
            "group_id": group["group_id"],
            "topics": [{"name": name, "partitions": parts} for name, parts in found.items()],
        }

    async def _delete_offsets(self, request: Fields, version: int, who: Caller) -> Fields:
        asked = group_pb2.DeleteOffsetsRequest(group_id=request["group_id"])
        rows = [(topic["name"], part["partition_index"]) for topic in request["topics"] for part in topic["partitions"]]
        if len(set(rows)) < len(rows):
            return {"error_code": code_of(InvalidRequestError("a partition is named twice")), "topics": []}
        async for name, number in in_turns(rows):
            asked.partitions.add(topic=name, partitions=[number])
        try:
            answer = await self._call("Group/DeleteOffsets", self._service.DeleteOffsets, asked, who)
        except RaftlogError as error:
            return {"error_code": code_of(error), "topics": []}
        codes = [
            code_of(errors.error_of(each.error)) if each.HasField("error") else errors.NONE
            async for each in in_turns(answer.results)
        ]
        return {"error_code": errors.NONE, **await coded(request, codes)}


async def offsets_in(request: Fields) -> list[group_pb2.CommitOffset]:
    """Return the offsets that a request commits, in its order. The event loop does other work in between."""
    return [
        group_pb2.CommitOffset(
            topic=topic["name"],
            partition=part["partition_index"],
            offset=part["committed_offset"],
            leader_epoch=part["committed_leader_epoch"],
            metadata=part["committed_metadata"] or "",
        )
        async for topic, part in in_turns(parts_of(request["topics"]))
    ]


async def coded(request: Fields, codes: Iterable[int]) -> Fields:
    """Return an error code for each partition of a request, by topic."""
    parts = (part["partition_index"] for topic in request["topics"] for part in topic["partitions"])
    results = ({"partition_index": part, "error_code": code} for part, code in zip(parts, codes, strict=True))
    return {"topics": await by_topic(request["topics"], results)}


def _none_committed(topics: Iterable[Fields], code: int) -> list[Fields]:
    return [
        {
            "name": topic["name"],
            "partitions": [
                {"partition_index": each, "committed_offset": -1, "metadata": "", "error_code": code}
                for each in topic["partition_indexes"]
            ],
        }
        for topic in topics
    ]


async def tell_operations(groups: list[Fields], who: Caller) -> None:
    """Add to descriptions of groups what the caller may do with each (KIP-430)."""
    async for each in in_turns(groups, GROUPS_AT_A_TIME):
        if each["error_code"] == errors.NONE and each["group_state"] != STATES[group_pb2.DEAD]:
            each["authorized_operations"] = authorized_operations(who, Acl.GROUP, each["group_id"])


def code_of(error: RaftlogError) -> int:
    """Return Kafka's code. Members give up at REQUEST_TIMED_OUT, and look for the coordinator at another one."""
    code = errors.code_of(error, of_coordinator=True)
    return errors.COORDINATOR_NOT_AVAILABLE if code == errors.REQUEST_TIMED_OUT else code
