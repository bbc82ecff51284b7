"""Pictures of a cluster in which nothing is wrong, for doctors to look at, and ways to change a thing in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raftlog._core.descriptions import (
    BrokerDescription,
    ClusterDescription,
    ConfigDescription,
    GroupListing,
    LoopLagDescription,
    NodeDescription,
    NodeLogDirDescription,
    OpenFilesDescription,
    PartitionDescription,
    PartitionLag,
    PartitionReplicas,
    QuorumDescription,
    QuorumObserverDescription,
    QuorumVoterDescription,
    ReplicaDescription,
    TopicDescription,
    VoterDescription,
)
from raftlog._doctor.picture import Picture
from raftlog.types import TopicPartition

NOW_MS = 1_800_000_000_000
GIB = 1 << 30
ORDERS = TopicPartition("orders", 0)


def partition(number: int, replicas: Sequence[int], **changes: Any) -> PartitionDescription:
    """Return a partition that is led by its first replica, with all in sync."""
    whole = PartitionDescription(number, replicas[0], 1, list(replicas), list(replicas), [], [], [], [], [])
    return whole._replace(**changes)


def topic(name: str, *partitions: PartitionDescription) -> TopicDescription:
    """Return a topic."""
    return TopicDescription(name, name.encode().ljust(16, b"-"), name.startswith("__"), list(partitions))


def broker(broker_id: int, **changes: Any) -> BrokerDescription:
    """Return a broker at work."""
    whole = BrokerDescription(broker_id, f"b{broker_id}", 9092, "", False, broker_epoch=broker_id, replicas=2)
    return whole._replace(**changes)


def voter(node_id: int, state: str = "follower", **changes: Any) -> QuorumVoterDescription:
    """Return a voter that is as far as the leader."""
    return QuorumVoterDescription(node_id, f"b{node_id}", 9093, state, 100, 0, 10)._replace(**changes)


def observer(broker_id: int, **changes: Any) -> QuorumObserverDescription:
    """Return a broker that acts on the newest metadata."""
    return QuorumObserverDescription(broker_id, 100, 0, False, 100)._replace(**changes)


def config(key: str, value: str, source: str = "default") -> ConfigDescription:
    """Return a setting."""
    return ConfigDescription(key, value, source, False, "")


def configs(values: Mapping[str, str], source: str = "static_broker") -> dict[str, ConfigDescription]:
    """Return settings."""
    return {key: config(key, value, source) for key, value in values.items()}


def log_dir(**changes: Any) -> NodeLogDirDescription:
    """Return a directory with space."""
    return NodeLogDirDescription("/data", False, None, 100 * GIB, 60 * GIB, GIB, 2)._replace(**changes)


def node(node_id: int, **changes: Any) -> NodeDescription:
    """Return a node that is a broker and a controller."""
    whole = NodeDescription(
        node_id=node_id,
        cluster_id="cluster",
        version="1.0",
        roles=["broker", "controller"],
        clock_offset_ms=0.0,
        clock_uncertainty_ms=2.0,
        uptime_ms=1_000_000,
        not_ready="",
        hostname=f"host-{node_id}",
        pid=node_id,
        python_version="3.11",
        platform="Linux",
        client_listener=f"b{node_id}:9092",
        inter_node_listener="127.0.0.1:9093",
        metrics_listener="",
        log_file="",
        metadata_offset=100,
        controller_id=1,
        controller_epoch=1,
        loop_lag=LoopLagDescription(10_000, 20.0, 0.001, 0.0),
        open_files=OpenFilesDescription(100, 100_000, 100_000),
        voter=VoterDescription("follower", 1, 1, 100, 100, 100, 0),
        log_dirs=[log_dir()],
        features={"metadata.version": (1, 2)},
        configs=configs(
            {
                "node.id": str(node_id),
                "listeners": "127.0.0.1:9092",
                "num.partitions": "1",
                "controller.quorum.voters": "1@b1:9093,2@b2:9093,3@b3:9093",
            }
        ),
        certificate_expires_ms=0,
        asked_through=f"b{node_id}:9092",
    )
    return whole._replace(**changes)


def replicas(part: TopicPartition, **ends: int) -> PartitionReplicas:
    """Return how far replicas are, `b2=90`: broker 2 up to 90; the leader is broker 1 with 100."""
    progress = [ReplicaDescription(1, 100, 0, 0, True)]
    for name, end in ends.items():
        progress.append(ReplicaDescription(int(name[1:]), end, 100 - end, 0, end == 100))
    return PartitionReplicas(*part, 1, 1, 0, 100, 100, progress)


def lag(offset: int | None = 100, **changes: Any) -> PartitionLag:
    """Return how far a group is in a partition that ends at 100."""
    left = None if offset is None else max(0, 100 - offset)
    seconds = None if offset is None else (0.0 if not left else 1.0)
    return PartitionLag(offset, 0, 100, left, seconds, "", NOW_MS, "member", None)._replace(**changes)


def cluster(*brokers: BrokerDescription, level: int = 2) -> ClusterDescription:
    """Return a cluster of these brokers."""
    return ClusterDescription("cluster", 1, 1, list(brokers), 100, {"metadata.version": level})


def quorum(*voters: QuorumVoterDescription, **changes: Any) -> QuorumDescription:
    """Return a quorum of these voters, led by 1."""
    seen = [observer(broker_id) for broker_id in (1, 2, 3)]
    return QuorumDescription("cluster", 1, 1, 100, 0, 100, 0, 0, 0, 1, list(voters), seen)._replace(**changes)


def healthy(**changes: Any) -> Picture:
    """Return three nodes with a topic and a group, in order; `changes` are parts of the picture."""
    orders = topic("orders", partition(0, [1, 2, 3]), partition(1, [2, 3, 1]), partition(2, [3, 1, 2]))
    progress = {ORDERS: replicas(ORDERS, b2=100, b3=100)}
    lags = {"billing": {ORDERS: lag()}}
    return replace(
        Picture(
            taken_at_ms=NOW_MS,
            apart_s=3.0,
            cluster=cluster(broker(1), broker(2), broker(3)),
            quorum=quorum(voter(1, "leader"), voter(2), voter(3)),
            topics=[orders],
            configs={
                "orders": configs(
                    {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}, "dynamic_broker"
                )
            },
            replicas=progress,
            replicas_before=progress,
            nodes={node_id: node(node_id) for node_id in (1, 2, 3)},
            groups=[GroupListing("billing", "stable", 1, 1)],
            lags=lags,
            lags_before=lags,
            hanging=[],
            transactions=[],
        ),
        **changes,
    )
