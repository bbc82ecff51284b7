"""How a record changes the image: the only way the cluster's state changes.

Loading the log, following another node and serving live commands all come through here.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from raftlog._core.security.acls import Acl, Role
from raftlog.errors import UnsupportedVersion
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, MetadataRecord
from raftmeta.credentials import Credential, CredentialKey
from raftmeta.image import (
    NO_LEADER,
    NO_LOAD,
    BrokerImage,
    BrokerLoad,
    FeatureSupport,
    MapBuilder,
    MetadataImage,
    PartitionImage,
    PersistentMap,
    ResourceKey,
    TopicImage,
    metric_name,
)
from raftmeta.producer_ids import ProducerIdKey
from raftmeta.quotas import QuotaEntity


def replay(image: MetadataImage, record: MetadataRecord, offset: int) -> MetadataImage:
    """Return the image after one record that was committed at `offset`."""
    return replay_all(image, (record,), offset)


def replay_all(image: MetadataImage, records: Iterable[MetadataRecord], offset: int) -> MetadataImage:
    """Return the image after the records of one command, committed at `offset`; equal to `replay` one by one.

    Raises:
        UnsupportedVersion: a record of a kind that this version does not know.
    """
    assert offset >= image.offset, f"metadata goes forward: {offset} after {image.offset}"
    change = _Change(image)
    for record in records:
        change.apply(record)
    return change.image(offset)


def image_from_records(records: Iterable[MetadataRecord], offset: int) -> MetadataImage:
    """Return the image that a snapshot's records build from nothing. Raises as `replay_all` does.

    Python's garbage collector is paused meanwhile: an image has no reference cycles, and searching hundreds of
    thousands of new objects for them takes twice as long as creating the objects.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return replay_all(MetadataImage(), records, offset)
    finally:
        if collecting:
            gc.enable()


