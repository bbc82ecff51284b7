"""The consumer, with or without a group. `./dev aio` writes raftlog/aio/_consumer.py from it; tools/aio.py says how.

RebalanceListener   an application overrides it to learn which partitions it gets and gives up (KIP-429)
Unread              records that were polled for iteration and not yielded yet
Progress            the offsets that a commit takes: those given, or those of records that the application has finished
GroupPart           the member: rebalances and commits, in the thread that polls
ToEnds              one read up to the ends of partitions
Consumer            the client
read_table          whole topics as one table
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Generic, Unpack

from raftlog._client.background import Client, LoopThread, Turn, told
from raftlog._client.consumer import PASSED_WAIT_S, ConsumerEngine
from raftlog._client.group_consumer import Change, GroupEngine, Step
from raftlog._client.groups import Claim, as_number, as_partition, checked
from raftlog._client.keywords import ConsumerKeywords, IsolationLevel, OffsetReset
from raftlog._client.metadata import EARLIEST, LATEST, monotonic_ms
from raftlog._client.options import Bootstrap, ConsumerOptions, taken_apart
from raftlog._client.tracing_choice import consumer_tracing
from raftlog._core.arguments import as_converter, converted
from raftlog._core.positions import Mark, PartitionState, Rows, table
from raftlog._delivery import Alarm, Deadline
from raftlog.errors import (
    InvalidConfig,
    InvalidGroupId,
    InvalidRequestError,
    InvalidTopic,
    OffsetOutOfRange,
    PartitionNotOwned,
    RaftlogError,
    RequestTimedOut,
)
from raftlog.types import GroupMetadata, K, OffsetAndMetadata, OffsetAndTimestamp, Record, TopicPartition, V


class RebalanceListener:
    """Learns which partitions a group member gets and gives up. Override the methods that you need.

    The consumer calls it in the thread that polls, during `poll`, iteration, `subscribe`, `unsubscribe` or `close`.
    The lists hold only the partitions that move; the member keeps reading the others. If a method raises, the
    consumer's call raises that exception. The methods may call `close` and `unsubscribe`; during such a call another
    one changes nothing.
    In `raftlog.aio` the methods may be coroutines, which the consumer awaits.
    """

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> object:
        """The member has these partitions now and has not returned any of their records yet. `seek` works here."""

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> object:
        """The member gives these partitions up; no other member gets them before this returns. `commit` works here."""

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> object:
        """The session ended: other members may already read these partitions, and this member's commits of them fail.

        By default it calls `on_partitions_revoked`.
        """
        return self.on_partitions_revoked(partitions)


def check_listener(listener: RebalanceListener) -> None:
    """Raise TypeError if the listener lacks a method, which would be called only when partitions move."""
    names = ("on_partitions_assigned", "on_partitions_revoked", "on_partitions_lost")
    missing = [name for name in names if not callable(getattr(listener, name, None))]
    if missing:
        raise TypeError(
            f"listener must be a RebalanceListener, not {type(listener).__name__}: it has no {', '.join(missing)}; "
            "derive its class from raftlog.RebalanceListener, and override what you need"
        )


ALL_ROWS: Final = 1 << 62
_LONGEST_NAME: Final = 249
_TOPIC_NAME: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{_LONGEST_NAME}}}")


def as_names(
    topics: str | Iterable[str] | None, pattern: str | None
) -> tuple[list[str] | None, re.Pattern[str] | None]:
    """Return the arguments of `subscribe` as a list of names or a compiled pattern.

    Raises:
        InvalidRequestError: both or neither were given, or the pattern is not a regular expression.
        InvalidTopic: no topic can have that name.
    """
    if (topics is None) == (pattern is None):
        raise InvalidRequestError("subscribe takes topics or a pattern, one of the two")
    if pattern is not None:
        try:
            return None, re.compile(pattern)
        except re.error as error:
            raise InvalidRequestError(f"pattern {pattern!r} is not a regular expression: {error}") from None
    assert topics is not None
    names = [topics] if isinstance(topics, str) else list(topics)
    for name in names:
        if not isinstance(name, str):
            raise InvalidRequestError(f"subscribe takes topics by name, not {name!r}")
        if _TOPIC_NAME.fullmatch(name) is None or name in (".", ".."):
            raise InvalidTopic(
                f"no topic can have the name {name[:_LONGEST_NAME]!r}: names have 1 to {_LONGEST_NAME} characters "
                "a-z A-Z 0-9 . _ -; pattern= takes a regular expression"
            )
    return names, None


def as_partitions(call: str, given: Iterable[object]) -> list[TopicPartition]:
    """Return the partitions that `call` was given, one by one or as one list.

    Raises:
        InvalidRequestError: the arguments are not partitions.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{call} takes partitions, as TopicPartition('orders', 0) is one, not {given!r}")
    items = [given] if isinstance(given, TopicPartition) else list(given)
    if len(items) == 1 and not isinstance(items[0], (str, tuple)) and isinstance(items[0], Iterable):
        items = list(items[0])
    try:
        return [as_partition(item) for item in items]
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{call} takes partitions: {error}") from None


def table_of(rows: list[Rows], engine: ConsumerEngine) -> Any:
    """Return the rows as a table whose topic dictionary names all assigned topics."""
    topics = {part.topic for part in engine.positions.states} | {chunk.topic_partition.topic for chunk in rows}
    return table(rows, sorted(topics))


