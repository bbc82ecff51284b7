"""The producer's engine: takes records from any thread, sends batches from its event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from raftlog._client.connections import Connections
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S, MetadataCache
from raftlog._client.options import ProducerOptions
from raftlog._client.produce_stream import ProduceStream
from raftlog._core.accumulator import Accumulator, AccumulatorConfig
from raftlog._core.batch import Batch
from raftlog._core.partition_queue import PartitionQueue
from raftlog._core.topic_queues import Partitioner, TopicQueues
from raftlog.errors import (
    ChainBroken,
    ClosedError,
    DeliveryTimeout,
    FencedError,
    MessageTooLarge,
    RaftlogError,
    RetriableError,
    from_wire,
)
from raftlog.format import Columns
from raftlog.types import Header
from raftlog.v1 import common_pb2

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.05
"""How often timeouts are looked at."""
_LEADER_ERRORS: Final = frozenset(
    {
        common_pb2.NOT_LEADER_OR_FOLLOWER,
        common_pb2.FENCED_LEADER_EPOCH,
        common_pb2.UNKNOWN_LEADER_EPOCH,
        common_pb2.UNKNOWN_TOPIC_ID,
        common_pb2.UNKNOWN_TOPIC_OR_PARTITION,
        common_pb2.LEADER_NOT_AVAILABLE,
        common_pb2.STORAGE_ERROR,
        common_pb2.SHUTTING_DOWN,
    }
)

Callbacks = list[Callable[[], None]]


def monotonic_ms() -> float:
    """Return milliseconds since some instant."""
    return time.monotonic() * 1000.0


class ProducerEngine:
    """Accumulator, metadata and one stream for each broker.

    Made on the event loop. Any thread may call what stands under "From any thread"; everything else runs on the
    loop. `lock` guards the accumulator, the queues and the batches; it is held for
    microseconds, never while encoding or waiting.
    """

    def __init__(
        self, bootstrap: list[str], options: ProducerOptions, partitioner: Partitioner | None, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.options = options
        self.loop = loop
        self.lock = threading.Lock()
        self.topics: dict[str, TopicQueues] = {}
        self.lean: dict[str, Batch] = {}
        """By topic: the open batch that a record with nothing but a value goes into, while it holds only such."""
        self.accumulator = Accumulator(
            AccumulatorConfig(
                batch_size_bytes=options.batch_size,
                buffer_memory_bytes=options.buffer_memory,
                max_request_size_bytes=options.max_request_size,
                linger_ms=options.linger_ms,
                delivery_timeout_ms=options.delivery_timeout_ms,
            ),
            owner=self,
        )
        self.room = threading.Condition(self.lock)
        self.closed: RaftlogError | None = None
        self.connections = Connections()
        self.metadata = MetadataCache(
            self.connections,
            bootstrap,
            max_age_ms=options.metadata_max_age_ms,
            request_timeout_ms=options.request_timeout_ms,
            backoff=options.backoff,
        )
        self.metadata.on_change(self._on_metadata)
        self._partitioner = partitioner
        self._pid = os.getpid()
        self._loop_thread_id = threading.get_ident()
        self._wake_pending = False
        self._room_waiters = 0
        self._room_futures: list[asyncio.Future[None]] = []
        self._streams: dict[int, ProduceStream] = {}
        self._unrouted: dict[PartitionQueue, float] = {}
        self._linger_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None

    @staticmethod
    def now_ms() -> float:
        """Return the clock that deadlines are measured with."""
        return monotonic_ms()

    def on_loop(self) -> bool:
        """Whether the caller runs in the event loop's thread."""
        return threading.get_ident() == self._loop_thread_id

    # From any thread

    def check_open(self) -> None:
        """Refuse when closed, or carried over into another process.

        Raises:
            ClosedError: says which.
        """
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))
        if self._pid != os.getpid():
            raise ClosedError(f"this producer was made in process {self._pid}; make one in each process")

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of everything without touching it."""
        self.lean = {}
        self.lock = threading.Lock()
        self.closed = ClosedError(f"this producer was made in process {self._pid}; make one in each process")

    def place(
        self,
        queues: TopicQueues,
        value: bytes | None,
        key: bytes | None,
        partition: int | None,
        headers: tuple[Header, ...],
        timestamp_ms: int,
        size: int,
    ) -> tuple[Batch, int, Batch | None] | None:
        """Append a record; return its batch, its index, and the batch before, full now, for `after_place`.

        None: `buffer.memory` is full. The caller holds the lock.

        Raises:
            InvalidPartitions: there is no such partition.
        """
        accumulator = self.accumulator
        queue = queues.queue_for(key, partition)
        full = None
        batch = accumulator.open_batch_for(queue, size)
        if batch is None:
            if not accumulator.has_room(size):
                return None
            full = queue.open
            if full is not None:
                accumulator.close(full)
                self._drop_lean((full,))
                queue = queues.queue_for(key, partition)
                batch = accumulator.open_batch_for(queue, size)
            if batch is None and queue.open is None:
                batch = accumulator.open(queue, size, monotonic_ms())
            elif batch is None:  # the next sticky partition has a batch that is nearly full: stay where there is none
                assert full is not None
                queue = full.queue
                batch = accumulator.open(queue, size, monotonic_ms())
        index = batch.append(value, key, headers, timestamp_ms, size)
        if queue.partition == queues.sticky and not queues.custom:
            if batch.keys is None and batch.headers is None:
                self.lean[queue.topic] = batch
            else:
                self.lean.pop(queue.topic, None)
        return batch, index, full

    def place_columns(
        self, queues: TopicQueues, partition: int, columns: Columns, base_timestamp_ms: int, size: int
    ) -> list[Batch] | None:
        """Queue columns for a partition (-1: the sticky one); return closed batches, the new one last, for `encode`.

        None: `buffer.memory` is full. The caller holds the lock.
        """
        if not self.accumulator.has_columns_room(size):
            return None
        queue = queues.queues[partition if partition >= 0 else queues.sticky]
        before = queue.open
        batch = self.accumulator.add_columns(queue, columns, base_timestamp_ms, size, monotonic_ms())
        if before is not None:
            self._drop_lean((before,))
        if partition < 0:
            queues.next_sticky()
            self.lean.pop(queues.topic, None)
        return [before, batch] if before is not None else [batch]

    def after_place(self, full: Batch | None) -> None:
        """Follow up on `place` without the lock: encode what was closed, and let the loop know."""
        if full is not None:
            self.encode((full,))
        else:
            self.wake()

    def encode(self, batches: Iterable[Batch]) -> None:
        """Encode closed batches and let the loop know; whoever closed them calls this, without the lock."""
        options = self.options
        todo = list(batches)
        closed = list(todo)
        try:
            while todo:
                try:
                    if not todo[0].done:
                        todo[0].encode(options.codec, options.level)
                except RaftlogError as error:
                    self.fail([todo[0]], error)
                del todo[0]
        except BaseException:  # an interrupt in the caller's thread: the loop encodes what is left
            self.loop.call_soon_threadsafe(self.encode, todo)
            raise
        with self.lock:
            self.accumulator.ready.update((batch.queue, None) for batch in closed)
        self.wake()

    def wake(self) -> None:
        """Make the loop look at what is ready, or at when it will be."""
        if self._wake_pending:
            return
        self._wake_pending = True
        try:
            if self.on_loop():
                self.loop.call_soon(self._pump)
            else:
                self.loop.call_soon_threadsafe(self._pump)
        except RuntimeError:  # the loop is closed: the interpreter, or the caller's asyncio.run, has ended
            self._wake_pending = False

    def close_batches(self, batches: Iterable[Batch] | None = None) -> None:
        """Send these open batches (None: all) without more lingering."""
        with self.lock:
            if batches is None:
                closed = self.accumulator.close_all()
            else:
                closed = [batch for batch in batches if self.accumulator.close(batch)]
            self._drop_lean(closed)
        if closed:
            self.encode(closed)

    def _drop_lean(self, closed: Iterable[Batch]) -> None:
        """A batch was closed: no more records for it, and the next sticky partition has its turn."""
        for batch in closed:
            topic = batch.queue.topic
            if self.lean.get(topic) is batch:
                del self.lean[topic]
            queues = self.topics.get(topic)
            if queues is not None and batch.queue.partition == queues.sticky:
                queues.next_sticky()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait, with the lock held, until memory was given back; False after the timeout."""
        self._room_waiters += 1
        try:
            return self.room.wait(timeout_s)
        finally:
            self._room_waiters -= 1

    async def room_given_back(self, timeout_s: float) -> None:
        """Wait on the event loop until memory was given back, or the timeout has passed."""
        future = self.loop.create_future()
        self._room_futures.append(future)
        await asyncio.wait([future], timeout=timeout_s)

    def fail(self, batches: Iterable[Batch], error: RaftlogError) -> None:
        """Complete batches with an error."""
        callbacks: Callbacks = []
        with self.lock:
            for batch in batches:
                self.complete(batch, callbacks, error=error)
        self.finish(callbacks)

    def complete(
        self, batch: Batch, callbacks: Callbacks, *, base_offset: int = -1, append_time_ms: int = -1, error: RaftlogError | None = None
    ) -> None:
        """Complete a batch under the lock; the caller runs `callbacks` through `finish` without it."""
        if self.accumulator.complete(batch, base_offset=base_offset, append_time_ms=append_time_ms, error=error):
            if batch.callbacks:
                callbacks += batch.callbacks
                batch.callbacks = None
            if self._room_waiters:
                self.room.notify_all()
            if self._room_futures:
                callbacks.append(self._release_room_futures)

    def _release_room_futures(self) -> None:
        futures, self._room_futures = self._room_futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    @staticmethod
    def finish(callbacks: Callbacks) -> None:
        """Run what waits for completed batches."""
        for callback in callbacks:
            try:
                callback()
            except Exception:  # a user's callback: it must not harm other deliveries
                logger.exception("a delivery callback failed")

    # On the event loop

    async def load_topic(self, topic: str) -> TopicQueues:
        """Return the queues of a topic, asking the cluster when it is not known.

        Raises:
            UnknownTopicOrPartition, BrokerUnavailable: after `max.block.ms` at most.
        """
        view = await self.metadata.topic(topic, self.options.max_block_ms)
        with self.lock:
            self.check_open()
            queues = self.topics.get(topic)
            if queues is None:
                queues = self.topics[topic] = TopicQueues(view, self._partitioner)
            return queues

    def _on_metadata(self) -> None:
        with self.lock:
            for topic, queues in self.topics.items():
                view = self.metadata.view.topics.get(topic)
                if view is not None and view.partitions:
                    queues.update(view)
            waiting, self._unrouted = self._unrouted, {}
            for queue, since_ms in waiting.items():
                self._route(queue, since_ms)
        for stream in self._streams.values():
            stream.check_leaders()

    def _pump(self) -> None:
        """Encode what has lingered, route what is ready, set the timers."""
        self._wake_pending = False
        with self.lock:
            lingered = self.accumulator.close_lingered(monotonic_ms())
            self._drop_lean(lingered)
        if lingered:
            self.encode(lingered)
        with self.lock:
            ready, self.accumulator.ready = self.accumulator.ready, {}
            for queue in ready:
                if queue.sendable:
                    self._route(queue)
            linger_ms = self.accumulator.next_linger_ms()
        if linger_ms is not None and self._linger_timer is None:
            delay_s = max(0.0, (linger_ms - monotonic_ms()) / 1000)
            self._linger_timer = self.loop.call_later(delay_s, self._on_linger)
        if self._tick_timer is None and self.accumulator.incomplete:
            self._tick_timer = self.loop.call_later(_TICK_S, self._tick)

    def _on_linger(self) -> None:
        self._linger_timer = None
        self._pump()

    def _route(self, queue: PartitionQueue, since_ms: float | None = None) -> None:
        """Hand the queue to its leader's stream; under the lock."""
        leader = self.metadata.view.leader(queue.topic, queue.partition)
        if leader is None:
            self._unrouted[queue] = since_ms if since_ms is not None else monotonic_ms()
            self.metadata.request_refresh()
            return
        stream = self._streams.get(leader.broker_id)
        if stream is None:
            stream = self._streams[leader.broker_id] = ProduceStream(self, leader.broker_id)
        stream.add(queue)

    def reroute(self, queue: PartitionQueue) -> None:
        """Look again for the leader of a queue; under the lock."""
        if queue.waiting:
            self._route(queue)

    def refused(self, batch: Batch, wire_error: common_pb2.Error, callbacks: Callbacks) -> tuple[Batch, Batch] | None:
        """Decide what becomes of a batch that the broker refused; under the lock. Returns halves to encode."""
        queue = batch.queue
        error = from_wire(wire_error)
        if wire_error.code in _LEADER_ERRORS:
            self.metadata.learn(queue.topic, queue.partition, wire_error)
        if isinstance(error, ChainBroken):
            queue.on_refused(batch, resend=True, counts=False)
            return None
        if isinstance(error, MessageTooLarge) and batch.count > 1 and not batch.done:
            return self._split(batch)
        if isinstance(error, (RetriableError, FencedError)):
            self.send_again(batch, error, callbacks)
            return None
        queue.on_refused(batch, resend=False, counts=False)
        self.complete(batch, callbacks, error=error)
        return None

    def send_again(self, batch: Batch, error: RaftlogError, callbacks: Callbacks) -> None:
        """Put a batch back that was refused or lost on the way, unless its retries are used up; under the lock."""
        batch.failures += 1
        batch.queue.last_error = error
        again = batch.failures <= self.options.retries
        batch.queue.on_refused(batch, resend=again, counts=True)
        if not again:
            self.complete(batch, callbacks, error=error)

    def _split(self, batch: Batch) -> tuple[Batch, Batch]:
        left, right = self.accumulator.split(batch)

        def joined() -> None:
            callbacks: Callbacks = []
            with self.lock:
                if left.done and right.done:
                    self.complete(batch, callbacks, base_offset=left.base_offset, error=left.error or right.error)
            self.finish(callbacks)

        left.callbacks, right.callbacks = [joined], [joined]
        return left, right

    def settle(self, queues: Iterable[PartitionQueue]) -> None:
        """Let queues go on after answers: in order again, after a pause when the broker had a reason; under the lock."""
        for queue in queues:
            if queue.recovered():
                if queue.failures:
                    pause_ms = self.options.backoff.pause_ms(queue.failures)
                    queue.not_before_ms = monotonic_ms() + pause_ms
                    self.loop.call_later(pause_ms / 1000, self._after_pause, queue)
                    continue
                self.reroute(queue)
            elif queue.waiting and not queue.in_flight:
                self.reroute(queue)

    def _after_pause(self, queue: PartitionQueue) -> None:
        with self.lock:
            self.reroute(queue)

    def _tick(self) -> None:
        """Look at deadlines; runs only while something is incomplete."""
        self._tick_timer = None
        callbacks: Callbacks = []
        now_ms = monotonic_ms()
        with self.lock:
            for batch in list(self.accumulator.expired(now_ms)):
                queue = batch.queue
                reason = queue.last_error or self.metadata.last_error
                error = DeliveryTimeout(
                    f"{queue}: no acknowledgement within delivery.timeout.ms={self.options.delivery_timeout_ms}; the "
                    f"records may or may not be in the log" + (f"; last error: {reason}" if reason else "")
                )
                if queue.open is batch:
                    self.accumulator.close(batch)
                    self._drop_lean((batch,))
                self.complete(batch, callbacks, error=error)
            for queue, since_ms in list(self._unrouted.items()):
                missing = self.metadata.view.missing.get(queue.topic)
                if missing is not None and now_ms - since_ms > UNKNOWN_TOPIC_GRACE_S * 1000:
                    del self._unrouted[queue]
                    self.topics.pop(queue.topic, None)
                    self.lean.pop(queue.topic, None)
                    for batch in queue.take_out():
                        self.complete(batch, callbacks, error=missing)
                else:
                    self.metadata.request_refresh()
            again = bool(self.accumulator.incomplete)
        self.finish(callbacks)
        for stream in self._streams.values():
            stream.check_timeouts(now_ms)
        if again and self._tick_timer is None:
            self._tick_timer = self.loop.call_later(_TICK_S, self._tick)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task on the engine's loop."""
        return self.loop.create_task(work)

    async def close(self) -> None:
        """Stop: whatever is not acknowledged ends with `ClosedError`. Flush before, if that is wanted."""
        self.closed = self.closed or ClosedError("the producer is closed")
        for timer in (self._linger_timer, self._tick_timer):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*(stream.close() for stream in self._streams.values()), return_exceptions=True)
        with self.lock:
            self.lean.clear()
            left = list(self.accumulator.incomplete)
        self.fail(left, ClosedError("the producer was closed before the record was acknowledged"))
        with self.lock:
            self.room.notify_all()
        await self.metadata.close()
        await self.connections.close()
