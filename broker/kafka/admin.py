"""Configs, elections, reassignments, log directories and the quorum: what Kafka's tools for operators ask for.

As in `apis.py`, each request becomes calls of the `Admin` service's methods, with their permissions.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from broker.config.config import BROKER_CONFIGS, BrokerConfig
from broker.kafka import errors
from broker.kafka import messages as api
from broker.kafka.apis import Apis, Handler, Services, config_value, each_of, failed, partition_fields
from broker.kafka.codec import Fields
from broker.kafka.parts import by_topic, check_count, once, parts_of
from broker.net.services.admin import MAX_REASSIGNMENTS
from broker.security.caller import Caller, Decisions
from broker.turns import in_turns
from raftlog._core.words import shown
from raftlog.config import ConfigKey
from raftlog.errors import (
    InvalidConfig,
    InvalidReplicationFactor,
    InvalidRequestError,
    RaftlogError,
    UnknownTopicOrPartition,
)
from raftlog.v1 import admin_pb2
from raftlog.v1.records_pb2 import ConfigResource
from raftlog.v1.security_pb2 import Acl
from raftmeta.image import CLUSTER_DEFAULT, NO_LEADER, MetadataImage, PartitionImage, TopicImage
from raftmeta.topic_configs import BROKER_KEY_BY_TOPIC_KEY, TOPIC_CONFIGS

SET, DELETE, APPEND, SUBTRACT = range(4)
"""What IncrementalAlterConfigs may do with a config."""
PREFERRED, UNCLEAN = 0, 1
"""Types of elections."""
MAX_ELECTIONS: Final = 16
"""Elections of one request that are under way at once."""
MAX_PARTITIONS: Final = 2_000
"""In a response of DescribeTopicPartitions."""
METADATA_TOPIC: Final = "__cluster_metadata"
OF_TOPIC, OF_BROKER, OF_ALL_BROKERS, IN_FILE, AS_DEFAULT, OF_LOGGER = 1, 2, 3, 4, 5, 6
"""Kafka's numbers for where a value comes from."""
_SOURCES: Final[dict[int, int]] = {
    admin_pb2.ConfigEntry.DYNAMIC_TOPIC: OF_TOPIC,
    admin_pb2.ConfigEntry.DYNAMIC_BROKER: OF_BROKER,
    admin_pb2.ConfigEntry.STATIC_BROKER: IN_FILE,
    admin_pb2.ConfigEntry.DEFAULT: AS_DEFAULT,
    admin_pb2.ConfigEntry.DYNAMIC_BROKER_LOGGER: OF_LOGGER,
}
_RESOURCES: Final = {2: ConfigResource.TOPIC, 4: ConfigResource.BROKER, 8: ConfigResource.BROKER_LOGGER}
"""Kafka's types of resources that have configs."""
_TYPES: Final = {"bool": 1, "string": 2, "int": 5, "ms": 5, "bytes": 5, "float": 6, "list": 7}
"""Kafka's numbers for the types of values."""
_UNKNOWN_TYPE: Final = 0
_TOPIC_KEYS: Final[Mapping[str, ConfigKey]] = {each.name: each for each in TOPIC_CONFIGS}
_BROKER_KEYS: Final[Mapping[str, ConfigKey]] = {each.name: each for each in BROKER_CONFIGS}
_KEYS: Final = {ConfigResource.TOPIC: _TOPIC_KEYS, ConfigResource.BROKER: _BROKER_KEYS}
"""The configs that there are, by type of resource; any logger may be configured."""


