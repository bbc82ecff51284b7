"""What is told of consumer groups: rows for tables, documents for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from raftlog._group_descriptions import GroupDescription, GroupListing, GroupMemberDescription, PartitionLag
from raftlog.cli.output import counted
from raftlog.types import TopicPartition

LAG_COLUMNS: Final = (
    "group",
    "topic",
    "partition",
    "current_offset",
    "log_end_offset",
    "lag",
    "lag_seconds",
    "member_id",
    "host",
    "client_id",
)
MEMBER_COLUMNS: Final = (
    "group",
    "member_id",
    "instance_id",
    "client_id",
    "host",
    "epoch",
    "partitions",
    "assigned",
    "to_get",
    "to_let_go",
    "last_heartbeat_ms",
    "connected",
    "subscription",
)

LAG_OPTIONAL: Final = ("member_id", "lag_seconds", "host", "client_id")
MEMBER_OPTIONAL: Final = (
    "assigned",
    "to_get",
    "to_let_go",
    "instance_id",
    "last_heartbeat_ms",
    "connected",
    "subscription",
    "host",
    "client_id",
)
"""Columns that a terminal's table may do without, the last one first."""

Lags = Mapping[TopicPartition, PartitionLag]


def listed(group: GroupListing) -> dict[str, Any]:
    """Return a group of a list under the names that `document` has."""
    return {
        "group_id": group.group_id,
        "state": group.state,
        "member_count": group.members,
        "coordinator_id": group.coordinator_id,
    }


def headline(group: GroupDescription) -> str:
    """Return a line on the group as a whole."""
    parts = [group.state, counted(len(group.members), "member")]
    if group.assignor:
        parts.append(f"assignor {group.assignor}")
    parts.append(f"coordinator {group.coordinator_id} (__consumer_offsets-{group.offsets_partition})")
    parts.append(f"group epoch {group.group_epoch}")
    if group.assignment_epoch < group.group_epoch:
        parts.append(f"assigned in epoch {group.assignment_epoch}")
    return f"{group.group_id}: {', '.join(parts)}"


def lag_rows(group: GroupDescription, lags: Lags) -> list[dict[str, Any]]:
    """Return a row for each partition, and one for each member that has none."""
    members = {member.member_id: member for member in group.members}
    rows = [_lag_row(group.group_id, part, lag, members.get(lag.member_id)) for part, lag in lags.items()]
    busy = {lag.member_id for lag in lags.values()}
    rows += [
        {"group": group.group_id, **_who(member)} for member in group.members if member.member_id not in busy
    ]  # idle: more members than partitions, or the partitions are still on their way
    return rows


def _lag_row(
    group_id: str, part: TopicPartition, lag: PartitionLag, member: GroupMemberDescription | None
) -> dict[str, Any]:
    return {
        "group": group_id,
        "topic": part.topic,
        "partition": part.partition,
        "current_offset": lag.offset,
        "log_end_offset": lag.log_end_offset,
        "lag": lag.lag,
        "lag_seconds": None if lag.lag_seconds is None else round(lag.lag_seconds, 1),
        "member_id": lag.member_id or None,
        **_who(member),
    }


def _who(member: GroupMemberDescription | None) -> dict[str, Any]:
    if member is None:
        return {}
    return {"member_id": member.member_id, "host": member.host or None, "client_id": member.client_id or None}


def member_rows(group: GroupDescription) -> list[dict[str, Any]]:
    """Return a row for each member."""
    return [
        {
            "group": group.group_id,
            "member_id": member.member_id,
            "instance_id": member.instance_id or None,
            "client_id": member.client_id or None,
            "host": member.host or None,
            "epoch": member.member_epoch,
            "partitions": len(member.assigned),
            "assigned": compact(member.assigned),
            "to_get": compact(set(member.target) - set(member.assigned)),
            "to_let_go": compact(member.pending_revocation),
            "last_heartbeat_ms": member.last_heartbeat_ms if member.last_heartbeat_ms >= 0 else None,
            "connected": member.connected,
            "subscription": [*member.topics, *([f"/{member.pattern}/"] if member.pattern else [])],
        }
        for member in group.members
    ]


def compact(parts: Iterable[TopicPartition]) -> str | None:
    """Return partitions as `a:0-3,7 b:1`, as `--topic` takes them one by one; None for none."""
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(parts):
        by_topic.setdefault(topic, []).append(number)
    return " ".join(f"{topic}:{_ranges(numbers)}" for topic, numbers in by_topic.items()) or None


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def document(group: GroupDescription, lags: Lags) -> dict[str, Any]:
    """Return everything that is known of a group."""
    return {
        **group._asdict(),
        "member_count": len(group.members),
        "members": [
            {
                **member._asdict(),
                **{field: _listed(getattr(member, field)) for field in ("assigned", "target", "pending_revocation")},
            }
            for member in group.members
        ],
        "partitions": [{**part._asdict(), **lag._asdict()} for part, lag in lags.items()],
    }


def _listed(parts: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    return [part._asdict() for part in parts]
