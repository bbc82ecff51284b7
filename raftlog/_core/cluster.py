"""A client's view of the cluster: addresses, brokers, topics and the leaders of partitions.

Imports nothing of gRPC: Spark checks options in processes that fork.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from raftlog.errors import InvalidConfig, RaftlogError, from_wire
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, metadata_pb2


def why_lost(
    topic: str, leader: int, replicas: Sequence[int], isr: Sequence[int], lost_replicas: Sequence[int]
) -> str | None:
    """Return cause and remedy for a leaderless partition whose whole ISR has lost its log; else None."""
    if leader >= 0 or not lost_replicas or not set(isr) <= set(lost_replicas):
        return None
    left = [replica for replica in replicas if replica not in lost_replicas]
    who = f"{'brokers' if len(isr) > 1 else 'broker'} {_listed(isr)}"
    then = (
        f"which has broker {_listed(left, ' or ')}, if it is up, lead with the records that it has"
        if left
        else "which begins the partition empty"
    )
    return (
        f"{who} alone had every record and came back without the log: the disk was replaced, or is not mounted; "
        "start it with the disk that it had, or give up what is lost: "
        f"raftlog partition elect {topic} --unclean, {then}"
    )


def _listed(ids: Sequence[int], between: str = ", ") -> str:
    return between.join(map(str, ids))


def parse_bootstrap(bootstrap: str | Sequence[str]) -> list[str]:
    """Return the addresses in "host:port,host:port" or in a list of addresses.

    Raises:
        InvalidConfig: an address without a port or with a scheme, no address, or a value that is not text.
    """
    items: Any = bootstrap.split(",") if isinstance(bootstrap, str) else bootstrap
    given = list(items) if isinstance(items, Iterable) else [items]
    if not all(isinstance(item, str) for item in given):
        raise InvalidConfig(f"bootstrap is {bootstrap!r}: give host:port, or a list of such, as text")
    addresses = [item.strip() for item in given if item.strip()]
    if not addresses:
        raise InvalidConfig("bootstrap is empty; name at least one broker as host:port")
    for address in addresses:
        if "://" in address:
            bare = address.partition("://")[2].rstrip("/")
            raise InvalidConfig(f"bootstrap address {address!r} is a URL; leave its scheme out: {bare}")
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidConfig(f"bootstrap address {address!r} is not host:port, for example 127.0.0.1:9092")
    return addresses


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; a name other than localhost counts as reachable from others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class BrokerView(NamedTuple):
    """One broker and its address for clients."""

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
    """One partition; `leader` is -1 if it has none."""

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
    """Return `host:port` for gRPC, an IPv6 address in brackets."""
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
    """The newest metadata that brokers have sent.

    Invariants: for one topic id the leader epoch of a partition never goes back, whichever broker answers (KIP-232);
    `metadata_offset` never goes back within a cluster, and an older response only adds unknown brokers and topics;
    a topic is either in `topics` or in `missing`, or was never requested.
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
        """Whether the response is older than an earlier one of the same cluster."""
        return response.cluster_id == self.cluster_id and response.metadata_offset < self.metadata_offset

    def merge(self, response: metadata_pb2.MetadataResponse, *, all_topics: bool) -> bool:
        """Apply a response; return whether anything changed. With `all_topics`, remove topics that it does not name."""
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
        """Add the brokers and topics of an older response that are not known yet; return whether there were any."""
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

    def apply_hint(self, topic: str, topic_id: bytes, partition: int, hint: common_pb2.LeaderHint) -> bool:
        """Apply the leader hint of a refusal (KIP-951); return whether it was new.

        `topic_id`: the topic of the refused request. A late hint may be about a deleted topic whose name another topic
        has now. That topic's leader epochs begin at 0, so the client, which accepts no lower epoch than it has seen,
        would ignore its true leaders from then on.
        """
        known = self.topics.get(topic)
        if known is None or known.topic_id != topic_id or partition >= len(known.partitions):
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
        """Return a sentence about a partition without a leader, or None if it has one or is unknown."""
        view = self.partition(topic_partition)
        if view is None or view.leader >= 0:
            return None
        replicas, isr = (", ".join(map(str, each)) for each in (view.replicas, view.isr))
        sentence = f"{topic_partition} has no leader (replicas {replicas}; in sync {isr})"
        why = why_lost(topic_partition.topic, view.leader, view.replicas, view.isr, view.lost_replicas)
        return sentence if why is None else f"{sentence}: {why}"

    def partition(self, topic_partition: TopicPartition) -> PartitionView | None:
        """Return the view of a partition, or None if it is unknown."""
        topic = self.topics.get(topic_partition.topic)
        if topic is None or not 0 <= topic_partition.partition < len(topic.partitions):
            return None
        return topic.partitions[topic_partition.partition]

    def leader(self, topic: str, partition: int) -> BrokerView | None:
        """Return the broker that leads the partition, or None if no leader is known."""
        view = self.partition(TopicPartition(topic, partition))
        return self.brokers.get(view.leader) if view is not None else None