class AdminApis:
    """The APIs of one broker; `handlers` has them by API key."""

    def __init__(
        self, apis: Apis, services: Services, config: BrokerConfig, image: Callable[[], MetadataImage]
    ) -> None:
        self._apis = apis
        self._admin = services.admin
        self._config = config
        self._image = image
        self.handlers: dict[int, Handler] = {
            api.DESCRIBE_CONFIGS: self._describe_configs,
            api.ALTER_CONFIGS: self._alter_configs,
            api.INCREMENTAL_ALTER_CONFIGS: self._incremental_alter_configs,
            api.DESCRIBE_LOG_DIRS: self._describe_log_dirs,
            api.ELECT_LEADERS: self._elect_leaders,
            api.ALTER_PARTITION_REASSIGNMENTS: self._alter_reassignments,
            api.LIST_PARTITION_REASSIGNMENTS: self._list_reassignments,
            api.DESCRIBE_QUORUM: self._describe_quorum,
            api.DESCRIBE_TOPIC_PARTITIONS: self._describe_topic_partitions,
        }

    # Configs

    async def _described(self, resource: ConfigResource, who: Caller) -> Iterable[admin_pb2.ConfigEntry]:
        call = admin_pb2.DescribeConfigsRequest(resource=resource)
        answer = await self._apis.call("Admin/DescribeConfigs", self._admin.DescribeConfigs, call, who)
        return answer.entries

    async def _describe_configs(self, request: Fields, version: int, who: Caller) -> Fields:
        async def describe(named: Fields) -> Fields:
            resource = _resource(named)
            wanted = None if named["configuration_keys"] is None else {*named["configuration_keys"]}
            keys = _TOPIC_KEYS if resource.type == ConfigResource.TOPIC else _BROKER_KEYS
            found = []
            for each in await self._described(resource, who):
                if wanted is not None and each.key not in wanted:
                    continue
                key = keys.get(each.key)
                found.append(
                    {
                        "name": each.key,
                        "value": each.value,
                        "read_only": each.read_only,
                        "config_source": _SOURCES[each.source],
                        "is_sensitive": key is not None and key.secret,
                        "synonyms": list(self._synonyms(resource, each)) if request["include_synonyms"] else [],
                        "config_type": _UNKNOWN_TYPE if key is None else _TYPES[key.kind],
                        "documentation": each.documentation if request["include_documentation"] else None,
                    }
                )
            return {"configs": found}

        resources = await once(request["resources"], lambda each: (each["resource_type"], each["resource_name"]))
        return {"results": await each_of(resources, describe, _named_resource)}

    def _synonyms(self, resource: ConfigResource, entry: admin_pb2.ConfigEntry) -> Iterator[Fields]:
        """Yield the values that there are for a key: the one in force, then those that it hides."""
        image, config = self._image(), self._config
        if resource.type == ConfigResource.BROKER_LOGGER:
            return
        broker_key: str | None = entry.key
        if resource.type == ConfigResource.TOPIC:
            own = image.resource_configs(ConfigResource.TOPIC, resource.name)
            if entry.key in own:
                yield _synonym(entry.key, own[entry.key], OF_TOPIC)
            broker_key = BROKER_KEY_BY_TOPIC_KEY.get(entry.key)
        if broker_key is not None:
            if resource.name != CLUSTER_DEFAULT or resource.type == ConfigResource.TOPIC:
                dynamic = image.resource_configs(ConfigResource.BROKER, str(config.node_id))
                if broker_key in dynamic:
                    yield _synonym(broker_key, dynamic[broker_key], OF_BROKER)
            dynamic = image.resource_configs(ConfigResource.BROKER, CLUSTER_DEFAULT)
            if broker_key in dynamic:
                yield _synonym(broker_key, dynamic[broker_key], OF_ALL_BROKERS)
            key = _BROKER_KEYS.get(broker_key)
            if key is not None:
                if broker_key in config.static_keys:
                    yield _synonym(broker_key, key.format(config.values[broker_key]), IN_FILE)
                yield _synonym(broker_key, key.format(key.default), AS_DEFAULT)
        else:
            yield _synonym(entry.key, _TOPIC_KEYS[entry.key].format(_TOPIC_KEYS[entry.key].default), AS_DEFAULT)

    async def _incremental_alter_configs(self, request: Fields, version: int, who: Caller) -> Fields:
        async def alter(named: Fields) -> Fields:
            resource = _resource(named)
            call = admin_pb2.AlterConfigsRequest(resource=resource, validate_only=request["validate_only"])
            self._apis.permit("Admin/AlterConfigs", call, who)
            present: dict[str, str] | None = None
            keys = _KEYS.get(resource.type)
            seen: set[str] = set()
            async for each in in_turns(named["configs"]):
                operation = each["config_operation"]
                if operation == DELETE and keys is not None and each["name"] not in keys:
                    continue  # Kafka's tools, and MirrorMaker 2, delete configs of Kafka whether they are set or not
                if each["name"] in seen:
                    raise InvalidRequestError(f"config {each['name'][:249]!r} is named twice")
                seen.add(each["name"])
                if operation == DELETE:
                    call.unset.append(each["name"])
                    continue
                value = config_value(each)
                if operation in (APPEND, SUBTRACT):
                    if present is None:
                        present = await self._present(resource, who)
                    value = _changed_list(resource, each["name"], present, value, append=operation == APPEND)
                elif operation != SET:
                    raise InvalidRequestError(f"config {each['name'][:249]!r}: there is no operation {operation}")
                call.set[each["name"]] = value
            await self._apis.call("Admin/AlterConfigs", self._admin.AlterConfigs, call, who)
            return {}

        return {"responses": await each_of(request["resources"], alter, _named_resource)}

    async def _alter_configs(self, request: Fields, version: int, who: Caller) -> Fields:
        """Replace all configs of a resource: those that are not named go back to their defaults."""

        async def alter(named: Fields) -> Fields:
            resource = _resource(named)
            call = admin_pb2.AlterConfigsRequest(resource=resource, validate_only=request["validate_only"])
            self._apis.permit("Admin/AlterConfigs", call, who)
            async for each in in_turns(named["configs"]):
                call.set[each["name"]] = config_value(each)
            await self._heard()
            own = self._image().resource_configs(resource.type, resource.name)
            call.unset.extend(sorted(key for key in own if key not in call.set))
            await self._apis.call("Admin/AlterConfigs", self._admin.AlterConfigs, call, who)
            return {}

        return {"responses": await each_of(request["resources"], alter, _named_resource)}

    async def _present(self, resource: ConfigResource, who: Caller) -> dict[str, str]:
        """Return the values in force; a change of them needs no permission to see them."""
        await self._heard()
        answer = await self._apis.unchecked(
            self._admin.DescribeConfigs, admin_pb2.DescribeConfigsRequest(resource=resource)
        )
        return {each.key: each.value for each in answer.entries}

    async def _heard(self) -> None:
        """Return once this broker knows every change that was acknowledged before: another broker may have taken it."""
        await self._apis.unchecked(self._admin.DescribeCluster, admin_pb2.DescribeClusterRequest(linearizable=True))

    # Replicas

    async def _describe_log_dirs(self, request: Fields, version: int, who: Caller) -> Fields:
        wanted: dict[str, set[int]] | None = None
        if request["topics"] is not None:
            wanted = {each["topic"]: set(each["partitions"]) for each in request["topics"]}
        try:
            answer = await self._apis.call(
                "Admin/DescribeLogDirs", self._admin.DescribeLogDirs, admin_pb2.DescribeLogDirsRequest(), who
            )
        except RaftlogError as error:
            return {"error_code": errors.code_of(error), "results": []}
        results = []
        for found in answer.log_dirs:
            grouped: dict[str, list[Fields]] = {}
            async for each in in_turns(found.partitions):
                if wanted is None or each.partition in wanted.get(each.topic, ()):
                    grouped.setdefault(each.topic, []).append(
                        {
                            "partition_index": each.partition,
                            "partition_size": each.size_bytes,
                            "offset_lag": max(0, each.high_watermark - each.log_end_offset),
                        }
                    )
            results.append(
                {
                    "error_code": errors.code_in(found),
                    "log_dir": found.path,
                    "topics": [{"name": name, "partitions": parts} for name, parts in grouped.items()],
                    "total_bytes": found.total_bytes,
                    "usable_bytes": found.usable_bytes,
                }
            )
        return {"results": results}

    async def _elect_leaders(self, request: Fields, version: int, who: Caller) -> Fields:
        unclean = request["election_type"] == UNCLEAN
        named = request["topic_partitions"]
        if request["election_type"] not in (PREFERRED, UNCLEAN):
            return {"error_code": errors.INVALID_REQUEST, "replica_election_results": []}
        try:
            self._apis.permit("Admin/ElectLeaders", admin_pb2.ElectLeadersRequest(), who)
        except RaftlogError as error:
            return {"error_code": errors.code_of(error), "replica_election_results": []}
        if named is None:  # those that need one
            topics = (self._image().topics[each] for each in self._image().topic_id_by_name.values())
            rows = [
                (topic.name, each.partition)
                for topic in topics
                for each in topic.partitions
                if (each.leader == NO_LEADER if unclean else each.leader != each.replicas[0])
            ]
        else:
            rows = [(topic["topic"], number) for topic in named for number in topic["partitions"]]

        async def elect(topic: str, partition: int) -> Fields:
            call = admin_pb2.ElectLeadersRequest(topic=topic, partitions=[partition], unclean=unclean)
            try:
                if partition < 0:
                    raise UnknownTopicOrPartition(f"topic {topic[:249]!r} has no partition {partition}")
                await self._apis.call("Admin/ElectLeaders", self._admin.ElectLeaders, call, who, request["timeout_ms"])
            except RaftlogError as error:
                return {"partition_id": partition, **failed(error)}
            return {"partition_id": partition, "error_code": errors.NONE, "error_message": None}

        grouped: dict[str, list[Fields]] = {}
        for first in range(0, len(rows), MAX_ELECTIONS):  # a request may name very many
            some = rows[first : first + MAX_ELECTIONS]
            for (topic, _), result in zip(some, await asyncio.gather(*(elect(*row) for row in some)), strict=True):
                grouped.setdefault(topic, []).append(result)
        return {
            "replica_election_results": [
                {"topic": topic, "partition_result": results} for topic, results in grouped.items()
            ]
        }

    async def _alter_reassignments(self, request: Fields, version: int, who: Caller) -> Fields:
        rows: list[tuple[str, Fields, Fields]] = [
            (topic["name"], part, {"partition_index": part["partition_index"], "error_code": errors.NONE})
            async for topic, part in in_turns(parts_of(request["topics"]))
        ]
        asked = []
        async for name, part, result in in_turns(rows):
            try:
                self._check_factor(name, part, keep=not request["allow_replication_factor_change"])
            except RaftlogError as error:
                result.update(failed(error))
            else:
                asked.append((name, part, result))
        whole: Fields = {"error_code": errors.NONE, "error_message": None}
        for first in range(0, len(asked), MAX_REASSIGNMENTS):
            some = asked[first : first + MAX_REASSIGNMENTS]
            call = admin_pb2.AdminAlterReassignmentsRequest()
            for name, part, _ in some:
                call.reassignments.add(topic=name, partition=part["partition_index"], replicas=part["replicas"] or ())
            try:
                answer = await self._apis.call(
                    "Admin/AlterReassignments", self._admin.AlterReassignments, call, who, request["timeout_ms"]
                )
            except RaftlogError as error:
                whole = failed(error)
                async for _, _, result in in_turns(asked[first:]):
                    result.update(whole)
                break
            for (_, _, result), found in zip(some, answer.results, strict=True):
                if found.HasField("error"):
                    result.update(failed(errors.error_of(found.error)))
        return {
            **whole,
            "allow_replication_factor_change": request["allow_replication_factor_change"],
            "responses": await by_topic(request["topics"], (result for _, _, result in rows)),
        }

    def _check_factor(self, topic: str, part: Fields, *, keep: bool) -> None:
        replicas = part["replicas"]
        if replicas is None:
            return
        if not replicas:
            raise InvalidRequestError("a partition has at least one replica; leave the replicas out to cancel")
        found = self._image().topic(topic)
        number = part["partition_index"]
        if not keep or found is None or not 0 <= number < len(found.partitions):
            return
        present = found.partitions[number]
        factor = len(present.replicas) - len(present.removing_replicas)
        if present.adding_replicas and len(present.adding_replicas) == len(present.removing_replicas):
            factor = len(present.replicas) - len(present.adding_replicas)
        if len(replicas) != factor:
            raise InvalidReplicationFactor(f"{topic[:249]}-{number} has {factor} replicas, {len(replicas)} are named")

    async def _list_reassignments(self, request: Fields, version: int, who: Caller) -> Fields:
        try:
            self._apis.permit("Admin/DescribeReplicas", admin_pb2.DescribeReplicasRequest(), who)
        except RaftlogError as error:
            return {**failed(error), "topics": []}
        image = self._image()
        wanted: dict[str, set[int]] | None = None
        if request["topics"] is not None:
            wanted = {each["name"]: set(each["partition_indexes"]) for each in request["topics"]}
        topics = []
        async for name, topic_id in in_turns(sorted(image.topic_id_by_name.items())):
            if wanted is not None and name not in wanted:
                continue
            moving = [
                {
                    "partition_index": each.partition,
                    "replicas": each.replicas,
                    "adding_replicas": each.adding_replicas,
                    "removing_replicas": each.removing_replicas,
                }
                for each in image.topics[topic_id].partitions
                if (each.adding_replicas or each.removing_replicas)
                and (wanted is None or each.partition in wanted[name])
            ]
            if moving:
                topics.append({"name": name, "partitions": moving})
        return {"error_message": None, "topics": topics}

    # The cluster

    async def _describe_quorum(self, request: Fields, version: int, who: Caller) -> Fields:
        try:
            answer = await self._apis.call(
                "Admin/DescribeQuorum", self._admin.DescribeQuorum, admin_pb2.AdminDescribeQuorumRequest(), who
            )
        except RaftlogError as error:
            return {**failed(error), "topics": [], "nodes": []}
        quorum, now_ms = answer.quorum, int(time.time() * 1_000)

        def progress(node_id: int, end_index: int, lag: int, contact_ms: int) -> Fields:
            seen_ms = now_ms - contact_ms if contact_ms >= 0 else -1
            end_offset = end_index + 1 if end_index >= 0 else -1
            return {
                "replica_id": node_id,
                "replica_directory_id": bytes(16),
                "log_end_offset": end_offset,
                "last_fetch_timestamp": seen_ms,
                "last_caught_up_timestamp": seen_ms if lag == 0 else -1,
            }

        def described(topic: str, partition: int) -> Fields:
            if topic != METADATA_TOPIC or partition != 0:
                return {
                    "partition_index": partition,
                    "error_code": errors.UNKNOWN_TOPIC_OR_PARTITION,
                    "error_message": None,
                    "leader_id": -1,
                    "current_voters": [],
                    "observers": [],
                }
            return {
                "partition_index": partition,
                "error_code": errors.NONE,
                "error_message": None,
                "leader_id": quorum.leader_id,
                "leader_epoch": quorum.leader_epoch,
                "high_watermark": quorum.commit_index + 1,
                "current_voters": [
                    progress(each.node_id, each.log_end_index, each.lag, each.last_contact_ms) for each in quorum.voters
                ],
                "observers": [
                    progress(each.broker_id, each.applied_offset, each.lag, each.last_heartbeat_ms)
                    for each in quorum.observers
                ],
            }

        return {
            "error_message": None,
            "topics": [
                {
                    "topic_name": topic["topic_name"],
                    "partitions": [
                        described(topic["topic_name"], each["partition_index"])
                        async for each in in_turns(
                            await once(topic["partitions"], lambda part: int(part["partition_index"]))
                        )
                    ],
                }
                async for topic in in_turns(await once(request["topics"], lambda topic: topic["topic_name"]))
            ],
            "nodes": [
                {
                    "node_id": each.node_id,
                    "listeners": [{"name": "CONTROLLER", "host": each.host, "port": each.port}],
                }
                for each in quorum.voters
            ],
        }

    async def _describe_topic_partitions(self, request: Fields, version: int, who: Caller) -> Fields:
        check_count(len(request["topics"]), "topics")
        image, cursor = self._image(), request["cursor"]
        room = max(1, min(request["response_partition_limit"], MAX_PARTITIONS))
        describes = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC, log=bool(request["topics"]))
        names = sorted({each["name"] for each in request["topics"]} or image.topic_id_by_name)
        topics: list[Fields] = []
        if cursor is not None:
            names = names[bisect_left(names, cursor["topic_name"]) :]
        async for name in in_turns(names):
            topic = image.topic(name)
            if describes is not None and not describes.allow(name):
                if request["topics"]:
                    topics.append(_absent(name, errors.code_of(describes.refusal(name))))
                continue
            if topic is None:
                topics.append(_absent(name, errors.UNKNOWN_TOPIC_OR_PARTITION))
                continue
            first = max(0, cursor["partition_index"]) if cursor is not None and name == cursor["topic_name"] else 0
            if not room:
                return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": first}}
            parts = topic.partitions[first : first + room]
            topics.append(_topic(image, topic, parts))
            room -= len(parts)
            if first + len(parts) < len(topic.partitions):
                following = {"topic_name": name, "partition_index": first + len(parts)}
                return {"topics": topics, "next_cursor": following}
        return {"topics": topics, "next_cursor": None}


