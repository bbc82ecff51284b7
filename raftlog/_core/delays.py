"""Delayed records: at which level each waits, what is stored with it, and where it goes when its time is over.

A level is a topic whose records all wait equally long, so that each of its partitions is in order of due times and only
its head has to be watched. A delay that is no level waits at the largest level below it and then again for the rest.
Times are Unix milliseconds: they are stored with the records, and whoever hands them over is another process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

from raftlog.errors import InvalidRequestError
from raftlog.types import Header, Record, TopicPartition

DUE_HEADER: Final = "raftlog.delay.due"
"""When the record is due, as a decimal number of Unix milliseconds."""
TARGET_HEADER: Final = "raftlog.delay.target"
"""The topic that a due record is handed over to; absent: a worker gets it."""
_OWN_HEADERS: Final = frozenset({DUE_HEADER, TARGET_HEADER})

_UNITS_MS: Final = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
_MAX_MS: Final = 100 * 365 * 86_400_000
_DIGITS: Final = re.compile(rb"[0-9]{1,15}")

DelayLike = timedelta | float
"""A time span, or a number of seconds."""
DEFAULT_LEVELS: Final[tuple[DelayLike, ...]] = (1, 5, 30, 60, 300, 1800, 3600, 21_600, 86_400)
"""From one second to a day, each a few times the one before."""


def as_delay_ms(delay: DelayLike, name: str = "delay") -> int:
    """Return a delay in milliseconds, rounded up: nothing is due too early.

    Raises:
        TypeError: neither a number of seconds nor a timedelta.
        InvalidRequestError: negative, not a number, or above a hundred years.
    """
    if isinstance(delay, timedelta):
        seconds = delay.total_seconds()
    elif isinstance(delay, (int, float)) and not isinstance(delay, bool):
        seconds = float(delay)
    else:
        raise TypeError(f"{name} must be seconds or a timedelta, not {type(delay).__name__}")
    if not 0 <= seconds * 1000 <= _MAX_MS:
        raise InvalidRequestError(f"{name} of {seconds:g} s is not between 0 and a hundred years")
    return math.ceil(round(seconds * 1000, 3))


@dataclass(frozen=True, slots=True, order=True)
class Level:
    """One delay with a topic of its own."""

    delay_ms: int

    def __str__(self) -> str:
        """The shortest name that says it exactly: `30s`, `5m`, `90s`."""
        unit, unit_ms = next(each for each in _UNITS_MS if self.delay_ms % each[1] == 0)
        return f"{self.delay_ms // unit_ms}{unit}"


_LABEL: Final = re.compile(r"([0-9]{1,13})(d|h|m|s|ms)")


def level_of(topic: str, name: str) -> Level | None:
    """Return the level that a topic of the queue `name` is, None if it is none."""
    found = _LABEL.fullmatch(topic.removeprefix(f"{name}.delay."))
    if found is None or not topic.startswith(f"{name}.delay."):
        return None
    level = Level(int(found[1]) * dict(_UNITS_MS)[found[2]])
    return level if str(level) == found[0] else None


class Levels:
    """The delay levels of one queue, in ascending order.

    Raises:
        InvalidRequestError: there is none, or one is 0.
    """

    def __init__(self, name: str, delays: Iterable[DelayLike]) -> None:
        self.name = name
        self.all = sorted({Level(as_delay_ms(delay, "level")) for delay in delays})
        if not self.all:
            raise InvalidRequestError(f"delay queue {name!r} has no levels; name at least one, 1.0 for a second")
        if self.all[0].delay_ms == 0:
            raise InvalidRequestError(f"delay queue {name!r}: a level of 0 is no delay")
        self._by_topic = {self.topic(level): level for level in self.all}

    def found(self, topics: Iterable[str]) -> None:
        """Read levels too that the queue has had before: `topics` are there."""
        for topic in sorted(topics):
            level = level_of(topic, self.name)
            if level is not None:
                self._by_topic.setdefault(topic, level)

    def topic(self, level: Level) -> str:
        """Return the name of the level's topic."""
        return f"{self.name}.delay.{level}"

    @property
    def topics(self) -> list[str]:
        """The topics to read: of all levels, and of those that the queue has had before."""
        return list(self._by_topic)

    def of(self, topic: str) -> Level:
        """Return the level of one of the queue's topics."""
        return self._by_topic[topic]

    def for_rest(self, rest_ms: int) -> Level:
        """Return where a record waits next that is due in `rest_ms`.

        The largest level that is not too long; the smallest one for a rest below that: there it is due earlier than the
        records before it, and may be late by that level at most.
        """
        fitting = [level for level in self.all if level.delay_ms <= rest_ms]
        return fitting[-1] if fitting else self.all[0]


class Delayed(NamedTuple):
    """A record of a level's topic, as it is understood."""

    record: Record
    """Without the queue's own headers."""
    due_ms: int
    ready_ms: int
    """When its time at this level is over: when it is due, or when the level's delay has passed, whichever is first."""
    target: str | None

    @property
    def partition(self) -> TopicPartition:
        """Where it lies."""
        return TopicPartition(self.record.topic, self.record.partition)


