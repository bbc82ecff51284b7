"""Consumer groups that fall behind, or have lost what they had yet to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from raftlog._core.words import counted
from raftlog._doctor.picture import Finding, Picture, named
from raftlog._doctor.report import Check
from raftlog._group_descriptions import PartitionLag
from raftlog.types import TopicPartition

BEHIND_S: Final = 300.0
"""Age of the oldest record that a group has not read, from which on it is behind."""


def _members(picture: Picture) -> Mapping[str, int]:
    return {group.group_id: group.members for group in picture.groups or ()}


def _behind(lags: Mapping[TopicPartition, PartitionLag]) -> dict[TopicPartition, PartitionLag]:
    """Return the partitions with a lag."""
    return {part: lag for part, lag in lags.items() if lag.lag}


def _said(part: TopicPartition, lag: PartitionLag) -> str:
    age = "" if lag.lag_seconds is None else f", the oldest {lag.lag_seconds:,.0f} s old"
    return f"{named(*part)}: {counted(lag.lag or 0, 'record')}{age}"


def growing(picture: Picture) -> Iterator[Finding]:
    """Find groups with members that are behind, and do not get nearer between two looks."""
    members = _members(picture)
    for group_id, lags in sorted((picture.lags or {}).items()):
        before = (picture.lags_before or {}).get(group_id, {})
        late = []
        for part, lag in _behind(lags).items():
            old = before.get(part)
            nearer = old is None or old.lag is None or (lag.lag or 0) < old.lag
            if not nearer and (lag.lag_seconds or 0.0) >= BEHIND_S:
                late.append(_said(part, lag) + (" (not assigned to any member)" if not lag.member_id else ""))
        if late and members.get(group_id, 0):
            yield Finding(
                "group-lag",
                "warning",
                f"group {group_id} is behind in {counted(len(late), 'partition')}, and did not get nearer within "
                f"{picture.apart_s:.0f} s",
                tuple(late),
                f"raftlog group describe {group_id} shows who reads what: look at the member that has these "
                "partitions; more members help up to one for each partition",
            )


def unread(picture: Picture) -> Iterator[Finding]:
    """Find groups without members that have something to read."""
    members = _members(picture)
    for group_id, lags in sorted((picture.lags or {}).items()):
        left = _behind(lags)
        if left and not members.get(group_id, 0):
            total = sum(lag.lag or 0 for lag in left.values())
            yield Finding(
                "group-empty-with-lag",
                "note",
                f"group {group_id} has no members and {counted(total, 'record')} to read",
                tuple(_said(part, lag) for part, lag in left.items()),
                f"where a job reads now and then that is as it should be; else start the consumers, or forget the "
                f"group: raftlog group delete {group_id}",
            )


def missed(picture: Picture) -> Iterator[Finding]:
    """Find groups whose next records were deleted before they were read, or are not there."""
    for group_id, lags in sorted((picture.lags or {}).items()):
        lost, beyond = [], []
        for part, lag in lags.items():
            if lag.offset is None:
                continue
            if lag.log_start_offset is not None and lag.offset < lag.log_start_offset:
                lost.append(f"{named(*part)}: {counted(lag.log_start_offset - lag.offset, 'offset')} before the begin")
            elif lag.log_end_offset is not None and lag.offset > lag.log_end_offset:
                beyond.append(f"{named(*part)}: committed {lag.offset:,}, the log ends at {lag.log_end_offset:,}")
        if lost:
            yield Finding(
                "group-missed-records",
                "warning",
                f"group {group_id} has not read records that are deleted by now",
                tuple(lost),
                f"a longer retention.ms keeps that from happening again; where the group goes on is what its "
                f"auto.offset.reset says, or raftlog group reset-offsets {group_id} --all-topics --to-earliest",
            )
        if beyond:
            yield Finding(
                "group-missed-records",
                "warning",
                f"group {group_id} has committed offsets that lie beyond the end of the log: the topic was made anew, "
                "or records were lost by an unclean election",
                tuple(beyond),
                f"raftlog group reset-offsets {group_id} --all-topics --to-current brings them back into the log",
            )


CHECKS = (
    Check("group-lag", "groups that are behind and do not get nearer", ("groups", "lags", "lags_before"), growing),
    Check("group-missed-records", "groups whose records are gone", ("groups", "lags"), missed),
    Check("group-empty-with-lag", "groups that nobody reads for", ("groups", "lags"), unread),
)
