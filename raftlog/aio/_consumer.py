"""The asynchronous consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from raftlog._client.connections import parse_bootstrap
from raftlog._client.consumer import ConsumerEngine
from raftlog._client.offsets import EARLIEST, LATEST
from raftlog._client.options import ConsumerOptions
from raftlog._consumer_arguments import ALL_ROWS, Unread, as_names, check_offset, check_times, refuse_group, table_of
from raftlog._core.fetched import Rows
from raftlog._delivery import Deadline
from raftlog.errors import ClosedError, InvalidRequestError
from raftlog.types import OffsetAndTimestamp, Record, TopicPartition


class Consumer:
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
        refuse_group(group_id)
        self._addresses = parse_bootstrap(bootstrap)
        if auto_offset_reset is not None:
            options["auto_offset_reset"] = auto_offset_reset
        if isolation_level is not None:
            options["isolation_level"] = isolation_level
        self._options = ConsumerOptions.make(config, options)
        self._made: ConsumerEngine | None = None
        self._closed = False
        self._data = asyncio.Event()
        self._unread = Unread()

    def _engine(self) -> ConsumerEngine:
        engine = self._made
        if engine is None:
            if self._closed:
                raise ClosedError("the consumer is closed")
            engine = self._made = ConsumerEngine(self._addresses, self._options, asyncio.get_running_loop())
            engine.on_data = self._data.set
        return engine

    # What to read

    async def subscribe(self, topics: str | Iterable[str] | None = None, pattern: str | None = None) -> None:
        """As `raftlog.Consumer.subscribe`."""
        names, compiled = as_names(topics, pattern)
        self._unread.put_back(self._engine())
        await self._engine().subscribe(names, compiled)

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """As `raftlog.Consumer.assign`."""
        self._unread.put_back(self._engine())
        await self._engine().assign(partitions)

    async def unsubscribe(self) -> None:
        """As `raftlog.Consumer.unsubscribe`."""
        self._unread.records.clear()
        await self._engine().unsubscribe()

    def assignment(self) -> list[TopicPartition]:
        """As `raftlog.Consumer.assignment`."""
        return sorted(self._made.positions.states) if self._made is not None else []

    async def partitions_for(self, topic: str) -> list[TopicPartition]:
        """As `raftlog.Consumer.partitions_for`."""
        engine = self._engine()
        engine.check_open()
        view = await engine.metadata.topic(topic, engine.options.default_api_timeout_ms, fresh=True)
        return [TopicPartition(topic, part.partition) for part in view.partitions]

    def pause(self, *partitions: TopicPartition) -> None:
        """As `raftlog.Consumer.pause`."""
        self._unread.put_back(self._engine())
        self._engine().pause(partitions, True)

    def resume(self, *partitions: TopicPartition) -> None:
        """As `raftlog.Consumer.resume`."""
        self._engine().pause(partitions, False)

    def paused(self) -> list[TopicPartition]:
        """As `raftlog.Consumer.paused`."""
        states = list(self._engine().positions.states.values())
        return sorted(state.topic_partition for state in states if state.paused)

    # Reading

    async def poll(self, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
        """As `raftlog.Consumer.poll`."""
        engine = self._engine()
        if self._unread.records:
            engine.check_open()
            return self._unread.take_all()
        found: list[Record] = []
        for rows in await self._rows(timeout, max_records or engine.options.max_poll_records):
            found += rows.records()
        return found

    async def poll_arrow(self, timeout: float | None = 1.0, max_records: int | None = None) -> Any:
        """As `raftlog.Consumer.poll_arrow`."""
        engine = self._engine()
        self._unread.put_back(engine)
        return table_of(await self._rows(timeout, max_records or ALL_ROWS), engine)

    async def _rows(self, timeout: float | None, max_rows: int) -> list[Rows]:
        engine, data = self._engine(), self._data
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
            try:
                async with asyncio.timeout(left_s):
                    await data.wait()
            except TimeoutError:
                return engine.take(max_rows)

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Record:
        """Return the next record; waits for ever, or ends after `consumer.timeout.ms` without one."""
        records = self._unread.records
        if not records:
            limit_ms = self._options.consumer_timeout_ms
            records.extend(await self.poll(None if limit_ms is None else limit_ms / 1000))
            if not records:
                raise StopAsyncIteration
        return records.popleft()

    # Positions

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """As `raftlog.Consumer.seek`."""
        check_offset(offset)
        self._unread.put_back(self._engine())
        self._engine().place(TopicPartition(*partition), offset)

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """As `raftlog.Consumer.seek_to_beginning`."""
        for part, offset in (await self.beginning_offsets(partitions or self.assignment())).items():
            self.seek(part, offset)

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        """As `raftlog.Consumer.seek_to_end`."""
        for part, offset in (await self.end_offsets(partitions or self.assignment())).items():
            self.seek(part, offset)

    async def position(self, partition: TopicPartition) -> int:
        """As `raftlog.Consumer.position`."""
        engine = self._engine()
        topic_partition = TopicPartition(*partition)
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
        found = await self._find({TopicPartition(*part): end for part in partitions})
        return {part: answer.offset for part, answer in found.items() if answer is not None}

    async def _find(
        self, timestamps_ms: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        engine = self._engine()
        engine.check_open()
        wanted = {TopicPartition(*part): at for part, at in timestamps_ms.items()}
        found = await engine.lookup.find(wanted, engine.options.isolation_level)
        return {part: found[part] for part in wanted}

    # End

    async def close(self) -> None:
        """Stop reading. Closing twice is allowed."""
        self._closed = True
        if self._made is not None and self._made.closed is None:
            await self._made.close()

    async def __aenter__(self) -> Consumer:
        self._engine()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
