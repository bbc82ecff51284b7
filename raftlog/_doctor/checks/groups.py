"""Checks of consumer groups, which fall behind or lose unread records, and of transactions that block consumers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from raftlog._core.descriptions import ONGOING, PartitionLag
from raftlog._core.words import counted
from raftlog._doctor.picture import Picture, Problem, named
from raftlog._doctor.report import Check
from raftlog.types import TopicPartition

BEHIND_S: Final = 300.0
"""A group whose oldest unread record is at least this old counts as behind."""


def _members(picture: Picture) -> Mapping[str, int]:
    return {group.group_id: group.members for group in picture.groups or ()}


def _behind(lags: Mapping[TopicPartition, PartitionLag]) -> dict[TopicPartition, PartitionLag]:
    """Return the partitions with a lag."""
    return {part: lag for part, lag in lags.items() if lag.lag}


def _said(part: TopicPartition, lag: PartitionLag) -> str:
    age = "" if lag.lag_seconds is None else f", the oldest {lag.lag_seconds:,.0f} s old"
    return f"{named(*part)}: lag {lag.lag or 0:,}{age}"


def growing(picture: Picture) -> Iterator[Problem]:
    """Find groups with members whose lag is large and does not shrink between two readings."""
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
            yield Problem(
                "warning",
                f"group {group_id} is behind in {counted(len(late), 'partition')}, and its lag did not shrink within "
                f"{picture.apart_s:.0f} s",
                tuple(late),
                f"raftlog group describe {group_id} shows the members of these partitions: check them; more members "
                "help, up to one for each partition",
            )


def unread(picture: Picture) -> Iterator[Problem]:
    """Find groups without members that have a lag. It counts offsets: markers of transactions are among them."""
    members = _members(picture)
    for group_id, lags in sorted((picture.lags or {}).items()):
        left = _behind(lags)
        if left and not members.get(group_id, 0):
            total = sum(lag.lag or 0 for lag in left.values())
            yield Problem(
                "note",
                f"group {group_id} has no members and a lag of {total:,}",
                tuple(_said(part, lag) for part, lag in left.items()),
                f"that is normal for a job that reads from time to time; otherwise start the consumers, or delete the "
                f"group: raftlog group delete {group_id}",
            )


def missed(picture: Picture) -> Iterator[Problem]:
    """Find groups whose next records were deleted unread, or whose offsets are beyond the log."""
    for group_id, lags in sorted((picture.lags or {}).items()):
        lost, beyond = [], []
        for part, lag in lags.items():
            if lag.offset is None:
                continue
            if lag.log_start_offset is not None and lag.offset < lag.log_start_offset:
                lost.append(
                    f"{named(*part)}: {counted(lag.log_start_offset - lag.offset, 'offset')} before the log start"
                )
            elif lag.log_end_offset is not None and lag.offset > lag.log_end_offset:
                beyond.append(f"{named(*part)}: committed {lag.offset:,}, the log ends at {lag.log_end_offset:,}")
        if lost:
            yield Problem(
                "warning",
                f"group {group_id} has missed records: they were deleted unread",
                tuple(lost),
                f"a longer retention.ms prevents that in the future; the group continues as its auto.offset.reset "
                f"says, or after raftlog group reset-offsets {group_id} --all-topics --to-earliest",
            )
        if beyond:
            yield Problem(
                "warning",
                f"group {group_id} has committed offsets beyond the end of the log: the topic was deleted and created "
                "again, or an unclean election has lost records",
                tuple(beyond),
                f"raftlog group reset-offsets {group_id} --all-topics --to-current sets them to the end of the log",
            )


GROUPS_CHECKS = (
    Check(
        "group-lag", "groups that are behind and whose lag does not shrink", ("groups", "lags", "lags_before"), growing
    ),
    Check("group-missed-records", "groups that have missed records", ("groups", "lags"), missed),
    Check("group-empty-with-lag", "groups without members that have a lag", ("groups", "lags"), unread),
)


DECIDED_S: Final = 60.0
"""The age above which missing markers are a finding: normally they are written within a second of the decision."""
LONG_S: Final = 300.0
"""Most producers end a transaction within a minute; transaction.max.timeout.ms is 15 minutes by default."""


def hanging(picture: Picture) -> Iterator[Problem]:
    """Find transactions that no coordinator knows and that never end."""
    found = picture.hanging or ()
    if found:
        yield Problem(
            "error",
            f"{counted(len(found), 'transaction is', 'transactions are')} open but unknown to every coordinator: "
            "read_committed consumers wait behind them forever",
            tuple(
                f"{named(each.topic, each.partition)} from offset {each.start_offset} (producer {each.producer_id})"
                for each in found
            ),
            "raftlog txn abort-hanging "
            + f"{found[0].topic} --partition {found[0].partition} --start-offset {found[0].start_offset}"
            + ("; raftlog txn find-hanging lists all of them" if len(found) > 1 else ""),
        )


def undelivered(picture: Picture) -> Iterator[Problem]:
    """Find decided transactions whose markers are not written."""
    found = []
    for each in picture.transactions or ():
        open_s = (picture.taken_at_ms - each.started_ms) / 1000 if each.started_ms else 0.0
        if each.state in ("prepare_commit", "prepare_abort") and open_s > DECIDED_S:
            name = each.transactional_id or f"sink {each.sink_id}"
            found.append(f"{name}: {each.state} (begun {open_s:,.0f} s ago)")
    if found:
        yield Problem(
            "warning",
            f"{counted(len(found), 'transaction is', 'transactions are')} decided, but lacks markers in partitions; "
            "read_committed consumers wait there",
            tuple(found),
            "raftlog txn describe ID shows the partitions without markers: bring their leaders back; then the markers "
            "are written automatically",
        )


def long_open(picture: Picture) -> Iterator[Problem]:
    """Find transactions and stages that have been open for a long time."""
    found = []
    for each in picture.transactions or ():
        open_s = (picture.taken_at_ms - each.started_ms) / 1000 if each.started_ms else 0.0
        if each.state == ONGOING and open_s > LONG_S:
            found.append(f"{each.transactional_id or f'sink {each.sink_id}'} (for {open_s:,.0f} s)")
    if found:
        yield Problem(
            "note",
            f"{counted(len(found), 'transaction is', 'transactions are')} open for more than {LONG_S / 60:.0f} "
            "minutes; read_committed consumers wait behind them",
            tuple(found),
            "if the producer is gone: raftlog txn abort ID, or raftlog txn abort-stages SINK for a sink; otherwise its "
            "timeout ends it",
        )


TRANSACTIONS_CHECKS = (
    Check("transaction-hanging", "transactions that no coordinator knows", ("hanging",), hanging),
    Check("transaction-undelivered", "decided transactions without markers", ("transactions",), undelivered),
    Check("transaction-long-open", "transactions that are open for a long time", ("transactions",), long_open),
)
