"""Deliveries, which `send` and `send_batch` return: one small object for each call; its batch holds the outcome.

Also `Alarm`, which a thread can wait for while a signal such as Ctrl-C may come at any moment, and `Deadline`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from raftlog.types import RecordMetadata

if TYPE_CHECKING:
    from raftlog._core.accumulator import Batch, PartitionQueue
    from raftlog.errors import RaftlogError


_LOOK_S: Final = 1.0
"""How long a wait blocks before the thread runs Python again, which handles signals."""


class Alarm:
    """A `threading.Event` that is safe with signals.

    A signal at the moment when a wait of an Event begins does not end the wait: the interpreter handles signals before
    and after it, so a thread that waits for an unset Event ignores Ctrl-C. A signal within the Event's own code leaves
    its lock held, and blocks every thread that sets it, even the signal's handler. Here a wait returns to Python once a
    second, and no lock is held.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[threading.Lock] = deque()
        """The lock of each waiter, released to wake it."""

    def set(self) -> None:
        """Wake all waiters; later waits return at once."""
        self._is_set = True
        while self._waiters:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                self._waiters.popleft().release()

    def clear(self) -> None:
        """Reset the alarm, so that waits block again."""
        self._is_set = False

    def is_set(self) -> bool:
        """Whether the alarm is set."""
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, `timeout` seconds at most (None: for ever); return whether it is set."""
        until = None if timeout is None else time.monotonic() + timeout
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            woken = self._is_set
            while not woken:
                left_s = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
                if left_s <= 0:
                    return self._is_set
                woken = waiter.acquire(timeout=left_s)
            return True
        finally:
            with contextlib.suppress(ValueError):  # it was woken
                self._waiters.remove(waiter)


class RecordRange(NamedTuple):
    """The place of consecutive records of a `send_batch`. `base_offset` is -1 if it is unknown, for the same reasons as
    `RecordMetadata.offset`."""

    topic: str
    partition: int
    base_offset: int
    record_count: int


class Engine(Protocol):
    """What a delivery needs of the engine that sends its batch (`ProducerEngine`)."""

    lock: threading.Lock
    loop: asyncio.AbstractEventLoop

    def on_loop(self) -> bool:
        """Whether the caller runs in the event loop's thread."""

    def check_process(self) -> None:
        """Refuse in a forked child, where no delivery ever ends; raises ClosedError."""

    def close_batches(self, batches: Iterable[Batch]) -> None:
        """Send these open batches without further lingering."""

    def trouble_of(self, queue: PartitionQueue) -> RaftlogError | None:
        """Return why batches do not get through to a partition, if known."""


def when_done(batch: Batch, callback: Callable[[], None]) -> bool:
    """Call `callback` once the batch is done; return False, without a call, if it already is."""
    engine: Engine = batch.owner
    with engine.lock:
        if batch.done:
            return False
        if batch.callbacks is None:
            batch.callbacks = []
        batch.callbacks.append(callback)
        return True


def wait_sync(batch: Batch, timeout: float | None) -> None:
    """Wait in a thread until the batch is done.

    Raises:
        TimeoutError: after `timeout` seconds; the delivery continues.
        ClosedError: this process was forked from the one that made the producer.
    """
    if batch.done:
        return
    engine: Engine = batch.owner
    if engine.on_loop():
        from raftlog.errors import InvalidRequestError

        raise InvalidRequestError("waiting for a delivery inside a delivery callback would never end")
    engine.check_process()
    done = Alarm()
    if when_done(batch, done.set):
        engine.close_batches((batch,))
        if not done.wait(timeout):
            within = f"within {timeout:g} s" if timeout else "yet"
            raise TimeoutError(f"no acknowledgement for {batch.queue} {within}; the delivery goes on")


def wait_all(batches: Iterable[Batch], timeout: float | None) -> None:
    """Wait in a thread until all batches are done.

    Raises:
        TimeoutError: after `timeout` seconds; the deliveries go on.
    """
    deadline = Deadline(timeout)
    for batch in batches:
        wait_sync(batch, deadline.left())


async def wait_async(batch: Batch) -> None:
    """Wait on the event loop until the batch is done."""
    if batch.done:
        return
    engine: Engine = batch.owner
    future = engine.loop.create_future()

    def finish() -> None:
        if not future.done():
            future.set_result(None)

    if when_done(batch, finish):
        engine.close_batches((batch,))
        await future


