"""The producer's side that any thread may call: records go into batches, within `buffer.memory`."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

from raftlog._alarm import Alarm
from raftlog._client.options import ProducerOptions
from raftlog._core.accumulator import Accumulator, AccumulatorConfig
from raftlog._core.batch import BATCH_BYTES, Batch
from raftlog._core.client_figures import ProducerFigures
from raftlog._core.partition_queue import PartitionQueue
from raftlog._core.send_batch import Piece
from raftlog._core.topic_queues import TopicQueues
from raftlog._delivery import Deadline, wait_async
from raftlog.errors import BufferExhausted, ClosedError, RaftlogError
from raftlog.types import Header

logger = logging.getLogger(__name__)

SLICE_BYTES: Final = 1 << 20
"""`send_batch` cuts its rows into batches of about this size, or of `batch.size` where that is larger."""

Callbacks = list[Callable[[], None]]


def monotonic_ms() -> float:
    """Return milliseconds since some instant."""
    return time.monotonic() * 1000.0


class ProducerBuffer:
    """Accumulator and topics, shared between the threads that send and the event loop that delivers.

    Made on the event loop. `lock` guards the accumulator, the queues and the batches; it is held for microseconds,
    never while encoding or waiting. Whoever closes a batch encodes it, so that a busy application thread does the
    work that it causes, and the loop finds bytes.
    """

    def __init__(self, options: ProducerOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.options = options
        self.loop = loop
        self.lock = threading.Lock()
        self.attributes = 0
        """Of all batches: whether they belong to transactions."""
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
        self.figures = ProducerFigures(options.delivery_timeout_ms, monotonic_ms() / 1_000)
        self.closed: RaftlogError | None = None
        self._pid = os.getpid()
        self._loop_thread_id = threading.get_ident()
        self._wake_pending = False
        self._room_alarms: list[Alarm] = []
        """Of threads that wait until memory is given back."""
        self._room_futures: list[asyncio.Future[None]] = []

    def _pump(self) -> None:
        """Look at what is ready; on the event loop."""
        raise NotImplementedError

    @staticmethod
    def now_ms() -> float:
        """Return the clock that deadlines are measured with."""
        return monotonic_ms()

    def on_loop(self) -> bool:
        """Whether the caller runs in the event loop's thread."""
        return threading.get_ident() == self._loop_thread_id

    def trouble_of(self, queue: PartitionQueue) -> RaftlogError | None:
        """Return why nothing gets through to a partition, as far as that is known."""
        return queue.last_error

    def check_open(self) -> None:
        """Refuse when closed, or carried over into another process.

        Raises:
            ClosedError: says which.
        """
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))
        if self._pid != os.getpid():
            raise ClosedError(f"this producer was made in process {self._pid}; make one in each process")

    def check_may_send(self) -> None:
        """Refuse a record that nobody may send now; under the lock.

        Raises:
            ClosedError: as `check_open`.
        """
        self.check_open()

    def abandon_after_fork(self) -> None:
        """In a forked child: let go of everything without touching it."""
        self.lean.clear()
        self.lock = threading.Lock()  # the old one may be held by a thread that does not exist here
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
                in_turn = queues.takes_turns and key is None and partition is None
                batch = accumulator.open(queue, size, monotonic_ms(), in_turn=in_turn)
            elif batch is None:  # the next sticky partition has a batch that is nearly full: stay where there is none
                assert full is not None
                queue = full.queue
                batch = accumulator.open(queue, size, monotonic_ms(), in_turn=True)
        index = batch.append(value, key, headers, timestamp_ms, size)
        if queue.partition == queues.sticky and not queues.custom:
            if batch.keys is None and batch.headers is None:
                self.lean[queue.topic] = batch
            else:
                self.lean.pop(queue.topic, None)
        return batch, index, full

    def place_columns(self, queues: TopicQueues, piece: Piece) -> list[Batch] | None:
        """Queue a piece of `send_batch`; return closed batches, the new one last, for `encode`.

        None: `buffer.memory` is full. The caller holds the lock.
        """
        if not self.accumulator.has_columns_room(piece.size_bytes):
            return None
        queue = queues.queues[piece.partition if piece.partition >= 0 else queues.sticky]
        before = queue.open
        batch = self.accumulator.add_columns(
            queue, piece.columns, piece.base_timestamp_ms, piece.size_bytes, monotonic_ms()
        )
        if before is not None:
            self._drop_lean((before,))
        if piece.partition < 0:
            queues.next_sticky()
        return [before, batch] if before is not None else [batch]

    def slice_limit_bytes(self) -> int:
        """Return the size that `send_batch` cuts its pieces at."""
        options = self.options
        return min(max(options.batch_size, SLICE_BYTES), options.max_request_size, options.buffer_memory) - BATCH_BYTES

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
                        todo[0].encode(options.codec, options.level, self.attributes)
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

    def want_room(self) -> Alarm:
        """Return what is set once memory is given back, for `wait_for_room`. The caller holds the lock."""
        self.accumulator.hurry()
        alarm = Alarm()
        self._room_alarms.append(alarm)
        return alarm

    def wait_for_room(self, given_back: Alarm, size: int, deadline: Deadline) -> None:
        """Wait in a thread, without the lock, until memory was given back.

        Raises:
            BufferExhausted: the deadline has passed, or this is the event loop's thread, which must not wait.
        """
        left_s = self._time_for_room(size, deadline)
        if self.on_loop():
            raise self._no_room(size)
        self.wake()
        began_s = monotonic_ms() / 1_000
        try:
            given_back.wait(left_s)
        finally:
            self._note_wait(began_s)

    async def room_given_back(self, size: int, deadline: Deadline) -> None:
        """Wait on the event loop until memory was given back.

        Raises:
            BufferExhausted: the deadline has passed.
        """
        left_s = self._time_for_room(size, deadline)
        with self.lock:
            self.accumulator.hurry()
        self.wake()
        future = self.loop.create_future()
        self._room_futures.append(future)
        began_s = monotonic_ms() / 1_000
        await asyncio.wait([future], timeout=left_s)
        self._note_wait(began_s)

    def _note_wait(self, began_s: float) -> None:
        now_s = monotonic_ms() / 1_000
        self.figures.waited(now_s - began_s, now_s)

    def _time_for_room(self, size: int, deadline: Deadline) -> float:
        left_s = deadline.left()
        assert left_s is not None
        if left_s <= 0:
            raise self._no_room(size)
        return left_s

    def _no_room(self, size: int) -> BufferExhausted:
        return BufferExhausted(
            f"no room for {size} bytes within max.block.ms={self.options.max_block_ms}: "
            f"{self.accumulator.used_bytes} of buffer.memory={self.options.buffer_memory} bytes wait for "
            "acknowledgement; send more slowly, raise buffer.memory, or look why the broker is slow"
        )

    def fail(self, batches: Iterable[Batch], error: RaftlogError) -> None:
        """Complete batches with an error."""
        callbacks: Callbacks = []
        with self.lock:
            for batch in batches:
                self.complete(batch, callbacks, error=error)
        self.finish(callbacks)

    def complete(
        self,
        batch: Batch,
        callbacks: Callbacks,
        *,
        base_offset: int = -1,
        append_time_ms: int = -1,
        error: RaftlogError | None = None,
    ) -> None:
        """Complete a batch under the lock; the caller runs `callbacks` through `finish` without it."""
        if self.accumulator.complete(batch, base_offset=base_offset, append_time_ms=append_time_ms, error=error):
            self.figures.done(batch, monotonic_ms() / 1_000)
            if batch.callbacks:
                callbacks += batch.callbacks
                batch.callbacks = None
            self.ring_for_room()
            if self._room_futures:
                callbacks.append(self._release_room_futures)

    def ring_for_room(self) -> None:
        """Wake the threads that wait for memory; under the lock."""
        while self._room_alarms:
            self._room_alarms.pop().set()

    def _release_room_futures(self) -> None:
        futures, self._room_futures = self._room_futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)

    def fail_incomplete(self, error: RaftlogError) -> None:
        """Let everything fail that is not acknowledged yet: nothing of it is sent (again)."""
        with self.lock:
            self._drop_lean(self.accumulator.close_all())
            left = list(self.accumulator.incomplete)
        self.fail(left, error)

    async def drain(self) -> None:
        """Send what is there and wait until all of it is acknowledged or has failed; `delivery.timeout.ms` at most."""
        self.close_batches()
        with self.lock:
            waiting = list(self.accumulator.incomplete)
        for batch in waiting:
            await wait_async(batch)

    def undelivered(self) -> int:
        """Return how many records are neither acknowledged nor failed for good."""
        with self.lock:
            return sum(batch.count or len(batch.values) for batch in self.accumulator.incomplete)

    @staticmethod
    def finish(callbacks: Callbacks) -> None:
        """Run what waits for completed batches, all of it, whatever some of it raises.

        Raises:
            KeyboardInterrupt: pressed meanwhile in the main thread, which alone gets it; not what a callback raised
                on the event loop's thread, where it would end every client of the process.
        """
        interrupt: KeyboardInterrupt | None = None
        for callback in callbacks:
            try:
                callback()
            except BaseException as error:  # a user's callback, SystemExit too: it must not harm other deliveries
                logger.exception("a delivery callback failed")
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    interrupt = error
        if interrupt is not None:
            raise interrupt
