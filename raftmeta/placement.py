"""Which brokers hold a new partition: evenly, racks apart, the same on every controller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raftlog.errors import InvalidReplicationFactor
from raftmeta.image import NO_LOAD, BrokerImage, MetadataImage


def place_partitions(image: MetadataImage, partitions: int, replication_factor: int) -> Iterator[tuple[int, ...]]:
    """Yield the replicas of each of `partitions` new partitions, the preferred leader first.

    The leader is the broker that leads fewest partitions, the others those that hold fewest, first from racks that
    the partition is not in yet; ties go to the lowest broker id. Brokers that are fenced, shutting down, cordoned or
    drained get nothing.
    What each has comes from `image.load`, so the partitions that are there already cost nothing.

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
    led = {broker.broker_id: image.load.get(broker.broker_id, NO_LOAD).leaderships for broker in available}
    held = {broker.broker_id: image.load.get(broker.broker_id, NO_LOAD).replicas for broker in available}
    return _place(available, led, held, partitions, replication_factor)


def _place(
    available: Sequence[BrokerImage],
    led: dict[int, int],
    held: dict[int, int],
    partitions: int,
    replication_factor: int,
) -> Iterator[tuple[int, ...]]:
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
        led[leader] += 1
        for broker_id in replicas:
            held[broker_id] += 1
        yield tuple(replicas)
