"""The APIs besides Produce and Fetch: each request becomes a call of a gRPC service's method, each answer a response.

The services hold every rule: what is checked, what is refused, which permissions are needed (`RULES` of
`broker/security/permissions.py`, with the same audit log). Here only the form changes: topics named by name instead of
by id, lists of topics instead of one call for each, Kafka's codes instead of raftlog's.

To add an API:
1. Name in PERMISSIONS the methods of gRPC's services whose rules its handler asks: those of the same act. There is one
   table of rules, `RULES`. With an authorizer, an API that PERMISSIONS lacks is refused: its connection is closed.
2. In the handler, call a method with `Apis.call`, which checks its rule; or call `Apis.permit` first; or, for a method
   whose rule is `inside`, check with `who.check` or `Decisions` what its service checks.
3. Answer a refusal with `errors.code_of(error)`, which gives TOPIC_AUTHORIZATION_FAILED and its like, for each part of
   the answer by itself where the answer has parts. Leave out of lists what may not be described.

`tests/integration/test_kafka_security.py` asks every API as a user without any permission, and fails if something is
answered; it needs an example of a request only where a generic one does not do. The operations that a client asks to be
told (KIP-430) come from `authorized_operations`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar, cast

from broker.config.config import BrokerConfig
from broker.kafka import errors
from broker.kafka import messages as api
from broker.kafka.codec import Fields
from broker.kafka.consumer_groups import ConsumerGroupApis
from broker.kafka.groups import GroupApis
from broker.kafka.parts import by_topic, check_count, once
from broker.net.services.admin import AdminService
from broker.net.services.calls import Context
from broker.net.services.groups import GroupService
from broker.net.services.log import LogService
from broker.net.services.transactions import TransactionService
from broker.security.caller import Caller, Decisions, authorized_operations
from broker.security.permissions import RULES, check
from broker.turns import in_turns
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import InvalidRequestError, RaftlogError, UnknownTopicId, UnknownTopicOrPartition
from raftlog.v1 import admin_pb2, common_pb2, group_pb2, log_pb2, transaction_pb2
from raftlog.v1.records_pb2 import ReplicaAssignment
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import BrokerImage, MetadataImage, PartitionImage, TopicImage

logger = logging.getLogger(__name__)

MAX_MESSAGE: Final = 500
"""Characters of an error's text in a response."""
DEFAULT: Final = -1
"""As a number of partitions or replicas: the broker's default."""
NOBODY: Final = -1
_WITHOUT_OPERATIONS: Final = (
    errors.UNKNOWN_TOPIC_OR_PARTITION,
    errors.UNKNOWN_TOPIC_ID,
    errors.TOPIC_AUTHORIZATION_FAILED,
)
"""Errors of topics of which no operations are told."""
GROUP, TRANSACTION = 0, 1
"""Types of a coordinator's key."""
FEATURES: Final = (("transaction.version", 2),)
"""Features that clients look for: with level 2 they use an epoch for each transaction (KIP-890)."""
_LONGEST_S: Final = 300.0

ANYBODY: Final[tuple[str, ...]] = ()
"""Needs no permission."""

