"""The synchronous consumer."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from raftlog._alarm import Alarm
from raftlog._client.background import abandon_after_fork, loop_thread
from raftlog._client.commit_arguments import as_partition
from raftlog._client.consumer import ConsumerEngine
from raftlog._client.fetcher import monotonic_ms
from raftlog._client.group_consumer import GroupEngine
from raftlog._client.offsets import EARLIEST, LATEST
from raftlog._client.options import ConsumerOptions
from raftlog._client.partition_reader import PASSED_WAIT_S
from raftlog._client.tracing_choice import consumer_tracing
from raftlog._consumer_arguments import (
    ALL_ROWS,
    Unread,
    as_names,
    as_partitions,
    check_offset,
    check_times,
    table_of,
)
from raftlog._core.bootstrap import parse_bootstrap
from raftlog._core.fetched import Rows
from raftlog._core.positions import Mark, PartitionState
from raftlog._delivery import Deadline
from raftlog._group import GroupCalls, GroupPart
from raftlog._group_listener import RebalanceListener
from raftlog._group_offsets import check_group_id, check_group_options
from raftlog.errors import InvalidRequestError
from raftlog.types import OffsetAndTimestamp, Record, TopicPartition


class Consumer(GroupCalls):
    """Reads records from a cluster. Thread-safe, though one thread that polls is the usual shape, and with a group the
    only one.

    >>> from raftlog import Consumer, Producer
    >>> with Producer(cluster.bootstrap) as producer:
    ...     sent = producer.send("orders", b"one apple", key=b"a17").result(timeout=10)
    >>> with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
    ...     consumer.subscribe("orders")
    ...     record = consumer.poll(timeout=10)[0]
    ...     (record.key, record.value, record.offset)
    (b'a17', b'one apple', 0)

    With a `group_id` the members of the group share the partitions of what they subscribe to, and what they commit is
    where the group goes on; without one every consumer reads all partitions of its topics. Options are Kafka's keys
    with underscores (`auto_offset_reset="earliest"`), or with dots in `config`; docs/configuration.md lists them.
    Fetched and not yet polled bytes are bounded by `fetch_max_bytes`.

    Raises:
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
        InvalidGroupId: not 1 to 255 characters.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        group_id: str | None = None,
        auto_offset_reset: str | None = None,
        isolation_level: str | None = None,
        *,
        config: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        check_group_id(group_id)
        addresses = parse_bootstrap(bootstrap)
        if auto_offset_reset is not None:
            options["auto_offset_reset"] = auto_offset_reset
        if isolation_level is not None:
            options["isolation_level"] = isolation_level
        if group_id is not None:
            options["group_id"] = group_id
        resolved = ConsumerOptions.make(config, options)
        check_group_options(resolved, options, config or {})
        self._tracing = consumer_tracing(resolved)
        self._thread = loop_thread()
        self._data = Alarm()
        self._unread = Unread()

        async def make() -> ConsumerEngine:
            return (GroupEngine if resolved.group_id else ConsumerEngine)(addresses, resolved, self._thread.loop)

        self._engine = self._thread.run(make())
        self._engine.on_data = self._data.set
        self._group = (
            GroupPart(self._engine, self._thread, self._unread) if isinstance(self._engine, GroupEngine) else None
        )
        abandon_after_fork(self)

    def _abandon(self) -> None:
        self._engine.abandon_after_fork()

    # What to read

    def subscribe(
        self,
        topics: str | Iterable[str] | None = None,
        pattern: str | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """Read all partitions of these topics, or of every topic whose whole name matches `pattern`.

        Returns when the starting positions are known, so what is sent afterwards is read, at `latest` too. Partitions
        without a leader delay the others by 2 seconds at most, and all together by `default.api.timeout.ms`: then a
        warning names them, and their positions are looked for further on.
        Topics and partitions that appear later are followed, from their start. Replaces what was subscribed or
        assigned before. With a group it returns when the group has said what this member reads first; `listener` is
        told of partitions that come and go.

        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     consumer.subscribe(pattern="orde.*")
        ...     [str(partition) for partition in consumer.assignment()]
        ['orders-0']

        Raises:
            InvalidRequestError: neither topics nor pattern, or both.
            BrokerUnavailable: nobody answered within `default.api.timeout.ms`.
            TopicAuthorizationFailed: some of the topics this user may not read; the others are read.
            RaftlogError: the group refuses this member (GroupMaxSizeReached, UnsupportedAssignor, FencedInstanceId), or
                has no coordinator for so long (CoordinatorNotAvailable, UnreleasedInstanceId).
        """
        names, compiled = as_names(topics, pattern)
        if listener is not None:
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
        """Read exactly these partitions; one that was assigned before keeps its position.

        >>> from raftlog import TopicPartition
        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     consumer.assign([TopicPartition("orders", 0)])
        ...     consumer.seek(TopicPartition("orders", 0), 0)
        ...     consumer.poll(timeout=10)[0].value
        b'one apple'

        Raises:
            UnknownTopicOrPartition: no such topic or partition.
            BrokerUnavailable: nobody answered within `default.api.timeout.ms`.
        """
        wanted = as_partitions("assign", partitions)
        self._unread.put_back(self._engine)
        if self._group is not None and self._group.engine.subscribed:
            self._group.end(clean=True)
        self._thread.run(self._engine.assign(wanted))

    def unsubscribe(self) -> None:
        """Read nothing any more; a member commits what is done, if it commits by itself, and leaves its group."""
        if self._group is not None:
            self._group.end(clean=True)
        self._unread.records.clear()
        self._thread.run(self._engine.unsubscribe())

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read, in order.

        A member of a group finds those that it has lost among them until its listener was told, by a poll; nothing of
        them is handed out any more, and commits of them are refused.
        """
        return self._engine.assigned()

    def partitions_for(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of a topic.

        Raises:
            UnknownTopicOrPartition: no such topic.
        """
        self._engine.check_open()
        view = self._thread.run(
            self._engine.metadata.topic(topic, self._engine.options.default_api_timeout_ms, fresh=True)
        )
        return [TopicPartition(topic, part.partition) for part in view.partitions]

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Stop fetching these partitions; positions stay."""
        wanted = as_partitions("pause", partitions)
        self._unread.put_back(self._engine)
        self._engine.pause(wanted, True)

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go on with paused partitions."""
        self._engine.pause(as_partitions("resume", partitions), False)

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions, in order."""
        states = list(self._engine.positions.states.values())
        return sorted(state.topic_partition for state in states if state.paused)

    # Reading

    def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """Return the next records, waiting up to `timeout` seconds (None: for ever) for the first one.

        Returns as soon as there is something, `max_records` at most (by default `max.poll.records`); an empty list
        after the timeout, or sooner if all that came were records that nobody gets (aborted ones) or markers of
        transactions: then positions have moved on. Partitions take turns.

        Raises:
            OffsetOutOfRange: the position is gone and `auto_offset_reset` is "none"; seek to go on.
            CorruptRecordError: a batch does not match its checksum; it is fetched again after that.
            AuthorizationError: the user may not do this, or cannot log in; the next poll tries once more.
            InvalidRequestError: nothing is subscribed or assigned.
            ClosedError: the consumer is closed.
        """
        engine, group = self._engine, self._group
        engine.check_open()
        if self._unread.records:
            if group is None:
                return self._unread.take_all(None)
            group.come_back()
            if self._unread.records:
                return self._unread.take_all(group.progress.handed_records)
        marks = self._come_back()
        try:
            found: list[Record] = []
            for rows in self._rows(timeout, max_records or engine.options.max_poll_records, marks):
                found += rows.records()
            return found
        except BaseException:
            engine.take_back(marks)
            raise

    def poll_arrow(self, timeout: float | None = 1.0, max_records: int | None = None) -> Any:
        """Return everything that is there as a `pyarrow.Table`, waiting up to `timeout` seconds for the first record.

        Columns: topic (dictionary of string), partition (int32), offset (int64), timestamp (timestamp[ms, UTC]), key
        and value (binary), headers (map<string, binary>). Values are not copied: the table keeps the fetched buffers
        alive, one chunk for each batch.

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
        """A poll begins; return where it is to mark what it takes."""
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
        engine, data, group = self._engine, self._data, self._group
        deadline: Deadline | None = None
        passed = engine.positions.passed
        while True:
            data.clear()
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
            data.wait(left_s if group is None else group.progress.wait_s(left_s))

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Record:
        """Return the next record; waits for ever, or ends after `consumer.timeout.ms` without one."""
        unread, group = self._unread, self._group
        self._engine.check_open()
        if group is not None:
            group.come_back()
        if not unread.records:
            limit_ms = self._engine.options.consumer_timeout_ms
            left = Deadline(None if limit_ms is None else limit_ms / 1000).left
            while not (found := self.poll(left())):
                if left() == 0:
                    raise StopIteration
            unread.records.extend(found)
        record = unread.records[0]
        if group is not None:
            group.progress.yielded(record)
        del unread.records[0]  # no call, so no signal between this and the return
        return record

    # Positions

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at `offset`; what was fetched before is dropped.

        Raises:
            InvalidRequestError: not assigned, or a negative offset.
        """
        wanted = as_partition(partition)
        check_offset(offset)
        self._unread.put_back(self._engine)
        self._engine.place(wanted, offset)

    def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go to the first offset of these partitions, of all assigned ones by default."""
        self._seek_to(self.beginning_offsets(self._or_all("seek_to_beginning", partitions)))

    def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """Go past the last offset of these partitions, of all assigned ones by default."""
        self._seek_to(self.end_offsets(self._or_all("seek_to_end", partitions)))

    def _or_all(self, call: str, partitions: Iterable[object]) -> list[TopicPartition]:
        return as_partitions(call, partitions) or sorted(self._engine.positions.states)

    def _seek_to(self, offsets: Mapping[TopicPartition, int]) -> None:
        for topic_partition, offset in offsets.items():
            self.seek(topic_partition, offset)

    def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record that poll or iteration will give.

        Raises:
            InvalidRequestError: not assigned.
            OffsetOutOfRange: there is none, and `auto_offset_reset` is "none".
        """
        topic_partition = as_partition(partition)
        unread = self._unread.first_offsets().get(topic_partition)
        if unread is not None:
            return unread
        found = self._engine.position_now(topic_partition)
        if found is None:
            self._thread.run(self._engine.placed())
            found = self._engine.position_now(topic_partition)
        if found is None:
            raise InvalidRequestError(f"{topic_partition} has no position yet: its start could not be looked up")
        return found

    def offsets_for_times(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return for each partition the first offset whose timestamp (Unix ms) is at least the one asked for.

        None where there is no such record. The partitions need not be assigned.

        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     found = consumer.offsets_for_times({TopicPartition("orders", 0): 0})
        ...     found[TopicPartition("orders", 0)].offset
        0

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: within `default.api.timeout.ms`.
        """
        check_times(timestamps_ms)
        return self._find(timestamps_ms)

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offset of each partition; they need not be assigned."""
        return self._ends(partitions, EARLIEST)

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset after the last readable record of each partition; they need not be assigned.

        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     consumer.end_offsets([TopicPartition("orders", 0)])
        {TopicPartition(topic='orders', partition=0): 1}
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
        """Return what this consumer counts, under the names of Kafka's client metrics, by group.

        As `Producer.metrics`; `records-lag` of a partition is what it had when its last records came.

        >>> with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
        ...     consumer.subscribe("orders")
        ...     _ = consumer.poll(timeout=10)
        ...     consumer.metrics()["consumer-fetch-manager-metrics"]["records-consumed-total"]
        1.0
        """
        return self._engine.metrics()

    # End

    def close(self) -> None:
        """Stop reading. Closing twice is allowed.

        A member of a group leaves it; a static one keeps its partitions until the session timeout. If it commits by
        itself, what the last poll returned counts as done, unless an exception is under way, or another thread polled.
        """
        self._close(clean=sys.exc_info()[0] is None)

    def _close(self, *, clean: bool) -> None:
        if self._engine.closed is None:
            try:
                if self._group is not None:
                    self._group.end(clean=clean)
            finally:
                if self._engine.closed is None:  # out of a listener it was closed already
                    self._thread.run(self._engine.close())

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(clean=kind is None)
