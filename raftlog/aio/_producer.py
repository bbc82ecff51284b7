"""The asynchronous producer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raftlog._client.options import ProducerOptions
from raftlog._client.producer import ProducerEngine
from raftlog._client.tracing_choice import producer_tracing
from raftlog._core.arguments import HeadersLike, as_bytes, as_headers, as_partition, as_timestamp, as_topic
from raftlog._core.batch import RECORD_BYTES, Batch
from raftlog._core.bootstrap import parse_bootstrap
from raftlog._core.send_batch import Piece, pieces_of, prepare
from raftlog._core.topic_queues import Partitioner, TopicQueues
from raftlog._delivery import AsyncBatchDelivery, AsyncDelivery, Deadline, wait_async
from raftlog.aio._transactions import TransactionMethods
from raftlog.errors import ClosedError
from raftlog.types import Header

if TYPE_CHECKING:
    from raftlog._tracing import Sending

_time_ns = time.time_ns


class Producer(TransactionMethods):
    """As `raftlog.Producer`, awaitable. Belongs to the event loop that runs when it is first used.

    `await send(...)` waits only while `buffer.memory` is full or the topic is not known yet, and returns the
    delivery; await that for the acknowledgement.

    >>> import asyncio
    >>> from raftlog import aio
    >>> async def greet():
    ...     async with aio.Producer(cluster.bootstrap) as producer:
    ...         delivery = await producer.send("aio-greetings", b"hello")
    ...         return await delivery
    >>> asyncio.run(greet()).offset
    0
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        acks: str | int = "all",
        *,
        partitioner: Partitioner | None = None,
        config: Mapping[str, object] | None = None,
        **options: object,
    ) -> None:
        self._addresses = parse_bootstrap(bootstrap)
        if config is None or "acks" not in config:
            options["acks"] = acks
        self._options = ProducerOptions.make(config, options)
        self._tracing = producer_tracing(self._options)
        self._partitioner = partitioner
        self._made: ProducerEngine | None = None
        self._closed = False

    def _engine(self) -> ProducerEngine:
        engine = self._made
        if engine is None:
            if self._closed:
                raise ClosedError("the producer is closed")
            loop = asyncio.get_running_loop()
            engine = self._made = ProducerEngine(self._addresses, self._options, self._partitioner, loop)
        return engine

    async def send(
        self,
        topic: str,
        value: bytes | None = b"",
        key: bytes | None = None,
        partition: int | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
    ) -> AsyncDelivery:
        """As `raftlog.Producer.send`; waits while `buffer.memory` is full, `max.block.ms` at most."""
        engine = self._made
        if (
            engine is not None
            and self._tracing is None
            and key is None
            and partition is None
            and headers is None
            and timestamp_ms is None
            and value.__class__ is bytes
        ):
            now_ms = _time_ns() // 1_000_000
            with engine.lock:
                batch = engine.lean.get(topic)
                if batch is not None:
                    size_bytes = batch.size_bytes + len(value) + RECORD_BYTES
                    if size_bytes <= batch.limit_bytes:
                        values = batch.values
                        index = len(values)
                        if now_ms != batch.last_timestamp_ms:
                            batch.note_timestamp(index, now_ms)
                        values.append(value)
                        batch.size_bytes = size_bytes
                        return AsyncDelivery(batch, index)
        return await self._send(topic, value, key, partition, headers, timestamp_ms)

    async def _send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: HeadersLike | None,
        timestamp_ms: int | None,
    ) -> AsyncDelivery:
        engine = self._engine()
        try:
            if self._tracing is not None:
                sending = self._tracing.begin(topic, as_headers(headers))
                return await self._place_traced(sending, engine, topic, value, key, partition, timestamp_ms)
            return await self._place(engine, topic, value, key, partition, headers, timestamp_ms)
        except Exception as error:
            engine.not_sent(error)
            raise

    async def _place_traced(
        self,
        sending: Sending,
        engine: ProducerEngine,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        timestamp_ms: int | None,
    ) -> AsyncDelivery:
        try:
            delivery = await self._place(
                engine, topic, value, key, partition, sending.headers, timestamp_ms, sending.traceparent
            )
        except BaseException as error:
            sending.fail(error)
            raise
        sending.follow([delivery._batch], delivery._index)
        return delivery

    async def _place(
        self,
        engine: ProducerEngine,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: HeadersLike | None,
        timestamp_ms: int | None,
        traceparent: str | None = None,
    ) -> AsyncDelivery:
        value = as_bytes(value, "value")
        key = as_bytes(key, "key")
        pairs: tuple[Header, ...] = as_headers(headers) if headers is not None else ()
        at_ms = _time_ns() // 1_000_000 if timestamp_ms is None else as_timestamp(timestamp_ms)
        if partition is not None:
            as_partition(partition)
        size = engine.accumulator.check_size(value, key, pairs)
        queues = await self._queues(topic)
        deadline: Deadline | None = None
        while True:
            with engine.lock:
                engine.check_may_send()
                placed = engine.place(queues, value, key, partition, pairs, at_ms, size)
                if placed is not None and traceparent is not None:
                    placed[0].trace(traceparent)
            if placed is None:
                deadline = deadline or Deadline(engine.options.max_block_ms / 1000)
                await engine.room_given_back(size, deadline)
                continue
            batch, index, full = placed
            if full is not None or not index:
                engine.after_place(full)
            return AsyncDelivery(batch, index)

    async def _queues(self, topic: str) -> TopicQueues:
        engine = self._engine()
        queues = engine.topics.get(topic)
        if queues is None:
            as_topic(topic)
            engine.check_open()
            queues = await engine.load_topic(topic)
        return queues

    async def send_batch(
        self,
        topic: str,
        values: Any,
        key: Any = None,
        partition: Any = None,
        headers: HeadersLike | None = None,
        timestamp_ms: Any = None,
    ) -> AsyncBatchDelivery:
        """As `raftlog.Producer.send_batch`; waits while `buffer.memory` is full, `max.block.ms` at most."""
        engine = self._engine()
        sending = None if self._tracing is None else self._tracing.begin(topic)
        try:
            return await self._send_batch(engine, topic, values, key, partition, headers, timestamp_ms, sending)
        except BaseException as error:
            if sending is not None:
                sending.fail(error)
            if isinstance(error, Exception):
                engine.not_sent(error)
            raise

    async def _send_batch(
        self,
        engine: ProducerEngine,
        topic: str,
        values: Any,
        key: Any,
        partition: Any,
        headers: HeadersLike | None,
        timestamp_ms: Any,
        sending: Sending | None,
    ) -> AsyncBatchDelivery:
        more, traceparent = (sending.headers, sending.traceparent) if sending is not None else ((), None)
        now_ms = _time_ns() // 1_000_000
        given = prepare(engine.accumulator, now_ms, values, key, partition, headers, timestamp_ms, more)
        queues = await self._queues(topic)
        batches = []
        for piece in pieces_of(given, queues, engine.slice_limit_bytes()):
            batches.append(await self._send_piece(queues, piece, traceparent))
            await asyncio.sleep(0)  # encoding takes a while: let others run between the pieces
        if sending is not None:
            sending.follow(batches)
        return AsyncBatchDelivery(batches)

    async def _send_piece(self, queues: TopicQueues, piece: Piece, traceparent: str | None) -> Batch:
        engine = self._engine()
        deadline: Deadline | None = None
        while True:
            with engine.lock:
                engine.check_may_send()
                placed = engine.place_columns(queues, piece)
                if placed is not None and traceparent is not None:
                    placed[-1].trace(traceparent)
            if placed is None:
                deadline = deadline or Deadline(engine.options.max_block_ms / 1000)
                await engine.room_given_back(piece.size_bytes, deadline)
                continue
            engine.encode(placed)
            return placed[-1]

    def metrics(self) -> dict[str, dict[str, float]]:
        """As `raftlog.Producer.metrics`; does not wait. Empty before the first use."""
        return {} if self._made is None else self._made.metrics()

    async def flush(self, timeout: float | None = None) -> None:
        """As `raftlog.Producer.flush`."""
        engine = self._made
        if engine is None:
            return
        engine.close_batches()
        waiting = list(engine.accumulator.incomplete)
        try:
            async with asyncio.timeout(timeout):
                for batch in waiting:
                    await wait_async(batch)
        except TimeoutError:
            left = sum(not batch.done for batch in waiting)
            raise TimeoutError(f"{left} batches are not acknowledged after {timeout} s; they go on") from None

    async def close(self, timeout: float | None = None) -> None:
        """As `raftlog.Producer.close`."""
        self._closed = True
        engine = self._made
        if engine is None or engine.closed is not None:
            return
        try:
            if engine.transactions is None:
                await self.flush(timeout)
        except TimeoutError:
            pass  # the deliveries that are left say so
        finally:
            await engine.close(timeout)

    async def __aenter__(self) -> Producer:
        self._engine()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
