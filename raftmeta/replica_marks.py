"""What is marked on single replicas of a partition, and until when.

    offline   its broker runs and says that it has no working log for it      until that broker registers anew
    lost      its broker has come back without its log directories            until all of those are back

Both end when the replica is taken into the ISR, or is no replica any more. A lost replica that is elected uncleanly has
a new log, which is the partition's from then on.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from raftlog._core.lost_logs import why_lost
from raftmeta.image import BrokerImage, MetadataImage, PartitionImage


def with_marks(image: MetadataImage, partition: PartitionImage) -> PartitionImage:
    """Return the partition with the marks that the brokers ask for; the same object when it has them already."""
    offline, lost = partition.offline_replicas, partition.lost_replicas
    if offline:
        offline = tuple(each for each in offline if image.is_offline(partition, each[0]))
    replaced = {
        broker.broker_id: broker.former_directory_ids
        for broker in map(image.brokers.get, partition.replicas)
        if broker is not None and broker.former_directory_ids
    }
    if lost or replaced:
        # A mark that is void stays until its broker is unfenced: the log is not in `former_directory_ids`.
        held = {each: ids for each, ids in lost if each in replaced or image.is_lost(partition, each)}
        lost = tuple(sorted({**replaced, **held}.items()))
    if offline == partition.offline_replicas and lost == partition.lost_replicas:
        return partition
    return replace(partition, offline_replicas=offline, lost_replicas=lost)


def without_marks(partition: PartitionImage, broker_ids: Container[int]) -> PartitionImage:
    """Return the partition without any mark of replicas on these brokers; the same object when there is none."""
    offline = tuple(each for each in partition.offline_replicas if each[0] not in broker_ids)
    lost = tuple(each for each in partition.lost_replicas if each[0] not in broker_ids)
    if offline == partition.offline_replicas and lost == partition.lost_replicas:
        return partition
    return replace(partition, offline_replicas=offline, lost_replicas=lost)


def lacks_mark(partition: PartitionImage, broker: BrokerImage) -> bool:
    """Whether a replica on a broker that came back without its log directories is not marked as lost yet."""
    return (
        bool(broker.former_directory_ids)
        and broker.broker_id in partition.replicas
        and all(marked != broker.broker_id for marked, _ in partition.lost_replicas)
    )


def has_log(image: MetadataImage, partition: PartitionImage, broker_id: int) -> bool:
    """Whether nothing is known that keeps the replica's log from being there and working."""
    return not image.is_offline(partition, broker_id) and not image.is_lost(partition, broker_id)


def why_leaderless(image: MetadataImage, topic: str, partition: PartitionImage) -> str | None:
    """Return what happened and what to do, where nobody leads because the log went with a disk; else None."""
    lost = [each for each, _ in partition.lost_replicas if image.is_lost(partition, each)]
    return why_lost(topic, partition.leader, partition.replicas, partition.isr, lost)
