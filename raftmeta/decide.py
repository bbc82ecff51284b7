"""What a command does to the cluster: pure, so that every controller decides the same.

A command carries everything that is not in the image: the proposer's clock, chosen ids and the controller epoch in
which the proposer believed itself controller. Deciding changes nothing; `raftmeta.replay` applies the records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from raftlog.config import ConfigDef
from raftlog.errors import (
    InvalidConfig,
    InvalidPartitions,
    InvalidRequestError,
    InvalidTopic,
    NotController,
    RaftlogError,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, MetadataCommand, MetadataRecord
from raftmeta.image import (
    CLUSTER_DEFAULT,
    NO_LEADER,
    BrokerImage,
    MetadataImage,
    PartitionImage,
    ResourceKey,
    TopicImage,
    broker_record,
    config_record,
    partition_record,
)
from raftmeta.placement import place_partitions
from raftmeta.topic_configs import DYNAMIC_BROKER_CONFIGS, TOPIC_CONFIGS

MAX_TOPIC_NAME_CHARACTERS = 249
MAX_PARTITIONS_PER_TOPIC = 10_000
FIRST_LEADER_EPOCH = 0
# A partition's directory is called <topic>-<partition>, and a file name has at most 255 bytes.
assert MAX_TOPIC_NAME_CHARACTERS + len(f"-{MAX_PARTITIONS_PER_TOPIC - 1}") <= 255

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)
_UUID_BYTES = 16


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What the proposer learns. `offset`: the metadata offset at which the command is in effect.

    A command that had nothing to change (validate_only, a repeated registration) is in effect already.
    """

    offset: int
    topic_id: bytes = b""
    broker_epoch: int = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """Records to commit at the image's next offset, and the answer; a refusal has no records."""

    records: tuple[MetadataRecord, ...]
    outcome: CommandResult | RaftlogError


def decide(image: MetadataImage, command: MetadataCommand) -> Decision:
    """Decide on a command that would be committed at `image.offset + 1`; never raises for what a command says."""
    try:
        records, result = _decide(image, command)
    except RaftlogError as error:
        return Decision((), error)
    return Decision(records, result)


_Accepted = tuple[tuple[MetadataRecord, ...], CommandResult]


def _decide(image: MetadataImage, command: MetadataCommand) -> _Accepted:
    kind = command.WhichOneof("command")
    if kind != "claim_controller" and command.controller_epoch != image.controller_epoch:
        raise NotController(
            f"controller epoch {command.controller_epoch} is not the cluster's, which is {image.controller_epoch} "
            f"of controller {image.controller_id}; send the request to the active controller"
        )
    match kind:
        case "claim_controller":
            return _claim_controller(image, command.claim_controller, command.controller_epoch)
        case "register_broker":
            return _register_broker(image, command.register_broker)
        case "create_topic":
            return _create_topic(image, command.create_topic)
        case "delete_topic":
            return _delete_topic(image, command.delete_topic)
        case "create_partitions":
            return _create_partitions(image, command.create_partitions)
        case "alter_configs":
            return _alter_configs(image, command.alter_configs)
        case None:
            raise InvalidRequestError("the command is empty, or of a kind that this version does not know")
        case _:
            assert_never(kind)


def _claim_controller(
    image: MetadataImage, command: records_pb2.ClaimControllerCommand, controller_epoch: int
) -> _Accepted:
    if controller_epoch <= image.controller_epoch:
        raise NotController(
            f"controller epoch {controller_epoch} cannot be claimed, "
            f"controller {image.controller_id} already has {image.controller_epoch}"
        )
    records = []
    if not image.cluster_id:
        if not command.cluster_id:
            raise InvalidRequestError("the first claim names the cluster: cluster_id is empty")
        records.append(MetadataRecord(cluster=records_pb2.ClusterRecord(cluster_id=command.cluster_id)))
    elif command.cluster_id not in ("", image.cluster_id):
        raise InvalidConfig(
            f"cluster.id={command.cluster_id!r}, but this metadata belongs to the cluster {image.cluster_id!r}; "
            "correct cluster.id or metadata.log.dir"
        )
    records.append(
        MetadataRecord(
            controller=records_pb2.ControllerRecord(
                controller_id=command.controller_id, controller_epoch=controller_epoch
            )
        )
    )
    return tuple(records), CommandResult(image.offset + 1)


