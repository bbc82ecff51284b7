"""Checks what clients of a replicated log saw: appends and polls in the manner of Jepsen's Kafka workload.

Producers append unique values and note the time of each request, and the time and offset of its acknowledgement, or
that the outcome is unknown. Consumers note the records of each poll. At the end, after all faults, each replica is read
from its start. The anomalies of `Kind` follow from these notes alone; a history without any is what the log promises.
Nothing is assumed about how the log works, and an append without an answer may be there or not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

Value = bytes
Replica = int
Log = dict[int, list["Entry"]]
"""By partition: what a reader found, in the order in which he found it."""
_NAMED = 5
"""So many anomalies of a kind are described, the rest is counted."""


class Entry(NamedTuple):
    """A record and where it was read."""

    offset: int
    value: Value


@dataclass(frozen=True, slots=True)
class Append:
    """One record that a producer sent; `number` counts what this producer sent to this partition, in order.

    Acknowledged if `offset` is known; else `returned_at` is when it was given up, if it was. `once`: the producer is
    idempotent, or does not retry, so that its value is there once at most, acknowledged or not; others may be there
    several times, and their first occurrences count. Times are of one clock.
    """

    producer: int
    number: int
    partition: int
    value: Value
    invoked_at: float
    returned_at: float | None = None
    offset: int | None = None
    once: bool = False

    def __post_init__(self) -> None:
        assert self.offset is None or self.returned_at is not None, (
            f"the append of {self.value!r} has an offset, but no time at which its acknowledgement came"
        )

    def __str__(self) -> str:
        where = f"acknowledged at {self.partition}:{self.offset}" if self.offset is not None else "no answer"
        return f"{self.value!r} (producer {self.producer}, number {self.number}, partition {self.partition}, {where})"


@dataclass(frozen=True, slots=True)
class Poll:
    """The records of one poll of a consumer, by partition and in order; when it was called and returned, if noted."""

    consumer: int
    partition: int
    entries: tuple[Entry, ...]
    invoked_at: float | None = None
    returned_at: float | None = None


@dataclass
class History:
    """Everything that was noted. Each consumer's polls are in the order in which he made them, from offset 0."""

    appends: list[Append] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)
    final: dict[Replica, Log] = field(default_factory=dict)


class Kind(Enum):
    """What must not happen."""

    LOST = "an acknowledged record is not where it was acknowledged"
    TWO_VALUES = "an offset has two values"
    VANISHED = "a record was read and is gone"
    INVENTED = "a record was read that nobody sent, or not there"
    REORDERED = "records of a producer are not in the order in which they were sent"
    BACK_IN_TIME = "a record was sent after another one was acknowledged and lies before it"
    DOUBLED = "a record is there twice that was sent once"
    WENT_BACK = "a consumer read an offset again, or an earlier one"
    SKIPPED = "a consumer passed a record over"
    GAP = "an offset of the log has no record"
    REPLICAS_DIFFER = "replicas have different logs"


class Anomaly(NamedTuple):
    """One thing that must not happen, and did. `kind` is a member of a checker's own `Kind`."""

    kind: Enum
    what: str

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.kind.value}: {self.what}"


def check(history: History) -> list[Anomaly]:
    """Return every anomaly; an empty list for a history that the promises allow."""
    assert history.final, "the history has no final read, without which lost records cannot be found"
    return [
        *_differences(history.final),
        *_two_values(history),
        *_unsent(history),
        *_lost_and_vanished(history),
        *_disordered(history),
        *_back_in_time(history.appends),
        *_doubled(history),
        *_consumers(history),
        *_gaps(history.final),
    ]


def describe(anomalies: Sequence[Anomaly]) -> str:
    """Return a text that names some of each kind."""
    by_kind: dict[Enum, list[Anomaly]] = defaultdict(list)
    for anomaly in anomalies:
        by_kind[anomaly.kind].append(anomaly)
    lines = []
    for kind, found in by_kind.items():
        lines += [f"{len(found)} x {kind.name}: {kind.value}", *(f"    {each.what}" for each in found[:_NAMED])]
    return "\n".join(lines)


def assert_sound(history: History) -> None:
    """Raise with a description of all anomalies if there are any.

    Raises:
        AssertionError: there are.
    """
    anomalies = check(history)
    assert not anomalies, describe(anomalies)


def _truth(final: Mapping[Replica, Log]) -> Log:
    """Return the longest of the logs of each partition: shorter ones are reported by themselves."""
    partitions = sorted({partition for log in final.values() for partition in log})
    return {partition: max((log.get(partition, []) for log in final.values()), key=len) for partition in partitions}


def _differences(final: Mapping[Replica, Log]) -> Iterable[Anomaly]:
    for partition, longest in _truth(final).items():
        for replica, log in sorted(final.items()):
            own = log.get(partition, [])
            if own != longest:
                at = next((i for i, (a, b) in enumerate(zip(own, longest, strict=False)) if a != b), len(own))
                here, there = (str(each[at]) if at < len(each) else "its end" for each in (own, longest))
                yield Anomaly(
                    Kind.REPLICAS_DIFFER,
                    f"partition {partition}: replica {replica} has {len(own)} records of {len(longest)}; "
                    f"the first difference: {here}, elsewhere {there}",
                )


