"""Decisions on topics and the number of their partitions.

New partitions are spread evenly over brokers and racks, in the same way on every controller. Configs are set here, too.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from raftlog._core.words import counted
from raftlog.config import ConfigDef
from raftlog.errors import (
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidRequestError,
    InvalidTopic,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, MetadataRecord
from raftmeta.decide.outcome import Accepted, CommandResult, shown
from raftmeta.elections import eligible_replicas, with_new_epochs
from raftmeta.features import OWN_TOPIC_ID_LEVEL, SPREAD_LEADERS_LEVEL, TOPIC_USERS_LEVEL, metadata_version
from raftmeta.image import (
    CLUSTER_DEFAULT,
    NO_LOAD,
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
from raftmeta.replay import replay_all
from raftmeta.topic_configs import DYNAMIC_BROKER_CONFIGS, TOPIC_CONFIGS


def place_partitions(
    image: MetadataImage, partitions: int, replication_factor: int, present: Sequence[PartitionImage] = ()
) -> Iterator[tuple[int, ...]]:
    """Yield the replicas of each of `partitions` new partitions, the preferred leader first.

    The preferred leader is the broker that is the preferred leader of the fewest partitions of the topic (`present`:
    its existing ones), then of the fewest partitions overall. The other replicas go to the brokers with the fewest
    replicas, first to racks without a replica of the partition; ties go to the lowest broker id. Brokers that are
    fenced, shutting down, cordoned or drained get none.
    The counts come from `image.load`, so the partitions of other topics cost nothing.

    Raises:
        InvalidReplicationFactor: below 1 or above the number of brokers that take replicas.
    """
    available = [broker for _, broker in sorted(image.brokers.items()) if broker.takes_replicas]
    if not 1 <= replication_factor <= len(available):
        cordoned = sum(broker.active and not broker.takes_replicas for broker in image.brokers.values())
        many = len(available)
        raise InvalidReplicationFactor(
            f"replication factor {replication_factor}: of {len(image.brokers)} registered brokers {many or 'none'} "
            f"{'is' if many < 2 else 'are'} up{' and not cordoned or drained' if cordoned else ''}"
            + (f", so it can be {'1' if many == 1 else f'from 1 to {many}'}" if many else "")
        )
    load = {broker.broker_id: image.load.get(broker.broker_id, NO_LOAD) for broker in available}
    held = {broker_id: each.replicas for broker_id, each in load.items()}
    if metadata_version(image) >= SPREAD_LEADERS_LEVEL:
        of_topic = Counter(partition.replicas[0] for partition in present)
        led = {broker_id: [of_topic[broker_id], each.preferred] for broker_id, each in load.items()}
    else:
        led = {broker_id: [each.leaderships] for broker_id, each in load.items()}
    return _place(available, led, held, partitions, replication_factor)


def _place(
    available: Sequence[BrokerImage],
    led: dict[int, list[int]],
    held: dict[int, int],
    partitions: int,
    replication_factor: int,
) -> Iterator[tuple[int, ...]]:
    """`led`: what a broker leads, in one or several counts, of which the first one that differs decides."""
    rack_of = {broker.broker_id: broker.rack for broker in available}
    one_rack = len(set(rack_of.values())) == 1
    for _ in range(partitions):
        _, _, leader = min([(led[broker_id], held[broker_id], broker_id) for broker_id in rack_of])
        replicas = [leader]
        if one_rack and replication_factor > 1:  # the same as below, in one step: no rack comes first
            rest_by_load = sorted([(held[broker_id], broker_id) for broker_id in rack_of if broker_id != leader])
            replicas += [broker_id for _, broker_id in rest_by_load[: replication_factor - 1]]
        while len(replicas) < replication_factor:
            racks = {rack_of[broker_id] for broker_id in replicas}
            rest = [broker_id for broker_id in rack_of if broker_id not in replicas]
            replicas.append(min(rest, key=lambda broker_id: (rack_of[broker_id] in racks, held[broker_id], broker_id)))
        led[leader] = [count + 1 for count in led[leader]]
        for broker_id in replicas:
            held[broker_id] += 1
        yield tuple(replicas)


MAX_TOPIC_NAME_CHARACTERS = 249
MAX_PARTITIONS_PER_TOPIC = 10_000
FIRST_LEADER_EPOCH = 0
# A partition's directory is called <topic>-<partition>, and a file name has at most 255 bytes.
assert MAX_TOPIC_NAME_CHARACTERS + len(f"-{MAX_PARTITIONS_PER_TOPIC - 1}") <= 255

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)
_UUID_BYTES = 16


def create_topic(image: MetadataImage, command: records_pb2.CreateTopicCommand, offset: int) -> Accepted:
    """Create a topic with partitions, placed on brokers that are up, and configs.

    A repeated request with the same name and id comes from a client that missed the response, and changes nothing. If
    the topic was deleted in between, it is created again with another id, so that no log of the first topic is taken
    for one of the second.
    """
    check_topic_name(command.name)
    known = image.topic(command.name)
    if known is not None and (known.requested_id or known.topic_id) == command.topic_id:
        return (), CommandResult(image.offset, topic_id=known.topic_id)
    if known is not None:
        raise TopicAlreadyExists(f"topic {command.name!r} already exists")
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
        user = command.user if metadata_version(image) >= TOPIC_USERS_LEVEL else ""
        topic = TopicImage(command.name, topic_id, requested_id=requested_id, user=user)
    else:
        topic = TopicImage(command.name, requested_id)
    if topic.topic_id in image.topics:
        raise InvalidRequestError(f"topic id {topic.topic_id.hex()} is in use")
    return topic


def _assigned(image: MetadataImage, command: records_pb2.CreateTopicCommand) -> Iterator[tuple[int, ...]]:
    """Return the replicas that the client chose for each partition. Raises InvalidReplicaAssignment."""
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
                raise InvalidReplicaAssignment(
                    f"{command.name}-{partition}: broker {replica} is not registered, or not up"
                )
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
    """Return a topic by id or name; if both are given, they must belong to the same topic.

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
            f"topic {topic.name!r} has {counted(present, 'partition')} and cannot get {command.partitions:,}: "
            f"the number only rises, to at most {MAX_PARTITIONS_PER_TOPIC}"
        )
    replication_factor = _replication_factor(topic)
    placements = place_partitions(image, command.partitions - present, replication_factor, topic.partitions)
    records = tuple(_new_partitions(topic.topic_id, present, placements))
    return records, CommandResult(offset, topic_id=topic.topic_id)