class Unread:
    """Records that were polled for iteration and not yielded yet."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque()

    def take(self, most: int, noted: Callable[[list[Record]], None] | None) -> list[Record]:
        """Return the first ones, at most `most`, after calling `noted` with them.

        No call lies between dropping and returning them, so a signal handler's exception loses none.
        """
        most = max(0, most)
        records, rest = list(islice(self.records, most)), deque(islice(self.records, most, None))
        if noted is not None:
            noted(records)
        self.records = rest
        return records

    def first_offsets(self) -> dict[TopicPartition, int]:
        """Return, by partition, the offset of the first record that the application has not got yet."""
        found: dict[TopicPartition, int] = {}
        for record in self.records:
            found.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        return found

    def drop(self, partitions: set[TopicPartition], engine: ConsumerEngine | None) -> None:
        """Drop the records of these partitions; `engine`, if given, fetches them again."""
        if not self.records:
            return
        if engine is not None:
            for topic_partition, offset in self.first_offsets().items():
                if topic_partition in partitions and topic_partition in engine.positions.states:
                    engine.place(topic_partition, offset)
        kept = [record for record in self.records if TopicPartition(record.topic, record.partition) not in partitions]
        self.records.clear()
        self.records.extend(kept)

    def put_back(self, engine: ConsumerEngine) -> None:
        """Drop all records and let the engine fetch them again: positions are about to change."""
        for topic_partition, offset in self.first_offsets().items():
            if topic_partition in engine.positions.states:
                engine.place(topic_partition, offset)
        self.records.clear()


def as_offset(offset: Any) -> int:
    """Return an offset, one of NumPy too, as an int.

    Raises:
        InvalidRequestError: not a whole number, negative, or more than any log holds.
    """
    number = as_number("offset", offset)
    if number is None:
        raise InvalidRequestError(f"{offset!r} is no offset: it takes a whole number from 0 to 2^63 - 1")
    if number < 0:
        raise InvalidRequestError(f"offset {number} is negative; seek_to_end and seek_to_beginning name the ends")
    return number


def as_times(timestamps_ms: Mapping[TopicPartition, Any]) -> dict[TopicPartition, int]:
    """Return timestamps as ints.

    Raises:
        InvalidRequestError: not a whole number, negative, or too large.
    """
    times: dict[TopicPartition, int] = {}
    for topic_partition, timestamp_ms in timestamps_ms.items():
        number, part = as_number("time", timestamp_ms), TopicPartition(*topic_partition)
        if number is None:
            raise InvalidRequestError(f"{part}: {timestamp_ms!r} is no timestamp: it takes Unix milliseconds, an int")
        if number < 0:
            raise InvalidRequestError(f"{part}: timestamp {number} is negative")
        times[part] = number
    return times


class ToEnds:
    """One `read_to_end`: its rows so far, and what is left of each partition."""

    def __init__(
        self,
        engine: ConsumerEngine,
        ends: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
        timeout: float | None,
    ) -> None:
        self.rows: list[Rows] = []
        self.passed_too_far: dict[TopicPartition, int] = {}
        """The positions to return to at the end, because whole batches were fetched and they reach past the ends."""
        self._engine = engine
        self._ends = ends
        self._timeout = timeout
        self._deadline = Deadline(timeout)
        self._patience_s = engine.options.default_api_timeout_ms / 1000
        self._patience = Deadline(self._patience_s)
        self._positions = dict(starts)
        self._total = sum(self.left.values())

    @property
    def left(self) -> dict[TopicPartition, int]:
        """The number of offsets left in each partition that is not complete."""
        found = {part: self._ends[part] - position for part, position in self._positions.items()}
        return {part: count for part, count in found.items() if count > 0}

    def passed(self) -> tuple[int, int]:
        """Return how many offsets have been passed, and how many there are in all."""
        return self._total - sum(self.left.values()), self._total

    def wait_s(self) -> float:
        """Return for how many seconds the next step may wait; 0 once the time is up."""
        return min(each for each in (self._deadline.left(), self._patience.left()) if each is not None)

    def add(self, rows: Iterable[Rows]) -> None:
        """Add what a step has read, up to the ends."""
        for each in rows:
            part = each.topic_partition
            end = self._ends.get(part)
            if end is None:  # a partition that the subscription found meanwhile
                self.passed_too_far.setdefault(part, each.first_offset)
                continue
            wanted = each.below(end)
            if len(wanted):
                self.rows.append(wanted)
            if len(wanted) < len(each):
                self.passed_too_far[part] = end
        for part, before in self._positions.items():
            position = self._engine.position_now(part)
            if position is not None and position > before:
                self._positions[part] = position
                self._patience = Deadline(self._patience_s)

    def too_late(self, reasons: Mapping[TopicPartition, str]) -> RequestTimedOut:
        """Return the error that names the incomplete partitions, each with its reason if `reasons` has one."""
        over = self._deadline.left() == 0
        late = f"not complete within {self._timeout:g} s" if over else f"nothing came for {self._patience_s:g} s"
        places = []
        for part, count in sorted(self.left.items()):
            why = f" ({reasons[part]})" if part in reasons else ""
            places.append(f"{part} is at {self._positions[part]}, {count} before its end{why}")
        return RequestTimedOut(f"{late}: {', '.join(places)}")


logger = logging.getLogger(__name__)

CommitArgument = Record[Any, Any] | Mapping[TopicPartition, int | OffsetAndMetadata] | None
"""What `commit` takes: None for all returned records, one record, or offsets by partition."""
CommitCallback = Callable[[dict[TopicPartition, OffsetAndMetadata], RaftlogError | None], object]

_MAX_GROUP_ID: Final = 255
_SHORTEST_WAIT_S: Final = 0.05


def check_group_id(group_id: str | None) -> None:
    """Check a group id; None is allowed.

    Raises:
        InvalidGroupId: not a string of 1 to 255 characters.
    """
    if group_id is None:
        return
    name = f"a group id is a string of 1 to {_MAX_GROUP_ID} characters"
    if not isinstance(group_id, str):
        raise InvalidGroupId(f"{name}, {group_id!r} is not a string")
    if not 1 <= len(group_id) <= _MAX_GROUP_ID:
        raise InvalidGroupId(f"{name}, this one has {len(group_id)}")


def check_group_options(resolved: ConsumerOptions, *given: Mapping[str, object]) -> None:
    """Check the options of groups; `given` are the caller's own.

    Raises:
        InvalidGroupId: as `check_group_id`.
        InvalidConfig: group.instance.id is empty, or stands without group.id.
    """
    check_group_id(resolved.group_id or None)
    names = ("group.instance.id", "group_instance_id")
    named = any(options.get(name) is not None for options in given for name in names)
    if named and not resolved.group_instance_id:
        raise InvalidConfig(
            "group.instance.id is empty; leave it out, or give this process a name that no other member has"
        )
    if resolved.group_instance_id and not resolved.group_id:
        raise InvalidConfig("group.instance.id names a member of a group: set group.id, too")


def offsets_of(
    argument: Record[Any, Any] | Mapping[TopicPartition, int | OffsetAndMetadata],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the offsets to commit.

    Raises:
        InvalidRequestError: neither a record nor offsets by partition, or a value that is not an offset.
    """
    if isinstance(argument, Record):
        return checked({TopicPartition(argument.topic, argument.partition): argument.offset + 1})
    if not isinstance(argument, Mapping):
        raise InvalidRequestError(f"commit takes a record, or offsets by partition, not a {type(argument).__name__}")
    return checked(argument)


