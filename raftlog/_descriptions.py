"""What the admin clients return: plain named tuples."""

from __future__ import annotations

from typing import NamedTuple

from raftlog._core.cluster import TopicView
from raftlog.errors import RaftlogError


class PartitionDescription(NamedTuple):
    """One partition; `leader` is -1 when nobody leads."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]


class TopicDescription(NamedTuple):
    """One topic; `partitions[i]` is partition i."""

    name: str
    topic_id: bytes
    internal: bool
    partitions: list[PartitionDescription]


class BrokerDescription(NamedTuple):
    """One broker."""

    broker_id: int
    host: str
    port: int
    rack: str
    fenced: bool


class ClusterDescription(NamedTuple):
    """The cluster; `controller_id` is -1 when nobody is the active controller."""

    cluster_id: str
    controller_id: int
    controller_epoch: int
    brokers: list[BrokerDescription]


class ConfigDescription(NamedTuple):
    """One config key. `source`: default, static_broker, dynamic_topic or dynamic_broker."""

    key: str
    value: str
    source: str
    read_only: bool
    documentation: str


class LogDirPartition(NamedTuple):
    """One partition in a log directory."""

    topic: str
    partition: int
    size_bytes: int
    log_start_offset: int
    log_end_offset: int
    high_watermark: int
    segments: int


class LogDirDescription(NamedTuple):
    """One log directory of a broker; `error` says why it is offline."""

    broker_id: int
    path: str
    error: RaftlogError | None
    total_bytes: int
    usable_bytes: int
    partitions: list[LogDirPartition]


def describe(view: TopicView) -> TopicDescription:
    """Return a topic as users see it."""
    return TopicDescription(
        view.name,
        view.topic_id,
        view.internal,
        [
            PartitionDescription(part.partition, part.leader, part.leader_epoch, list(part.replicas), list(part.isr))
            for part in view.partitions
        ],
    )
