"""The asynchronous consumer."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

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
from raftlog._group_listener import RebalanceListener
from raftlog._group_offsets import check_group_id, check_group_options
from raftlog.aio._group import GroupCalls, GroupPart
from raftlog.errors import ClosedError, InvalidRequestError
from raftlog.types import OffsetAndTimestamp, Record, TopicPartition


class Consumer(GroupCalls):
    """As `raftlog.Consumer`, awaitable. Belongs to the event loop that runs when it is first used.

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
        self._addresses = parse_bootstrap(bootstrap)
        if auto_offset_reset is not None:
            options["auto_offset_reset"] = auto_offset_reset
        if isolation_level is not None:
            options["isolation_level"] = isolation_level
        if group_id is not None:
            options["group_id"] = group_id
        self._options = ConsumerOptions.make(config, options)
        check_group_options(self._options, options, config or {})
        self._tracing = consumer_tracing(self._options)
        self._made: ConsumerEngine | None = None
        self._group: GroupPart | None = None
        self._closed = False
        self._data = asyncio.Event()
        self._unread = Unread()

    def _engine(self) -> ConsumerEngine:
        engine = self._made
        if engine is None:
            if self._closed:
                raise ClosedError("the consumer is closed")
            loop = asyncio.get_running_loop()
            if self._options.group_id:
                member = GroupEngine(self._addresses, self._options, loop)
                self._group = GroupPart(member, self._unread)
                engine = self._made = member
            else:
                engine = self._made = ConsumerEngine(self._addresses, self._options, loop)
            engine.on_data = self._data.set
        return engine

    def _made_group(self) -> GroupPart | None:
        self._engine()
        return self._group

    # What to read

    async def subscribe(
        self,
        topics: str | Iterable[str] | None = None,
        pattern: str | None = None,
        listener: RebalanceListener | None = None,
    ) -> None:
        """As `raftlog.Consumer.subscribe`; the methods of the listener may be coroutines."""
        names, compiled = as_names(topics, pattern)
        engine = self._engine()
        if listener is not None:
            self._of_group("a listener").listener = listener
        self._unread.put_back(engine)
        group = self._group
        if group is None:
            await engine.subscribe(names, compiled)
            return
        if not engine.subscribed:
            group.progress.forget()
        try:
            await engine.subscribe(names, compiled)
            await group.look()
            await group.engine.something_to_read()
            await group.look()
            await engine.placed()
        finally:
            group.engine.polled_ms = monotonic_ms()

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """As `raftlog.Consumer.assign`."""
        wanted = as_partitions("assign", partitions)
        self._unread.put_back(self._engine())
        if self._group is not None and self._group.engine.subscribed:
            await self._group.end(clean=True)
        await self._engine().assign(wanted)

    async def unsubscribe(self) -> None:
        """As `raftlog.Consumer.unsubscribe`."""
        engine = self._engine()
        if self._group is not None:
            await self._group.end(clean=True)
        self._unread.records.clear()
        await engine.unsubscribe()

    def assignment(self) -> list[TopicPartition]:
        """As `raftlog.Consumer.assignment`."""
        return self._made.assigned() if self._made is not None else []

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        """As `raftlog.Consumer.partitions_for`."""
        engine = self._engine()
        engine.check_open()
        view = await engine.metadata.topic(topic, engine.options.default_api_timeout_ms, fresh=True)
        return [TopicPartition(topic, part.partition) for part in view.partitions]

    def pause(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """As `raftlog.Consumer.pause`."""
        wanted = as_partitions("pause", partitions)
        self._unread.put_back(self._engine())
        self._engine().pause(wanted, True)

    def resume(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """As `raftlog.Consumer.resume`."""
        self._engine().pause(as_partitions("resume", partitions), False)

    def paused(self) -> list[TopicPartition]:
        """As `raftlog.Consumer.paused`."""
        states = list(self._engine().positions.states.values())
        return sorted(state.topic_partition for state in states if state.paused)

    # Reading

    async def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """As `raftlog.Consumer.poll`."""
        engine, group = self._engine(), self._group
        engine.check_open()
        if self._unread.records:
            if group is None:
                return self._unread.take_all(None)
            await group.come_back()
            if self._unread.records:
                return self._unread.take_all(group.progress.handed_records)
        marks = await self._come_back()
        try:
            found: list[Record] = []
            for rows in await self._rows(timeout, max_records or engine.options.max_poll_records, marks):
                found += rows.records()
            return found
        except BaseException:
            engine.take_back(marks)
            raise

    async def poll_arrow(self, timeout: float | None = 1.0, max_records: int | None = None) -> Any:
        """As `raftlog.Consumer.poll_arrow`."""
        engine = self._engine()
        engine.check_open()
        self._unread.put_back(engine)
        marks = await self._come_back()
        try:
            return table_of(await self._rows(timeout, max_records or ALL_ROWS, marks), engine)
        except BaseException:
            engine.take_back(marks)
            raise

    async def _come_back(self) -> dict[PartitionState, Mark]:
        """A poll begins; return where it is to mark what it takes."""
        if self._group is None:
            self._engine().settle()
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
        engine, data, group = self._engine(), self._data, self._group
        deadline: Deadline | None = None
        passed = engine.positions.passed
        while True:
            data.clear()
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
            try:
                async with asyncio.timeout(left_s if group is None else group.progress.wait_s(left_s)):
                    await data.wait()
            except TimeoutError:
                if group is None:
                    return engine.take(max_rows, marks)

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Record:
        """Return the next record; waits for ever, or ends after `consumer.timeout.ms` without one."""
        unread, group = self._unread, self._group
        self._engine().check_open()
        if group is not None:
            await group.come_back()
        if not unread.records:
            limit_ms = self._options.consumer_timeout_ms
            left = Deadline(None if limit_ms is None else limit_ms / 1000).left
            while not (found := await self.poll(left())):
                if left() == 0:
                    raise StopAsyncIteration
            unread.records.extend(found)
        record = unread.records[0]
        if self._group is not None:
            self._group.progress.yielded(record)
        del unread.records[0]
        return record

    # Positions

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """As `raftlog.Consumer.seek`."""
        wanted = as_partition(partition)
        check_offset(offset)
        self._unread.put_back(self._engine())
        self._engine().place(wanted, offset)

    async def seek_to_beginning(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """As `raftlog.Consumer.seek_to_beginning`."""
        for part, offset in (await self.beginning_offsets(self._or_all("seek_to_beginning", partitions))).items():
            self.seek(part, offset)

    async def seek_to_end(self, *partitions: TopicPartition | Iterable[TopicPartition]) -> None:
        """As `raftlog.Consumer.seek_to_end`."""
        for part, offset in (await self.end_offsets(self._or_all("seek_to_end", partitions))).items():
            self.seek(part, offset)

    def _or_all(self, call: str, partitions: Iterable[object]) -> list[TopicPartition]:
        return as_partitions(call, partitions) or sorted(self._engine().positions.states)

    async def position(self, partition: TopicPartition) -> int:
        """As `raftlog.Consumer.position`."""
        engine = self._engine()
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
        """As `raftlog.Consumer.offsets_for_times`."""
        check_times(timestamps_ms)
        return await self._find(timestamps_ms)

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """As `raftlog.Consumer.beginning_offsets`."""
        return await self._ends(partitions, EARLIEST)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """As `raftlog.Consumer.end_offsets`."""
        return await self._ends(partitions, LATEST)

    async def _ends(self, partitions: Iterable[TopicPartition], end: int) -> dict[TopicPartition, int]:
        found = await self._find(dict.fromkeys(as_partitions("this", partitions), end))
        return {part: answer.offset for part, answer in found.items() if answer is not None}

    async def _find(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        engine = self._engine()
        engine.check_open()
        wanted = {as_partition(part): at for part, at in timestamps_ms.items()}
        found = await engine.lookup.find(wanted, engine.options.isolation_level)
        return {part: found[part] for part in wanted}

    def metrics(self) -> dict[str, dict[str, float]]:
        """As `raftlog.Consumer.metrics`; does not wait. Empty before the first use."""
        return {} if self._made is None else self._made.metrics()

    # End

    async def close(self) -> None:
        """As `raftlog.Consumer.close`."""
        await self._close(clean=sys.exc_info()[0] is None)

    async def _close(self, *, clean: bool) -> None:
        self._closed = True
        if self._made is not None and self._made.closed is None:
            try:
                if self._group is not None:
                    await self._group.end(clean=clean)
            finally:
                if self._made.closed is None:  # out of a listener it was closed already
                    await self._made.close()

    async def __aenter__(self) -> Consumer:
        self._engine()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close(clean=kind is None)
