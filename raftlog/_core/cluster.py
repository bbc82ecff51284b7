"""What a client knows of the cluster: brokers, topics, who leads what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from raftlog._core.lost_logs import why_lost
from raftlog.errors import RaftlogError, from_wire
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, metadata_pb2


class BrokerView(NamedTuple):
    """One broker and where clients reach it."""

    broker_id: int
    host: str
    port: int
    rack: str = ""
    fenced: bool = False

    @property
    def address(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        return join_address(self.host, self.port)


class PartitionView(NamedTuple):
    """One partition: `leader` is -1 when nobody leads."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...] = ()
    isr: tuple[int, ...] = ()
    eligible_leader_replicas: tuple[int, ...] = ()
    adding_replicas: tuple[int, ...] = ()
    removing_replicas: tuple[int, ...] = ()
    offline_replicas: tuple[int, ...] = ()
    lost_replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TopicView:
    """One topic, by name and id."""

    name: str
    topic_id: bytes
    partitions: tuple[PartitionView, ...]
    internal: bool = False


def join_address(host: str, port: int) -> str:
    """Return `host:port` as gRPC wants it."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _partition(info: metadata_pb2.PartitionInfo) -> PartitionView:
    return PartitionView(
        info.partition,
        info.leader,
        info.leader_epoch,
        tuple(info.replicas),
        tuple(info.isr),
        tuple(info.eligible_leader_replicas),
        tuple(info.adding_replicas),
        tuple(info.removing_replicas),
        tuple(info.offline_replicas),
        tuple(info.lost_replicas),
    )


def _broker(info: metadata_pb2.BrokerInfo) -> BrokerView:
    return BrokerView(info.broker_id, info.host, info.port, info.rack, info.fenced)


class ClusterCache:
    """The last that was heard, never older than what was heard before.

    Invariants: for one topic id the leader epoch of a partition never goes back, whichever broker answers (KIP-232);
    `metadata_offset` never goes back within a cluster, and an answer from before it only adds what was not known;
    a topic stands either in `topics` or in `missing`, or was never asked for.
    """

    def __init__(self) -> None:
        self.cluster_id = ""
        self.metadata_offset = -1
        self.controller_id = -1
        self.controller_epoch = -1
        self.brokers: dict[int, BrokerView] = {}
        self.topics: dict[str, TopicView] = {}
        self.missing: dict[str, RaftlogError] = {}

    def is_older(self, response: metadata_pb2.MetadataResponse) -> bool:
        """Whether an answer comes from a broker that knows less than one that answered before."""
        return response.cluster_id == self.cluster_id and response.metadata_offset < self.metadata_offset

    def merge(self, response: metadata_pb2.MetadataResponse, *, all_topics: bool) -> bool:
        """Take an answer in; return whether any topic changed. With `all_topics`, what is not named is gone."""
        if self.is_older(response):
            return self._merge_older(response)
        self.cluster_id, self.metadata_offset = response.cluster_id, response.metadata_offset
        if response.controller_epoch >= self.controller_epoch:
            self.controller_id, self.controller_epoch = response.controller_id, response.controller_epoch
        brokers = {info.broker_id: _broker(info) for info in response.brokers}
        changed = brokers != self.brokers
        self.brokers = brokers
        named = set()
        for info in response.topics:
            named.add(info.name)
            changed |= self._merge_topic(info)
        if all_topics:
            for name in self.topics.keys() - named:
                del self.topics[name]
                changed = True
        return changed

    def _merge_older(self, response: metadata_pb2.MetadataResponse) -> bool:
        """Add the brokers and topics that nobody has told of yet: better than nothing, and no step back."""
        changed = False
        for info in response.brokers:
            if info.broker_id not in self.brokers:
                self.brokers = {**self.brokers, info.broker_id: _broker(info)}
                changed = True
        for topic in response.topics:
            denied = topic.HasField("error") and topic.error.code
            if not denied and topic.name not in self.topics and topic.name not in self.missing:
                changed |= self._merge_topic(topic)
        return changed

    def _merge_topic(self, info: metadata_pb2.TopicInfo) -> bool:
        known = self.topics.get(info.name)
        if info.HasField("error") and info.error.code:
            self.missing[info.name] = from_wire(info.error)
            return self.topics.pop(info.name, None) is not None
        self.missing.pop(info.name, None)
        partitions = []
        for part in sorted(info.partitions, key=lambda part: part.partition):
            view = _partition(part)
            if known is not None and known.topic_id == info.topic_id and view.partition < len(known.partitions):
                older = known.partitions[view.partition]
                if older.leader_epoch > view.leader_epoch:
                    view = older
            partitions.append(view)
        topic = TopicView(info.name, info.topic_id, tuple(partitions), info.internal)
        if topic == known:
            return False
        self.topics[info.name] = topic
        return True

    def apply_hint(self, topic: str, partition: int, hint: common_pb2.LeaderHint) -> bool:
        """Take in who leads now, from a refusal (KIP-951); return whether that was news."""
        known = self.topics.get(topic)
        if known is None or partition >= len(known.partitions):
            return False
        view = known.partitions[partition]
        if hint.leader_epoch <= view.leader_epoch:
            return False
        if hint.host and hint.leader_id >= 0:
            self.brokers[hint.leader_id] = BrokerView(hint.leader_id, hint.host, hint.port)
        partitions = list(known.partitions)
        partitions[partition] = view._replace(leader=hint.leader_id, leader_epoch=hint.leader_epoch)
        self.topics[topic] = replace(known, partitions=tuple(partitions))
        return True

    def without_leader(self, topic_partition: TopicPartition) -> str | None:
        """Return a sentence that says that nobody leads the partition, None when somebody does or it is not known."""
        view = self.partition(topic_partition)
        if view is None or view.leader >= 0:
            return None
        replicas, isr = (", ".join(map(str, each)) for each in (view.replicas, view.isr))
        sentence = f"{topic_partition} has no leader (replicas {replicas}; in sync {isr})"
        why = why_lost(topic_partition.topic, view.leader, view.replicas, view.isr, view.lost_replicas)
        return sentence if why is None else f"{sentence}: {why}"

    def partition(self, topic_partition: TopicPartition) -> PartitionView | None:
        """Return what is known of a partition."""
        topic = self.topics.get(topic_partition.topic)
        if topic is None or not 0 <= topic_partition.partition < len(topic.partitions):
            return None
        return topic.partitions[topic_partition.partition]

    def leader(self, topic: str, partition: int) -> BrokerView | None:
        """Return the broker that leads the partition, None when nobody does as far as is known."""
        view = self.partition(TopicPartition(topic, partition))
        return self.brokers.get(view.leader) if view is not None else None
