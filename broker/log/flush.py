"""Flushing: when a log is flushed, and group commit, which shares one fsync among many appends.

flush.messages   what a replica counts as durable     when it asks for a flush
1                records that were fsynced            at every append; appends of one loop round share the flush
above 1          records that it has appended         after so many records, after flush.ms, and after a roll

Above 1, acknowledged records are lost with the machine's power, so the log directory first notes the topic durably
(`LogDir.note_unsynced`); until then the log behaves as with 1.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from broker.clock import Clock
from broker.log.log_dir import is_passing, passing
from broker.log.partition_log import FlushTicket, PartitionLog
from raftlog.errors import RaftlogError, StorageError

OnDone = Callable[[int], None]
OnError = Callable[[BaseException], None]

AT_A_TIME: Final = 16
"""Flushes under way: four for each thread that waits for the disk, so that none of them waits for the event loop."""


class _Queue:
    """Requests for one log: `flushing` waits for the flush under way, `waiting` for the next one."""

    __slots__ = ("flushing", "log", "ticket", "waiting")

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.waiting: list[tuple[OnDone, OnError]] = []
        self.flushing: list[tuple[OnDone, OnError]] | None = None
        self.ticket: FlushTicket | None = None
        """The flush under way."""


class GroupCommit:
    """Flushes logs for one event loop, at most one flush at a time for each log; `executor` waits for the disk.

    A flush begins at the end of the loop's present round, so that all appends of a round share it; later requests
    share the next one. While `AT_A_TIME` are under way the others wait, topics one after another: a topic of hundreds
    of partitions, each with a record to flush, delays those of other topics by a few flushes, not by hundreds
    (docs/adr/0053). Equal callbacks of one flush are called once. After each successful flush `on_flushed` gets the log
    directory and the seconds that the flush took.
    """

    def __init__(
        self,
        executor: Executor,
        on_flushed: Callable[[str, float], None] = lambda log_dir, s: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._on_flushed = on_flushed
        self._monotonic_s = monotonic_s
        self._queues: dict[PartitionLog, _Queue] = {}
        self._due: dict[str, deque[_Queue]] = {}
        """Whose flush is to begin, by topic; the topic whose turn it is comes first. No topic without any."""
        self._under_way = 0
        """Queues with a ticket."""
        self._is_scheduled = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def request(self, log: PartitionLog, on_done: OnDone, on_error: OnError) -> None:
        """Make everything that `log` holds now durable.

        `on_done` gets the flushed end offset, `on_error` the reason of a failure. That is final if the log directory is
        offline by then; otherwise (no descriptors) the records stay in the log and the next request covers them. Either
        is called on the loop, after this method returns.
        """
        queue = self._queues.get(log)
        if queue is None:
            queue = self._queues[log] = _Queue(log)
            self._idle.clear()
        if not queue.waiting and queue.flushing is None:
            if self._loop is None:
                self._loop = asyncio.get_running_loop()
            if not self._is_scheduled:
                self._is_scheduled = True
                self._loop.call_soon(self._begin_due)
            self._due.setdefault(log.topic, deque()).append(queue)
        queue.waiting.append((on_done, on_error))

    async def close(self) -> None:
        """Return once no flush is under way."""
        await self._idle.wait()

    def _begin_due(self) -> None:
        self._is_scheduled = False
        self._begin_some()

    def _begin_some(self) -> None:
        while self._due and self._under_way < AT_A_TIME:
            topic = next(iter(self._due))
            queues = self._due.pop(topic)
            queue = queues.popleft()
            if queues:
                self._due[topic] = queues  # behind the other topics
            self._begin(queue)

    def _begin(self, queue: _Queue) -> None:
        callbacks, queue.waiting = queue.waiting, []
        queue.flushing = callbacks
        failure: Exception | None = None
        try:
            ticket = queue.log.begin_flush()
            if ticket is not None:
                self._submit(queue, ticket)
                return
        except Exception as error:  # offline, closed, or no thread: the callbacks must learn of it
            failure = error
        assert self._loop is not None
        self._loop.call_soon(self._end, queue, failure)  # not at once: hundreds may end like this, one within another

    def _submit(self, queue: _Queue, ticket: FlushTicket) -> None:
        queue.ticket = ticket
        self._under_way += 1
        try:
            self._executor.submit(self._run, queue, ticket)
        except RuntimeError as error:  # shut down, or no new thread; another thread may still run it
            queue.ticket = None
            self._under_way -= 1
            raise StorageError(f"flush of {queue.log} cannot begin: {error}; try again later") from error

    def _run(self, queue: _Queue, ticket: FlushTicket) -> None:
        failure: BaseException | None = None
        started_s = self._monotonic_s()
        try:
            ticket.run()
        except BaseException as error:  # goes to the callbacks
            failure = error
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._finish, queue, ticket, failure, self._monotonic_s() - started_s)
        if failure is None:
            ticket.tidy()  # the callbacks do not wait for this

    def _finish(self, queue: _Queue, ticket: FlushTicket, failure: BaseException | None, took_s: float) -> None:
        if failure is None:
            queue.log.finish_flush(ticket)
            queue.log.log_dir.note_flush(took_s * 1000)
            self._on_flushed(os.path.dirname(queue.log.directory), took_s)
        if queue.ticket is ticket:
            queue.ticket = None
            self._under_way -= 1
            self._end(queue, failure)

    def _end(self, queue: _Queue, failure: BaseException | None) -> None:
        callbacks, queue.flushing = queue.flushing or [], None
        if queue.waiting:
            self._due.setdefault(queue.log.topic, deque()).append(queue)
        elif self._queues.pop(queue.log, None) is not None and not self._queues:
            self._idle.set()
        if not self._is_scheduled:
            self._begin_some()  # the next before answering: the disk should not wait for us
        flushed_end_offset = queue.log.flushed_end_offset
        for on_done, on_error in dict.fromkeys(callbacks):
            if failure is None:
                on_done(flushed_end_offset)
            else:
                on_error(failure)


class Flushing:
    """The flushes of one log.

    `on_durable` is called after a flush. `on_refused` is called when a flush was refused for a passing reason (no
    descriptors) and is due again. `on_broken` is called when a flush failed for another reason, with the error of the
    operating system or of the program. Records of a failed flush are not acknowledged.
    """

    def __init__(
        self,
        log: PartitionLog,
        group_commit: GroupCommit,
        clock: Clock,
        *,
        on_durable: Callable[[], None],
        on_refused: Callable[[RaftlogError], None],
        on_broken: Callable[[PartitionLog, BaseException], None],
    ) -> None:
        self._log = log
        self._group_commit = group_commit
        self._clock = clock
        self._on_durable = on_durable
        self._on_refused = on_refused
        self._on_broken = on_broken
        self._requested_end = log.flushed_end_offset
        self._last_ms = clock.monotonic_ms()
        self.was_refused = False
        """Whether a flush was refused and is due again."""
        self.closed = False

    @property
    def durable_end_offset(self) -> int:
        """Exclusive: the end of what this replica counts as durable; with flush.messages=1 all of it was fsynced."""
        if self._log.flush_messages <= 1:
            return self._log.flushed_end_offset
        return self._log.log_end_offset

    @property
    def by_time(self) -> bool:
        """Whether `flush.ms` is set, so that housekeeping must call `flush_if_due` often."""
        return self._log.config.flush_ms is not None

    def appended(self) -> bool:
        """Request a flush if one is due after an append; return whether the records already count as durable."""
        config, flush_messages = self._log.config, self._log.flush_messages
        if flush_messages <= 1:
            self.request()
            return False
        self._requested_end = min(self._requested_end, self._log.log_end_offset)  # after a truncation
        unflushed = self._log.log_end_offset - self._requested_end
        by_time = config.flush_ms is not None and self._waits_for_ms() >= config.flush_ms
        # A sealed segment keeps its file open until it is flushed, so that does not wait for many records.
        rolled = self._log.has_unflushed_segments and self._requested_end <= self._log.active_base_offset
        if unflushed >= flush_messages or by_time or rolled:
            self.request()
        return True

    def _waits_for_ms(self) -> float:
        return self._clock.monotonic_ms() - self._last_ms

    def flush_if_due(self) -> None:
        """Request a flush when `flush.ms` has passed since the last one, or when one was refused."""
        if self.closed or self._log.log_end_offset <= self._log.flushed_end_offset:
            return
        flush_ms = self._log.config.flush_ms
        if (flush_ms is not None and self._waits_for_ms() >= flush_ms) or self.was_refused:
            self.was_refused = False
            self.request()

    def catch_up(self) -> None:
        """Request a flush of records that an earlier role or a truncation has left unflushed."""
        if not self.closed and self._log.needs_flush and self._log.flush_messages <= 1:
            self.request()

    def request(self) -> None:
        """Request a flush of everything that the log holds."""
        self._requested_end = self._log.log_end_offset
        if self._log.config.flush_ms is not None:
            self._last_ms = self._clock.monotonic_ms()
        self._group_commit.request(self._log, self._done, self._failed)

    def _done(self, flushed_end_offset: int) -> None:
        if not self.closed:
            self._on_durable()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, RaftlogError) or is_passing(error):
            # Nothing was synced: the reason passes (no descriptors, no memory), or the directory is offline and the
            # partition is about to be closed.
            if not self.closed:
                self.was_refused = True
                self._on_refused(error if isinstance(error, RaftlogError) else passing(error, "a flush"))
        else:
            self._on_broken(self._log, error)
