"""Rows and problems of partitions and brokers; pure except for `ask_leaders`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import raftlog
from raftlog._core.cluster import why_lost
from raftlog._core.descriptions import BrokerDescription, PartitionDescription, PartitionReplicas, TopicDescription
from raftlog.cli.output import Output, print_note
from raftlog.errors import AuthorizationError, RaftlogError
from raftlog.types import TopicPartition

PATIENCE_S: Final = 3.0
"""The time limit for asking leaders for lags; the metadata is useful without them too."""

ALWAYS: Final = ("topic", "partition", "leader", "leader_epoch", "replicas", "isr", "lag")
IF_ANY: Final = ("eligible", "offline", "adding", "removing", "lost")
"""Columns that a terminal shows only if they have values; scripts always get them."""


class Seen(NamedTuple):
    """The leaders' answers about their replicas; `silent`: the error of each leader that did not answer."""

    replicas: Mapping[TopicPartition, PartitionReplicas]
    silent: Mapping[int, RaftlogError]


def ask_leaders(admin: raftlog.Admin, topics: Iterable[str]) -> Seen:
    """Ask leaders for the progress of their replicas; print a note for each leader that does not answer."""
    silent: dict[int, RaftlogError] = {}
    try:
        found = admin.describe_replicas(topics, silent=silent, timeout=PATIENCE_S)
    except RaftlogError as error:
        print_note(f"note: the lags of replicas are unknown: {error}")
        return Seen({}, {})
    refused = {broker: why for broker, why in silent.items() if isinstance(why, AuthorizationError)}
    for broker in refused:
        del silent[broker]  # it answered
    for broker, why in sorted(silent.items()):
        print_note(f"note: leader {broker} does not answer: {why}")
    for reason in dict.fromkeys(str(each) for each in refused.values()):
        print_note(f"note: the lags of replicas are unknown: not allowed ({reason})")
    return Seen(found, silent)


def is_under_replicated(part: PartitionDescription) -> bool:
    """Return whether a replica is out of sync that is not being added."""
    return bool(set(part.replicas) - set(part.adding_replicas) - set(part.isr))


def is_under_min_isr(part: PartitionDescription, min_insync_replicas: int) -> bool:
    """Return whether writes with acks=all are refused."""
    return len(part.isr) < min_insync_replicas


def is_at_min_isr(part: PartitionDescription, min_insync_replicas: int) -> bool:
    """Return whether writes with acks=all are refused once one more replica falls out of sync."""
    return len(part.isr) == min_insync_replicas


def why_lost_of(topic: str, part: PartitionDescription) -> str | None:
    """Return cause and remedy if the partition has no leader because its log was lost with a disk; else None."""
    return why_lost(topic, part.leader, part.replicas, part.isr, part.lost_replicas)


def why_unavailable(topic: str, part: PartitionDescription, silent: Mapping[int, RaftlogError]) -> str | None:
    """Return why the partition cannot be written to, or None: it has no leader, or its leader is down or silent."""
    if part.leader < 0:
        why = why_lost_of(topic, part)
        return "it has no leader" if why is None else f"it has no leader: {why}"
    if part.leader in part.offline_replicas:
        return f"leader {part.leader} is down"
    if part.leader in silent:
        return f"leader {part.leader} does not answer: {silent[part.leader]}"
    return None


def state_of(broker: BrokerDescription) -> str:
    """Return a broker's state: active, stopping, stopped, or fenced (it does not send heartbeats)."""
    if broker.in_controlled_shutdown:
        return "stopped" if broker.fenced else "stopping"
    return "fenced" if broker.fenced else "active"


def broker_row(broker: BrokerDescription, output: Output) -> dict[str, Any]:
    """Return a broker as a row; in tables its state also says whether it is cordoned, drained or full."""
    state = state_of(broker)
    if output is not Output.JSON and broker.cordoned:
        what = "cordoned" if not broker.drained else "drained"
        state = f"{state}, {what}{' until it restarts' if broker.drained_until_restart else ''}"
    if output is Output.TABLE and broker.storage_full:
        state = f"{state}, disk full"
    return {**broker._asdict(), "state": state}


def row_of(topic: TopicDescription, part: PartitionDescription, seen: PartitionReplicas | None) -> dict[str, Any]:
    """Return a partition as a row; lags as `broker:records`, with `?` for an unknown one, or an old one of a broker
    that is down."""
    row: dict[str, Any] = {
        "topic": topic.name,
        "partition": part.partition,
        "leader": part.leader if part.leader >= 0 else None,
        "leader_epoch": part.leader_epoch,
        "replicas": part.replicas,
        "isr": part.isr,
        "lag": [],
        "eligible": part.eligible_leader_replicas,
        "offline": part.offline_replicas,
        "adding": part.adding_replicas,
        "removing": part.removing_replicas,
        "lost": part.lost_replicas,
    }
    if seen is not None:
        lags = {each.broker_id: each.lag for each in seen.replicas if each.broker_id not in part.offline_replicas}
        row["lag"] = [f"{each}:{'?' if lags.get(each, -1) < 0 else lags[each]}" for each in part.replicas]
    return row


def document_of(
    topic: str, part: PartitionDescription, seen: PartitionReplicas | None, silent: Mapping[int, RaftlogError]
) -> dict[str, Any]:
    """Return a partition for programs; `unavailable` is the reason, or None."""
    document: dict[str, Any] = {**part._asdict(), "unavailable": why_unavailable(topic, part, silent)}
    if seen is not None:
        document |= {
            "log_start_offset": seen.log_start_offset,
            "high_watermark": seen.high_watermark,
            "log_end_offset": seen.log_end_offset,
            "replica_lags": [each._asdict() for each in seen.replicas],
        }
    return document
