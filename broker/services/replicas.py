"""DescribeReplicas: how far the replicas of the partitions that this broker leads are, as their leader sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Final, Protocol

from raftlog.errors import RaftlogError
from raftlog.v1.admin_pb2 import PartitionReplicas

PARTITIONS_AT_A_TIME: Final = 100
"""Then the event loop has its turn."""


class ReplicaView(Protocol):
    """One replica; -1 where the leader does not know. Times are of the monotonic clock."""

    @property
    def broker_id(self) -> int: ...
    @property
    def held_end_offset(self) -> int: ...
    @property
    def lag(self) -> int: ...
    @property
    def last_caught_up_ms(self) -> int: ...
    @property
    def in_sync(self) -> bool: ...


class DescriptionView(Protocol):
    """A partition as its leader sees it, the leader's own replica first."""

    @property
    def leader_epoch(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def log_end_offset(self) -> int: ...
    @property
    def replicas(self) -> Iterable[ReplicaView]: ...


class LogIdentity(Protocol):
    """Which partition a log is of."""

    @property
    def topic_id(self) -> bytes: ...
    @property
    def partition(self) -> int: ...


class PartitionView(Protocol):
    """A partition of this broker; `describe_replicas` raises where another broker leads, or nobody."""

    @property
    def log(self) -> LogIdentity: ...
    def describe_replicas(self) -> DescriptionView: ...


async def describe_replicas(
    partitions: Iterable[PartitionView], topic_ids: Collection[bytes], now_ms: float
) -> list[PartitionReplicas]:
    """Return the partitions of these topics (of all, if none is named) that are led here, by topic id and number."""
    found = []
    for seen, partition in enumerate(partitions, 1):
        if seen % PARTITIONS_AT_A_TIME == 0:
            await asyncio.sleep(0)
        if topic_ids and partition.log.topic_id not in topic_ids:
            continue
        try:
            led = partition.describe_replicas()
        except RaftlogError:
            continue  # another broker answers for it, or nobody
        found.append(_described(partition.log, led, now_ms))
    return sorted(found, key=lambda each: (each.topic_id, each.partition))


def _described(partition: LogIdentity, led: DescriptionView, now_ms: float) -> PartitionReplicas:
    described = PartitionReplicas(
        topic_id=partition.topic_id,
        partition=partition.partition,
        leader_epoch=led.leader_epoch,
        log_start_offset=led.log_start_offset,
        high_watermark=led.high_watermark,
        log_end_offset=led.log_end_offset,
    )
    for replica in led.replicas:
        known = replica.last_caught_up_ms >= 0
        described.replicas.add(
            broker_id=replica.broker_id,
            log_end_offset=replica.held_end_offset,
            lag=replica.lag,
            last_caught_up_ms=max(0, int(now_ms - replica.last_caught_up_ms)) if known else -1,
            in_sync=replica.in_sync,
        )
    return described
