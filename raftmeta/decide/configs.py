"""Decisions on configs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raftlog.config import ConfigDef
from raftlog.errors import InvalidConfig, InvalidRequestError
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, MetadataRecord
from raftmeta.decide.outcome import Accepted, CommandResult, shown
from raftmeta.decide.topics import find_topic
from raftmeta.elections import eligible_replicas, with_new_epochs
from raftmeta.image import CLUSTER_DEFAULT, MetadataImage, ResourceKey, config_record, partition_record
from raftmeta.replay import replay_all
from raftmeta.topic_configs import DYNAMIC_BROKER_CONFIGS, TOPIC_CONFIGS

MIN_INSYNC_REPLICAS = "min.insync.replicas"
"""Has the same name as a topic's config and as the default of all topics."""


def alter_configs(image: MetadataImage, command: records_pb2.AlterConfigsCommand, offset: int) -> Accepted:
    """Set and take back configs of one resource, all or nothing."""
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

    The leader may commit from now on, and who is outside the ISR does not have that. It cannot wait until partitions
    are settled: raised again before then, the config would hide that there was such a time.
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
                f"there is no broker {shown(resource.name)}; name a registered one, or none for the default of all "
                "brokers"
            )
        return DYNAMIC_BROKER_CONFIGS
    raise InvalidRequestError(f"config resource type {resource.type} is not known here")
