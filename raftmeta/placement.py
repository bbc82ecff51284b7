"""Which brokers hold a new partition: evenly, racks apart, the same on every controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from raftlog.errors import InvalidReplicationFactor
from raftmeta.image import NO_LEADER, BrokerImage, MetadataImage


def place_partitions(image: MetadataImage, partitions: int, replication_factor: int) -> Iterator[tuple[int, ...]]:
    """Yield the replicas of each of `partitions` new partitions, the preferred leader first.

    The leader is the broker that leads fewest partitions, the others those that hold fewest, first from racks that
    the partition is not in yet; ties go to the lowest broker id. Fenced brokers get nothing.

    Raises:
        InvalidReplicationFactor: below 1 or above the number of brokers that are not fenced.
    """
    available = [broker for _, broker in sorted(image.brokers.items()) if not broker.fenced]
    if not 1 <= replication_factor <= len(available):
        raise InvalidReplicationFactor(
            f"replication factor {replication_factor}: there are {len(available)} brokers that are up "
            f"of {len(image.brokers)} registered, so it can be from 1 to {len(available)}"
        )
    led: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for topic in image.topics.values():
        for partition in topic.partitions:
            if partition.leader != NO_LEADER:
                led[partition.leader] += 1
            held.update(partition.replicas)
    return _place(available, led, held, partitions, replication_factor)


def _place(
    available: list[BrokerImage], led: Counter[int], held: Counter[int], partitions: int, replication_factor: int
) -> Iterator[tuple[int, ...]]:
    for _ in range(partitions):
        leader = min(available, key=lambda broker: (led[broker.broker_id], held[broker.broker_id]))
        chosen = [leader]
        while len(chosen) < replication_factor:
            racks = {broker.rack for broker in chosen}
            rest = [broker for broker in available if broker not in chosen]
            chosen.append(min(rest, key=lambda broker: (broker.rack in racks, held[broker.broker_id])))
        replicas = tuple(broker.broker_id for broker in chosen)
        led[leader.broker_id] += 1
        held.update(replicas)
        yield replicas