class _Change:
    """A change under way: copies what it writes to of the old image, never the image itself."""

    def __init__(self, base: MetadataImage) -> None:
        self._base = base
        self._cluster_id = base.cluster_id
        self._controller_id = base.controller_id
        self._controller_epoch = base.controller_epoch
        self._next_producer_id = base.next_producer_id
        self._producer_id_key = base.producer_id_key
        self._brokers: dict[int, BrokerImage] | None = None
        self._features: dict[str, int] | None = None
        self._configs: dict[ResourceKey, Mapping[str, str]] | None = None
        self._load: dict[int, list[int]] = {}
        """By broker: how many more partitions than before name it as their leader, and as a replica."""
        self._topics: MapBuilder[bytes, TopicImage] | None = None
        self._names: MapBuilder[str, bytes] | None = None
        self._dotted_names: MapBuilder[str, str] | None = None
        self._partitions: dict[bytes, list[PartitionImage]] = {}
        self._credentials: dict[CredentialKey, Credential] | None = None
        self._acls: set[Acl] | None = None
        self._quotas: dict[QuotaEntity, Mapping[str, float]] | None = None
        self._roles: dict[str, Role] | None = None

    def apply(self, record: MetadataRecord) -> None:
        kind = record.WhichOneof("record")
        match kind:
            case "partition":
                self._put_partition(record.partition)
            case "config":
                self._put_config(record.config)
            case "topic":
                self._add_topic(record.topic)
            case "remove_topic":
                self._remove_topic(record.remove_topic.topic_id)
            case "broker":
                self._own_brokers()[record.broker.broker_id] = broker_from_record(record.broker)
            case "remove_broker":
                self._remove_broker(record.remove_broker.broker_id)
            case "producer_ids":
                self._next_producer_id = record.producer_ids.next_producer_id
            case "producer_id_key":
                self._producer_id_key = ProducerIdKey(
                    record.producer_id_key.secret, record.producer_id_key.first_number
                )
            case "feature":
                self._put_feature(record.feature)
            case "cluster":
                self._cluster_id = record.cluster.cluster_id
            case "controller":
                self._controller_id = record.controller.controller_id
                self._controller_epoch = record.controller.controller_epoch
            case "acl":
                self._own_acls().add(Acl.from_wire(record.acl.acl))
            case "remove_acl":
                self._own_acls().remove(Acl.from_wire(record.remove_acl.acl))
            case "scram_credential":
                credential = Credential.from_wire(record.scram_credential.credential, record.scram_credential.version)
                self._own_credentials()[credential.key] = credential
            case "remove_scram_credential":
                removed = record.remove_scram_credential
                del self._own_credentials()[CredentialKey(removed.user, removed.mechanism)]
            case "quota":
                self._put_quota(record.quota)
            case "role":
                roles = self._own_roles()
                roles[record.role.name] = roles.get(record.role.name, Role(record.role.name)).changed_by(record.role)
            case "remove_role":
                del self._own_roles()[record.remove_role.name]
            case None:
                raise UnsupportedVersion(
                    "the metadata holds a record of a kind that this version does not know; "
                    "it was written by a newer version, run that one or newer"
                )
            case _:
                assert_never(kind)

    def image(self, offset: int) -> MetadataImage:
        base = self._base
        if self._partitions:
            topics = self._own_topics()
            for topic_id, partitions in self._partitions.items():
                topic = topics[topic_id]
                topics[topic_id] = TopicImage(
                    topic.name, topic_id, tuple(partitions), topic.configs, topic.requested_id, topic.user
                )
        return MetadataImage(
            offset=offset,
            cluster_id=self._cluster_id,
            controller_id=self._controller_id,
            controller_epoch=self._controller_epoch,
            brokers=base.brokers if self._brokers is None else self._brokers,
            topics=base.topics if self._topics is None else self._topics.build(),
            topic_id_by_name=base.topic_id_by_name if self._names is None else self._names.build(),
            configs=base.configs if self._configs is None else self._configs,
            features=base.features if self._features is None else self._features,
            next_producer_id=self._next_producer_id,
            producer_id_key=self._producer_id_key,
            load=self._new_load() if self._load else base.load,
            dotted_names=base.dotted_names if self._dotted_names is None else self._dotted_names.build(),
            credentials=base.credentials if self._credentials is None else self._credentials,
            acls=base.acls if self._acls is None else frozenset(self._acls),
            quotas=base.quotas if self._quotas is None else self._quotas,
            roles=base.roles if self._roles is None else self._roles,
        )

    # Copies of what is written to

    def _own_brokers(self) -> dict[int, BrokerImage]:
        if self._brokers is None:
            self._brokers = dict(self._base.brokers)
        return self._brokers

    def _own_configs(self) -> dict[ResourceKey, Mapping[str, str]]:
        if self._configs is None:
            self._configs = dict(self._base.configs)
        return self._configs

    def _own_topics(self) -> MapBuilder[bytes, TopicImage]:
        if self._topics is None:
            self._topics = MapBuilder(PersistentMap.of(self._base.topics))
        return self._topics

    def _own_names(self) -> MapBuilder[str, bytes]:
        if self._names is None:
            self._names = MapBuilder(PersistentMap.of(self._base.topic_id_by_name))
        return self._names

    def _own_dotted_names(self) -> MapBuilder[str, str]:
        if self._dotted_names is None:
            self._dotted_names = MapBuilder(PersistentMap.of(self._base.dotted_names))
        return self._dotted_names

    def _own_credentials(self) -> dict[CredentialKey, Credential]:
        if self._credentials is None:
            self._credentials = dict(self._base.credentials)
        return self._credentials

    def _own_acls(self) -> set[Acl]:
        if self._acls is None:
            self._acls = set(self._base.acls)
        return self._acls

    def _own_roles(self) -> dict[str, Role]:
        if self._roles is None:
            self._roles = dict(self._base.roles)
        return self._roles

    def _put_quota(self, record: records_pb2.QuotaRecord) -> None:
        if self._quotas is None:
            self._quotas = dict(self._base.quotas)
        entity = QuotaEntity.from_wire(record.entity)
        values = dict(self._quotas.get(entity, {}))
        if record.HasField("value"):
            values[record.key] = record.value
        else:
            del values[record.key]
        if values:
            self._quotas[entity] = values
        else:
            del self._quotas[entity]

    # Topics and partitions

    def _add_topic(self, record: records_pb2.TopicRecord) -> None:
        topics, names = self._own_topics(), self._own_names()
        assert record.topic_id not in topics, record.topic_id.hex()
        assert record.name not in names, record.name
        topics[record.topic_id] = TopicImage(
            record.name, record.topic_id, requested_id=record.requested_id, user=sys.intern(record.user)
        )
        names[record.name] = record.topic_id
        if "." in record.name:
            self._own_dotted_names()[metric_name(record.name)] = record.name

    def _remove_topic(self, topic_id: bytes) -> None:
        topic = self._own_topics().pop(topic_id)
        self._own_names().pop(topic.name)
        if "." in topic.name:
            self._own_dotted_names().pop(metric_name(topic.name))
        for partition in self._partitions.pop(topic_id, topic.partitions):
            self._count(partition.leader, partition.replicas, -1)

    def _put_partition(self, record: records_pb2.PartitionRecord) -> None:
        partitions = self._partitions.get(record.topic_id)
        if partitions is None:
            topics = self._base.topics if self._topics is None else self._topics
            partitions = self._partitions[record.topic_id] = list(topics[record.topic_id].partitions)
        image = partition_from_record(record)
        assert 0 <= record.partition <= len(partitions), f"partition {record.partition} of {len(partitions)}"
        if record.partition == len(partitions):
            partitions.append(image)
            self._count(image.leader, image.replicas, 1)
            return
        before = partitions[record.partition]
        partitions[record.partition] = image
        if (before.leader, before.replicas) != (image.leader, image.replicas):
            self._count(before.leader, before.replicas, -1)
            self._count(image.leader, image.replicas, 1)

    def _count(self, leader: int, replicas: tuple[int, ...], step: int) -> None:
        load = self._load
        for broker_id in replicas:
            more = load.get(broker_id)
            if more is None:
                more = load[broker_id] = [0, 0, 0]
            more[1] += step
        load[replicas[0]][2] += step
        if leader != NO_LEADER:
            assert leader in replicas, f"{leader} leads but is not among {replicas}"
            load[leader][0] += step

    def _new_load(self) -> dict[int, BrokerLoad]:
        load = dict(self._base.load)
        for broker_id, (leaderships, replicas, preferred) in self._load.items():
            was = load.get(broker_id, NO_LOAD)
            now = BrokerLoad(was.leaderships + leaderships, was.replicas + replicas, was.preferred + preferred)
            if now.replicas:
                load[broker_id] = now
            else:
                load.pop(broker_id, None)
        return load

    # Brokers, configs, features

    def _remove_broker(self, broker_id: int) -> None:
        del self._own_brokers()[broker_id]
        resource = ResourceKey(ConfigResource.BROKER, str(broker_id))
        if resource in self._base.configs or self._configs is not None:
            self._own_configs().pop(resource, None)

    def _put_config(self, record: records_pb2.ConfigRecord) -> None:
        if record.resource.type == ConfigResource.TOPIC:
            topics = self._own_topics()
            topic_id = (self._base.topic_id_by_name if self._names is None else self._names)[record.resource.name]
            topic = topics[topic_id]
            topics[topic_id] = replace(topic, configs=_with_config(topic.configs, record))
            return
        resource = ResourceKey(record.resource.type, record.resource.name)
        values = _with_config(self._own_configs().get(resource, {}), record)
        if values:
            self._own_configs()[resource] = values
        else:
            self._own_configs().pop(resource, None)

    def _put_feature(self, record: records_pb2.FeatureRecord) -> None:
        if self._features is None:
            self._features = dict(self._base.features)
        if record.level:
            self._features[record.name] = record.level
        else:
            self._features.pop(record.name, None)


