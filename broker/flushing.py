"""When a partition's log is flushed, and what counts as held: flush.messages and flush.ms, for leaders and followers.

flush.messages   what a replica counts as held        when it asks for a flush
1                everything that was fsynced          at every append; those of one loop round share it
above 1          everything that it has appended      after so many records, and after flush.ms
"""

from __future__ import annotations

from collections.abc import Callable

from broker.clock import Clock
from broker.log.faults import is_passing, passing
from broker.log.group_commit import GroupCommit
from broker.log.partition_log import PartitionLog
from raftlog.errors import RaftlogError


class Flushing:
    """The flushes of one log.

    `on_held` is called after a flush, `on_refused` when one was refused for a reason that passes (no descriptors) and
    is due again, `on_broken` with what the operating system said when the disk is at fault, or with what went wrong in
    the program: no answer may come of that either.
    """

    def __init__(
        self,
        log: PartitionLog,
        group_commit: GroupCommit,
        clock: Clock,
        *,
        on_held: Callable[[], None],
        on_refused: Callable[[RaftlogError], None],
        on_broken: Callable[[PartitionLog, BaseException], None],
    ) -> None:
        self._log = log
        self._group_commit = group_commit
        self._clock = clock
        self._on_held = on_held
        self._on_refused = on_refused
        self._on_broken = on_broken
        self._requested_end = log.flushed_end_offset
        self._last_ms = clock.monotonic_ms()
        self._refused = False
        self.closed = False

    @property
    def held_end_offset(self) -> int:
        """Exclusive: what this replica counts as held. With flush.messages=1 that is what has been fsynced."""
        if self._log.config.flush_messages <= 1:
            return self._log.flushed_end_offset
        return self._log.log_end_offset

    @property
    def by_time(self) -> bool:
        """Whether `flush.ms` is set, so that housekeeping has to look often."""
        return self._log.config.flush_ms is not None

    def appended(self) -> bool:
        """Ask for a flush if one is due after an append; return whether the records count as held already."""
        config = self._log.config
        if config.flush_messages <= 1:
            self.request()
            return False
        self._requested_end = min(self._requested_end, self._log.log_end_offset)  # a truncation was below it
        unflushed = self._log.log_end_offset - self._requested_end
        if unflushed >= config.flush_messages or (
            config.flush_ms is not None and self._waits_for_ms() >= config.flush_ms
        ):
            self.request()
        return True

    def _waits_for_ms(self) -> float:
        return self._clock.monotonic_ms() - self._last_ms

    def flush_if_due(self) -> None:
        """Ask for a flush when `flush.ms` has passed since the last one, or one was refused."""
        if self.closed or self._log.log_end_offset <= self._log.flushed_end_offset:
            return
        flush_ms = self._log.config.flush_ms
        if (flush_ms is not None and self._waits_for_ms() >= flush_ms) or self._refused:
            self._refused = False
            self.request()

    def catch_up(self) -> None:
        """Ask for a flush of what an earlier role, or a truncation, has left unflushed."""
        if not self.closed and self._log.needs_flush and self._log.config.flush_messages <= 1:
            self.request()

    def request(self) -> None:
        """Ask for a flush of everything that the log has."""
        self._requested_end = self._log.log_end_offset
        if self._log.config.flush_ms is not None:
            self._last_ms = self._clock.monotonic_ms()
        self._group_commit.request(self._log, self._done, self._failed)

    def _done(self, flushed_end_offset: int) -> None:
        if not self.closed:
            self._on_held()

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, RaftlogError) or is_passing(error):
            # Nothing was synced, for a reason that passes (no descriptors, no memory), or because the directory is
            # offline, and then the partition is about to be closed. Who waits hears of it; another flush follows.
            if not self.closed:
                self._refused = True
                self._on_refused(error if isinstance(error, RaftlogError) else passing(error, "a flush"))
        else:
            self._on_broken(self._log, error)
