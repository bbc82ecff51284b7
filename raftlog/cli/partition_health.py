"""What is told of partitions and what is wrong with them; pure but for the questions in `lags_of`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import raftlog
from raftlog._core.lost_logs import why_lost
from raftlog._descriptions import BrokerDescription, PartitionDescription, PartitionReplicas, TopicDescription
from raftlog.cli.output import Output, print_note
from raftlog.errors import AuthorizationError, RaftlogError
from raftlog.types import TopicPartition

PATIENCE_S: Final = 3.0
"""How long leaders are asked for lags: what the metadata says is worth showing without them."""

ALWAYS: Final = ("topic", "partition", "leader", "leader_epoch", "replicas", "isr", "lag")
IF_ANY: Final = ("eligible", "offline", "adding", "removing", "lost")
"""Columns that a terminal shows only when there is something in them; scripts get them always."""


class Seen(NamedTuple):
    """What leaders say of their replicas, and which of them said nothing, and why."""

    replicas: Mapping[TopicPartition, PartitionReplicas]
    silent: Mapping[int, RaftlogError]


def ask_leaders(admin: raftlog.Admin, topics: Iterable[str]) -> Seen:
    """Ask leaders how far the replicas are; with a note where one does not answer."""
    silent: dict[int, RaftlogError] = {}
    try:
        found = admin.describe_replicas(topics, silent=silent, timeout=PATIENCE_S)
    except RaftlogError as error:
        print_note(f"note: how far the replicas are is not known: {error}")
        return Seen({}, {})
    refused = {broker: why for broker, why in silent.items() if isinstance(why, AuthorizationError)}
    for broker in refused:
        del silent[broker]  # it answered
    for broker, why in sorted(silent.items()):
        print_note(f"note: leader {broker} does not answer: {why}")
    for reason in dict.fromkeys(str(each) for each in refused.values()):
        print_note(f"note: how far the replicas are: not allowed ({reason})")
    return Seen(found, silent)


def is_under_replicated(part: PartitionDescription) -> bool:
    """Whether a replica that is not new is out of sync."""
    return bool(set(part.replicas) - set(part.adding_replicas) - set(part.isr))


def is_under_min_isr(part: PartitionDescription, min_insync_replicas: int) -> bool:
    """Whether writes with acks=all are refused."""
    return len(part.isr) < min_insync_replicas


def is_at_min_isr(part: PartitionDescription, min_insync_replicas: int) -> bool:
    """Whether writes with acks=all are refused as soon as one more replica falls out of sync."""
    return len(part.isr) == min_insync_replicas


def why_lost_of(topic: str, part: PartitionDescription) -> str | None:
    """Return what happened and what to do where nobody leads because the log is gone with a disk; else None."""
    return why_lost(topic, part.leader, part.replicas, part.isr, part.lost_replicas)


def why_unavailable(topic: str, part: PartitionDescription, silent: Mapping[int, RaftlogError]) -> str | None:
    """Return why nobody can write to it: nobody leads, or its leader is down or does not answer; else None."""
    if part.leader < 0:
        why = why_lost_of(topic, part)
        return "nobody leads it" if why is None else f"nobody leads it: {why}"
    if part.leader in part.offline_replicas:
        return f"leader {part.leader} is down"
    if part.leader in silent:
        return f"leader {part.leader} does not answer: {silent[part.leader]}"
    return None


def state_of(broker: BrokerDescription) -> str:
    """Return what a broker is doing: it is active, is about to stop, has stopped, or is fenced: nobody hears of it."""
    if broker.in_controlled_shutdown:
        return "stopped" if broker.fenced else "stopping"
    return "fenced" if broker.fenced else "active"


def broker_row(broker: BrokerDescription, output: Output) -> dict[str, Any]:
    """Return a broker as a row; for people its state says as well whether it is cordoned or drained."""
    state = state_of(broker)
    if output is Output.TABLE and broker.cordoned:
        what = "cordoned" if not broker.drained else "drained"
        state = f"{state}, {what}{' until it restarts' if broker.drained_until_restart else ''}"
    return {**broker._asdict(), "state": state}


def row_of(topic: TopicDescription, part: PartitionDescription, seen: PartitionReplicas | None) -> dict[str, Any]:
    """Return a partition as a row; lags as `broker:records`, `?` where it is not known."""
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
        lags = {each.broker_id: each.lag for each in seen.replicas}
        row["lag"] = [f"{each}:{'?' if lags.get(each, -1) < 0 else lags[each]}" for each in part.replicas]
    return row


def document_of(
    topic: str, part: PartitionDescription, seen: PartitionReplicas | None, silent: Mapping[int, RaftlogError]
) -> dict[str, Any]:
    """Return a partition for programs; `unavailable` says why, where it is."""
    document: dict[str, Any] = {**part._asdict(), "unavailable": why_unavailable(topic, part, silent)}
    if seen is not None:
        document |= {
            "log_start_offset": seen.log_start_offset,
            "high_watermark": seen.high_watermark,
            "log_end_offset": seen.log_end_offset,
            "replica_lags": [each._asdict() for each in seen.replicas],
        }
    return document
