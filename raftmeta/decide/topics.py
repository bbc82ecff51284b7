"""Decisions on topics and the number of their partitions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from raftlog.errors import (
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidRequestError,
    InvalidTopic,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, MetadataRecord
from raftmeta.decide.outcome import Accepted, CommandResult, shown
from raftmeta.features import OWN_TOPIC_ID_LEVEL, metadata_version
from raftmeta.image import (
    BrokerImage,
    MetadataImage,
    PartitionImage,
    ResourceKey,
    TopicImage,
    config_record,
    metric_name,
    partition_record,
    topic_record,
)
from raftmeta.placement import place_partitions
from raftmeta.topic_configs import TOPIC_CONFIGS

MAX_TOPIC_NAME_CHARACTERS = 249
MAX_PARTITIONS_PER_TOPIC = 10_000
FIRST_LEADER_EPOCH = 0
# A partition's directory is called <topic>-<partition>, and a file name has at most 255 bytes.
assert MAX_TOPIC_NAME_CHARACTERS + len(f"-{MAX_PARTITIONS_PER_TOPIC - 1}") <= 255

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)
_UUID_BYTES = 16


def create_topic(image: MetadataImage, command: records_pb2.CreateTopicCommand, offset: int) -> Accepted:
    """Create a topic with partitions, placed on brokers that are up, and configs.

    Once more with the same name and id, it is a client that has not heard the answer, and there is nothing to do. Where
    the topic was deleted in between it is made again, with another id, so that no log of the first one passes for its.
    """
    check_topic_name(command.name)
    known = image.topic(command.name)
    if known is not None and (known.requested_id or known.topic_id) == command.topic_id:
        return (), CommandResult(image.offset, topic_id=known.topic_id)
    if known is not None:
        raise TopicAlreadyExists(f"topic {command.name!r} is there already")
    _check_collision(image, command.name)
    topic = _new_topic(image, command, offset)
    if not 1 <= command.partitions <= MAX_PARTITIONS_PER_TOPIC:
        raise InvalidPartitions(
            f"topic {command.name!r} cannot have {command.partitions} partitions, "
            f"ask for 1 to {MAX_PARTITIONS_PER_TOPIC}"
        )
    configs = TOPIC_CONFIGS.canonical(command.configs)
    if command.assignments:
        placements = _assigned(image, command)
    else:
        placements = place_partitions(image, command.partitions, command.replication_factor)
    if command.validate_only:
        return (), CommandResult(image.offset, topic_id=topic.topic_id)
    resource = ResourceKey(ConfigResource.TOPIC, command.name)
    records = [
        topic_record(topic),
        *(config_record(resource, key, value) for key, value in configs.items()),
        *_new_partitions(topic.topic_id, 0, placements),
    ]
    return tuple(records), CommandResult(offset, topic_id=topic.topic_id)


def _new_topic(image: MetadataImage, command: records_pb2.CreateTopicCommand, offset: int) -> TopicImage:
    """Return a topic without partitions, under an id that no topic before it had. Raises InvalidRequestError."""
    requested_id = command.topic_id
    if len(requested_id) != _UUID_BYTES:
        raise InvalidRequestError(f"topic id {requested_id[: _UUID_BYTES + 1].hex()!r} is not 16 bytes")
    if metadata_version(image) >= OWN_TOPIC_ID_LEVEL:
        # No two commands are committed at one offset. The hash is part of what all controllers have to agree on.
        at = offset.to_bytes(8, "big")
        topic_id = hashlib.blake2b(requested_id + at, digest_size=_UUID_BYTES).digest()
        topic = TopicImage(command.name, topic_id, requested_id=requested_id)
    else:
        topic = TopicImage(command.name, requested_id)
    if topic.topic_id in image.topics:
        raise InvalidRequestError(f"topic id {topic.topic_id.hex()} is in use")
    return topic


def _assigned(image: MetadataImage, command: records_pb2.CreateTopicCommand) -> Iterator[tuple[int, ...]]:
    """Return the replicas that somebody chose for each partition. Raises InvalidReplicaAssignment."""
    chosen = [tuple(each.replicas) for each in command.assignments]
    if len(chosen) != command.partitions or any(len(each) != command.replication_factor for each in chosen):
        raise InvalidReplicaAssignment(
            f"topic {command.name!r}: {command.partitions} partitions need as many assignments of "
            f"{command.replication_factor} replicas each"
        )
    for partition, replicas in enumerate(chosen):
        if not replicas or len(set(replicas)) < len(replicas):
            raise InvalidReplicaAssignment(
                f"{command.name}-{partition}: {list(replicas)} names no broker, or one of them twice"
            )
        for replica in replicas:
            broker = image.brokers.get(replica)
            if broker is None or not broker.active:
                raise InvalidReplicaAssignment(f"{command.name}-{partition}: broker {replica} is not there, or not up")
            check_takes_replicas(broker, f"{command.name}-{partition}")
    return iter(chosen)


def check_takes_replicas(broker: BrokerImage, where: str) -> None:
    """Refuse a replica for a broker that is cordoned or drained; `where` names the partition.

    Raises:
        InvalidReplicaAssignment: it is.
    """
    if broker.cordoned or broker.drained:
        state, undo = ("drained", "undrain") if broker.drained else ("cordoned", "uncordon")
        raise InvalidReplicaAssignment(
            f"{where}: broker {broker.broker_id} is {state} and gets no new replicas; choose another, or take that "
            f"back first (raftlog broker {undo} {broker.broker_id})"
        )


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
    flat = metric_name(name)
    other = image.dotted_names.get(flat)
    if other is None and flat in image.topic_id_by_name:
        other = flat
    if other is not None and other != name:
        raise InvalidTopic(
            f"topic name {name!r} collides with the topic {other!r}: "
            "'.' and '_' become the same in metric names; choose another name"
        )


def find_topic(image: MetadataImage, name: str, topic_id: bytes = b"") -> TopicImage:
    """Return a topic by id or name; where both are given they have to agree.

    Raises:
        UnknownTopicId, UnknownTopicOrPartition: it is not there.
        InvalidRequestError: the id is that of a topic with another name.
    """
    if topic_id:
        found = image.topics.get(topic_id)
        if found is None:
            raise UnknownTopicId(f"there is no topic with the id {topic_id[:_UUID_BYTES].hex()}")
        if name and name != found.name:
            raise InvalidRequestError(f"topic id {topic_id.hex()} is {found.name!r}, not {shown(name)}")
        return found
    topic = image.topic(name)
    if topic is None:
        raise UnknownTopicOrPartition(f"there is no topic {shown(name)}")
    return topic


def delete_topic(image: MetadataImage, command: records_pb2.DeleteTopicCommand, offset: int) -> Accepted:
    """Delete a topic, by name or id, with its configs."""
    topic = find_topic(image, command.name, command.topic_id)
    record = MetadataRecord(remove_topic=records_pb2.RemoveTopicRecord(topic_id=topic.topic_id))
    return (record,), CommandResult(offset, topic_id=topic.topic_id)


def create_partitions(image: MetadataImage, command: records_pb2.CreatePartitionsCommand, offset: int) -> Accepted:
    """Raise a topic's number of partitions; the new ones are placed like those of a new topic."""
    topic = find_topic(image, command.topic)
    present = len(topic.partitions)
    if not present < command.partitions <= MAX_PARTITIONS_PER_TOPIC:
        raise InvalidPartitions(
            f"topic {topic.name!r} has {present} partitions and cannot get {command.partitions}: "
            f"the number only rises, to at most {MAX_PARTITIONS_PER_TOPIC}"
        )
    replication_factor = _replication_factor(topic)
    placements = place_partitions(image, command.partitions - present, replication_factor)
    records = tuple(_new_partitions(topic.topic_id, present, placements))
    return records, CommandResult(offset, topic_id=topic.topic_id)


def _replication_factor(topic: TopicImage) -> int:
    """Return how many replicas a new partition gets: as many as the first one wants."""
    first = topic.partitions[0]
    return len(first.replicas) - len(first.removing_replicas)