def _with_config(configs: Mapping[str, str], record: records_pb2.ConfigRecord) -> Mapping[str, str]:
    changed = dict(configs)
    if record.HasField("value"):
        changed[record.key] = record.value
    else:
        changed.pop(record.key, None)
    return changed


def broker_from_record(record: records_pb2.BrokerRecord) -> BrokerImage:
    """Return the broker that a record describes."""
    return BrokerImage(
        broker_id=record.broker_id,
        incarnation_id=record.incarnation_id,
        broker_epoch=record.broker_epoch,
        host=record.host,
        port=record.port,
        rack=record.rack,
        fenced=record.fenced,
        in_controlled_shutdown=record.in_controlled_shutdown,
        unclean=record.unclean,
        directory_id=record.directory_id,
        lock_identity=record.lock_identity,
        inter_node_host=record.inter_node_host,
        inter_node_port=record.inter_node_port,
        features=tuple(FeatureSupport(known.name, known.min_level, known.max_level) for known in record.features),
        cordoned=record.cordoned,
        drained=record.drained,
        drained_until_restart=record.drained_until_restart,
        other_directory_ids=tuple(record.other_directory_ids),
        former_directory_ids=tuple(record.former_directory_ids),
        unsynced_topic_ids=tuple(record.unsynced_topic_ids),
        storage_full=record.storage_full,
        kafka_host=record.kafka_host,
        kafka_port=record.kafka_port,
    )


def partition_from_record(record: records_pb2.PartitionRecord) -> PartitionImage:
    """Return the partition that a record describes."""
    replicas = tuple(record.replicas)
    isr = tuple(record.isr)
    return PartitionImage(  # by position: names take time, and a large command has 10 000 of these
        record.partition,
        replicas,
        replicas if isr == replicas else isr,  # most often the same: one object less to keep
        record.leader,
        record.leader_epoch,
        record.partition_epoch,
        tuple(record.adding_replicas),
        tuple(record.removing_replicas),
        tuple(record.eligible_leader_replicas),
        record.revoked_leader if record.HasField("revoked_leader") else None,
        record.revoked_at_offset,
        tuple((each.broker_id, each.broker_epoch) for each in record.offline_replicas)
        if record.offline_replicas
        else (),
        tuple((each.broker_id, tuple(each.directory_ids)) for each in record.lost_replicas)
        if record.lost_replicas
        else (),
    )