def _two_values(history: History) -> Iterable[Anomaly]:
    """Acknowledgements, polls and final reads: all that was ever said of an offset."""
    said: dict[tuple[int, int], dict[Value, str]] = defaultdict(dict)
    for append in history.appends:
        if append.offset is not None:
            said[append.partition, append.offset].setdefault(append.value, f"acknowledged to {append.producer}")
    for poll in history.polls:
        for entry in poll.entries:
            said[poll.partition, entry.offset].setdefault(entry.value, f"read by consumer {poll.consumer}")
    for replica, log in history.final.items():
        for partition, entries in log.items():
            for entry in entries:
                said[partition, entry.offset].setdefault(entry.value, f"on replica {replica} in the end")
    for (partition, offset), values in sorted(said.items()):
        if len(values) > 1:
            each = ", ".join(f"{value!r} {where}" for value, where in values.items())
            yield Anomaly(Kind.TWO_VALUES, f"{partition}:{offset}: {each}")


def _unsent(history: History) -> Iterable[Anomaly]:
    sent = {(append.partition, append.value) for append in history.appends}
    found: dict[tuple[int, Value], str] = {}
    for poll in history.polls:
        for entry in poll.entries:
            found.setdefault((poll.partition, entry.value), f"offset {entry.offset}, consumer {poll.consumer}")
    for replica, log in history.final.items():
        for partition, entries in log.items():
            for entry in entries:
                found.setdefault((partition, entry.value), f"offset {entry.offset}, replica {replica} in the end")
    for (partition, value), where in found.items():
        if (partition, value) not in sent:
            yield Anomaly(Kind.INVENTED, f"{value!r} in partition {partition}, {where}")


def _lost_and_vanished(history: History) -> Iterable[Anomaly]:
    """Against every replica: one that lost it would lose it for all, as leader."""
    for replica, log in sorted(history.final.items()):
        there = {(partition, *entry) for partition, entries in log.items() for entry in entries}
        for append in history.appends:
            if append.offset is not None and (append.partition, append.offset, append.value) not in there:
                yield Anomaly(Kind.LOST, f"{append} on replica {replica}")
        seen: dict[tuple[int, int, Value], int] = {}
        for poll in history.polls:
            for entry in poll.entries:
                seen.setdefault((poll.partition, *entry), poll.consumer)
        for (partition, offset, value), consumer in seen.items():
            if (partition, offset, value) not in there:
                what = f"{value!r}, read by consumer {consumer} at {partition}:{offset}, on replica {replica}"
                yield Anomaly(Kind.VANISHED, what)


def _disordered(history: History) -> Iterable[Anomaly]:
    first: dict[tuple[int, Value], int] = {}
    for partition, entries in _truth(history.final).items():
        for entry in entries:
            first.setdefault((partition, entry.value), entry.offset)
    by_sender: dict[tuple[int, int], list[Append]] = defaultdict(list)
    for append in history.appends:
        by_sender[append.producer, append.partition].append(append)
    for appends in by_sender.values():
        before: tuple[int, Append] | None = None
        for append in sorted(appends, key=lambda each: each.number):
            offset = first.get((append.partition, append.value))
            if offset is None:
                continue
            if before is not None and offset < before[0]:
                yield Anomaly(Kind.REORDERED, f"{append} first lies at {offset}, behind it {before[1]} at {before[0]}")
            else:
                before = offset, append


def _back_in_time(appends: Iterable[Append]) -> Iterable[Anomaly]:
    by_partition: dict[int, list[Append]] = defaultdict(list)
    for append in appends:
        if append.offset is not None:
            by_partition[append.partition].append(append)
    for answered in by_partition.values():
        by_return = sorted(answered, key=lambda each: each.returned_at or 0.0)
        ended, highest = 0, None
        for append in sorted(answered, key=lambda each: each.invoked_at):
            while (by_return[ended].returned_at or 0.0) < append.invoked_at:
                if highest is None or (by_return[ended].offset or 0) > (highest.offset or 0):
                    highest = by_return[ended]
                ended += 1
            if highest is not None and (append.offset or 0) <= (highest.offset or 0):
                yield Anomaly(Kind.BACK_IN_TIME, f"{append} was sent after {highest} was acknowledged")


def _doubled(history: History) -> Iterable[Anomaly]:
    times: dict[tuple[int, Value], list[int]] = defaultdict(list)
    for partition, entries in _truth(history.final).items():
        for entry in entries:
            times[partition, entry.value].append(entry.offset)
    for append in history.appends:
        offsets = times.get((append.partition, append.value), [])
        if append.once and len(offsets) > 1:
            yield Anomaly(Kind.DOUBLED, f"{append} lies at {', '.join(map(str, offsets))}")


def _consumers(history: History) -> Iterable[Anomaly]:
    """Each begins at the start, and is given every record once and in order."""
    offsets = {
        partition: sorted({entry.offset for entry in entries}) for partition, entries in _truth(history.final).items()
    }
    expected = {partition: dict(zip([-1, *each], each, strict=False)) for partition, each in offsets.items()}
    last: dict[tuple[int, int], int] = defaultdict(lambda: -1)
    for poll in history.polls:
        key = poll.consumer, poll.partition
        for entry in poll.entries:
            if entry.offset <= last[key]:
                what = f"consumer {poll.consumer}, partition {poll.partition}: {entry.offset} after {last[key]}"
                yield Anomaly(Kind.WENT_BACK, what)
            else:
                wanted = expected.get(poll.partition, {}).get(last[key])
                if wanted is not None and entry.offset > wanted:
                    what = f"consumer {poll.consumer}, partition {poll.partition}: {entry.offset} after {last[key]}"
                    yield Anomaly(Kind.SKIPPED, f"{what}, though there is {wanted}")
            last[key] = entry.offset


def _gaps(final: Mapping[Replica, Log]) -> Iterable[Anomaly]:
    for replica, log in sorted(final.items()):
        for partition, entries in log.items():
            found = [entry.offset for entry in entries]
            if found != list(range(len(found))):
                at = next(number for number, offset in enumerate(found) if number != offset)
                yield Anomaly(Kind.GAP, f"partition {partition}, replica {replica}: {found[at]} where {at} should be")
