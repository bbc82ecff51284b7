"""Group commit: fsync off the event loop, at most one at a time for a log, everybody who came meanwhile in the next."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor

from broker.log.partition_log import FlushTicket, PartitionLog
from raftlog.errors import StorageError

OnDone = Callable[[int], None]
OnError = Callable[[BaseException], None]


class _Queue:
    """Requests for one log: those that the flush under way answers, and those for the next."""

    __slots__ = ("flushing", "log", "ticket", "waiting")

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.waiting: list[tuple[OnDone, OnError]] = []
        self.flushing: list[tuple[OnDone, OnError]] | None = None
        self.ticket: FlushTicket | None = None
        """What `flushing` waits for."""


class GroupCommit:
    """Runs on one event loop; `executor` does the waiting for the disk.

    A flush begins at the end of the loop's present round, so that all appends of a round share it. Equal callbacks of
    one flush are called once. `on_flushed` hears of each that worked: the log directory, and the seconds it took.
    """

    def __init__(self, executor: Executor, on_flushed: Callable[[str, float], None] = lambda log_dir, s: None) -> None:
        self._executor = executor
        self._on_flushed = on_flushed
        self._queues: dict[PartitionLog, _Queue] = {}
        self._due: list[_Queue] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def request(self, log: PartitionLog, on_done: OnDone, on_error: OnError) -> None:
        """Have everything that `log` holds now made durable.

        `on_done` gets the flushed end offset, `on_error` the reason: final when the log directory is offline by then,
        else (no descriptors) the records stay in the log and the next request covers them. Either is called on the
        loop, after this returns.
        """
        queue = self._queues.get(log)
        if queue is None:
            queue = self._queues[log] = _Queue(log)
            self._idle.clear()
        if not queue.waiting and queue.flushing is None:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            if not self._due:
                self._loop.call_soon(self._begin_due)
            self._due.append(queue)
        queue.waiting.append((on_done, on_error))

    async def close(self) -> None:
        """Return once nothing is under way."""
        await self._idle.wait()

    def _begin_due(self) -> None:
        due, self._due = self._due, []
        for queue in due:
            self._begin(queue)

    def _begin(self, queue: _Queue) -> None:
        callbacks, queue.waiting = queue.waiting, []
        queue.flushing = callbacks
        try:
            ticket = queue.log.begin_flush()
            if ticket is not None:
                queue.ticket = ticket
                self._submit(queue, ticket)
                return
        except Exception as error:  # offline, closed, or no thread: whoever waits must hear of it
            self._end(queue, error)
            return
        self._end(queue, None)

    def _submit(self, queue: _Queue, ticket: FlushTicket) -> None:
        try:
            self._executor.submit(self._run, queue, ticket)
        except RuntimeError as error:  # shut down, or no new thread: then another thread may run it all the same
            raise StorageError(f"flush of {queue.log} cannot begin: {error}; try again later") from error

    def _run(self, queue: _Queue, ticket: FlushTicket) -> None:
        failure: BaseException | None = None
        started_s = time.monotonic()
        try:
            ticket.run()
        except BaseException as error:  # travels to those who wait
            failure = error
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._finish, queue, ticket, failure, time.monotonic() - started_s)
        if failure is None:
            ticket.tidy()  # who waits for the flush does not wait for this

    def _finish(self, queue: _Queue, ticket: FlushTicket, failure: BaseException | None, took_s: float) -> None:
        if failure is None:
            queue.log.finish_flush(ticket)
            self._on_flushed(os.path.dirname(queue.log.directory), took_s)
        if queue.ticket is ticket:
            self._end(queue, failure)

    def _end(self, queue: _Queue, failure: BaseException | None) -> None:
        callbacks, queue.flushing, queue.ticket = queue.flushing or [], None, None
        if queue.waiting:  # begin the next before answering: the disk should not wait for us
            self._begin(queue)
        elif self._queues.pop(queue.log, None) is not None and not self._queues:
            self._idle.set()
        flushed_end_offset = queue.log.flushed_end_offset
        for on_done, on_error in dict.fromkeys(callbacks):
            if failure is None:
                on_done(flushed_end_offset)
            else:
                on_error(failure)