class Progress:
    """Which records a group's consumer has returned to the application, and which of these the application finished.

    The application has finished a record when it asks for more: a `poll` finishes all records of the previous one,
    iteration finishes the record that it yielded last.
    """

    def __init__(self, engine: GroupEngine, unread: Unread) -> None:
        self._engine = engine
        self._membership = engine.membership
        self._unread = unread
        self.out: dict[PartitionState, Mark] = {}
        """The positions before the present or last poll took records.

        They are marked before records are taken, so an interrupted poll finishes none.
        """
        self._last: tuple[PartitionState, int] | None = None
        """The partition and offset of the record that iteration yielded last."""
        self._read: dict[PartitionState, int] = {}
        """Partitions whose records were returned, with the offset of the first one."""
        self._lost: dict[TopicPartition, OffsetAndMetadata] = {}
        """Lost partitions with returned and uncommitted records that no commit has reported yet."""
        options = engine.options
        self._auto = options.enable_auto_commit
        self._interval_ms = options.auto_commit_interval_ms
        self._due_ms = monotonic_ms() + self._interval_ms if self._auto else math.inf
        self._under_way = False

    @property
    def auto(self) -> bool:
        """Whether the consumer commits automatically."""
        return self._auto

    def come_back(self, now_ms: float) -> bool:
        """Note that the application asks for more records; return whether `GroupPart.attend` must run first."""
        self._engine.settle()
        self._engine.polled_ms = now_ms
        self._last = None
        if self.out:
            self._let_go()
        return self.wants_attention(now_ms)

    def _let_go(self) -> None:
        """Forget the records of the last poll: the application has finished them, or they wait in the iteration."""
        for state, mark in self.out.items():
            self._read.setdefault(state, mark.position)
        self.out = {}

    def wants_attention(self, now_ms: float) -> bool:
        """Whether a commit is due, or the membership has changed."""
        return self._engine.attention or now_ms >= self._due_ms or self.may_be_over(now_ms)

    def may_be_over(self, now_ms: float) -> bool:
        """Whether the session may be over, or is, and the application has not been told.

        The event loop of the clients may have noticed, and not yet taken the partitions away: then they are `lost`, and
        there is no deadline any more. So the deadline is looked at first.
        """
        return now_ms >= self._membership.session_deadline_ms or bool(self._membership.lost)

    def ending(self) -> None:
        """Note that the application closes the consumer: polled records count as finished, the yielded one does not."""
        self._engine.settle()
        self._let_go()

    def handed_records(self, records: Iterable[Record]) -> None:
        """Note that a poll returns these records, which were waiting in the iteration."""
        states = self._engine.positions.states
        for record in records:
            state = states.get(TopicPartition(record.topic, record.partition))
            if state is not None and state not in self.out:
                self.out[state] = Mark(record.offset, -1, state.topic_id)

    def yielded(self, record: Record) -> None:
        """Note that iteration is about to yield this record."""
        state = self._engine.positions.states.get(TopicPartition(record.topic, record.partition))
        self._last = None if state is None else (state, record.offset)
        if self.out:
            self._let_go()

    def drop(self, partitions: Iterable[TopicPartition], *, lost: bool) -> None:
        """Drop the waiting records of revoked or lost partitions; a revoked one's position returns to its first."""
        gone = set(partitions)
        if lost:
            self._note_losses()
        self._unread.drop(gone, None if lost else self._engine)
        for state in [*self._read, *self.out]:
            if state.topic_partition in gone:
                self._read.pop(state, None)
                self.out.pop(state, None)

    def forget(self) -> None:
        """Forget returned records: the subscription has changed or ended."""
        self.out, self._last = {}, None
        self._read.clear()
        self._lost.clear()

    def positions(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return, for assigned partitions, the offset after the returned records."""
        return self._positions(None, {})

    def done(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return, for assigned partitions, the offset after the records that the application has finished."""
        out = {state: OffsetAndMetadata(mark.position, "", mark.last_epoch) for state, mark in self.out.items()}
        if self._last is not None:
            out[self._last[0]] = OffsetAndMetadata(self._last[1])
        found = self._positions(partitions, out)
        known = self._engine.committed_offsets
        return {part: offset for part, offset in found.items() if known.get(part) != offset.offset}

    def _positions(
        self, partitions: Iterable[TopicPartition] | None, out: Mapping[PartitionState, OffsetAndMetadata]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        engine = self._engine
        engine.settle()
        wanted = None if partitions is None else set(partitions)
        unread = self._unread.first_offsets()
        found: dict[TopicPartition, OffsetAndMetadata] = {}
        with engine.lock:
            for part, state in engine.positions.states.items():
                if state.position is None or (wanted is not None and part not in wanted):
                    continue
                offset = OffsetAndMetadata(state.position, "", state.last_epoch)
                if part in unread and unread[part] < offset.offset:
                    offset = OffsetAndMetadata(unread[part])
                if state in out and out[state].offset < offset.offset:
                    offset = out[state]
                found[part] = offset
        return found

    # Commits that the application asks for

    def asked(
        self, argument: CommitArgument
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], dict[TopicPartition, Claim]]:
        """Return the offsets that a `commit` call commits, and the claims that prove ownership.

        Raises:
            InvalidRequestError: as `offsets_of`.
            PartitionNotOwned: another member has the partition.
        """
        with self._engine.lock:
            offsets = self.positions() if argument is None else offsets_of(argument)
            return offsets, self._engine.claims(offsets)

    def losses(self) -> tuple[dict[TopicPartition, OffsetAndMetadata], PartitionNotOwned] | None:
        """Return, once, the uncommitted offsets of lost partitions, and the error that reports them."""
        self._note_losses()
        if not self._lost:
            return None
        lost, self._lost = self._lost, {}
        return lost, PartitionNotOwned(
            f"this member of {self._engine.group_id} lost {', '.join(map(str, sorted(lost)))} before it committed "
            "their returned records: the next reader of these partitions gets the records again"
        )

    def _note_losses(self) -> None:
        engine = self._engine
        unread = self._unread.first_offsets()
        read = self._read | {state: self._read.get(state, mark.position) for state, mark in self.out.items()}
        with engine.lock:
            for state, first in read.items():
                part = state.topic_partition
                if not engine.subscribed or engine.positions.states.get(part) is state:
                    continue
                self._read.pop(state, None)
                self.out.pop(state, None)
                if state.position is None:
                    continue
                end = min(state.position, unread.get(part, state.position))
                if end > max(first, engine.committed_offsets.get(part, -1)):
                    self._lost[part] = OffsetAndMetadata(end)

    # Automatic commits

    def wait_s(self, left_s: float | None) -> float | None:
        """Return for how many seconds a poll may wait before it looks again, at most `left_s`."""
        until_ms = min(self._due_ms, self._engine.session_deadline_ms)
        if until_ms == math.inf:
            return left_s
        wait_s = max(_SHORTEST_WAIT_S, (until_ms - monotonic_ms()) / 1000)
        return wait_s if left_s is None else min(wait_s, left_s)

    def auto_commit(self, now_ms: float) -> None:
        """Commit finished records in the background, if a commit is due."""
        engine = self._engine
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + self._interval_ms
        if self._under_way:
            return
        with engine.lock:
            offsets = self.done()
            claims = engine.claims(offsets)
        if offsets:
            self._under_way = True
            engine.commit_soon(offsets, claims, self._over)

    def _over(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], error: RaftlogError | None) -> None:
        self._under_way = False
        if error is not None and self._engine.closed is None:
            logger.warning("group %s: automatic commit failed: %s", self._engine.group_id, error)


