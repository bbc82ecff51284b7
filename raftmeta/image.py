"""The state of the cluster at one metadata offset, immutable.

Whoever holds a `MetadataImage` may keep it and share it between threads: a change makes a new image
(`raftmeta.replay`) that shares what did not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, MetadataRecord
from raftmeta.topic_configs import TOPIC_KEY_BY_BROKER_KEY

NO_LEADER = -1
INTERNAL_PREFIX = "__"
"""Begins the names of the topics that raftlog keeps for itself; users cannot create such."""
CLUSTER_DEFAULT = ""
"""Name of the broker resource whose configs hold for all brokers."""


@dataclass(frozen=True, slots=True)
class BrokerImage:
    """A registered broker. `broker_epoch` is the metadata offset of its registration, so it only rises."""

    broker_id: int
    incarnation_id: bytes
    broker_epoch: int
    host: str
    port: int
    rack: str = ""
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class PartitionImage:
    """One partition. `leader` is NO_LEADER when nobody leads; `replicas` stand in order of preference.

    Invariants: isr is a subset of replicas, not empty; leader is in isr or NO_LEADER.
    """

    partition: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int


@dataclass(frozen=True, slots=True)
class TopicImage:
    """One topic; `partitions[i].partition == i`."""

    name: str
    topic_id: bytes
    partitions: tuple[PartitionImage, ...] = ()

    @property
    def internal(self) -> bool:
        """Whether the topic belongs to raftlog itself."""
        return self.name.startswith(INTERNAL_PREFIX)


@dataclass(frozen=True, slots=True, order=True)
class ResourceKey:
    """What a config belongs to: type is `ConfigResource.TOPIC` or `.BROKER`."""

    type: ConfigResource.Type.ValueType
    name: str


@dataclass(frozen=True, slots=True)
class MetadataImage:
    """Everything the quorum has decided up to `offset`; 0 is the empty image.

    Invariants: `topic_id_by_name` is the inverse of the topics' names; no empty mapping stands in `configs`.
    """

    offset: int = 0
    cluster_id: str = ""
    controller_id: int = -1
    controller_epoch: int = 0
    brokers: Mapping[int, BrokerImage] = field(default_factory=dict)
    topics: Mapping[bytes, TopicImage] = field(default_factory=dict)
    topic_id_by_name: Mapping[str, bytes] = field(default_factory=dict)
    configs: Mapping[ResourceKey, Mapping[str, str]] = field(default_factory=dict)

    def topic(self, name: str) -> TopicImage | None:
        """Return the topic of that name."""
        topic_id = self.topic_id_by_name.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def resource_configs(self, resource_type: ConfigResource.Type.ValueType, name: str) -> Mapping[str, str]:
        """Return what is set on one resource, in canonical spelling; empty when nothing is."""
        return self.configs.get(ResourceKey(resource_type, name), {})

    def broker_configs(self, broker_id: int) -> dict[str, str]:
        """Return the dynamic configs of a broker: the cluster's defaults, over them its own."""
        return {
            **self.resource_configs(ConfigResource.BROKER, CLUSTER_DEFAULT),
            **self.resource_configs(ConfigResource.BROKER, str(broker_id)),
        }

    def topic_configs(self, name: str, broker_id: int | None = None) -> dict[str, str]:
        """Return the topic's configs in canonical spelling.

        With `broker_id`, what that broker's dynamic configs say about every topic (log.retention.ms and the like)
        lies beneath. What is in neither comes from the broker's file.
        """
        beneath = {}
        if broker_id is not None:
            beneath = {
                TOPIC_KEY_BY_BROKER_KEY[key]: value
                for key, value in self.broker_configs(broker_id).items()
                if key in TOPIC_KEY_BY_BROKER_KEY
            }
        return {**beneath, **self.resource_configs(ConfigResource.TOPIC, name)}

    def to_records(self) -> Iterator[MetadataRecord]:
        """Yield records that build this image from the empty one, always in the same order.

        Two equal images give equal records: a snapshot's bytes depend on nothing but the state.
        """
        if self.cluster_id:
            yield MetadataRecord(cluster=records_pb2.ClusterRecord(cluster_id=self.cluster_id))
        if self.controller_epoch:
            yield MetadataRecord(
                controller=records_pb2.ControllerRecord(
                    controller_id=self.controller_id, controller_epoch=self.controller_epoch
                )
            )
        for broker_id in sorted(self.brokers):
            yield broker_record(self.brokers[broker_id])
        for name in sorted(self.topic_id_by_name):
            topic = self.topics[self.topic_id_by_name[name]]
            yield MetadataRecord(topic=records_pb2.TopicRecord(topic_id=topic.topic_id, name=name))
            for partition in topic.partitions:
                yield partition_record(topic.topic_id, partition)
        for resource in sorted(self.configs):
            for key, value in sorted(self.configs[resource].items()):
                yield config_record(resource, key, value)


def broker_record(broker: BrokerImage) -> MetadataRecord:
    """Return the record that makes the broker what it is."""
    return MetadataRecord(
        broker=records_pb2.BrokerRecord(
            broker_id=broker.broker_id,
            incarnation_id=broker.incarnation_id,
            broker_epoch=broker.broker_epoch,
            host=broker.host,
            port=broker.port,
            rack=broker.rack,
            fenced=broker.fenced,
        )
    )


def partition_record(topic_id: bytes, partition: PartitionImage) -> MetadataRecord:
    """Return the record that makes the partition what it is."""
    return MetadataRecord(
        partition=records_pb2.PartitionRecord(
            topic_id=topic_id,
            partition=partition.partition,
            replicas=partition.replicas,
            isr=partition.isr,
            leader=partition.leader,
            leader_epoch=partition.leader_epoch,
            partition_epoch=partition.partition_epoch,
        )
    )


def config_record(resource: ResourceKey, key: str, value: str | None) -> MetadataRecord:
    """Return the record that sets a config, or takes it back with None."""
    wire = ConfigResource(type=resource.type, name=resource.name)
    return MetadataRecord(config=records_pb2.ConfigRecord(resource=wire, key=key, value=value))
