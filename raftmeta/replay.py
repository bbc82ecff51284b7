"""How a record changes the image: the only way the cluster's state changes.

Loading the log, following another node and serving live commands all come through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from raftlog.errors import UnsupportedVersion
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import ConfigResource, MetadataRecord
from raftmeta.image import BrokerImage, MetadataImage, PartitionImage, ResourceKey, TopicImage


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
    """Return the image that a snapshot's records build from nothing. Raises as `replay_all` does."""
    return replay_all(MetadataImage(), records, offset)


class _Change:
    """A change under way: copies a mapping of the old image when it first writes to it, never the image itself."""

    def __init__(self, base: MetadataImage) -> None:
        self._base = base
        self._cluster_id = base.cluster_id
        self._controller_id = base.controller_id
        self._controller_epoch = base.controller_epoch
        self._brokers: dict[int, BrokerImage] | None = None
        self._topics: dict[bytes, TopicImage] | None = None
        self._topic_id_by_name: dict[str, bytes] | None = None
        self._configs: dict[ResourceKey, Mapping[str, str]] | None = None
        self._partitions: dict[bytes, list[PartitionImage]] = {}

    def apply(self, record: MetadataRecord) -> None:
        kind = record.WhichOneof("record")
        match kind:
            case "cluster":
                self._cluster_id = record.cluster.cluster_id
            case "controller":
                self._controller_id = record.controller.controller_id
                self._controller_epoch = record.controller.controller_epoch
            case "broker":
                self._put_broker(record.broker)
            case "topic":
                self._add_topic(record.topic)
            case "remove_topic":
                self._remove_topic(record.remove_topic.topic_id)
            case "partition":
                self._put_partition(record.partition)
            case "config":
                self._put_config(record.config)
            case None:
                raise UnsupportedVersion(
                    "the metadata holds a record of a kind that this version does not know; "
                    "it was written by a newer version, run that one or newer"
                )
            case _:
                assert_never(kind)

    def image(self, offset: int) -> MetadataImage:
        base = self._base
        topics = self._topics
        if self._partitions:
            topics = self._own_topics()
            for topic_id, partitions in self._partitions.items():
                topic = topics[topic_id]
                topics[topic_id] = TopicImage(topic.name, topic_id, tuple(partitions))
        return MetadataImage(
            offset=offset,
            cluster_id=self._cluster_id,
            controller_id=self._controller_id,
            controller_epoch=self._controller_epoch,
            brokers=base.brokers if self._brokers is None else self._brokers,
            topics=base.topics if topics is None else topics,
            topic_id_by_name=base.topic_id_by_name if self._topic_id_by_name is None else self._topic_id_by_name,
            configs=base.configs if self._configs is None else self._configs,
        )

    def _put_broker(self, record: records_pb2.BrokerRecord) -> None:
        if self._brokers is None:
            self._brokers = dict(self._base.brokers)
        self._brokers[record.broker_id] = BrokerImage(
            broker_id=record.broker_id,
            incarnation_id=record.incarnation_id,
            broker_epoch=record.broker_epoch,
            host=record.host,
            port=record.port,
            rack=record.rack,
            fenced=record.fenced,
        )

    def _own_topics(self) -> dict[bytes, TopicImage]:
        if self._topics is None:
            self._topics = dict(self._base.topics)
        return self._topics

    def _own_names(self) -> dict[str, bytes]:
        if self._topic_id_by_name is None:
            self._topic_id_by_name = dict(self._base.topic_id_by_name)
        return self._topic_id_by_name

    def _own_configs(self) -> dict[ResourceKey, Mapping[str, str]]:
        if self._configs is None:
            self._configs = dict(self._base.configs)
        return self._configs

    def _add_topic(self, record: records_pb2.TopicRecord) -> None:
        topics, names = self._own_topics(), self._own_names()
        assert record.topic_id not in topics, record.topic_id.hex()
        assert record.name not in names, record.name
        topics[record.topic_id] = TopicImage(record.name, record.topic_id)
        names[record.name] = record.topic_id

    def _remove_topic(self, topic_id: bytes) -> None:
        topic = self._own_topics().pop(topic_id)
        del self._own_names()[topic.name]
        self._partitions.pop(topic_id, None)
        self._own_configs().pop(ResourceKey(ConfigResource.TOPIC, topic.name), None)

    def _put_partition(self, record: records_pb2.PartitionRecord) -> None:
        partitions = self._partitions.get(record.topic_id)
        if partitions is None:
            topics = self._base.topics if self._topics is None else self._topics
            partitions = self._partitions[record.topic_id] = list(topics[record.topic_id].partitions)
        image = PartitionImage(
            partition=record.partition,
            replicas=tuple(record.replicas),
            isr=tuple(record.isr),
            leader=record.leader,
            leader_epoch=record.leader_epoch,
            partition_epoch=record.partition_epoch,
        )
        assert 0 <= record.partition <= len(partitions), f"partition {record.partition} of {len(partitions)}"
        if record.partition == len(partitions):
            partitions.append(image)
        else:
            partitions[record.partition] = image

    def _put_config(self, record: records_pb2.ConfigRecord) -> None:
        configs = self._own_configs()
        resource = ResourceKey(record.resource.type, record.resource.name)
        values = dict(configs.get(resource, {}))
        if record.HasField("value"):
            values[record.key] = record.value
        else:
            values.pop(record.key, None)
        if values:
            configs[resource] = values
        else:
            configs.pop(resource, None)