def _register_broker(image: MetadataImage, command: records_pb2.RegisterBrokerCommand) -> _Accepted:
    if command.broker_id < 0:
        raise InvalidRequestError(f"broker id {command.broker_id} is negative")
    if len(command.incarnation_id) != _UUID_BYTES:
        raise InvalidRequestError(f"an incarnation id has 16 bytes, this one has {len(command.incarnation_id)}")
    if not command.host or not 1 <= command.port <= 65535:
        raise InvalidRequestError(f"broker {command.broker_id}: {command.host!r}:{command.port} is no address")
    known = image.brokers.get(command.broker_id)
    same_incarnation = known is not None and known.incarnation_id == command.incarnation_id
    broker = BrokerImage(
        broker_id=command.broker_id,
        incarnation_id=command.incarnation_id,
        broker_epoch=known.broker_epoch if known is not None and same_incarnation else image.offset + 1,
        host=command.host,
        port=command.port,
        rack=command.rack,
    )
    if broker == known:
        return (), CommandResult(image.offset, broker_epoch=broker.broker_epoch)
    records = [broker_record(broker)]
    if not same_incarnation:
        records += _new_epochs(image, broker.broker_id)
    return tuple(records), CommandResult(image.offset + 1, broker_epoch=broker.broker_epoch)


def _new_epochs(image: MetadataImage, broker_id: int) -> Iterator[MetadataRecord]:
    """Yield a new leader epoch for each partition that a restarted broker leads, or leads again.

    The process before may have written a tail that it lost; what is written from now on has another epoch, so the
    two can never be taken for one another.
    """
    for topic_id in sorted(image.topics):
        for partition in image.topics[topic_id].partitions:
            leaderless = partition.leader == NO_LEADER and broker_id in partition.isr
            if partition.leader == broker_id or leaderless:
                yield partition_record(
                    topic_id,
                    replace(
                        partition,
                        leader=broker_id,
                        leader_epoch=partition.leader_epoch + 1,
                        partition_epoch=partition.partition_epoch + 1,
                    ),
                )


def _create_topic(image: MetadataImage, command: records_pb2.CreateTopicCommand) -> _Accepted:
    check_topic_name(command.name)
    if command.name in image.topic_id_by_name:
        raise TopicAlreadyExists(f"topic {command.name!r} is there already")
    _check_collision(image, command.name)
    if len(command.topic_id) != _UUID_BYTES or command.topic_id in image.topics:
        raise InvalidRequestError(f"topic id {command.topic_id.hex()!r} is not 16 bytes, or in use")
    if not 1 <= command.partitions <= MAX_PARTITIONS_PER_TOPIC:
        raise InvalidPartitions(
            f"topic {command.name!r} cannot have {command.partitions} partitions, "
            f"ask for 1 to {MAX_PARTITIONS_PER_TOPIC}"
        )
    configs = TOPIC_CONFIGS.canonical(command.configs)
    placements = place_partitions(image, command.partitions, command.replication_factor)
    if command.validate_only:
        return (), CommandResult(image.offset, topic_id=command.topic_id)
    resource = ResourceKey(ConfigResource.TOPIC, command.name)
    records = [
        MetadataRecord(topic=records_pb2.TopicRecord(topic_id=command.topic_id, name=command.name)),
        *(config_record(resource, key, value) for key, value in configs.items()),
        *_new_partitions(command.topic_id, 0, placements),
    ]
    return tuple(records), CommandResult(image.offset + 1, topic_id=command.topic_id)


def _new_partitions(topic_id: bytes, first: int, placements: Iterator[tuple[int, ...]]) -> Iterator[MetadataRecord]:
    for partition, replicas in enumerate(placements, first):
        yield partition_record(
            topic_id,
            PartitionImage(
                partition=partition,
                replicas=replicas,
                isr=replicas,
                leader=replicas[0],
                leader_epoch=FIRST_LEADER_EPOCH,
                partition_epoch=0,
            ),
        )


