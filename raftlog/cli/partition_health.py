"""What is told of partitions and what is wrong with them; pure but for the questions in `lags_of`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import raftlog
from raftlog._descriptions import PartitionDescription, PartitionReplicas, TopicDescription
from raftlog.cli.output import print_note
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition

PATIENCE_S: Final = 3.0
"""How long leaders are asked for lags: what the metadata says is worth showing without them."""

ALWAYS: Final = ("topic", "partition", "leader", "leader_epoch", "replicas", "isr", "lag")
IF_ANY: Final = ("eligible", "offline", "adding", "removing")
"""Columns that a terminal shows only when there is something in them; scripts get them always."""


def lags_of(admin: raftlog.Admin, topics: Iterable[str]) -> Mapping[TopicPartition, PartitionReplicas]:
    """Return what leaders say of the replicas; nothing, and a note, where none of them answers."""
    try:
        return admin.describe_replicas(topics, timeout=PATIENCE_S)
    except RaftlogError as error:
        print_note(f"note: how far the replicas are is not known: {error}")
        return {}


def is_under_replicated(part: PartitionDescription) -> bool:
    """Whether a replica that is not new is out of sync."""
    return bool(set(part.replicas) - set(part.adding_replicas) - set(part.isr))


def is_under_min_isr(part: PartitionDescription, min_insync_replicas: int) -> bool:
    """Whether writes with acks=all are refused."""
    return len(part.isr) < min_insync_replicas


def is_unavailable(part: PartitionDescription) -> bool:
    """Whether nobody leads, or the leader's broker is down."""
    return part.leader < 0 or part.leader in part.offline_replicas


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
    }
    if seen is not None:
        lags = {each.broker_id: each.lag for each in seen.replicas}
        row["lag"] = [f"{each}:{'?' if lags.get(each, -1) < 0 else lags[each]}" for each in part.replicas]
    return row


def document_of(part: PartitionDescription, seen: PartitionReplicas | None) -> dict[str, Any]:
    """Return a partition for programs."""
    document: dict[str, Any] = part._asdict()
    if seen is not None:
        document |= {
            "log_start_offset": seen.log_start_offset,
            "high_watermark": seen.high_watermark,
            "log_end_offset": seen.log_end_offset,
            "replica_lags": [each._asdict() for each in seen.replicas],
        }
    return document
