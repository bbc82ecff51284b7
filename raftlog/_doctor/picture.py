"""What is known of a cluster at one time, from one look or two: what checks are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from raftlog._descriptions import (
    BrokerDescription,
    ClusterDescription,
    ConfigDescription,
    PartitionDescription,
    PartitionReplicas,
    QuorumDescription,
    TopicDescription,
)
from raftlog._group_descriptions import GroupListing, PartitionLag
from raftlog._node_descriptions import NodeDescription
from raftlog._transaction_descriptions import HangingTransaction, TransactionListing
from raftlog.types import TopicPartition

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The worst one first. error: something does not work, or records may be lost. warning: it works, and one more failure
or some time will change that. note: worth knowing; it may be meant."""


class Finding(NamedTuple):
    """Something that a check found. `where`: the partitions, brokers or groups; `remedy`: what to do, with commands."""

    check: str
    severity: Severity
    what: str
    where: tuple[str, ...]
    remedy: str


class Unanswered(NamedTuple):
    """A question that got no answer; `part` is the part of the picture that is missing for it, or not whole.

    `who`: a node, topic or group by kind and name; `all` when nothing of the part is known, `some` when a part of it.
    `refused`: there was an answer, that this user may not look at it.
    """

    part: str
    who: str
    why: str
    refused: bool = False

    def __str__(self) -> str:
        match self.who:
            case "all":
                return f"{self.part}: {self.why}"
            case "some":
                return f"some of the {self.part}: {self.why}"
            case _:
                return f"{self.who}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is known. A part that is None could not be had; `unanswered` says why, and who is missing in the others.

    `topics` include the internal ones. `configs`: of topics, by name. `replicas` and `lags` are there twice: as they
    were `apart_s` seconds before; without a second look both `..._before` are None. `silent_leaders` did not say how
    far their replicas are, `silent_nodes` nothing of themselves; why, by id. Who refuses is none of the former, and
    both of the latter and of `unanswered`. `hidden_topics`: on disks of brokers, and this user may not describe them.
    """

    taken_at_ms: int
    apart_s: float = 0.0
    cluster: ClusterDescription | None = None
    quorum: QuorumDescription | None = None
    topics: Sequence[TopicDescription] | None = None
    hidden_topics: Sequence[str] = ()
    configs: Mapping[str, Mapping[str, ConfigDescription]] | None = None
    replicas: Mapping[TopicPartition, PartitionReplicas] | None = None
    replicas_before: Mapping[TopicPartition, PartitionReplicas] | None = None
    silent_leaders: Mapping[int, str] = field(default_factory=dict)
    nodes: Mapping[int, NodeDescription] | None = None
    silent_nodes: Mapping[int, str] = field(default_factory=dict)
    groups: Sequence[GroupListing] | None = None
    lags: Mapping[str, Mapping[TopicPartition, PartitionLag]] | None = None
    lags_before: Mapping[str, Mapping[TopicPartition, PartitionLag]] | None = None
    hanging: Sequence[HangingTransaction] | None = None
    transactions: Sequence[TransactionListing] | None = None
    unanswered: Sequence[Unanswered] = ()

    def partitions(self) -> Iterator[tuple[TopicDescription, PartitionDescription]]:
        """Yield every partition with its topic."""
        for topic in self.topics or ():
            for part in topic.partitions:
                yield topic, part

    def brokers(self) -> Mapping[int, BrokerDescription]:
        """Return the registered brokers by id."""
        return {broker.broker_id: broker for broker in self.cluster.brokers} if self.cluster is not None else {}

    def live_brokers(self) -> list[BrokerDescription]:
        """Return those that serve: neither fenced nor stopping."""
        return [broker for broker in self.brokers().values() if not broker.fenced and not broker.in_controlled_shutdown]

    def refusals(self) -> list[Unanswered]:
        """Return what this user was not allowed to look at."""
        return [each for each in self.unanswered if each.refused]

    def broker_nodes(self) -> dict[int, NodeDescription]:
        """Return the brokers among the nodes that answered."""
        return {node_id: node for node_id, node in (self.nodes or {}).items() if "broker" in node.roles}

    def topic_config(self, topic: str, key: str) -> str | None:
        """Return a topic's config as it is in effect; None where it is not known."""
        found = (self.configs or {}).get(topic, {}).get(key)
        return found.value if found is not None else None

    def min_insync_replicas(self, topic: str) -> int:
        """Return min.insync.replicas of a topic; 1, which is the default, where it is not known."""
        return int(self.topic_config(topic, "min.insync.replicas") or 1)


def named(topic: str, partition: int) -> str:
    """Return a partition as people write it."""
    return f"{topic}-{partition}"


def one_topic(topics: Sequence[str]) -> str:
    """Return the topic for a command that is to be given for each: its name where it is the only one, else TOPIC."""
    return topics[0] if len(set(topics)) == 1 else "TOPIC"


def ids(brokers: Sequence[int] | set[int] | frozenset[int]) -> str:
    """Return ids in a list; `none` for none."""
    return ", ".join(map(str, brokers if isinstance(brokers, Sequence) else sorted(brokers))) or "none"
