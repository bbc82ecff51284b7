"""Delayed records: the level where each waits, its headers, and its destination once it is due. Pure.

A level is a topic whose records all wait equally long: each of its partitions is in order of due times, so a reader
watches only the first record. A record whose delay is not a level waits at the largest level below it, and then again
for the rest. Times are Unix milliseconds, because they are stored with the records and another process reads them.

`Waits` decides which records a reader keeps, which partitions it pauses, and until when.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, NamedTuple

from raftlog.errors import InvalidRequestError
from raftlog.types import Header, Record, TopicPartition

DUE_HEADER: Final = "raftlog.delay.due"
"""The due time of the record, in Unix milliseconds as decimal digits."""
TARGET_HEADER: Final = "raftlog.delay.target"
"""The topic that a due record goes to; absent: a worker gets it."""
_OWN_HEADERS: Final = frozenset({DUE_HEADER, TARGET_HEADER})

_UNITS_MS: Final = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1))
_MAX_MS: Final = 100 * 365 * 86_400_000
_DIGITS: Final = re.compile(rb"[0-9]{1,15}")

DelayLike = timedelta | float
"""A time span, or a number of seconds."""
DEFAULT_LEVELS: Final[tuple[DelayLike, ...]] = (1, 5, 30, 60, 300, 1800, 3600, 21_600, 86_400)
"""The default levels: from one second to a day, each a few times as long as the previous one."""


def as_delay_ms(delay: DelayLike, name: str = "delay") -> int:
    """Return a delay in milliseconds, rounded up, so that no record is due too early.

    Raises:
        TypeError: neither a number of seconds nor a timedelta.
        InvalidRequestError: the delay is negative, NaN, or above a hundred years.
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
        """The shortest exact name: `30s`, `5m`, `90s`."""
        unit, unit_ms = next(each for each in _UNITS_MS if self.delay_ms % each[1] == 0)
        return f"{self.delay_ms // unit_ms}{unit}"


_LABEL: Final = re.compile(r"([0-9]{1,13})(d|h|m|s|ms)")


def level_of(topic: str, name: str) -> Level | None:
    """Return the level of a topic of the queue `name`, or None if the topic is not a level."""
    found = _LABEL.fullmatch(topic.removeprefix(f"{name}.delay."))
    if found is None or not topic.startswith(f"{name}.delay."):
        return None
    level = Level(int(found[1]) * dict(_UNITS_MS)[found[2]])
    return level if str(level) == found[0] else None


class Levels:
    """The delay levels of one queue, in ascending order.

    Raises:
        InvalidRequestError: there is no level, or one is 0.
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
        """Also read former levels of the queue, among the existing `topics`."""
        for topic in sorted(topics):
            level = level_of(topic, self.name)
            if level is not None:
                self._by_topic.setdefault(topic, level)

    def topic(self, level: Level) -> str:
        """Return the name of the level's topic."""
        return f"{self.name}.delay.{level}"

    @property
    def topics(self) -> list[str]:
        """The topics to read: of all levels, present and former."""
        return list(self._by_topic)

    def of(self, topic: str) -> Level:
        """Return the level of one of the queue's topics."""
        return self._by_topic[topic]

    def for_rest(self, rest_ms: int) -> Level:
        """Return the level where a record that is due in `rest_ms` waits next.

        It is the largest level within `rest_ms`, or the smallest level of all. In the latter case the record is due
        before earlier records of its partition, and is late by at most that level.
        """
        fitting = [level for level in self.all if level.delay_ms <= rest_ms]
        return fitting[-1] if fitting else self.all[0]


class Delayed(NamedTuple):
    """A decoded record of a level's topic."""

    record: Record
    """The record without the queue's own headers."""
    due_ms: int
    ready_ms: int
    """When the record leaves this level: when it is due or when the level's delay has passed, whichever is first."""
    target: str | None

    @property
    def partition(self) -> TopicPartition:
        """The level's partition that holds it."""
        return TopicPartition(self.record.topic, self.record.partition)


def stored_headers(headers: Sequence[Header], due_ms: int, target: str | None) -> tuple[Header, ...]:
    """Return the headers of a record at its level.

    Raises:
        InvalidRequestError: a header has a reserved name of the queue.
    """
    taken = [name for name, _ in headers if name in _OWN_HEADERS]
    if taken:
        raise InvalidRequestError(f"header {taken[0]!r} is reserved for the delay queue; use another name")
    own: list[Header] = [(DUE_HEADER, b"%d" % due_ms)]
    if target is not None:
        own.append((TARGET_HEADER, target.encode()))
    return (*headers, *own)


