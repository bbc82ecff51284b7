"""DescribeCluster, and the commands behind AlterBroker and ElectLeaders. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raftlog.errors import UnknownTopicOrPartition
from raftlog.v1 import admin_pb2
from raftlog.v1.records_pb2 import AlterBrokerCommand, ElectLeadersCommand, FeatureRange, MetadataCommand, PartitionRef
from raftmeta.decide import MAX_PARTITIONS_PER_COMMAND
from raftmeta.features import BASELINE, SUPPORTED, supports
from raftmeta.image import NO_LOAD, BrokerImage, MetadataImage


def describe_cluster(image: MetadataImage, response: admin_pb2.DescribeClusterResponse) -> None:
    """Fill in who is in the cluster, and what every broker carries."""
    response.cluster_id = image.cluster_id
    response.controller_id = image.controller_id
    response.controller_epoch = image.controller_epoch
    response.metadata_offset = image.offset
    for broker_id, broker in sorted(image.brokers.items()):
        load = image.load.get(broker_id, NO_LOAD)
        response.brokers.add(
            broker_id=broker_id,
            host=broker.host,
            port=broker.port,
            rack=broker.rack,
            fenced=broker.fenced,
            in_controlled_shutdown=broker.in_controlled_shutdown,
            broker_epoch=broker.broker_epoch,
            leaderships=load.leaderships,
            replicas=load.replicas,
            cordoned=broker.cordoned or broker.drained,
            drained=broker.drained,
            drained_until_restart=broker.drained_until_restart,
        )
    for name, level in {**BASELINE, **image.features}.items():
        response.features[name] = level
    response.supported_features.extend(supported_by_all(image.brokers.values()))


def supported_by_all(brokers: Iterable[BrokerImage]) -> Iterator[FeatureRange]:
    """Yield the levels of each feature that this version and all of the brokers know."""
    everybody = list(brokers)
    for name, known in sorted(SUPPORTED.items()):
        levels = [
            level
            for level in range(known.min_level, known.max_level + 1)
            if all(supports(broker.features, name, level) for broker in everybody)
        ]
        if levels:
            yield FeatureRange(name=name, min_level=levels[0], max_level=levels[-1])


def alter_broker_command(request: admin_pb2.AdminAlterBrokerRequest) -> AlterBrokerCommand:
    """Return the command behind AlterBroker; what the request leaves open stays open."""
    return AlterBrokerCommand(
        broker_id=request.broker_id,
        cordoned=request.cordoned if request.HasField("cordoned") else None,
        drained=request.drained if request.HasField("drained") else None,
        until_restart=request.until_restart,
    )


def election_commands(image: MetadataImage, request: admin_pb2.ElectLeadersRequest) -> Iterator[MetadataCommand]:
    """Yield the commands that elect leaders for the partitions that are named, or for all of the topic.

    Raises:
        UnknownTopicOrPartition: there is no such topic, or no such partition of it.
    """
    topic = image.topic(request.topic)
    if topic is None:
        raise UnknownTopicOrPartition(f"there is no topic {request.topic[:249]!r}")
    partitions = sorted(set(request.partitions)) or range(len(topic.partitions))
    for partition in partitions:
        if not 0 <= partition < len(topic.partitions):
            raise UnknownTopicOrPartition(
                f"topic {topic.name!r} has {len(topic.partitions)} partitions and none numbered {partition}"
            )
    election = ElectLeadersCommand.UNCLEAN if request.unclean else ElectLeadersCommand.PREFERRED
    for start in range(0, len(partitions), MAX_PARTITIONS_PER_COMMAND):
        refs = [
            PartitionRef(topic_id=topic.topic_id, partition=partition)
            for partition in partitions[start : start + MAX_PARTITIONS_PER_COMMAND]
        ]
        yield MetadataCommand(elect_leaders=ElectLeadersCommand(partitions=refs, type=election))