PERMISSIONS: Final[Mapping[int, tuple[str, ...]]] = {
    api.PRODUCE: ("Log/Produce",),
    api.FETCH: ("Log/Fetch",),
    api.LIST_OFFSETS: ("Log/ListOffsets",),
    api.METADATA: ("Metadata/Get",),
    api.OFFSET_COMMIT: ("Group/CommitOffsets",),
    api.OFFSET_FETCH: ("Group/FetchOffsets",),
    api.FIND_COORDINATOR: ("Group/FindCoordinator", "Transaction/FindCoordinator"),
    api.JOIN_GROUP: ("Group/Session",),
    api.HEARTBEAT: ("Group/Session",),
    api.LEAVE_GROUP: ("Group/Session",),
    api.SYNC_GROUP: ("Group/Session",),
    api.DESCRIBE_GROUPS: ("Group/DescribeGroups",),
    api.LIST_GROUPS: ("Group/ListGroups",),
    api.DELETE_GROUPS: ("Group/DeleteGroups",),
    api.OFFSET_DELETE: ("Group/DeleteOffsets",),
    api.SASL_HANDSHAKE: ANYBODY,
    api.API_VERSIONS: ANYBODY,
    api.CREATE_TOPICS: ("Admin/CreateTopic",),
    api.DELETE_TOPICS: ("Admin/DeleteTopic",),
    api.DELETE_RECORDS: ("Log/DeleteRecords",),
    api.INIT_PRODUCER_ID: ("Transaction/InitProducerId",),
    api.OFFSET_FOR_LEADER_EPOCH: ("Log/OffsetForLeaderEpoch",),
    api.ADD_PARTITIONS_TO_TXN: ("Transaction/AddToTransaction",),
    api.ADD_OFFSETS_TO_TXN: ("Transaction/AddToTransaction",),
    api.END_TXN: ("Transaction/EndTransaction",),
    api.WRITE_TXN_MARKERS: ("Transaction/AbortHanging",),
    api.TXN_OFFSET_COMMIT: ("Group/CommitTransactionOffsets",),
    api.DESCRIBE_ACLS: ("Security/DescribeAcls",),
    api.CREATE_ACLS: ("Security/CreateAcls",),
    api.DELETE_ACLS: ("Security/DeleteAcls",),
    api.DESCRIBE_CONFIGS: ("Admin/DescribeConfigs",),
    api.ALTER_CONFIGS: ("Admin/AlterConfigs",),
    api.DESCRIBE_LOG_DIRS: ("Admin/DescribeLogDirs",),
    api.SASL_AUTHENTICATE: ANYBODY,
    api.CREATE_PARTITIONS: ("Admin/CreatePartitions",),
    api.ELECT_LEADERS: ("Admin/ElectLeaders",),
    api.INCREMENTAL_ALTER_CONFIGS: ("Admin/AlterConfigs",),
    api.ALTER_PARTITION_REASSIGNMENTS: ("Admin/AlterReassignments",),
    api.LIST_PARTITION_REASSIGNMENTS: ("Admin/DescribeReplicas",),
    api.DESCRIBE_QUORUM: ("Admin/DescribeQuorum",),
    api.DESCRIBE_CLIENT_QUOTAS: ("Admin/DescribeClientQuotas",),
    api.ALTER_CLIENT_QUOTAS: ("Admin/AlterClientQuotas",),
    api.DESCRIBE_USER_SCRAM_CREDENTIALS: ("Security/DescribeUsers",),
    api.ALTER_USER_SCRAM_CREDENTIALS: ("Security/AlterUsers",),
    api.DESCRIBE_CLUSTER: ("Admin/DescribeCluster",),
    api.CONSUMER_GROUP_HEARTBEAT: ("Group/Session",),
    api.CONSUMER_GROUP_DESCRIBE: ("Group/DescribeGroups",),
    api.DESCRIBE_PRODUCERS: ("Transaction/DescribeProducers",),
    api.DESCRIBE_TRANSACTIONS: ("Transaction/DescribeTransactions",),
    api.LIST_TRANSACTIONS: ("Transaction/ListTransactions",),
    api.DESCRIBE_TOPIC_PARTITIONS: ("Metadata/Get",),
}
"""By API key."""

T = TypeVar("T")
Handler = Callable[[Fields, int, Caller], Awaitable[Fields]]


class _Deadline:
    """Stands for the gRPC context of a service's method, which asks it for the time that is left."""

    def __init__(self, timeout_ms: int | None) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._callbacks: list[Callable[[object], None]] = []
        self._until_s = None if timeout_ms is None else loop.time() + min(max(timeout_ms, 0) / 1_000, _LONGEST_S)

    def time_remaining(self) -> float | None:
        """Return the seconds left; None: no deadline."""
        return None if self._until_s is None else max(0.0, self._until_s - self._loop.time())

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Have `over` call `callback`."""
        self._callbacks.append(callback)

    def over(self) -> None:
        """Note that the service has answered; a Kafka client's connection bounds what is not read."""
        for callback in self._callbacks:
            callback(self)

    async def abort(self, status: object, details: str) -> NoReturn:
        """Refuse the request, as a service does that breaks a bound."""
        raise InvalidRequestError(details)