def _replication_factor(topic: TopicImage) -> int:
    """Return the number of replicas of a new partition: that which the first one has, or has after a reassignment."""
    first = topic.partitions[0]
    return len(first.replicas) - len(first.removing_replicas)


MIN_INSYNC_REPLICAS = "min.insync.replicas"
"""Has the same name as a topic's config and as the default of all topics."""


def alter_configs(image: MetadataImage, command: records_pb2.AlterConfigsCommand, offset: int) -> Accepted:
    """Set and unset configs of one resource, all or none."""
    table = _config_table(image, command.resource)
    values = table.canonical(command.set)
    unset = {table.key(name).name for name in command.unset}
    both = sorted(unset & values.keys())
    if both:
        raise InvalidConfig(f"{table.what} {both[0]} is both set and unset in one request")
    resource = ResourceKey(command.resource.type, command.resource.name)
    present = image.resource_configs(resource.type, resource.name)
    records = [config_record(resource, key, value) for key, value in values.items() if present.get(key) != value] + [
        config_record(resource, key, None) for key in sorted(unset & present.keys())
    ]
    if command.validate_only or not records:
        return (), CommandResult(image.offset)
    if any(record.config.key == MIN_INSYNC_REPLICAS for record in records):
        records += _no_longer_eligible(replay_all(image, records, offset), resource)
    return tuple(records), CommandResult(offset)


def _no_longer_eligible(image: MetadataImage, resource: ResourceKey) -> Iterator[MetadataRecord]:
    """Yield the partitions whose ISR is large enough by the new min.insync.replicas, without eligible replicas.

    The leader may commit from now on, and replicas outside the ISR do not get those records. This cannot wait until
    partitions are settled: if the config is raised again before, the time in between would go unnoticed.
    """
    named = image.topic(resource.name) if resource.type == ConfigResource.TOPIC else None
    topics = [image.topics[topic_id] for topic_id in sorted(image.topics)] if named is None else [named]
    for topic in topics:
        for partition in topic.partitions:
            if partition.eligible_leader_replicas:
                eligible = eligible_replicas(image, topic, partition, partition.isr)
                after = with_new_epochs(partition, replace(partition, eligible_leader_replicas=eligible))
                if after is not partition:
                    yield partition_record(topic.topic_id, after)


def _config_table(image: MetadataImage, resource: ConfigResource) -> ConfigDef:
    if resource.type == ConfigResource.TOPIC:
        find_topic(image, resource.name)
        return TOPIC_CONFIGS
    if resource.type == ConfigResource.BROKER:
        known = {CLUSTER_DEFAULT, *(str(broker_id) for broker_id in image.brokers)}
        if resource.name not in known:
            raise InvalidRequestError(
                f"there is no broker {shown(resource.name)}; name a registered one, or all: `default` in raftlog "
                "config, an empty name in a client"
            )
        return DYNAMIC_BROKER_CONFIGS
    raise InvalidRequestError(f"config resource type {resource.type} is not known here")
