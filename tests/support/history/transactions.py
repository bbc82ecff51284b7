"""Checks what was committed and read of transactions that each put one value into several partitions.

Whatever a log may not do is looked for by `append_checker`, which is told of every value of every transaction as of a
record that may be there or not, once at most. What makes it a transaction comes on top: all or nothing, nothing of what
was aborted, and nothing before anybody asked for the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from tests.support import append_checker
from tests.support.append_checker import Append, Log, Poll
from tests.support.history.model import Outcome, Problem


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a producer put into each of `partitions`; `number` counts its transactions, in order.

    `outcome`: "ok": committed, "failed": aborted, "unknown": no answer came. `ending_at`: when the commit was first
    requested, if known.
    """

    producer: str
    number: int
    value: bytes
    partitions: tuple[int, ...]
    outcome: Outcome
    ending_at: float | None = None

    def __str__(self) -> str:
        told = {"ok": "committed", "failed": "aborted", "unknown": "no answer"}[self.outcome]
        return f"{self.value!r} ({self.producer}, transaction {self.number}, {told})"


@dataclass
class History:
    """Everything that was noted by producers and by readers of what is committed. `final`: what there is in the end."""

    transactions: list[Transaction] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)
    final: Log = field(default_factory=dict)


class Kind(Enum):
    """What must not happen to a transaction."""

    COMMIT_LOST = "a committed transaction is not there"
    TORN = "a transaction is in some of its partitions and not in others"
    ABORTED_READ = "a record of an aborted transaction was read"
    READ_TOO_EARLY = "a record was read before anybody asked for the commit of its transaction"


_NO_LOG_HAS: frozenset[append_checker.Kind] = frozenset({append_checker.Kind.GAP})
"""Markers and aborted records take offsets that no reader of what is committed is given."""


def check(history: History) -> list[Problem]:
    """Return everything that is wrong; an empty list for a history that the promises allow."""
    producers = {name: number for number, name in enumerate(sorted({each.producer for each in history.transactions}))}
    appends = [
        Append(producers[each.producer], each.number, partition, each.value, 0.0, once=True)
        for each in history.transactions
        for partition in each.partitions
    ]
    in_logs = append_checker.check(append_checker.History(appends, history.polls, {0: history.final}))
    found = [Problem(each.kind.name, each.kind.value, each.what) for each in in_logs if each.kind not in _NO_LOG_HAS]
    for kind, whats in (
        (Kind.COMMIT_LOST, _lost(history)),
        (Kind.TORN, _torn(history)),
        (Kind.ABORTED_READ, _aborted(history)),
        (Kind.READ_TOO_EARLY, _early(history)),
    ):
        found += [Problem(kind.name, kind.value, what) for what in whats]
    return found


def _places(final: Log) -> Mapping[bytes, set[int]]:
    found: dict[bytes, set[int]] = {}
    for partition, entries in final.items():
        for entry in entries:
            found.setdefault(entry.value, set()).add(partition)
    return found


def _lost(history: History) -> Iterator[str]:
    places = _places(history.final)
    for each in history.transactions:
        if each.outcome == "ok" and each.partitions and each.value not in places:
            yield str(each)


def _torn(history: History) -> Iterator[str]:
    """Also of transactions of unknown outcome."""
    places = _places(history.final)
    for each in history.transactions:
        there = places.get(each.value, set()) & set(each.partitions)
        missing = sorted(set(each.partitions) - there)
        if there and missing:
            yield f"{each} is in {_list(sorted(there))} and not in {_list(missing)}"


def _aborted(history: History) -> Iterator[str]:
    aborted = {each.value: each for each in history.transactions if each.outcome == "failed"}
    for poll in history.polls:
        for entry in poll.entries:
            if entry.value in aborted:
                where = f"by reader {poll.consumer} at {poll.partition}:{entry.offset}"
                yield f"{aborted[entry.value]}, {where}"
    for partition, entries in history.final.items():
        for entry in entries:
            if entry.value in aborted:
                yield f"{aborted[entry.value]}, in the end at {partition}:{entry.offset}"


def _early(history: History) -> Iterator[str]:
    """A reader that has it by then was given it while it was open."""
    asked = {each.value: each for each in history.transactions if each.ending_at is not None}
    for poll in history.polls:
        if poll.returned_at is None:
            continue
        for entry in poll.entries:
            found = asked.get(entry.value)
            if found is not None and found.ending_at is not None and poll.returned_at < found.ending_at:
                yield f"{found}, by reader {poll.consumer}, {found.ending_at - poll.returned_at:.3f} s before"


def _list(partitions: Iterable[int]) -> str:
    found: Sequence[str] = [str(each) for each in partitions]
    return f"partition{'s' * (len(found) > 1)} {', '.join(found)}"
