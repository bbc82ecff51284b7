"""The state of a cluster at one time, from one or two readings: the input of checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from raftlog._core.descriptions import (
    BrokerDescription,
    ClusterDescription,
    ConfigDescription,
    GroupListing,
    HangingTransaction,
    NodeDescription,
    PartitionDescription,
    PartitionLag,
    PartitionReplicas,
    QuorumDescription,
    TopicDescription,
    TransactionListing,
)
from raftlog.types import TopicPartition

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The severities, the worst first. error: something does not work, or records may be lost. warning: that will happen
after one more failure, or after some time. note: the state may be intended."""


class Problem(NamedTuple):
    """A problem that a check finds. `where`: the partitions, brokers or groups; `remedy`: what to do, with commands."""

    severity: Severity
    what: str
    where: tuple[str, ...]
    remedy: str


class Finding(NamedTuple):
    """A problem under the id of its check."""

    check: str
    severity: Severity
    what: str
    where: tuple[str, ...]
    remedy: str


_WORDS = {"hanging": "hanging transactions"}
"""Parts of a picture whose name is no word."""


class Unanswered(NamedTuple):
    """A question without an answer; `part` is the field of `Picture` that is missing or incomplete because of it.

    `who`: a node, topic or group by kind and name; `all` if nothing of the part is known, `some` if it is incomplete.
    `refused`: the answer was that this user lacks the permission.
    """

    part: str
    who: str
    why: str
    refused: bool = False

    @property
    def words(self) -> str:
        """What `part` holds, in words."""
        return _WORDS.get(self.part, self.part)

    def __str__(self) -> str:
        match self.who:
            case "all":
                return f"{self.words}: {self.why}"
            case "some":
                return f"some of the {self.words}: {self.why}"
            case _:
                return f"{self.who}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The state of a cluster. A field is None if it is unknown; `unanswered` has the reasons, and names gaps in others.

    `topics` include internal ones; `configs` are those of topics, by name. `..._before` are readings from `apart_s`
    seconds before; None after a single reading. `silent_leaders` did not describe their replicas, and `silent_nodes`
    did not describe themselves; each has its reason. A node that refuses is in `silent_nodes` and `unanswered`, but not
    in `silent_leaders`. `hidden_topics` are on brokers' disks, but this user may not describe them.
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
        """Return the brokers that are neither fenced nor stopping."""
        return [broker for broker in self.brokers().values() if not broker.fenced and not broker.in_controlled_shutdown]

    def refusals(self) -> list[Unanswered]:
        """Return the questions that this user has no permission for."""
        return [each for each in self.unanswered if each.refused]

    def broker_nodes(self) -> dict[int, NodeDescription]:
        """Return the brokers among the nodes that answered."""
        return {node_id: node for node_id, node in (self.nodes or {}).items() if "broker" in node.roles}

    def topic_config(self, topic: str, key: str) -> str | None:
        """Return a topic's effective config; None if it is unknown."""
        found = (self.configs or {}).get(topic, {}).get(key)
        return found.value if found is not None else None

    def min_insync_replicas(self, topic: str) -> int:
        """Return min.insync.replicas of a topic; if it is unknown, the default, 1."""
        return int(self.topic_config(topic, "min.insync.replicas") or 1)


def setting(node: NodeDescription, key: str) -> str:
    """Return a node's setting; "" if the node's description lacks it."""
    found = node.configs.get(key)
    return found.value if found is not None else ""


def named(topic: str, partition: int) -> str:
    """Return a partition as TOPIC-PARTITION."""
    return f"{topic}-{partition}"


def one_topic(topics: Sequence[str]) -> str:
    """Return the topic for an example command: its name if it is the only one, else TOPIC."""
    return topics[0] if len(set(topics)) == 1 else "TOPIC"


def ids(brokers: Sequence[int] | set[int] | frozenset[int]) -> str:
    """Return ids in a list; `none` for none."""
    return ", ".join(map(str, brokers if isinstance(brokers, Sequence) else sorted(brokers))) or "none"