def log_failure(offsets: Mapping[TopicPartition, OffsetAndMetadata], error: RaftlogError | None) -> None:
    """Log the failure of an asynchronous commit without a callback."""
    if error is not None:
        logger.warning("a commit of %d partitions failed: %s", len(offsets), error)


LAST_COMMIT_MS: Final = 5000.0
"""How long the last commit of a leaving member may take."""


class GroupPart:
    """Carries out the coordinator's rebalances, tells the application's listener, and commits."""

    def __init__(
        self,
        engine: GroupEngine,
        unread: Unread,
        thread: LoopThread,  # sync
    ) -> None:
        self.engine = engine
        self.progress = Progress(engine, unread)
        self.listener = RebalanceListener()
        self._thread = thread  # sync
        self._turn = Turn()
        self._telling: Step | None = None
        self._ending = False
        self._poller: int | None = None
        """The thread of the last poll."""

    def come_back(self) -> None:
        """Attend to the group before the application gets more records.

        Raises:
            RaftlogError: the group refuses this member for good.
        """
        now_ms = monotonic_ms()
        self._poller = get_ident()
        if self.progress.come_back(now_ms):
            self.attend(now_ms)

    def look(self) -> None:
        """Attend to the group while a poll waits, or during another call; this finishes no record."""
        now_ms = monotonic_ms()
        if self.progress.wants_attention(now_ms):
            self.attend(now_ms)

    def attend(self, now_ms: float) -> None:
        """Report lost partitions, give up revoked ones, take new ones, commit.

        Raises:
            RaftlogError: the group refuses this member for good.
        """
        with self._turn as outside:
            if not outside:  # a listener has called
                return
            engine = self.engine
            if self.progress.may_be_over(now_ms):
                self._thread.run(engine.look_again())
            while engine.attention and (step := self._thread.run(engine.next_step())) is not None:
                try:
                    self._tell(step)
                finally:
                    self._thread.run(engine.finish_step(step))
            self.progress.auto_commit(now_ms)
            if (failure := engine.failure()) is not None:
                raise type(failure)(str(failure))

    def _tell(self, step: Step) -> None:
        self._telling = step
        try:
            match step.change:
                case Change.LOST:
                    self.progress.drop(step.partitions, lost=True)
                    told(self.listener.on_partitions_lost(step.partitions))
                case Change.REVOKED:
                    try:
                        if self.progress.auto:
                            self._commit_now(step.partitions, self.engine.options.default_api_timeout_ms)
                    finally:  # the member gives them up even if the commit is interrupted
                        self.progress.drop(step.partitions, lost=False)
                        told(self.listener.on_partitions_revoked(step.partitions))
                case Change.ASSIGNED:
                    told(self.listener.on_partitions_assigned(step.partitions))
        finally:
            self._telling = None

    def _commit_now(self, partitions: Iterable[TopicPartition] | None, timeout_ms: float) -> None:
        try:
            with self.engine.lock:
                offsets = self.progress.done(partitions)
                claims = self.engine.claims(offsets)
            self._thread.run(self.engine.commit_now(offsets, claims, timeout_ms))
        except RaftlogError as error:
            logger.warning("group %s: committing before partitions go failed: %s", self.engine.group_id, error)

    def end(self, *, clean: bool) -> None:
        """Commit finished records, tell the listener, and leave the group.

        The records of the last poll count as finished only if `clean` (no exception is the reason for the end) and if
        this is the thread that polled. If the listener calls it while it is told of the end, the call does nothing.
        """
        if self._ending:
            return
        self._ending = True
        try:
            self._end(clean and self._poller in (None, get_ident()))
        finally:
            self._ending = False

    def _end(self, clean: bool) -> None:
        engine = self.engine
        if clean:
            self.progress.ending()
        if self.progress.auto:
            self._commit_now(None, min(LAST_COMMIT_MS, engine.options.default_api_timeout_ms))
        if not engine.subscribed:
            return
        reported = gone_already(self._telling)
        try:
            if lost := sorted(engine.membership.lost - reported):
                told(self.listener.on_partitions_lost(lost))
            if owned := sorted(engine.positions.states.keys() - reported):
                told(self.listener.on_partitions_revoked(owned))
        finally:
            self._thread.run(engine.leave(LAST_COMMIT_MS))
            self.progress.forget()

    # Calls

    def commit(self, argument: CommitArgument) -> None:
        """See `Consumer.commit`."""
        if argument is None and (lost := self.progress.losses()) is not None:
            raise lost[1]
        self._thread.run(self.engine.commit_now(*self.progress.asked(argument)))

    def commit_async(self, argument: CommitArgument, callback: CommitCallback | None) -> None:
        """See `Consumer.commit_async`."""
        self.engine.check_open()
        over = callback or log_failure
        if argument is None and (lost := self.progress.losses()) is not None:
            self.engine.commit_soon(lost[0], {}, over, refused=lost[1])
        else:
            self.engine.commit_soon(*self.progress.asked(argument), over)


def gone_already(step: Step | None) -> set[TopicPartition]:
    """Return the partitions that this step takes away, while the listener is being told of it."""
    return set() if step is None or step.change is Change.ASSIGNED else set(step.partitions)


