"""What a node shows of the metadata quorum; a controller more than a broker, the active one most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

from broker.loop_lag import LoopLagMonitor
from broker.observability.broker_families import PREFIX, counter, gauge, histogram_family
from broker.observability.counters import Counters
from raftmeta.image import NO_LEADER, MetadataImage
from raftmeta.quorum.description import RaftView

ROLES = ("leader", "candidate", "follower")


class Voter(Protocol):
    """What is asked of a node that has a vote."""

    @property
    def is_active_controller(self) -> bool: ...
    def raft_view(self) -> RaftView: ...


class NodeFamilies:
    """A collector: the process, its loop, its view of the metadata, and its vote, if it has one."""

    def __init__(
        self,
        node_id: int,
        version: str,
        image: Callable[[], MetadataImage],
        loop_lag: LoopLagMonitor,
        voter: Voter | None,
        counters: Counters,
    ) -> None:
        self._node_id = node_id
        self._version = version
        self._image = image
        self._loop_lag = loop_lag
        self._voter = voter
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        image = self._image()
        yield InfoMetricFamily(
            f"{PREFIX}build", "What runs here.", {"version": self._version, "node_id": str(self._node_id)}
        )
        yield histogram_family(
            "event_loop_lag_seconds", "By how much the event loop woke too late.", self._loop_lag.seconds
        )
        yield gauge("metadata_offset", "Metadata offset of the image that this node acts on.", image.offset)
        yield gauge("controller_epoch", "Epoch of the controller that this node knows.", image.controller_epoch)
        active = self._voter is not None and self._voter.is_active_controller
        yield gauge("active_controller_count", "1 on the active controller, 0 elsewhere; the sum has to be 1.", active)
        if self._voter is not None:
            yield from _raft(self._voter.raft_view())
            yield from self._decided()
        if active:
            yield from _cluster(image)

    def _decided(self) -> Iterator[Metric]:
        counters = self._counters
        yield histogram_family(
            "raft_commit_latency_seconds",
            "Seconds from the proposal of a command until it was applied, on the node that leads.",
            counters.commit_seconds,
        )
        yield counter(
            "leader_elections",
            "Partitions that got another leader while this node was the active controller.",
            counters.leader_elections,
        )
        yield counter(
            "unclean_leader_elections",
            "Those of them that got one which was not in sync: committed records may be lost.",
            counters.unclean_leader_elections,
        )


def _raft(view: RaftView) -> Iterator[Metric]:
    state = GaugeMetricFamily(f"{PREFIX}raft_state", "1 for the role that this voter has.", labels=("state",))
    for role in ROLES:
        state.add_metric([role], view.role == role)
    yield state
    for name, doc, value in (
        ("raft_term", "Raft term, which is the controller epoch.", view.term),
        ("raft_leader_id", "Voter that leads, as this one knows; -1: none.", view.leader_id),
        ("raft_commit_index", "Last committed entry.", view.commit_index),
        ("raft_applied_index", "Last applied entry.", view.last_applied),
        ("raft_log_end_index", "Last entry of the log.", view.last_index),
        ("raft_snapshot_index", "Last entry that the snapshot covers.", view.snapshot_index),
    ):
        yield gauge(name, doc, value)
    lags = GaugeMetricFamily(
        f"{PREFIX}raft_voter_lag", "Entries that a voter lacks, as the leader knows.", labels=("voter",)
    )
    for voter_id, lag in sorted(view.lags.items()):
        lags.add_metric([str(voter_id)], lag)
    yield lags


def _cluster(image: MetadataImage) -> Iterator[Metric]:
    """Kafka's KafkaController: the whole cluster, as the one who decides sees it."""
    partitions = offline = elsewhere = 0
    for topic in image.topics.values():
        partitions += len(topic.partitions)
        for part in topic.partitions:
            offline += part.leader == NO_LEADER
            elsewhere += part.leader != NO_LEADER and part.leader != part.replicas[0]
    brokers = image.brokers.values()
    for name, doc, value in (
        ("global_topic_count", "Topics.", len(image.topics)),
        ("global_partition_count", "Partitions.", partitions),
        ("offline_partitions_count", "Partitions that nobody leads.", offline),
        ("preferred_replica_imbalance_count", "Partitions whose first replica does not lead.", elsewhere),
        ("active_broker_count", "Brokers that may be given work.", sum(broker.active for broker in brokers)),
        ("fenced_broker_count", "Registered brokers that are fenced.", sum(broker.fenced for broker in brokers)),
    ):
        yield gauge(name, doc, value)