def _topic(image: MetadataImage, topic: TopicImage, partitions: Iterable[PartitionImage]) -> Fields:
    return {
        "error_code": errors.NONE,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": topic.internal,
        "partitions": [
            {
                **partition_fields(image, each),
                "eligible_leader_replicas": each.eligible_leader_replicas,
                "last_known_elr": (),  # Java's client cannot read null
            }
            for each in partitions
        ],
    }


def _absent(name: str, code: int) -> Fields:
    return {"error_code": code, "name": name, "topic_id": bytes(16), "partitions": []}


def _synonym(name: str, value: str, source: int) -> Fields:
    return {"name": name, "value": shown(name, value), "source": source}


def _changed_list(resource: ConfigResource, name: str, present: Mapping[str, str], value: str, *, append: bool) -> str:
    """Return a list with values added, or removed. Raises InvalidConfig: it is no list."""
    key = (_TOPIC_KEYS if resource.type == ConfigResource.TOPIC else _BROKER_KEYS).get(name)
    if key is None or key.kind != "list":
        raise InvalidConfig(f"config {name[:249]!r} is no list: values can be set and deleted only")
    members = [each for each in present.get(name, "").split(",") if each]
    changed = [each.strip() for each in value.split(",") if each.strip()]
    if append:
        return ",".join([*members, *(each for each in changed if each not in members)])
    return ",".join(each for each in members if each not in changed)


def _resource(resource: Fields) -> ConfigResource:
    kind = _RESOURCES.get(resource["resource_type"])
    if kind is None:
        raise InvalidRequestError(f"resources of type {resource['resource_type']} have no configs here")
    return ConfigResource(type=kind, name=resource["resource_name"])


def _named_resource(resource: Fields) -> Fields:
    return {"resource_type": resource["resource_type"], "resource_name": resource["resource_name"], "configs": []}