class Consumer(Client[ConsumerEngine], Generic[K, V]):
    """Reads records from a cluster. Thread-safe, but only one thread should poll; with a group only one may.

    >>> from raftlog import Consumer, Producer
    >>> with Producer(cluster.bootstrap) as producer:
    ...     sent = producer.send("orders", b"one apple", key=b"a17").result(timeout=10)
    >>> with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
    ...     consumer.subscribe("orders")
    ...     record = consumer.poll(timeout=10)[0]
    ...     (record.key, record.value, record.offset)
    (b'a17', b'one apple', 0)

    With a `group_id` the members of the group share the partitions of their topics, and each partition continues at the
    group's committed offset. Without a group every consumer reads all partitions of its topics. Options are Kafka's
    keys with underscores (`auto_offset_reset="earliest"`), or with dots in `config`; docs/configuration.md lists them.
    `fetch_max_bytes` limits the bytes that are fetched and not yet polled.

    `key_deserializer` and `value_deserializer` are functions that turn the bytes of records into what `poll` and
    iteration return; None stays None. They run once for each record, in the thread that polls. If one raises, `poll`
    first returns the records before that one; then every poll raises the exception, with a note that names partition
    and offset, until `seek` passes the record. `poll_arrow` does not use them; it is the way to read many records
    quickly.

    Raises:
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
        InvalidGroupId: not 1 to 255 characters.
    """

    # aio-doc: >>> import asyncio
    # aio-doc: >>> from raftlog import aio
    # aio-doc: >>> async def first():
    # aio-doc: ...     async with aio.Producer(cluster.bootstrap) as producer:
    # aio-doc: ...         await (await producer.send("aio-orders", b"a pear"))
    # aio-doc: ...     async with aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
    # aio-doc: ...         await consumer.subscribe("aio-orders")
    # aio-doc: ...         async for record in consumer:
    # aio-doc: ...             return record.value
    # aio-doc: >>> asyncio.run(first())
    # aio-doc: b'a pear'

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        group_id: str | None = None,
        auto_offset_reset: OffsetReset | None = None,
        isolation_level: IsolationLevel | None = None,
        *,
        key_deserializer: Callable[[bytes], K] | None = None,
        value_deserializer: Callable[[bytes], V] | None = None,
        config: Mapping[str, object] | None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> None:
        self._key_deserializer = as_converter("key_deserializer", key_deserializer)
        self._value_deserializer = as_converter("value_deserializer", value_deserializer)
        self._converts = key_deserializer is not None or value_deserializer is not None
        check_group_id(group_id)
        given = taken_apart(bootstrap, config, options)
        self._addresses = given.addresses
        named = {"auto_offset_reset": auto_offset_reset, "isolation_level": isolation_level, "group_id": group_id}
        given.keywords.update({name: value for name, value in named.items() if value is not None})
        self._options = ConsumerOptions.make(given.config, given.keywords)
        check_group_options(self._options, given.keywords, given.config)
        self._tracing = consumer_tracing(self._options)
        self._data = Alarm()
        self._unread = Unread()
        self._group: GroupPart | None = None
        self._start()

    def _make(self, loop: asyncio.AbstractEventLoop) -> ConsumerEngine:
        engine: ConsumerEngine
        if self._options.group_id:
            engine = member = GroupEngine(self._addresses, self._options, loop)
            self._group = GroupPart(
                member,
                self._unread,
                self._thread,  # sync
            )
        else:
            engine = ConsumerEngine(self._addresses, self._options, loop)
        engine.on_data = self._data.set
        return engine

    def _abandon(self) -> None:  # sync
        self._engine.abandon_after_fork()

    # What to read

    def subscribe(
        self,
        topics: str | Iterable[str] | None = None,
        pattern: str | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """Read all partitions of these topics, or of every topic whose whole name matches the regular expression.

        The call returns once the starting positions are known, so the consumer reads every record that is sent
        afterwards, even with `latest`. Partitions without a leader delay the others by at most 2 seconds, and the call
        by at most `default.api.timeout.ms`; then a warning names them, and the client keeps looking for their positions
        in the background. New topics that match, and new partitions, are read from their start. The call replaces an
        earlier subscription or assignment. With a group it returns once the coordinator has assigned the first
        partitions; `listener` learns of later changes.

        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     consumer.subscribe(pattern="orde.*")
        ...     [str(partition) for partition in consumer.assignment()]
        ['orders-0']

        Raises:
            InvalidRequestError: neither topics nor pattern, or both.
            TypeError: the listener lacks a method of `RebalanceListener`.
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`.
            TopicAuthorizationFailed: this user may not read some of the topics; the others are read.
            RaftlogError: the group refuses this member (GroupMaxSizeReached, UnsupportedAssignor, FencedInstanceId), or
                no coordinator answered in that time (CoordinatorNotAvailable, UnreleasedInstanceId).
        """
        names, compiled = as_names(topics, pattern)
        if listener is not None:
            check_listener(listener)
            self._of_group("a listener").listener = listener
        self._unread.put_back(self._engine)
        group = self._group
        if group is None:
            self._thread.run(self._engine.subscribe(names, compiled))
            return
        if not self._engine.subscribed:
            group.progress.forget()
        try:
            self._thread.run(self._engine.subscribe(names, compiled))
            group.look()
            self._thread.run(group.engine.something_to_read())
            group.look()
            self._thread.run(self._engine.placed())
        finally:
            group.engine.polled_ms = monotonic_ms()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions. A partition that was assigned before keeps its position.

        >>> from raftlog import TopicPartition
        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     consumer.assign([TopicPartition("orders", 0)])
        ...     consumer.seek(TopicPartition("orders", 0), 0)
        ...     consumer.poll(timeout=10)[0].value
        b'one apple'

        Raises:
            UnknownTopicOrPartition: there is no such topic or partition.
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`.
        """
        wanted = as_partitions("assign", partitions)
        self._unread.put_back(self._engine)
        if self._group is not None and self._group.engine.subscribed:
            self._group.end(clean=True)
        self._thread.run(self._engine.assign(wanted))

    def unsubscribe(self) -> None:
        """Stop reading. A group member commits finished records, if it commits automatically, and leaves its group."""
        if self._group is not None:
            self._group.end(clean=True)
        self._unread.records.clear()
        self._thread.run(self._engine.unsubscribe())

    def assignment(self) -> list[TopicPartition]:
        """Return the assigned partitions, in order.

        For a group member this includes lost partitions until a poll has told the listener of the loss. The consumer no
        longer returns their records, `seek`, `pause` and `resume` have no effect on them, and commits of them fail.
        """
        # aio: if self._made is None:
        # aio:     return []
        return self._engine.assigned()

    def partitions_for(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of a topic.

        Raises:
            UnknownTopicOrPartition: there is no such topic.
        """
        self._engine.check_open()
        view = self._thread.run(
            self._engine.metadata.topic(topic, self._engine.options.default_api_timeout_ms, fresh=True)
        )
        return [TopicPartition(topic, part.partition) for part in view.partitions]

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Stop fetching these partitions; their positions stay.

        Raises:
            InvalidRequestError: a partition is not assigned.
        """
        wanted = as_partitions("pause", partitions)
        self._unread.put_back(self._engine)
        self._engine.pause(wanted, True)

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Fetch these paused partitions again.

        Raises:
            InvalidRequestError: a partition is not assigned.
        """
        self._engine.pause(as_partitions("resume", partitions), False)

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions, in order."""
        states = list(self._engine.positions.states.values())
        return sorted(state.topic_partition for state in states if state.paused)

    # Reading

    def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record[K, V]]:
        """Return the next records, waiting up to `timeout` seconds (None: without a limit) for the first one.

        Returns as soon as there are records, at most `max_records` (by default `max.poll.records`). Returns an empty
        list after the timeout, or earlier if only aborted records or transaction markers arrived: then positions have
        moved. Partitions take turns.

        Raises:
            OffsetOutOfRange: the position is no longer in the log, and `auto_offset_reset` is "none"; seek to continue.
            CorruptRecordError: a batch does not match its checksum; the next poll fetches it again.
            AuthorizationError: the user may not read this, or cannot log in; the next poll tries again.
            InvalidRequestError: no topic is subscribed and no partition assigned.
            ClosedError: the consumer is closed.
        """
        found: list[Any] = self._poll(timeout, max_records)
        return self._converted(found) if self._converts else found

    def _converted(self, found: list[Record]) -> list[Record[K, V]]:
        """Return the records with keys and values converted, up to the first failure; the rest waits."""
        done: list[Record[K, V]] = []
        try:
            for record in found:
                done.append(self._convert(record))  # noqa: PERF401 # what is done stays when one fails
        except BaseException as error:
            waiting = found[len(done) :] if isinstance(error, Exception) else found
            self._unread.records.extendleft(reversed(waiting))
            if len(waiting) == len(found):
                raise
        return done

    def _convert(self, record: Record) -> Any:
        where = f"{record.topic_partition} at offset {record.offset}; seek past it to skip the record"
        return record._replace(
            key=converted(self._key_deserializer, record.key, "key_deserializer", where),
            value=converted(self._value_deserializer, record.value, "value_deserializer", where),
        )

    def _poll(self, timeout: float | None, max_records: int | None) -> list[Record]:
        engine, group = self._engine, self._group
        engine.check_open()
        most = max_records or engine.options.max_poll_records
        if self._unread.records:
            if group is None:
                return self._unread.take(most, None)
            group.come_back()
            if self._unread.records:
                return self._unread.take(most, group.progress.handed_records)
        marks = self._come_back()
        try:
            found: list[Record] = []
            for rows in self._rows(timeout, most, marks):
                found += rows.records()
            return found
        except BaseException:
            engine.take_back(marks)
            raise

    def poll_arrow(self, timeout: float | None = 1.0, max_records: int | None = None) -> Any:
        """Return all fetched records as a `pyarrow.Table`, waiting up to `timeout` seconds for the first record.

        Columns: topic (dictionary of string), partition (int32), offset (int64), timestamp (timestamp[ms, UTC]), key
        and value (binary), headers (map<string, binary>). Values are not copied: the table keeps the fetched buffers
        alive, one chunk per batch.

        >>> with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        ...     consumer.subscribe("orders")
        ...     table = consumer.poll_arrow(timeout=10)
        ...     table.select(["topic", "offset", "value"]).to_pylist()
        [{'topic': 'orders', 'offset': 0, 'value': b'one apple'}]

        Raises:
            RaftlogError: as `poll`.
        """
        engine = self._engine
        engine.check_open()
        self._unread.put_back(engine)
        marks = self._come_back()
        try:
            return table_of(self._rows(timeout, max_records or ALL_ROWS, marks), engine)
        except BaseException:
            engine.take_back(marks)
            raise

    def _come_back(self) -> dict[PartitionState, Mark]:
        """Begin a poll; return the dict in which it marks positions before it takes records."""
        if self._group is None:
            self._engine.settle()
            return {}
        self._group.come_back()
        return self._group.progress.out

    def _rows(self, timeout: float | None, max_rows: int, marks: dict[PartitionState, Mark]) -> list[Rows]:
        tracing = self._tracing
        if tracing is None:
            return self._untraced_rows(timeout, max_rows, marks)
        begun_ns = tracing.begin()
        found = self._untraced_rows(timeout, max_rows, marks)
        tracing.end(begun_ns, found)
        return found

    def _untraced_rows(self, timeout: float | None, max_rows: int, marks: dict[PartitionState, Mark]) -> list[Rows]:
        if self._group is None:
            return self._wait_for_rows(timeout, max_rows, marks)
        member = self._group.engine
        member.polled_ms = math.inf
        try:
            return self._wait_for_rows(timeout, max_rows, marks)
        finally:
            member.polled_ms = monotonic_ms()

    def _wait_for_rows(self, timeout: float | None, max_rows: int, marks: dict[PartitionState, Mark]) -> list[Rows]:
        engine, group = self._engine, self._group
        deadline: Deadline | None = None
        passed = engine.positions.passed
        while True:
            self._data.clear()
            if group is not None:
                group.look()
            rows = engine.take(max_rows, marks)
            if rows or timeout == 0:
                return rows
            deadline = deadline or Deadline(timeout)
            left_s = deadline.left()
            if left_s is not None and passed != engine.positions.passed:
                passed, left_s = engine.positions.passed, min(left_s, PASSED_WAIT_S)
                deadline = Deadline(left_s)
            if left_s is not None and left_s <= 0:
                return rows
            self._data.wait(left_s if group is None else group.progress.wait_s(left_s))

    def __iter__(self) -> Consumer[K, V]:
        return self

    def __next__(self) -> Record[K, V]:
        """Return the next record; waits without a limit, or ends after `consumer.timeout.ms` without a record."""
        self._engine.check_open()
        unread, group = self._unread, self._group
        if group is not None:
            group.come_back()
        if not unread.records:
            limit_ms = self._engine.options.consumer_timeout_ms
            left = Deadline(None if limit_ms is None else limit_ms / 1000).left
            while not (found := self._poll(left(), None)):
                if left() == 0:
                    raise StopIteration
            unread.records.extend(found)
        record = unread.records[0]
        result: Record[Any, Any] = self._convert(record) if self._converts else record
        if group is not None:
            group.progress.yielded(record)
        del unread.records[0]  # no call, so no signal between this and the return
        return result

    # Group

    def _of_group(self, what: str) -> GroupPart:
        if not self._options.group_id:
            raise InvalidRequestError(f"{what} needs a consumer with a group_id")
        self._engine.check_open()
        assert self._group is not None
        return self._group

    def commit(self, offsets: CommitArgument = None) -> None:
        """Commit offsets and wait for the coordinator: after a failure or a rebalance the group continues there.

        Without an argument, commit the offsets after all returned records: those that `poll` returned, or that
        iteration yielded, including the last one. If a partition was lost before its records were committed, the call
        commits nothing and raises `PartitionNotOwned`, once: another member gets these records again. With a `Record`,
        commit the offset after it; with offsets by partition, commit exactly these.

        >>> from raftlog import Consumer, TopicPartition
        >>> with Consumer(cluster.bootstrap, group_id="readers", auto_offset_reset="earliest") as consumer:
        ...     consumer.subscribe("orders")
        ...     record = consumer.poll(timeout=10, max_records=1)[0]
        ...     consumer.commit(record)
        ...     consumer.committed(TopicPartition("orders", 0))[TopicPartition("orders", 0)].offset
        1

        Raises:
            PartitionNotOwned: this member does not have the partition, or has lost it to another one.
            FencedError: the group has removed this member.
            InvalidRequestError: the consumer has no group, or the argument holds no offsets.
            OffsetMetadataTooLarge: the metadata of an offset is too long.
            RaftlogError: the coordinator's last refusal, after retries for `default.api.timeout.ms`.
        """
        group = self._of_group("commit")
        group.commit(offsets)

    def commit_async(self, offsets: CommitArgument = None, callback: CommitCallback | None = None) -> None:
        """Commit in the background. Commits take effect in the order of the calls, even if some are retried.

        `callback(offsets, error)` runs on the client's event loop: it must be quick and must not block; `error` is None
        after a success. Without a callback, the consumer logs a failure.

        Raises:
            PartitionNotOwned: this member does not have the partition of an offset.
            InvalidRequestError: as `commit`. The callback receives all other errors.
        """
        self._of_group("commit_async").commit_async(offsets, callback)

    def committed(
        self, *partitions: TopicPartition | Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the group's committed offset of each of these partitions, by default of the assigned ones.

        The value is None for a partition without a committed offset.

        Raises:
            RaftlogError: the coordinator refused, or did not answer within `default.api.timeout.ms`.
        """
        group = self._of_group("committed")
        wanted = as_partitions("committed", partitions) or sorted(group.engine.positions.states)
        return group._thread.run(group.engine.committed(wanted))

    def group_metadata(self) -> GroupMetadata:
        """Return the group id, member id and member epoch of this consumer, for `send_offsets_to_transaction`."""
        return self._of_group("group_metadata").engine.group_metadata()

    def group_note(self) -> str:
        """Return why the member has no partitions, or which topics it waits for; "" if neither applies."""
        return self._of_group("group_note").engine.membership.note

    # Positions

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue at `offset`, and drop the records that were fetched before.

        Raises:
            InvalidRequestError: the partition is not assigned, or the offset is negative or no whole number.
        """
        wanted, begin = as_partition(partition), as_offset(offset)
        self._unread.put_back(self._engine)
        self._engine.place(wanted, begin)

    def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go to the first offset of these partitions, by default of all assigned ones."""
        self._seek_to(self.beginning_offsets(self._or_all("seek_to_beginning", partitions)))

    def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go past the last offset of these partitions, by default of all assigned ones."""
        self._seek_to(self.end_offsets(self._or_all("seek_to_end", partitions)))

    def seek_to_committed(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go back to the group's committed offsets in these partitions, by default in all assigned ones.

        Polls return the records since the last commit again. A partition without a committed offset goes where
        `auto_offset_reset` says.

        >>> with Consumer(cluster.bootstrap, group_id="again", auto_offset_reset="earliest") as consumer:
        ...     consumer.subscribe("orders")
        ...     first = consumer.poll(timeout=10)
        ...     consumer.seek_to_committed()  # nothing is committed yet
        ...     first == consumer.poll(timeout=10)
        True

        Raises:
            OffsetOutOfRange: a partition has no committed offset, and `auto_offset_reset` is "none".
            RaftlogError: as `committed`.
        """
        found = self.committed(self._or_all("seek_to_committed", partitions))
        without = [part for part, offset in found.items() if offset is None]
        policy = self._options.auto_offset_reset
        if without and policy == "none":
            raise OffsetOutOfRange(
                f"{', '.join(map(str, without))}: nothing is committed there, and auto.offset.reset is none; seek to "
                "continue"
            )
        if without:
            self._seek_to(self._ends(without, EARLIEST if policy == "earliest" else LATEST))
        self._seek_to({part: offset.offset for part, offset in found.items() if offset is not None})

    def read_to_end(self, timeout: float | None = None, progress: Callable[[int, int], object] | None = None) -> Any:
        """Return the records from the positions up to the ends that the assigned partitions have now, as a table.

        The call looks the ends up once, so it ends although records keep coming; then the positions are at these ends.
        The columns are those of `poll_arrow`. Paused partitions are left out. All records are in memory: if they do not
        fit, call `poll_arrow` until `position` reaches `end_offsets`. The call runs `progress(passed, total)`, both
        numbers of offsets, at the beginning and after each step. `raftlog.read_table` reads whole topics.

        >>> with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        ...     consumer.assign([TopicPartition("orders", 0)])
        ...     consumer.read_to_end(timeout=30)["value"].to_pylist()
        [b'one apple']

        Raises:
            RequestTimedOut: the read is not complete within `timeout` seconds, or nothing came for
                `default.api.timeout.ms`; the message names the partitions. The positions are as before the call.
            InvalidRequestError: the consumer is a member of a group, whose partitions may change meanwhile.
            RaftlogError: as `poll`; the positions are as before the call.
        """
        engine = self._engine
        engine.check_open()
        if self._group is not None and self._group.engine.subscribed:
            raise InvalidRequestError("read_to_end needs partitions that stay: use assign, not subscribe with a group")
        self._unread.put_back(engine)
        paused = self.paused()
        parts = [part for part in self.assignment() if part not in paused]
        ends = self.end_offsets(parts)
        back = {part: self.position(part) for part in parts}
        reading = ToEnds(engine, ends, back, timeout)
        try:
            while True:
                if progress is not None:
                    progress(*reading.passed())
                if not reading.left:
                    break
                wait_s = reading.wait_s()
                if wait_s <= 0:
                    raise reading.too_late(self._thread.run(engine.out_of_reach()))
                reading.add(self._rows(wait_s, ALL_ROWS, self._come_back()))
        except BaseException:
            self._seek_to(back)
            raise
        self._seek_to(reading.passed_too_far)
        return table_of(reading.rows, engine)

    def _or_all(self, call: str, partitions: Iterable[object]) -> list[TopicPartition]:
        return as_partitions(call, partitions) or sorted(self._engine.positions.states)

    def _seek_to(self, offsets: Mapping[TopicPartition, int]) -> None:
        for topic_partition, offset in offsets.items():
            self.seek(topic_partition, offset)

    def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record that poll or iteration will return.

        Raises:
            InvalidRequestError: the partition is not assigned.
            OffsetOutOfRange: there is no position, and `auto_offset_reset` is "none".
        """
        engine = self._engine
        topic_partition = as_partition(partition)
        unread = self._unread.first_offsets().get(topic_partition)
        if unread is not None:
            return unread
        found = engine.position_now(topic_partition)
        if found is None:
            self._thread.run(engine.placed())
            found = engine.position_now(topic_partition)
        if found is None:
            raise InvalidRequestError(f"{topic_partition} has no position yet: its start could not be looked up")
        return found

    def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first offset of each partition whose record has this or a later timestamp (ms since 1970).

        The value is None for a partition without such a record. The partitions need not be assigned.

        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     found = consumer.offsets_for_times({TopicPartition("orders", 0): 0})
        ...     found[TopicPartition("orders", 0)].offset
        0

        Raises:
            UnknownTopicOrPartition: there is no such topic or partition.
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`.
        """
        return self._find(as_times(timestamps_ms))

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offset of each partition. The partitions need not be assigned.

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: as `offsets_for_times`.
        """
        return self._ends(partitions, EARLIEST)

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset after the last readable record of each partition. The partitions need not be assigned.

        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     consumer.end_offsets([TopicPartition("orders", 0)])
        {TopicPartition(topic='orders', partition=0): 1}

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: as `offsets_for_times`.
        """
        return self._ends(partitions, LATEST)

    def _ends(self, partitions: Iterable[TopicPartition], end: int) -> dict[TopicPartition, int]:
        found = self._find(dict.fromkeys(as_partitions("this", partitions), end))
        return {part: answer.offset for part, answer in found.items() if answer is not None}

    def _find(self, timestamps_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        engine = self._engine
        engine.check_open()
        wanted = {as_partition(part): at for part, at in timestamps_ms.items()}
        found = self._thread.run(engine.lookup.find(wanted, engine.options.isolation_level))
        return {part: found[part] for part in wanted}

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the consumer's metrics by group, under the names of Kafka's client metrics.

        Units and periods are as in `Producer.metrics`. A partition's `records-lag` is its lag when its last records
        arrived.

        >>> with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        ...     consumer.subscribe("orders")
        ...     _ = consumer.poll(timeout=10)
        ...     consumer.metrics()["consumer-fetch-manager-metrics"]["records-consumed-total"]
        1.0
        """
        # aio: if self._made is None:
        # aio:     return {}
        return self._engine.metrics()

    # End

    def close(self) -> None:
        """Stop reading. Closing twice is allowed.

        A group member leaves the group; a static member keeps its partitions until the session timeout. With automatic
        commits the records of the last poll count as finished and are committed, unless an exception is being handled
        or another thread polled them.
        """
        self._close(clean=sys.exc_info()[0] is None)

    def _close(self, *, clean: bool) -> None:
        # aio: self._closed = True
        engine = self._made
        if engine is None or engine.closed is not None:
            return
        try:
            if self._group is not None:
                self._group.end(clean=clean)
        finally:
            if engine.closed is None:  # unless a listener has closed it
                self._thread.run(engine.close())

    def __enter__(self) -> Consumer[K, V]:
        # aio: assert self._engine is not None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(clean=kind is None)


def read_table(
    bootstrap: Bootstrap,
    topics: str | Iterable[str],
    *,
    since_ms: int | None = None,
    isolation_level: IsolationLevel | None = None,
    timeout: float | None = None,
    progress: Callable[[int, int], object] | None = None,
    config: Mapping[str, object] | None = None,
    **options: Unpack[ConsumerKeywords],
) -> Any:
    """Return all records that these topics have now as one `pyarrow.Table`, with the columns of `poll_arrow`.

    Each partition is read from its first offset, or from the first record with a timestamp of at least `since_ms`, to
    the end that it has when the call begins. `progress` and `timeout` are those of `Consumer.read_to_end`, options
    those of `Consumer`.

    >>> import raftlog
    >>> raftlog.read_table(cluster.bootstrap, "orders").select(["offset", "key"]).to_pylist()
    [{'offset': 0, 'key': b'a17'}]

    Raises:
        UnknownTopicOrPartition: there is no such topic.
        RequestTimedOut: as `Consumer.read_to_end`.
    """
    names, _ = as_names(topics, None)
    with Consumer(bootstrap, None, "earliest", isolation_level, config=config, **options) as consumer:
        parts: list[TopicPartition] = []
        for name in names or ():
            parts += consumer.partitions_for(name)
        consumer.assign(parts)
        consumer.seek_to_beginning()
        if since_ms is not None:
            found = consumer.offsets_for_times(dict.fromkeys(parts, since_ms))
            for part, first in found.items():
                if first is None:
                    consumer.seek_to_end(part)
                else:
                    consumer.seek(part, first.offset)
        return consumer.read_to_end(timeout, progress)