def understood(record: Record, level: Level) -> Delayed:
    """Return the decoded record of a level's topic.

    A record of another producer, without a valid due time, is due when the level's delay has passed, so that it does
    not block the queue.
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
    """Return the offset of the first record of each partition."""
    found: dict[TopicPartition, int] = {}
    for delayed in taken:
        found.setdefault(delayed.partition, delayed.record.offset)
    return found


def ends_of(taken: Iterable[Delayed]) -> dict[TopicPartition, int]:
    """Return the offset after the last record of each partition, to commit when all of them are processed."""
    return {delayed.partition: delayed.record.offset + 1 for delayed in taken}


class Outgoing(NamedTuple):
    """A record to send. `timestamp_ms` None: the time of sending."""

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
    """Return the record to send to the level where it waits next.

    Raises:
        InvalidRequestError: a header has a reserved name of the queue.
    """
    topic = levels.topic(levels.for_rest(max(0, due_ms - now_ms)))
    return Outgoing(topic, value, key, stored_headers(headers, due_ms, target), now_ms)


def goes_on(delayed: Delayed, now_ms: int) -> bool:
    """Whether a record that leaves its level goes to its target or to another level, and not to a worker."""
    return delayed.due_ms > now_ms or delayed.target is not None


def first_runs(ready: Iterable[Delayed], now_ms: int) -> tuple[list[Delayed], list[Delayed]]:
    """Split the records: each partition's first run of one kind (`goes_on`, or for a worker), and all later ones.

    So the offset after records that go on can be committed together with them.
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
    """Records that leave their level."""

    given: list[Record]
    """For workers."""
    outgoing: list[Outgoing]
    """Records for their targets, or for the next level."""
    handed_over: int
    """How many of `outgoing` go to their targets."""


def sort_out(levels: Levels, ready: Iterable[Delayed], now_ms: int, *, forwards: bool) -> SortedOut:
    """Return the destination of each record: another level, its target, or a worker.

    Raises:
        InvalidRequestError: with `forwards`, which has no worker, a record is for a worker.
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
                "target; take it with poll, or send records with a target"
            )
        else:
            given.append(record)
    return SortedOut(given, outgoing, handed_over)


HORIZON_MS: Final = 1000
"""Records that are due within this time stay in memory; later ones are dropped and fetched again."""
LEAD_MS: Final = 300
"""A paused partition is fetched again this long before its first record is due."""
HELD_MAX: Final = 2000
"""At most this many records of a partition stay in memory, plus those of one poll."""
assert LEAD_MS < HORIZON_MS, "refetched records lie within the horizon, or they would be refetched endlessly"


@dataclass(slots=True)
class _Waiting:
    """One partition.

    Invariants: `held` is in order of offsets, directly before the next record to fetch; `fetch_at_ms` is set while that
    record is known and lies beyond the horizon.
    """

    held: deque[Delayed] = field(default_factory=deque)
    fetch_at_ms: int | None = None
    paused: bool = False


def _head_ms(held: deque[Delayed]) -> int:
    return held[0].ready_ms


class Reading(NamedTuple):
    """The partitions to pause and to resume before the next poll."""

    pause: list[TopicPartition]
    resume: list[TopicPartition]


class Waits:
    """The kept records and pauses of all partitions of a reader."""

    def __init__(self) -> None:
        self._partitions: dict[TopicPartition, _Waiting] = {}

    def offer(self, partition: TopicPartition, polled: Sequence[Delayed], now_ms: int) -> int | None:
        """Keep the polled records of a partition; return the offset to seek back to, or None if all are kept.

        If it is an offset, the caller pauses the partition and seeks: what it fetched meanwhile would only be dropped.
        """
        waiting = self._partitions.setdefault(partition, _Waiting())
        for delayed in polled:
            if delayed.ready_ms > now_ms + HORIZON_MS:
                waiting.fetch_at_ms = delayed.ready_ms - LEAD_MS
                waiting.paused = True
                return delayed.record.offset
            waiting.held.append(delayed)
        return None

    def take(self, now_ms: int, limit: int) -> list[Delayed]:
        """Return at most `limit` ready records, by partition, in order; the partition ready longest comes first."""
        taken: list[Delayed] = []
        for held in sorted((each.held for each in self._partitions.values() if each.held), key=_head_ms):
            while held and held[0].ready_ms <= now_ms and len(taken) < limit:
                taken.append(held.popleft())
        return taken

    def give_back(self, rest: Sequence[Delayed]) -> None:
        """Take back the last records that `take` returned for some partitions."""
        for delayed in reversed(rest):
            self._partitions[delayed.partition].held.appendleft(delayed)

    def reading(self, now_ms: int) -> Reading:
        """Return which partitions to pause and to resume; the caller must do so."""
        pause: list[TopicPartition] = []
        resume: list[TopicPartition] = []
        for partition, waiting in self._partitions.items():
            if waiting.fetch_at_ms is not None and waiting.fetch_at_ms <= now_ms:
                waiting.fetch_at_ms = None
            full = len(waiting.held) >= (HELD_MAX // 2 if waiting.paused else HELD_MAX)
            stand_still = full or waiting.fetch_at_ms is not None
            if stand_still != waiting.paused:
                waiting.paused = stand_still
                (pause if stand_still else resume).append(partition)
        return Reading(pause, resume)

    def next_at_ms(self) -> int | None:
        """Return when a partition's first record becomes ready or must be fetched, or None."""
        times = [waiting.held[0].ready_ms for waiting in self._partitions.values() if waiting.held]
        times += [waiting.fetch_at_ms for waiting in self._partitions.values() if waiting.fetch_at_ms is not None]
        return min(times, default=None)

    def put_off(self, partitions: Iterable[TopicPartition], until_ms: int) -> None:
        """Drop the kept records of partitions, and do not fetch them until `until_ms`."""
        for partition in partitions:
            self._partitions[partition] = _Waiting(fetch_at_ms=until_ms)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop partitions that another member reads now."""
        for partition in partitions:
            self._partitions.pop(TopicPartition(*partition), None)