class Services:
    """The gRPC services of one broker."""

    def __init__(
        self, log: LogService, groups: GroupService, transactions: TransactionService, admin: AdminService
    ) -> None:
        self.log = log
        self.groups = groups
        self.transactions = transactions
        self.admin = admin


class Apis:
    """The APIs of one broker; `handlers` has them by API key."""

    def __init__(self, services: Services, config: BrokerConfig, image: Callable[[], MetadataImage]) -> None:
        self._services = services
        self._config = config
        self._image = image
        self.handlers: dict[int, Handler] = {
            api.LIST_OFFSETS: self._list_offsets,
            api.METADATA: self._metadata,
            api.FIND_COORDINATOR: self._find_coordinator,
            api.API_VERSIONS: self._api_versions,
            api.CREATE_TOPICS: self._create_topics,
            api.DELETE_TOPICS: self._delete_topics,
            api.OFFSET_FOR_LEADER_EPOCH: self._offset_for_leader_epoch,
            api.CREATE_PARTITIONS: self._create_partitions,
            api.DELETE_RECORDS: self._delete_records,
            api.DESCRIBE_CLUSTER: self._describe_cluster,
            **GroupApis(services.groups, config, self.call).handlers,
            **ConsumerGroupApis(services.groups, config, self.call, image).handlers,
        }

    # Calls of the services

    def permit(self, method: str, request: Any, who: Caller) -> None:
        """Check what the method's rule asks for. Raises AuthorizationError."""
        if who.authorizer is not None:
            for either in RULES[f"/raftlog.v1.{method}"](request, self.name_of):
                check(who, either)

    async def call(
        self,
        method: str,
        call: Callable[[Any, Any], Awaitable[T]],
        request: Any,
        who: Caller,
        timeout_ms: int | None = None,
    ) -> T:
        """Return a method's answer.

        Raises:
            RaftlogError: the permission is missing, a bound is exceeded, or the answer has an error.
        """
        self.permit(method, request, who)
        return await self.unchecked(call, request, timeout_ms)

    async def unchecked(
        self, call: Callable[[Any, Any], Awaitable[T]], request: Any, timeout_ms: int | None = None
    ) -> T:
        """Return a method's answer, as `call` does, without its permission: for what is part of another request."""
        context = _Deadline(timeout_ms)
        try:
            answer = await call(request, cast(Context, context))
        finally:
            context.over()
        error = getattr(answer, "error", None)
        if error is not None and error.code:
            raise errors.error_of(error)
        return answer

    def name_of(self, topic_id: bytes) -> str | None:
        """Return a topic's name; None: there is no such topic."""
        topic = self._image().topics.get(topic_id)
        return None if topic is None else topic.name

    def id_of(self, topic: str) -> bytes | None:
        """Return a topic's id; None: there is no such topic."""
        return self._image().topic_id_by_name.get(topic)

    # The cluster

    async def _api_versions(self, request: Fields, version: int, who: Caller) -> Fields:
        return api_versions(errors.NONE)

    async def _metadata(self, request: Fields, version: int, who: Caller) -> Fields:
        image = self._image()
        named = request["topics"]
        if named is None or (version == 0 and not named):
            topics = await self._all_topics(image, who)
        else:
            check_count(len(named), "topics")
            each_once = await once(named, lambda topic: (topic["name"], topic["topic_id"]))
            topics = []
            async for topic in in_turns((self._named_topic(image, each, who) for each in each_once), weight=_parts_in):
                topics.append(topic)
        if request["include_topic_authorized_operations"]:
            async for topic in in_turns(topics):
                if topic["error_code"] not in _WITHOUT_OPERATIONS:
                    topic["topic_authorized_operations"] = authorized_operations(who, Acl.TOPIC, topic["name"])
        allowed: Fields = {}
        if request["include_cluster_authorized_operations"]:
            allowed["cluster_authorized_operations"] = authorized_operations(who, Acl.CLUSTER, CLUSTER_NAME)
        return {
            **allowed,
            "brokers": self._brokers(image, "node_id"),
            "cluster_id": image.cluster_id,
            "controller_id": self._config.node_id,  # any broker takes what a controller is asked
            "topics": topics,
        }

    def _brokers(self, image: MetadataImage, id_name: str) -> list[Fields]:
        return [
            {id_name: each.broker_id, "host": each.kafka_host, "port": each.kafka_port, "rack": each.rack or None}
            for _, each in sorted(image.brokers.items())
            if _reachable(each)
        ]

    async def _all_topics(self, image: MetadataImage, who: Caller) -> list[Fields]:
        describes = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC, log=False)
        return [
            self._topic(image, topic)
            async for topic in in_turns(
                (image.topics[image.topic_id_by_name[name]] for name in sorted(image.topic_id_by_name)),
                weight=lambda topic: len(topic.partitions),
            )
            if describes is None or describes.allow(topic.name)
        ]

    def _named_topic(self, image: MetadataImage, wanted: Fields, who: Caller) -> Fields:
        name, topic_id = wanted["name"], wanted["topic_id"]
        if name is None:
            topic = image.topics.get(topic_id)
            unknown = errors.UNKNOWN_TOPIC_ID
        else:
            topic = image.topic(name)
            unknown = errors.UNKNOWN_TOPIC_OR_PARTITION
        try:
            if (seen := name if name is not None else topic.name if topic is not None else None) is not None:
                who.check(Acl.DESCRIBE, Acl.TOPIC, seen)
        except RaftlogError as error:
            return {"error_code": errors.code_of(error), "name": name, "topic_id": topic_id, "partitions": []}
        if topic is None:
            return {"error_code": unknown, "name": name, "topic_id": topic_id, "partitions": []}
        return self._topic(image, topic)

    def _topic(self, image: MetadataImage, topic: TopicImage) -> Fields:
        return {
            "error_code": errors.NONE,
            "name": topic.name,
            "topic_id": topic.topic_id,
            "is_internal": topic.internal,
            "partitions": [partition_fields(image, each) for each in topic.partitions],
        }

    async def _describe_cluster(self, request: Fields, version: int, who: Caller) -> Fields:
        if request["endpoint_type"] != 1:
            return failed(InvalidRequestError("only brokers can be listed, endpoint type 1"), cluster_id="", brokers=[])
        image = self._image()
        allowed: Fields = {}
        if request["include_cluster_authorized_operations"]:
            allowed["cluster_authorized_operations"] = authorized_operations(who, Acl.CLUSTER, CLUSTER_NAME)
        return {
            **allowed,
            "cluster_id": image.cluster_id,
            "controller_id": self._config.node_id,
            "brokers": self._brokers(image, "broker_id"),
        }

    # Offsets in logs

    async def _list_offsets(self, request: Fields, version: int, who: Caller) -> Fields:
        committed = request["isolation_level"] == 1
        wanted = log_pb2.ListOffsetsRequest(
            isolation_level=common_pb2.READ_COMMITTED if committed else common_pb2.READ_UNCOMMITTED
        )
        rows = await self.rows(request["topics"], "name", "partition_index", who)
        async for topic_id, _, part in in_turns(rows):
            if topic_id is not None:
                wanted.partitions.add(
                    topic_id=topic_id,
                    partition=part["partition_index"],
                    leader_epoch=part["current_leader_epoch"],
                    timestamp_ms=part["timestamp"],
                )
        answered = iter((await self._services.log.list_offsets(wanted)).results)
        async for topic_id, result, _ in in_turns(rows):
            if topic_id is None:
                continue
            found = next(answered)
            result["error_code"] = errors.code_in(found)
            if not result["error_code"]:
                result["timestamp"], result["offset"] = found.timestamp_ms, found.offset
                result["leader_epoch"] = found.leader_epoch if found.offset >= 0 else -1
        return {"topics": await by_topic(request["topics"], (result for _, result, _ in rows))}

    async def _offset_for_leader_epoch(self, request: Fields, version: int, who: Caller) -> Fields:
        wanted = log_pb2.OffsetForLeaderEpochRequest()
        rows = await self.rows(request["topics"], "topic", "partition", who)
        async for topic_id, _, part in in_turns(rows):
            if topic_id is not None:
                wanted.partitions.add(
                    topic_id=topic_id,
                    partition=part["partition"],
                    current_leader_epoch=part["current_leader_epoch"],
                    leader_epoch=part["leader_epoch"],
                )
        answer = await self.call("Log/OffsetForLeaderEpoch", self._services.log.OffsetForLeaderEpoch, wanted, who)
        answered = iter(answer.results)
        async for topic_id, result, _ in in_turns(rows):
            if topic_id is not None:
                found = next(answered)
                result["error_code"] = errors.code_in(found)
                if not result["error_code"]:
                    result["leader_epoch"], result["end_offset"] = found.leader_epoch, found.end_offset
        return {"topics": await by_topic(request["topics"], (result for _, result, _ in rows), "topic")}

    async def _delete_records(self, request: Fields, version: int, who: Caller) -> Fields:
        wanted = log_pb2.DeleteRecordsRequest()
        rows = await self.rows(request["topics"], "name", "partition_index", who)
        async for topic_id, result, part in in_turns(rows):
            result["low_watermark"] = -1
            if topic_id is not None:
                wanted.partitions.add(
                    topic_id=topic_id, partition=part["partition_index"], before_offset=part["offset"]
                )
        answer = await self.call("Log/DeleteRecords", self._services.log.DeleteRecords, wanted, who)
        answered = iter(answer.results)
        async for topic_id, result, _ in in_turns(rows):
            if topic_id is not None:
                found = next(answered)
                result["error_code"] = errors.code_in(found)
                if not result["error_code"]:
                    result["low_watermark"] = found.log_start_offset
        return {"topics": await by_topic(request["topics"], (result for _, result, _ in rows))}

    async def rows(self, topics: Sequence[Fields], name: str, index: str, who: Caller) -> list[Row]:
        """Return (topic id, result, part) of every partition; no id: the result says why there is no more to it.

        There is no such topic, or, as in Kafka, the request has named the partition before.

        Raises:
            InvalidRequestError: the request names too many partitions.
        """
        check_count(sum(len(topic["partitions"]) for topic in topics), "partitions")
        describes = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC)
        seen: set[tuple[str, int]] = set()
        rows: list[Row] = []
        async for topic in in_turns(topics, weight=_parts_in):
            topic_id = self.id_of(topic[name])
            code = errors.NONE
            if topic_id is None:  # no answer may tell a stranger which topics exist
                hidden = describes is not None and not describes.allow(topic[name])
                refused = describes.refusal(topic[name]) if hidden and describes is not None else None
                code = errors.UNKNOWN_TOPIC_OR_PARTITION if refused is None else errors.code_of(refused)
            async for part in in_turns(topic["partitions"]):
                at = topic[name], part[index]
                if at in seen:
                    rows.append((None, {index: part[index], "error_code": errors.INVALID_REQUEST}, part))
                else:
                    rows.append((topic_id, {index: part[index], "error_code": code}, part))
                seen.add(at)
        return rows

    # Topics

    async def _create_topics(self, request: Fields, version: int, who: Caller) -> Fields:
        named = Counter(each["name"] for each in request["topics"])

        async def create(topic: Fields) -> Fields:
            if named[topic["name"]] > 1:
                raise InvalidRequestError(f"topic {topic['name'][:249]!r} is named twice")
            call = admin_pb2.CreateTopicRequest(name=topic["name"], validate_only=request["validate_only"])
            self.permit("Admin/CreateTopic", call, who)  # before work for all that a topic may have
            async for config in in_turns(topic["configs"]):
                call.configs[config["name"]] = config_value(config)
            if topic["assignments"]:
                by_partition = {each["partition_index"]: each["broker_ids"] for each in topic["assignments"]}
                if sorted(by_partition) != list(range(len(topic["assignments"]))):
                    raise InvalidRequestError("the assignments name the partitions from 0 on, each once")
                async for number in in_turns(sorted(by_partition)):
                    call.assignments.append(ReplicaAssignment(replicas=by_partition[number]))
            call.partitions = _number_or_default(topic["num_partitions"], "num_partitions")
            call.replication_factor = _number_or_default(topic["replication_factor"], "replication_factor")
            answer = await self.call(
                "Admin/CreateTopic", self._services.admin.CreateTopic, call, who, request["timeout_ms"]
            )
            made = self._image().topic(topic["name"])
            created: Fields = {"topic_id": answer.topic_id or bytes(16), "configs": []}
            if made is not None and made.topic_id == answer.topic_id:
                created["num_partitions"] = len(made.partitions)
                created["replication_factor"] = len(made.partitions[0].replicas)
            return created

        # One answer for a name, as from Kafka: librdkafka takes a second one for a broken response.
        topics = await once(request["topics"], lambda topic: topic["name"])
        return {"topics": await each_of(topics, create, lambda topic: {"name": topic["name"], "configs": []})}

    async def _delete_topics(self, request: Fields, version: int, who: Caller) -> Fields:
        topics = request["topics"] or [{"name": name, "topic_id": bytes(16)} for name in request["topic_names"]]

        async def delete(topic: Fields) -> Fields:
            name = topic["name"]
            if name is None:
                name = self.name_of(topic["topic_id"])
                if name is None:
                    raise UnknownTopicId(f"there is no topic with the id {topic['topic_id'].hex()}")
                who.check(Acl.DELETE, Acl.TOPIC, name, topic["topic_id"])  # whose refusal may not show the name
            await self.call(
                "Admin/DeleteTopic",
                self._services.admin.DeleteTopic,
                admin_pb2.DeleteTopicRequest(name=name, topic_id=b"" if topic["name"] else topic["topic_id"]),
                who,
                request["timeout_ms"],
            )
            return {"name": name}

        def begin(topic: Fields) -> Fields:
            return {"name": topic["name"], "topic_id": topic["topic_id"]}

        return {"responses": await each_of(topics, delete, begin, by_name=False)}

    async def _create_partitions(self, request: Fields, version: int, who: Caller) -> Fields:
        async def create(topic: Fields) -> Fields:
            if topic["assignments"] is not None:
                raise InvalidRequestError("the cluster places new partitions itself: leave the assignments out")
            present = self._image().topic(topic["name"])
            if request["validate_only"]:
                self.permit("Admin/CreatePartitions", admin_pb2.CreatePartitionsRequest(topic=topic["name"]), who)
                if present is None:
                    raise UnknownTopicOrPartition(f"there is no topic {topic['name'][:249]!r}")
                return {}
            await self.call(
                "Admin/CreatePartitions",
                self._services.admin.CreatePartitions,
                admin_pb2.CreatePartitionsRequest(topic=topic["name"], partitions=max(0, topic["count"])),
                who,
                request["timeout_ms"],
            )
            return {}

        return {"results": await each_of(request["topics"], create, lambda topic: {"name": topic["name"]})}

    # Coordinators and committed offsets

    async def _find_coordinator(self, request: Fields, version: int, who: Caller) -> Fields:
        if version < 4:
            found = await self._coordinator(request["key"], request["key_type"], who)
            del found["key"]
            return found
        keys = request["coordinator_keys"]
        return {
            "coordinators": [
                await self._coordinator(each, request["key_type"], who) async for each in in_turns(await once(keys))
            ]
        }

    async def _coordinator(self, key: str, key_type: int, who: Caller) -> Fields:
        try:
            if key_type == GROUP:
                of_group = group_pb2.FindCoordinatorRequest(group_id=key)
                call = self._services.groups.FindCoordinator
                node_id = (await self.call("Group/FindCoordinator", call, of_group, who)).node_id
            elif key_type == TRANSACTION:
                of_id = transaction_pb2.FindTransactionCoordinatorRequest(id=key)
                find = self._services.transactions.FindCoordinator
                node_id = (await self.call("Transaction/FindCoordinator", find, of_id, who)).node_id
            else:
                raise InvalidRequestError(f"coordinators of type {key_type} do not exist here")
            broker = self._image().brokers.get(node_id)
            if broker is None or not _reachable(broker):
                return _failed_coordinator(key, errors.COORDINATOR_NOT_AVAILABLE, "it has no Kafka listener")
        except RaftlogError as error:
            return _failed_coordinator(key, errors.code_of(error, of_coordinator=True), str(error))
        return {"key": key, "node_id": node_id, "host": broker.kafka_host, "port": broker.kafka_port}