def raised(error: RaftlogError) -> RaftlogError:
    """Return a copy of an error to raise: one object that many callers raise would collect the tracebacks of all."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    return copy


class BaseDelivery:
    """The outcome of one `send`, once it is known."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        """Whether the broker has acknowledged the record, or the delivery has failed for good."""
        return self._batch.done

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(delivery)` once the delivery is done, on the client's event loop thread.

        There it must be quick and must not block, and exceptions that it raises are logged. If the delivery is already
        done, the callback runs at once, in this thread.
        """
        if not when_done(self._batch, lambda: callback(self)):
            callback(self)

    def _outcome(self) -> RecordMetadata:
        batch, _ = self._batch.leaf(self._index)
        if batch.error is not None:
            raise raised(batch.error)
        return self._batch.metadata(self._index)

    def __repr__(self) -> str:
        batch, _ = self._batch.leaf(self._index)
        state = "pending" if not batch.done else "acknowledged" if batch.error is None else f"failed: {batch.error}"
        return f"<{type(self).__name__.removeprefix('Async')} {batch.queue} {state}>"


class Delivery(BaseDelivery):
    """The outcome of one `send` of the synchronous producer."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait for the acknowledgement, `timeout` seconds at most, and return the place of the record.

        Raises:
            TimeoutError: no acknowledgement yet; the delivery continues.
            RaftlogError: the delivery has failed for good; the class says why.
        """
        wait_sync(self._batch, timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> RaftlogError | None:
        """As `result`, but return the error, or None, instead of raising it."""
        wait_sync(self._batch, timeout)
        return self._batch.leaf(self._index)[0].error


class AsyncDelivery(BaseDelivery):
    """The outcome of one `send` of the asynchronous producer: await it for the `RecordMetadata`."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait for the acknowledgement, `timeout` seconds at most, and return the place of the record.

        Raises:
            TimeoutError: no acknowledgement yet; the delivery continues.
            RaftlogError: the delivery has failed for good; the class says why.
        """
        async with asyncio.timeout(timeout):
            await wait_async(self._batch)
        return self._outcome()

    def exception(self) -> RaftlogError | None:
        """Return the error of a failed delivery, or None if it has not failed yet."""
        return self._batch.leaf(self._index)[0].error


class BaseBatchDelivery:
    """The outcome of one `send_batch`, once it is known."""

    __slots__ = ("_batches",)

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def done(self) -> bool:
        """Whether every record is acknowledged or has failed for good."""
        return all(batch.done for batch in self._batches)

    def __repr__(self) -> str:
        leaves = list(self._leaves())
        error = self._error()
        done = sum(batch.done for batch in leaves)
        state = f"failed: {error}" if error is not None else f"{done} of {len(leaves)} batches acknowledged"
        return f"<{type(self).__name__.removeprefix('Async')} {state}>"

    def _leaves(self) -> Iterator[Batch]:
        for batch in self._batches:
            yield from batch.leaves()

    def _error(self) -> RaftlogError | None:
        return next((batch.error for batch in self._leaves() if batch.error is not None), None)

    def _outcome(self) -> list[RecordRange]:
        error = self._error()
        if error is not None:
            raise raised(error)
        return [
            RecordRange(batch.queue.topic, batch.queue.partition, batch.base_offset, batch.count)
            for batch in self._leaves()
        ]


def awaited(delivery: BaseBatchDelivery) -> str:
    """Name the partitions that have not acknowledged yet, with the reasons."""
    reasons: dict[str, str] = {}
    for batch in delivery._leaves():
        if not batch.done:
            engine: Engine = batch.owner
            reason = engine.trouble_of(batch.queue)
            reasons[str(batch.queue)] = str(reason or "no answer yet")
    return "; ".join(why if why.startswith(name) else f"{name}: {why}" for name, why in sorted(reasons.items()))


class BatchDelivery(BaseBatchDelivery):
    """The outcome of one `send_batch` of the synchronous producer."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> list[RecordRange]:
        """Wait for all acknowledgements, `timeout` seconds at most; return the ranges in order.

        Raises:
            TimeoutError: no acknowledgement yet; the delivery continues.
            RaftlogError: the error of the first failed part; other parts may be in the log.
        """
        wait_all(self._batches, timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> RaftlogError | None:
        """As `result`, but return the first error, or None, instead of raising it."""
        wait_all(self._batches, timeout)
        return self._error()


class AsyncBatchDelivery(BaseBatchDelivery):
    """The outcome of one `send_batch` of the asynchronous producer: await it for the ranges."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, list[RecordRange]]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> list[RecordRange]:
        """Wait for all acknowledgements, `timeout` seconds at most; return the ranges in order.

        Raises:
            TimeoutError: no acknowledgement yet; the delivery continues.
            RaftlogError: the error of the first failed part; other parts may be in the log.
        """
        async with asyncio.timeout(timeout):
            for batch in self._batches:
                await wait_async(batch)
        return self._outcome()

    def exception(self) -> RaftlogError | None:
        """Return the first error so far, or None."""
        return self._error()


class Deadline:
    """A timeout in seconds, from now on."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Return the seconds left; None: no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())
