"""The awaitable side of `raftlog/_consumer.py`, generated from it by `./dev aio`: change that file."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Unpack

from raftlog._client.consumer import PASSED_WAIT_S, ConsumerEngine
from raftlog._client.group_consumer import Change, GroupEngine, Step
from raftlog._client.groups import as_partition
from raftlog._client.keywords import ConsumerKeywords, IsolationLevel, OffsetReset
from raftlog._client.metadata import EARLIEST, LATEST, monotonic_ms
from raftlog._client.options import Bootstrap, ConsumerOptions, taken_apart
from raftlog._client.tracing_choice import consumer_tracing
from raftlog._consumer import (
    ALL_ROWS,
    LAST_COMMIT_MS,
    CommitArgument,
    CommitCallback,
    Progress,
    RebalanceListener,
    ToEnds,
    Unread,
    as_names,
    as_offset,
    as_partitions,
    as_times,
    check_group_id,
    check_group_options,
    check_listener,
    gone_already,
    log_failure,
    table_of,
)
from raftlog._core.arguments import as_converter, converted
from raftlog._core.positions import Mark, PartitionState, Rows
from raftlog._delivery import Deadline
from raftlog.aio._loop import Alarm, Client, Turn, get_ident, told
from raftlog.errors import (
    InvalidRequestError,
    OffsetOutOfRange,
    RaftlogError,
)
from raftlog.types import GroupMetadata, K, OffsetAndMetadata, OffsetAndTimestamp, Record, TopicPartition, V

logger = logging.getLogger(__name__)


class GroupPart:
    """Carries out the coordinator's rebalances, tells the application's listener, and commits."""

    def __init__(
        self,
        engine: GroupEngine,
        unread: Unread,
    ) -> None:
        self.engine = engine
        self.progress = Progress(engine, unread)
        self.listener = RebalanceListener()
        self._turn = Turn()
        self._telling: Step | None = None
        self._ending = False
        self._poller: int | None = None
        """The thread of the last poll."""

    async def come_back(self) -> None:
        """Attend to the group before the application gets more records.

        Raises:
            RaftlogError: the group refuses this member for good.
        """
        now_ms = monotonic_ms()
        self._poller = get_ident()
        if self.progress.come_back(now_ms):
            await self.attend(now_ms)

    async def look(self) -> None:
        """Attend to the group while a poll waits, or during another call; this finishes no record."""
        now_ms = monotonic_ms()
        if self.progress.wants_attention(now_ms):
            await self.attend(now_ms)

    async def attend(self, now_ms: float) -> None:
        """Report lost partitions, give up revoked ones, take new ones, commit.

        Raises:
            RaftlogError: the group refuses this member for good.
        """
        async with self._turn as outside:
            if not outside:  # a listener has called
                return
            engine = self.engine
            if self.progress.may_be_over(now_ms):
                await engine.look_again()
            while engine.attention and (step := await engine.next_step()) is not None:
                try:
                    await self._tell(step)
                finally:
                    await engine.finish_step(step)
            self.progress.auto_commit(now_ms)
            if (failure := engine.failure()) is not None:
                raise type(failure)(str(failure))

    async def _tell(self, step: Step) -> None:
        self._telling = step
        try:
            match step.change:
                case Change.LOST:
                    self.progress.drop(step.partitions, lost=True)
                    await told(self.listener.on_partitions_lost(step.partitions))
                case Change.REVOKED:
                    try:
                        if self.progress.auto:
                            await self._commit_now(step.partitions, self.engine.options.default_api_timeout_ms)
                    finally:  # the member gives them up even if the commit is interrupted
                        self.progress.drop(step.partitions, lost=False)
                        await told(self.listener.on_partitions_revoked(step.partitions))
                case Change.ASSIGNED:
                    await told(self.listener.on_partitions_assigned(step.partitions))
        finally:
            self._telling = None

    async def _commit_now(self, partitions: Iterable[TopicPartition] | None, timeout_ms: float) -> None:
        try:
            with self.engine.lock:
                offsets = self.progress.done(partitions)
                claims = self.engine.claims(offsets)
            await self.engine.commit_now(offsets, claims, timeout_ms)
        except RaftlogError as error:
            logger.warning("group %s: committing before partitions go failed: %s", self.engine.group_id, error)

    async def end(self, *, clean: bool) -> None:
        """Commit finished records, tell the listener, and leave the group.

        The records of the last poll count as finished only if `clean` (no exception is the reason for the end) and if
        this is the thread that polled. If the listener calls it while it is told of the end, the call does nothing.
        """
        if self._ending:
            return
        self._ending = True
        try:
            await self._end(clean and self._poller in (None, get_ident()))
        finally:
            self._ending = False

    async def _end(self, clean: bool) -> None:
        engine = self.engine
        if clean:
            self.progress.ending()
        if self.progress.auto:
            await self._commit_now(None, min(LAST_COMMIT_MS, engine.options.default_api_timeout_ms))
        if not engine.subscribed:
            return
        reported = gone_already(self._telling)
        try:
            if lost := sorted(engine.membership.lost - reported):
                await told(self.listener.on_partitions_lost(lost))
            if owned := sorted(engine.positions.states.keys() - reported):
                await told(self.listener.on_partitions_revoked(owned))
        finally:
            await engine.leave(LAST_COMMIT_MS)
            self.progress.forget()

    # Calls

    async def commit(self, argument: CommitArgument) -> None:
        """See `Consumer.commit`."""
        if argument is None and (lost := self.progress.losses()) is not None:
            raise lost[1]
        await self.engine.commit_now(*self.progress.asked(argument))

    def commit_async(self, argument: CommitArgument, callback: CommitCallback | None) -> None:
        """See `Consumer.commit_async`."""
        self.engine.check_open()
        over = callback or log_failure
        if argument is None and (lost := self.progress.losses()) is not None:
            self.engine.commit_soon(lost[0], {}, over, refused=lost[1])
        else:
            self.engine.commit_soon(*self.progress.asked(argument), over)


class Consumer(Client[ConsumerEngine], Generic[K, V]):
    """Reads records from a cluster. Belongs to the event loop that runs when it is first used.

    With a `group_id` the members of the group share the partitions of their topics, and each partition continues at the
    group's committed offset. Without a group every consumer reads all partitions of its topics. Options are Kafka's
    keys with underscores (`auto_offset_reset="earliest"`), or with dots in `config`; docs/configuration.md lists them.
    `fetch_max_bytes` limits the bytes that are fetched and not yet polled.

    `key_deserializer` and `value_deserializer` are functions that turn the bytes of records into what `poll` and
    iteration return; None stays None. They run once for each record, in the thread that polls. If one raises, `poll`
    first returns the records before that one; then every poll raises the exception, with a note that names partition
    and offset, until `seek` passes the record. `poll_arrow` does not use them; it is the way to read many records
    quickly.

    >>> import asyncio
    >>> from raftlog import aio
    >>> async def first():
    ...     async with aio.Producer(cluster.bootstrap) as producer:
    ...         await (await producer.send("aio-orders", b"a pear"))
    ...     async with aio.Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
    ...         await consumer.subscribe("aio-orders")
    ...         async for record in consumer:
    ...             return record.value
    >>> asyncio.run(first())
    b'a pear'

    Raises:
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
        InvalidGroupId: not 1 to 255 characters.
    """

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
            )
        else:
            engine = ConsumerEngine(self._addresses, self._options, loop)
        engine.on_data = self._data.set
        return engine

    # What to read

    async def subscribe(
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
            await self._engine.subscribe(names, compiled)
            return
        if not self._engine.subscribed:
            group.progress.forget()
        try:
            await self._engine.subscribe(names, compiled)
            await group.look()
            await group.engine.something_to_read()
            await group.look()
            await self._engine.placed()
        finally:
            group.engine.polled_ms = monotonic_ms()

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions. A partition that was assigned before keeps its position.

        Raises:
            UnknownTopicOrPartition: there is no such topic or partition.
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`.
        """
        wanted = as_partitions("assign", partitions)
        self._unread.put_back(self._engine)
        if self._group is not None and self._group.engine.subscribed:
            await self._group.end(clean=True)
        await self._engine.assign(wanted)

    async def unsubscribe(self) -> None:
        """Stop reading. A group member commits finished records, if it commits automatically, and leaves its group."""
        if self._group is not None:
            await self._group.end(clean=True)
        self._unread.records.clear()
        await self._engine.unsubscribe()

    def assignment(self) -> list[TopicPartition]:
        """Return the assigned partitions, in order.

        For a group member this includes lost partitions until a poll has told the listener of the loss. The consumer no
        longer returns their records, `seek`, `pause` and `resume` have no effect on them, and commits of them fail.
        """
        if self._made is None:
            return []
        return self._engine.assigned()

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of a topic.

        Raises:
            UnknownTopicOrPartition: there is no such topic.
        """
        self._engine.check_open()
        view = await self._engine.metadata.topic(topic, self._engine.options.default_api_timeout_ms, fresh=True)
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

    async def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record[K, V]]:
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
        found: list[Any] = await self._poll(timeout, max_records)
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

    async def _poll(self, timeout: float | None, max_records: int | None) -> list[Record]:
        engine, group = self._engine, self._group
        engine.check_open()
        most = max_records or engine.options.max_poll_records
        if self._unread.records:
            if group is None:
                return self._unread.take(most, None)
            await group.come_back()
            if self._unread.records:
                return self._unread.take(most, group.progress.handed_records)
        marks = await self._come_back()
        try:
            found: list[Record] = []
            for rows in await self._rows(timeout, most, marks):
                found += rows.records()
            return found
        except BaseException:
            engine.take_back(marks)
            raise

    async def poll_arrow(self, timeout: float | None = 1.0, max_records: int | None = None) -> Any:
        """Return all fetched records as a `pyarrow.Table`, waiting up to `timeout` seconds for the first record.

        Columns: topic (dictionary of string), partition (int32), offset (int64), timestamp (timestamp[ms, UTC]), key
        and value (binary), headers (map<string, binary>). Values are not copied: the table keeps the fetched buffers
        alive, one chunk per batch.

        Raises:
            RaftlogError: as `poll`.
        """
        engine = self._engine
        engine.check_open()
        self._unread.put_back(engine)
        marks = await self._come_back()
        try:
            return table_of(await self._rows(timeout, max_records or ALL_ROWS, marks), engine)
        except BaseException:
            engine.take_back(marks)
            raise

    async def _come_back(self) -> dict[PartitionState, Mark]:
        """Begin a poll; return the dict in which it marks positions before it takes records."""
        if self._group is None:
            self._engine.settle()
            return {}
        await self._group.come_back()
        return self._group.progress.out

    async def _rows(self, timeout: float | None, max_rows: int, marks: dict[PartitionState, Mark]) -> list[Rows]:
        tracing = self._tracing
        if tracing is None:
            return await self._untraced_rows(timeout, max_rows, marks)
        begun_ns = tracing.begin()
        found = await self._untraced_rows(timeout, max_rows, marks)
        tracing.end(begun_ns, found)
        return found

    async def _untraced_rows(
        self, timeout: float | None, max_rows: int, marks: dict[PartitionState, Mark]
    ) -> list[Rows]:
        if self._group is None:
            return await self._wait_for_rows(timeout, max_rows, marks)
        member = self._group.engine
        member.polled_ms = math.inf
        try:
            return await self._wait_for_rows(timeout, max_rows, marks)
        finally:
            member.polled_ms = monotonic_ms()

    async def _wait_for_rows(
        self, timeout: float | None, max_rows: int, marks: dict[PartitionState, Mark]
    ) -> list[Rows]:
        engine, group = self._engine, self._group
        deadline: Deadline | None = None
        passed = engine.positions.passed
        while True:
            self._data.clear()
            if group is not None:
                await group.look()
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
            await self._data.wait(left_s if group is None else group.progress.wait_s(left_s))

    def __aiter__(self) -> Consumer[K, V]:
        return self

    async def __anext__(self) -> Record[K, V]:
        """Return the next record; waits without a limit, or ends after `consumer.timeout.ms` without a record."""
        self._engine.check_open()
        unread, group = self._unread, self._group
        if group is not None:
            await group.come_back()
        if not unread.records:
            limit_ms = self._engine.options.consumer_timeout_ms
            left = Deadline(None if limit_ms is None else limit_ms / 1000).left
            while not (found := await self._poll(left(), None)):
                if left() == 0:
                    raise StopAsyncIteration
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

    async def commit(self, offsets: CommitArgument = None) -> None:
        """Commit offsets and wait for the coordinator: after a failure or a rebalance the group continues there.

        Without an argument, commit the offsets after all returned records: those that `poll` returned, or that
        iteration yielded, including the last one. If a partition was lost before its records were committed, the call
        commits nothing and raises `PartitionNotOwned`, once: another member gets these records again. With a `Record`,
        commit the offset after it; with offsets by partition, commit exactly these.

        Raises:
            PartitionNotOwned: this member does not have the partition, or has lost it to another one.
            FencedError: the group has removed this member.
            InvalidRequestError: the consumer has no group, or the argument holds no offsets.
            OffsetMetadataTooLarge: the metadata of an offset is too long.
            RaftlogError: the coordinator's last refusal, after retries for `default.api.timeout.ms`.
        """
        group = self._of_group("commit")
        await group.commit(offsets)

    def commit_async(self, offsets: CommitArgument = None, callback: CommitCallback | None = None) -> None:
        """Commit in the background. Commits take effect in the order of the calls, even if some are retried.

        `callback(offsets, error)` runs on the client's event loop: it must be quick and must not block; `error` is None
        after a success. Without a callback, the consumer logs a failure.

        Raises:
            PartitionNotOwned: this member does not have the partition of an offset.
            InvalidRequestError: as `commit`. The callback receives all other errors.
        """
        self._of_group("commit_async").commit_async(offsets, callback)

    async def committed(
        self, *partitions: TopicPartition | Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the group's committed offset of each of these partitions, by default of the assigned ones.

        The value is None for a partition without a committed offset.

        Raises:
            RaftlogError: the coordinator refused, or did not answer within `default.api.timeout.ms`.
        """
        group = self._of_group("committed")
        wanted = as_partitions("committed", partitions) or sorted(group.engine.positions.states)
        return await group.engine.committed(wanted)

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

    async def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go to the first offset of these partitions, by default of all assigned ones."""
        self._seek_to(await self.beginning_offsets(self._or_all("seek_to_beginning", partitions)))

    async def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go past the last offset of these partitions, by default of all assigned ones."""
        self._seek_to(await self.end_offsets(self._or_all("seek_to_end", partitions)))

    async def seek_to_committed(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go back to the group's committed offsets in these partitions, by default in all assigned ones.

        Polls return the records since the last commit again. A partition without a committed offset goes where
        `auto_offset_reset` says.

        Raises:
            OffsetOutOfRange: a partition has no committed offset, and `auto_offset_reset` is "none".
            RaftlogError: as `committed`.
        """
        found = await self.committed(self._or_all("seek_to_committed", partitions))
        without = [part for part, offset in found.items() if offset is None]
        policy = self._options.auto_offset_reset
        if without and policy == "none":
            raise OffsetOutOfRange(
                f"{', '.join(map(str, without))}: nothing is committed there, and auto.offset.reset is none; seek to "
                "continue"
            )
        if without:
            self._seek_to(await self._ends(without, EARLIEST if policy == "earliest" else LATEST))
        self._seek_to({part: offset.offset for part, offset in found.items() if offset is not None})

    async def read_to_end(
        self, timeout: float | None = None, progress: Callable[[int, int], object] | None = None
    ) -> Any:
        """Return the records from the positions up to the ends that the assigned partitions have now, as a table.

        The call looks the ends up once, so it ends although records keep coming; then the positions are at these ends.
        The columns are those of `poll_arrow`. Paused partitions are left out. All records are in memory: if they do not
        fit, call `poll_arrow` until `position` reaches `end_offsets`. The call runs `progress(passed, total)`, both
        numbers of offsets, at the beginning and after each step. `raftlog.read_table` reads whole topics.

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
        ends = await self.end_offsets(parts)
        back = {part: await self.position(part) for part in parts}
        reading = ToEnds(engine, ends, back, timeout)
        try:
            while True:
                if progress is not None:
                    progress(*reading.passed())
                if not reading.left:
                    break
                wait_s = reading.wait_s()
                if wait_s <= 0:
                    raise reading.too_late(await engine.out_of_reach())
                reading.add(await self._rows(wait_s, ALL_ROWS, await self._come_back()))
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

    async def position(self, partition: TopicPartition) -> int:
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
            await engine.placed()
            found = engine.position_now(topic_partition)
        if found is None:
            raise InvalidRequestError(f"{topic_partition} has no position yet: its start could not be looked up")
        return found

    async def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return the first offset of each partition whose record has this or a later timestamp (ms since 1970).

        The value is None for a partition without such a record. The partitions need not be assigned.

        Raises:
            UnknownTopicOrPartition: there is no such topic or partition.
            BrokerUnavailable: no broker answered within `default.api.timeout.ms`.
        """
        return await self._find(as_times(timestamps_ms))

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offset of each partition. The partitions need not be assigned.

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: as `offsets_for_times`.
        """
        return await self._ends(partitions, EARLIEST)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset after the last readable record of each partition. The partitions need not be assigned.

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: as `offsets_for_times`.
        """
        return await self._ends(partitions, LATEST)

    async def _ends(self, partitions: Iterable[TopicPartition], end: int) -> dict[TopicPartition, int]:
        found = await self._find(dict.fromkeys(as_partitions("this", partitions), end))
        return {part: answer.offset for part, answer in found.items() if answer is not None}

    async def _find(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        engine = self._engine
        engine.check_open()
        wanted = {as_partition(part): at for part, at in timestamps_ms.items()}
        found = await engine.lookup.find(wanted, engine.options.isolation_level)
        return {part: found[part] for part in wanted}

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the consumer's metrics by group, under the names of Kafka's client metrics.

        Units and periods are as in `Producer.metrics`. A partition's `records-lag` is its lag when its last records
        arrived.
        """
        if self._made is None:
            return {}
        return self._engine.metrics()

    # End

    async def close(self) -> None:
        """Stop reading. Closing twice is allowed.

        A group member leaves the group; a static member keeps its partitions until the session timeout. With automatic
        commits the records of the last poll count as finished and are committed, unless an exception is being handled
        or another thread polled them.
        """
        await self._close(clean=sys.exc_info()[0] is None)

    async def _close(self, *, clean: bool) -> None:
        self._closed = True
        engine = self._made
        if engine is None or engine.closed is not None:
            return
        try:
            if self._group is not None:
                await self._group.end(clean=clean)
        finally:
            if engine.closed is None:  # unless a listener has closed it
                await engine.close()

    async def __aenter__(self) -> Consumer[K, V]:
        assert self._engine is not None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close(clean=kind is None)


async def read_table(
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

    Raises:
        UnknownTopicOrPartition: there is no such topic.
        RequestTimedOut: as `Consumer.read_to_end`.
    """
    names, _ = as_names(topics, None)
    async with Consumer(bootstrap, None, "earliest", isolation_level, config=config, **options) as consumer:
        parts: list[TopicPartition] = []
        for name in names or ():
            parts += await consumer.partitions_for(name)
        await consumer.assign(parts)
        await consumer.seek_to_beginning()
        if since_ms is not None:
            found = await consumer.offsets_for_times(dict.fromkeys(parts, since_ms))
            for part, first in found.items():
                if first is None:
                    await consumer.seek_to_end(part)
                else:
                    consumer.seek(part, first.offset)
        return await consumer.read_to_end(timeout, progress)