def check_topic_name(name: str) -> None:
    """Check a topic name by Kafka's rules.

    Raises:
        InvalidTopic: empty, longer than 249 characters, `.` or `..`, or with other characters than a-z A-Z 0-9 . _ -
    """
    if not 1 <= len(name) <= MAX_TOPIC_NAME_CHARACTERS:
        raise InvalidTopic(
            f"topic name {name[:80]!r} has {len(name)} characters, it may have 1 to {MAX_TOPIC_NAME_CHARACTERS}"
        )
    if name in (".", ".."):
        raise InvalidTopic(f"a topic cannot be named {name!r}")
    if _TOPIC_NAME.fullmatch(name) is None:
        raise InvalidTopic(f"topic name {name!r} has characters other than a-z A-Z 0-9 . _ -")


def _check_collision(image: MetadataImage, name: str) -> None:
    """Refuse names that differ from another one only in `.` and `_`: in metric names both become `_`."""
    if "." not in name and "_" not in name:
        return
    flat = name.replace(".", "_")
    for other in image.topic_id_by_name:
        if len(other) == len(name) and other.replace(".", "_") == flat:
            raise InvalidTopic(
                f"topic name {name!r} collides with the topic {other!r}: "
                "'.' and '_' become the same in metric names; choose another name"
            )


def _find_topic(image: MetadataImage, name: str, topic_id: bytes = b"") -> TopicImage:
    if topic_id:
        found = image.topics.get(topic_id)
        if found is None:
            raise UnknownTopicId(f"there is no topic with the id {topic_id.hex()}")
        if name and name != found.name:
            raise InvalidRequestError(f"topic id {topic_id.hex()} is {found.name!r}, not {name!r}")
        return found
    topic = image.topic(name)
    if topic is None:
        raise UnknownTopicOrPartition(f"there is no topic {name!r}")
    return topic


def _delete_topic(image: MetadataImage, command: records_pb2.DeleteTopicCommand) -> _Accepted:
    topic = _find_topic(image, command.name, command.topic_id)
    record = MetadataRecord(remove_topic=records_pb2.RemoveTopicRecord(topic_id=topic.topic_id))
    return (record,), CommandResult(image.offset + 1, topic_id=topic.topic_id)


def _create_partitions(image: MetadataImage, command: records_pb2.CreatePartitionsCommand) -> _Accepted:
    topic = _find_topic(image, command.topic)
    present = len(topic.partitions)
    if not present < command.partitions <= MAX_PARTITIONS_PER_TOPIC:
        raise InvalidPartitions(
            f"topic {topic.name!r} has {present} partitions and cannot get {command.partitions}: "
            f"the number only rises, to at most {MAX_PARTITIONS_PER_TOPIC}"
        )
    replication_factor = len(topic.partitions[0].replicas)
    placements = place_partitions(image, command.partitions - present, replication_factor)
    records = tuple(_new_partitions(topic.topic_id, present, placements))
    return records, CommandResult(image.offset + 1, topic_id=topic.topic_id)


def _alter_configs(image: MetadataImage, command: records_pb2.AlterConfigsCommand) -> _Accepted:
    table = _config_table(image, command.resource)
    values = table.canonical(command.set)
    unset = {table.key(name).name for name in command.unset}
    both = sorted(unset & values.keys())
    if both:
        raise InvalidConfig(f"{table.what} {both[0]} is both set and unset in one request")
    resource = ResourceKey(command.resource.type, command.resource.name)
    present: Mapping[str, str] = image.configs.get(resource, {})
    records = [config_record(resource, key, value) for key, value in values.items() if present.get(key) != value] + [
        config_record(resource, key, None) for key in sorted(unset & present.keys())
    ]
    if command.validate_only or not records:
        return (), CommandResult(image.offset)
    return tuple(records), CommandResult(image.offset + 1)


def _config_table(image: MetadataImage, resource: ConfigResource) -> ConfigDef:
    if resource.type == ConfigResource.TOPIC:
        _find_topic(image, resource.name)
        return TOPIC_CONFIGS
    if resource.type == ConfigResource.BROKER:
        known = {CLUSTER_DEFAULT, *(str(broker_id) for broker_id in image.brokers)}
        if resource.name not in known:
            raise InvalidRequestError(
                f"there is no broker {resource.name!r}; name a registered one, or none for the default of all brokers"
            )
        return DYNAMIC_BROKER_CONFIGS
    raise InvalidRequestError(f"config resource type {resource.type} is not known here")