Row = tuple[bytes | None, Fields, Fields]


def _parts_in(topic: Fields) -> int:
    return 1 + len(topic["partitions"])


def api_versions(error_code: int) -> Fields:
    """Return the versions that this broker offers."""
    return {
        "error_code": error_code,
        "api_keys": [
            {
                "api_key": key,
                "min_version": api.ADVERTISED_FROM.get(key, message.first),
                "max_version": message.last,
            }
            for key, message in sorted(api.REQUESTS.items())
        ],
        "supported_features": [{"name": name, "min_version": 0, "max_version": level} for name, level in FEATURES],
        "finalized_features_epoch": 0,
        "finalized_features": [
            {"name": name, "max_version_level": level, "min_version_level": level} for name, level in FEATURES
        ],
    }


def _reachable(broker: BrokerImage) -> bool:
    """Whether Kafka clients can be sent to this broker."""
    return bool(broker.kafka_host) and not broker.fenced


def partition_fields(image: MetadataImage, partition: PartitionImage) -> Fields:
    """Return a partition as responses about topics have it."""
    leader = image.brokers.get(partition.leader)
    code = errors.NONE
    if leader is None or leader.fenced:
        code = errors.LEADER_NOT_AVAILABLE
    elif not leader.kafka_host:
        code = errors.LISTENER_NOT_FOUND
    return {
        "error_code": code,
        "partition_index": partition.partition,
        "leader_id": partition.leader if code == errors.NONE else NOBODY,
        "leader_epoch": partition.leader_epoch,
        "replica_nodes": partition.replicas,
        "isr_nodes": partition.isr,
        "offline_replicas": [each for each in partition.replicas if _is_offline(image, partition, each)],
    }


