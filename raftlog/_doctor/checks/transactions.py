"""Transactions that hold readers of committed records back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from raftlog._core.words import counted
from raftlog._doctor.picture import Finding, Picture, named
from raftlog._doctor.report import Check
from raftlog._transaction_descriptions import ONGOING

DECIDED_S: Final = 60.0
"""Markers of a decided transaction are written within a second, unless a leader is missing."""
LONG_S: Final = 300.0
"""Most producers end a transaction within a minute; transaction.max.timeout.ms is 15 minutes by default."""


def hanging(picture: Picture) -> Iterator[Finding]:
    """Find transactions that nobody will end."""
    found = picture.hanging or ()
    if found:
        yield Finding(
            "transaction-hanging",
            "error",
            f"{counted(len(found), 'transaction is', 'transactions are')} open of which no coordinator knows: readers "
            "of committed records wait behind them for ever",
            tuple(
                f"{named(each.topic, each.partition)} from offset {each.start_offset} (producer {each.producer_id})"
                for each in found
            ),
            "raftlog txn abort-hanging "
            + f"{found[0].topic} --partition {found[0].partition} --start-offset {found[0].start_offset}"
            + ("; raftlog txn find-hanging lists all of them" if len(found) > 1 else ""),
        )


def undelivered(picture: Picture) -> Iterator[Finding]:
    """Find transactions that are decided, and whose markers do not get written."""
    found = []
    for each in picture.transactions or ():
        open_s = (picture.taken_at_ms - each.started_ms) / 1000 if each.started_ms else 0.0
        if each.state in ("prepare_commit", "prepare_abort") and open_s > DECIDED_S:
            name = each.transactional_id or f"sink {each.sink_id}"
            found.append(f"{name}: {each.state} (begun {open_s:,.0f} s ago)")
    if found:
        yield Finding(
            "transaction-undelivered",
            "warning",
            f"{counted(len(found), 'transaction is', 'transactions are')} decided and not told to all partitions; "
            "readers wait there",
            tuple(found),
            "raftlog txn describe ID shows which partitions are to be told: bring their leaders back; markers are "
            "written by themselves then",
        )


def long_open(picture: Picture) -> Iterator[Finding]:
    """Find transactions and stages that have been open for long."""
    found = []
    for each in picture.transactions or ():
        open_s = (picture.taken_at_ms - each.started_ms) / 1000 if each.started_ms else 0.0
        if each.state == ONGOING and open_s > LONG_S:
            found.append(f"{each.transactional_id or f'sink {each.sink_id}'} (for {open_s:,.0f} s)")
    if found:
        yield Finding(
            "transaction-long-open",
            "note",
            f"{counted(len(found), 'transaction is', 'transactions are')} open for more than {LONG_S / 60:.0f} "
            "minutes; readers of committed records wait behind them",
            tuple(found),
            "where the producer is gone: raftlog txn abort ID, and raftlog txn abort-stages SINK for a sink; else its "
            "timeout ends it",
        )


CHECKS = (
    Check("transaction-hanging", "transactions that nobody ends", ("hanging",), hanging),
    Check("transaction-undelivered", "decided transactions without markers", ("transactions",), undelivered),
    Check("transaction-long-open", "transactions that are open for long", ("transactions",), long_open),
)