def stored_headers(headers: Sequence[Header], due_ms: int, target: str | None) -> tuple[Header, ...]:
    """Return the headers of a record at its level.

    Raises:
        InvalidRequestError: one of them has a name that is the queue's own.
    """
    taken = [name for name, _ in headers if name in _OWN_HEADERS]
    if taken:
        raise InvalidRequestError(f"header {taken[0]!r} is the delay queue's own")
    own: list[Header] = [(DUE_HEADER, b"%d" % due_ms)]
    if target is not None:
        own.append((TARGET_HEADER, target.encode()))
    return (*headers, *own)


def understood(record: Record, level: Level) -> Delayed:
    """Return what a record of a level's topic says about itself.

    One that somebody else put there, without or with a senseless time, is due when the level's delay has passed: a
    queue is not held up by what it cannot read.
    """
    ready_ms = record.timestamp_ms + level.delay_ms
    own = {name: value for name, value in record.headers if name in _OWN_HEADERS}
    due = own.get(DUE_HEADER)
    due_ms = int(due) if due is not None and _DIGITS.fullmatch(due) else ready_ms
    target = own.get(TARGET_HEADER)
    plain = tuple(header for header in record.headers if header[0] not in _OWN_HEADERS) if own else record.headers
    name = target.decode(errors="replace") if target else None
    return Delayed(record._replace(headers=plain), due_ms, min(due_ms, ready_ms), name)


def by_partition(records: Iterable[Record]) -> dict[TopicPartition, list[Record]]:
    """Return records by partition, in order."""
    found: dict[TopicPartition, list[Record]] = {}
    for record in records:
        found.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
    return found


def starts_of(taken: Iterable[Delayed]) -> dict[TopicPartition, int]:
    """Return by partition the offset of the first of these records."""
    found: dict[TopicPartition, int] = {}
    for delayed in taken:
        found.setdefault(delayed.partition, delayed.record.offset)
    return found


def ends_of(taken: Iterable[Delayed]) -> dict[TopicPartition, int]:
    """Return by partition the offset after the last of these records: what to commit when all are done with."""
    return {delayed.partition: delayed.record.offset + 1 for delayed in taken}


class Outgoing(NamedTuple):
    """A record to be sent. `timestamp_ms` None: that of its sending."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: tuple[Header, ...]
    timestamp_ms: int | None = None


def delayed_send(
    levels: Levels,
    value: bytes | None,
    key: bytes | None,
    headers: Sequence[Header],
    due_ms: int,
    target: str | None,
    now_ms: int,
) -> Outgoing:
    """Return a record as it goes to the level where it waits next.

    Raises:
        InvalidRequestError: a header has a name that is the queue's own.
    """
    topic = levels.topic(levels.for_rest(max(0, due_ms - now_ms)))
    return Outgoing(topic, value, key, stored_headers(headers, due_ms, target), now_ms)


def goes_on(delayed: Delayed, now_ms: int) -> bool:
    """Whether a record whose time at its level is over goes to its target, or to another level, and not to a worker."""
    return delayed.due_ms > now_ms or delayed.target is not None


def first_runs(ready: Iterable[Delayed], now_ms: int) -> tuple[list[Delayed], list[Delayed]]:
    """Return of each partition the first records that all go on, or that are all for a worker; and what comes behind.

    So that the offset behind what goes on can be committed with it.
    """
    kinds: dict[TopicPartition, bool] = {}
    cut: set[TopicPartition] = set()
    runs: list[Delayed] = []
    rest: list[Delayed] = []
    for delayed in ready:
        kind = goes_on(delayed, now_ms)
        if kinds.setdefault(delayed.partition, kind) != kind:
            cut.add(delayed.partition)
        (rest if delayed.partition in cut else runs).append(delayed)
    return runs, rest


class SortedOut(NamedTuple):
    """Records whose time at their level is over."""

    given: list[Record]
    """For workers."""
    outgoing: list[Outgoing]
    """To their targets, and to the next level."""
    handed_over: int
    """How many of these go to their targets."""


def sort_out(levels: Levels, ready: Iterable[Delayed], now_ms: int, *, forwards: bool) -> SortedOut:
    """Return where each record goes: on to another level, to its target, or to a worker.

    Raises:
        InvalidRequestError: one is for a worker, and `forwards` says that there is none.
    """
    given: list[Record] = []
    outgoing: list[Outgoing] = []
    handed_over = 0
    for delayed in ready:
        record = delayed.record
        if delayed.due_ms > now_ms:
            target = delayed.target
            outgoing.append(
                delayed_send(levels, record.value, record.key, record.headers, delayed.due_ms, target, now_ms)
            )
        elif delayed.target is not None:
            outgoing.append(Outgoing(delayed.target, record.value, record.key, record.headers))
            handed_over += 1
        elif forwards:
            raise InvalidRequestError(
                f"delay queue {levels.name!r}: the record at offset {record.offset} of {delayed.partition} has no "
                "target to hand it over to; take it with poll, or send with a target"
            )
        else:
            given.append(record)
    return SortedOut(given, outgoing, handed_over)
