"""What `send` returns: a claim on the answer. One small object for each record; the batch behind it does the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from raftlog._alarm import Alarm
from raftlog.types import RecordMetadata

if TYPE_CHECKING:
    from raftlog._client.producer_buffer import ProducerBuffer
    from raftlog._core.batch import Batch
    from raftlog.errors import RaftlogError


class RecordRange(NamedTuple):
    """Where consecutive records of a `send_batch` were put. `base_offset` is -1 where it is not known, as
    `RecordMetadata.offset` is."""

    topic: str
    partition: int
    base_offset: int
    record_count: int


def when_done(batch: Batch, callback: Callable[[], None]) -> bool:
    """Have `callback` called once the batch is done; False when it is already."""
    engine: ProducerBuffer = batch.owner
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
        TimeoutError: after `timeout` seconds; the delivery goes on.
    """
    if batch.done:
        return
    engine: ProducerBuffer = batch.owner
    if engine.on_loop():
        from raftlog.errors import InvalidRequestError

        raise InvalidRequestError("waiting for a delivery inside a delivery callback would be for ever")
    done = Alarm()
    if when_done(batch, done.set):
        engine.close_batches((batch,))
        if not done.wait(timeout):
            within = f"within {timeout:g} s" if timeout else "yet"
            raise TimeoutError(f"no acknowledgement for {batch.queue} {within}; the delivery goes on")


async def wait_async(batch: Batch) -> None:
    """Wait on the event loop until the batch is done."""
    if batch.done:
        return
    engine: ProducerBuffer = batch.owner
    future = engine.loop.create_future()

    def finish() -> None:
        if not future.done():
            future.set_result(None)

    if when_done(batch, finish):
        engine.close_batches((batch,))
        await future


def raised(error: RaftlogError) -> RaftlogError:
    """Return an error of the same kind to raise: one that many share would collect all their tracebacks."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.args = error.args
    return copy


class BaseDelivery:
    """The answer to one `send`, as far as it is there."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    def done(self) -> bool:
        """Whether the broker has acknowledged the record, or the delivery has failed for good."""
        return self._batch.done

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(delivery)` once it is done: on the client's event loop thread, so it should be quick and
        must not block; at once when it is done already. What it raises is logged."""
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
        return f"<{type(self).__name__} {batch.queue} {state}>"


class Delivery(BaseDelivery):
    """The answer to one `send` of the synchronous producer."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait for the acknowledgement, `timeout` seconds at most, and return where the record is.

        Raises:
            TimeoutError: not yet; the delivery goes on.
            RaftlogError: it failed for good; the class says why.
        """
        wait_sync(self._batch, timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> RaftlogError | None:
        """Wait like `result`, and return the error instead of raising it, None when there is none."""
        wait_sync(self._batch, timeout)
        return self._batch.leaf(self._index)[0].error


class AsyncDelivery(BaseDelivery):
    """The answer to one `send` of the asynchronous producer: await it for the `RecordMetadata`."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> RecordMetadata:
        """Wait for the acknowledgement, `timeout` seconds at most, and return where the record is.

        Raises:
            TimeoutError: not yet; the delivery goes on.
            RaftlogError: it failed for good; the class says why.
        """
        async with asyncio.timeout(timeout):
            await wait_async(self._batch)
        return self._outcome()

    def exception(self) -> RaftlogError | None:
        """Return the error of a delivery that has failed, None when it has not (yet)."""
        return self._batch.leaf(self._index)[0].error


class BaseBatchDelivery:
    """The answer to one `send_batch`, as far as it is there."""

    __slots__ = ("_batches",)

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def done(self) -> bool:
        """Whether every record is acknowledged or has failed for good."""
        return all(batch.done for batch in self._batches)

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
    """Name the partitions that have not acknowledged yet, and what their leaders, or whoever looked for them, said."""
    reasons: dict[str, str] = {}
    for batch in delivery._leaves():
        if not batch.done:
            engine: ProducerBuffer = batch.owner
            reason = engine.trouble_of(batch.queue)
            reasons[str(batch.queue)] = str(reason or "no answer yet")
    return "; ".join(why if why.startswith(name) else f"{name}: {why}" for name, why in sorted(reasons.items()))


class BatchDelivery(BaseBatchDelivery):
    """The answer to one `send_batch` of the synchronous producer."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> list[RecordRange]:
        """Wait for all acknowledgements, `timeout` seconds at most; return the ranges in the order they were cut.

        Raises:
            TimeoutError: not yet; the delivery goes on.
            RaftlogError: the first part that failed for good; other parts may be in the log.
        """
        deadline = Deadline(timeout)
        for batch in self._batches:
            wait_sync(batch, deadline.left())
        return self._outcome()

    def exception(self, timeout: float | None = None) -> RaftlogError | None:
        """Wait like `result`, and return the first error instead of raising it, None when there is none."""
        deadline = Deadline(timeout)
        for batch in self._batches:
            wait_sync(batch, deadline.left())
        return self._error()


class AsyncBatchDelivery(BaseBatchDelivery):
    """The answer to one `send_batch` of the asynchronous producer: await it for the ranges."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, list[RecordRange]]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> list[RecordRange]:
        """Wait for all acknowledgements, `timeout` seconds at most; return the ranges in the order they were cut.

        Raises:
            TimeoutError: not yet; the delivery goes on.
            RaftlogError: the first part that failed for good; other parts may be in the log.
        """
        async with asyncio.timeout(timeout):
            for batch in self._batches:
                await wait_async(batch)
        return self._outcome()

    def exception(self) -> RaftlogError | None:
        """Return the first error so far, None when there is none."""
        return self._error()


class Deadline:
    """What is left of a timeout in seconds."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds left, None for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())
