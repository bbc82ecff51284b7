"""The synchronous consumer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from raftlog._client.background import abandon_after_fork, loop_thread
from raftlog._client.connections import parse_bootstrap
from raftlog._client.consumer import ConsumerEngine
from raftlog._client.offsets import EARLIEST, LATEST, STRAGGLER_GRACE_S
from raftlog._client.options import ConsumerOptions
from raftlog._consumer_arguments import ALL_ROWS, Unread, as_names, check_offset, check_times, refuse_group, table_of
from raftlog._core.fetched import Rows
from raftlog._delivery import Deadline
from raftlog.errors import InvalidRequestError, RaftlogError
from raftlog.types import OffsetAndTimestamp, Record, TopicPartition


class Consumer:
    """Reads records from a cluster. Thread-safe, though one thread that polls is the usual shape.

    >>> from raftlog import Consumer, Producer
    >>> with Producer(cluster.bootstrap) as producer:
    ...     sent = producer.send("orders", b"one apple", key=b"a17").result(timeout=10)
    >>> with Consumer(cluster.bootstrap, auto_offset_reset="earliest") as consumer:
    ...     consumer.subscribe("orders")
    ...     record = consumer.poll(timeout=10)[0]
    ...     (record.key, record.value, record.offset)
    (b'a17', b'one apple', 0)

    Without a group every consumer reads all partitions of its topics. Options are Kafka's keys with underscores
    (`auto_offset_reset="earliest"`), or with dots in `config`; docs/configuration.md lists them. Fetched and not yet
    polled bytes are bounded by `fetch_max_bytes`.

    Raises:
        InvalidConfig: an unknown option, a bad value, or a bootstrap address that is not host:port.
        InvalidRequestError: `group_id` is given; groups come with a later version.
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
        refuse_group(group_id)
        addresses = parse_bootstrap(bootstrap)
        if auto_offset_reset is not None:
            options["auto_offset_reset"] = auto_offset_reset
        if isolation_level is not None:
            options["isolation_level"] = isolation_level
        resolved = ConsumerOptions.make(config, options)
        self._thread = loop_thread()
        self._data = threading.Event()
        self._unread = Unread()

        async def make() -> ConsumerEngine:
            return ConsumerEngine(addresses, resolved, self._thread.loop)

        self._engine = self._thread.run(make())
        self._engine.on_data = self._data.set
        abandon_after_fork(self)

    def _abandon(self) -> None:
        self._engine.abandon_after_fork()

    # What to read

    def subscribe(self, topics: str | Iterable[str] | None = None, pattern: str | None = None) -> None:
        """Read all partitions of these topics, or of every topic whose whole name matches `pattern`.

        Returns when the starting positions are known, so what is sent afterwards is read, at `latest` too. Partitions
        without a leader delay the others by 2 seconds at most, and all together by `default.api.timeout.ms`: then a
        warning names them, and their positions are looked for further on.
        Topics and partitions that appear later are followed, from their start. Replaces what was subscribed or
        assigned before.

        >>> with Consumer(cluster.bootstrap) as consumer:
        ...     consumer.subscribe(pattern="orde.*")
        ...     [str(partition) for partition in consumer.assignment()]
        ['orders-0']

        Raises:
            InvalidRequestError: neither topics nor pattern, or both.
            BrokerUnavailable: nobody answered within `default.api.timeout.ms`.
        """
        names, compiled = as_names(topics, pattern)
        self._unread.put_back(self._engine)
        self._thread.run(self._engine.subscribe(names, compiled))

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
        self._unread.put_back(self._engine)
        self._thread.run(self._engine.assign(partitions))

    def unsubscribe(self) -> None:
        """Read nothing any more."""
        self._unread.records.clear()
        self._thread.run(self._engine.unsubscribe())

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read, in order."""
        return sorted(self._engine.positions.states)

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

    def pause(self, *partitions: TopicPartition) -> None:
        """Stop fetching these partitions; positions stay."""
        self._unread.put_back(self._engine)
        self._engine.pause(partitions, True)

    def resume(self, *partitions: TopicPartition) -> None:
        """Go on with paused partitions."""
        self._engine.pause(partitions, False)

    def paused(self) -> list[TopicPartition]:
        """Return the paused partitions, in order."""
        states = list(self._engine.positions.states.values())
        return sorted(state.topic_partition for state in states if state.paused)

    # Reading

    def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """Return the next records, waiting up to `timeout` seconds (None: for ever) for the first one.

        Returns as soon as there is something, `max_records` at most (by default `max.poll.records`); an empty list
        after the timeout. Partitions take turns.

        Raises:
            OffsetOutOfRange: the position is gone and `auto_offset_reset` is "none"; seek to go on.
            CorruptRecordError: a batch does not match its checksum; it is fetched again after that.
            InvalidRequestError: nothing is subscribed or assigned.
            ClosedError: the consumer is closed.
        """
        if self._unread.records:
            self._engine.check_open()
            return self._unread.take_all()
        found: list[Record] = []
        for rows in self._rows(timeout, max_records or self._engine.options.max_poll_records):
            found += rows.records()
        return found

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
        self._unread.put_back(self._engine)
        return table_of(self._rows(timeout, max_records or ALL_ROWS), self._engine)

    def _rows(self, timeout: float | None, max_rows: int) -> list[Rows]:
        engine, data = self._engine, self._data
        deadline: Deadline | None = None
        while True:
            data.clear()
            rows = engine.take(max_rows)
            if rows or timeout == 0:
                return rows
            deadline = deadline or Deadline(timeout)
            left_s = deadline.left()
            if left_s is not None and left_s <= 0:
                return rows
            data.wait(left_s)

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Record:
        """Return the next record; waits for ever, or ends after `consumer.timeout.ms` without one."""
        records = self._unread.records
        if not records:
            limit_ms = self._engine.options.consumer_timeout_ms
            records.extend(self.poll(None if limit_ms is None else limit_ms / 1000))
            if not records:
                raise StopIteration
        return records.popleft()

    # Positions

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Go on at `offset`; what was fetched before is dropped.

        Raises:
            InvalidRequestError: not assigned, or a negative offset.
        """
        check_offset(offset)
        self._unread.put_back(self._engine)
        self._engine.place(TopicPartition(*partition), offset)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Go to the first offset of these partitions, of all assigned ones by default."""
        self._seek_to(self.beginning_offsets(partitions or self.assignment()))

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Go past the last offset of these partitions, of all assigned ones by default."""
        self._seek_to(self.end_offsets(partitions or self.assignment()))

    def _seek_to(self, offsets: Mapping[TopicPartition, int]) -> None:
        for topic_partition, offset in offsets.items():
            self.seek(topic_partition, offset)

    def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record that poll or iteration will give.

        Raises:
            InvalidRequestError: not assigned.
            OffsetOutOfRange: there is none, and `auto_offset_reset` is "none".
        """
        topic_partition = TopicPartition(*partition)
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
        found = self._find({TopicPartition(*part): end for part in partitions})
        return {part: answer.offset for part, answer in found.items() if answer is not None}

    def _find(self, timestamps_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        engine = self._engine
        engine.check_open()
        wanted = {TopicPartition(*part): at for part, at in timestamps_ms.items()}
        found = self._thread.run(engine.lookup.find(wanted, engine.options.isolation_level))
        return {part: found[part] for part in wanted}

    # End

    def close(self) -> None:
        """Stop reading. Closing twice is allowed."""
        if self._engine.closed is None:
            self._thread.run(self._engine.close())

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def out_of_reach(consumer: Consumer) -> dict[TopicPartition, str]:
    """Return the assigned partitions whose leaders the consumer has no contact with, and why."""
    consumer._engine.check_open()
    return consumer._thread.run(consumer._engine.out_of_reach())


def leaderless(consumer: Consumer, partition: TopicPartition) -> str | None:
    """Return a sentence when nobody leads the partition, as far as the consumer knows."""
    return consumer._engine.metadata.view.without_leader(partition)


def partitions_now(consumer: Consumer, topic: str, patience_s: float) -> list[TopicPartition]:
    """Return the partitions of a topic as brokers know them now.

    Raises:
        RaftlogError: nobody says so within `patience_s`.
    """
    consumer._engine.check_open()
    view = consumer._thread.run(consumer._engine.metadata.topic(topic, patience_s * 1000, fresh=True))
    return [TopicPartition(topic, part.partition) for part in view.partitions]


def try_offsets(
    consumer: Consumer,
    partitions: Iterable[TopicPartition],
    which: int,
    grace_s: float = STRAGGLER_GRACE_S,
    patience_s: float | None = None,
) -> dict[TopicPartition, int | RaftlogError]:
    """Return the first or last offset (EARLIEST, LATEST) of the partitions that answer, and why the others do not.

    Arguments and errors are those of `OffsetLookup.find_some`.
    """
    engine = consumer._engine
    engine.check_open()
    wanted = dict.fromkeys(partitions, which)
    found = consumer._thread.run(engine.lookup.find_some(wanted, engine.options.isolation_level, grace_s, patience_s))
    return {
        part: answer if isinstance(answer, RaftlogError) else answer.offset
        for part, answer in found.items()
        if answer is not None
    }