def _is_offline(image: MetadataImage, partition: PartitionImage, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is None or broker.fenced or image.is_offline(partition, broker_id)


async def each_of(
    things: Iterable[T],
    work: Callable[[T], Awaitable[Fields]],
    begin: Callable[[T], Fields] = lambda _: {},
    *,
    by_name: bool = True,
) -> list[Fields]:
    """Return a result for each thing, one after the other: what `begin` returns, with `work`'s fields or its error."""
    results = []
    async for each in in_turns(things, at_a_time=1):
        result = begin(each)
        try:
            result.update(error_code=errors.NONE, **await work(each))
        except RaftlogError as error:
            result.update(failed(error, by_name=by_name))
        results.append(result)
    return results


def failed(error: RaftlogError, *, by_name: bool = True, **fields: Any) -> Fields:
    """Return an error's code and message, and further fields."""
    code = errors.code_of(error, by_name=by_name)
    return {"error_code": code, "error_message": str(error)[:MAX_MESSAGE], **fields}


def _failed_coordinator(key: str, code: int, why: str) -> Fields:
    message = why[:MAX_MESSAGE]
    return {"key": key, "error_code": code, "error_message": message, "node_id": NOBODY, "host": "", "port": -1}


def config_value(config: Fields) -> str:
    """Return the value that a request gives a config. Raises InvalidRequestError: none."""
    if config["value"] is None:
        raise InvalidRequestError(f"config {config['name'][:249]!r} has no value: leave it out for the default")
    return str(config["value"])


def _number_or_default(number: int, what: str) -> int:
    """Return what `CreateTopic` takes: 0 for the default. Raises InvalidRequestError."""
    if number == DEFAULT:
        return 0
    if number <= 0:
        raise InvalidRequestError(f"{what} {number}: at least 1, or -1 for the broker's default")
    return number
