"""Compaction in the background: one log at a time, the one with the largest dirty share first.

    idle  -- log.cleaner.backoff.ms have gone by (`tick`) -->  choosing, in a thread
          -- one is due -->  a piece, in a thread  -->  pausing  --> ... -->  choosing again
          -- none is -->  idle

The pauses keep to `log.cleaner.io.max.bytes.per.second`. A log of which a cleaning failed is let alone for a while, so
that it does not keep the others waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Final

from broker.clock import Clock
from broker.log.cleaner import CleaningAbandoned, Plan, clean, dirtiest, plan_cleaning
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.suspicion import OnDamaged
from raftlog.errors import CorruptRecordError, RaftlogError

logger = logging.getLogger(__name__)

FAILED_PAUSE_MS: Final = 60_000.0
"""Before a log is tried again of which the cleaning failed, or was abandoned."""


def committed_end(log: PartitionLog) -> int:
    """Return the offset from which on nothing is compacted: what lies there may still be cut, or aborted."""
    return log.last_stable_offset


def no_markers(log: PartitionLog) -> int:
    """Let no marker go."""
    return 0


class Cleaner:
    """Compacts the logs of a broker whose topics want it. On the loop; `on_damaged` is called there."""

    def __init__(
        self,
        logs: LogManager,
        disk: Executor,
        clock: Clock,
        on_damaged: OnDamaged,
        *,
        bytes_per_second: int,
        backoff_ms: float,
        dedupe_bytes: int,
        bound_of: Callable[[PartitionLog], int] = committed_end,
        markers_below_of: Callable[[PartitionLog], int] = no_markers,
    ) -> None:
        """`markers_below_of`: below which offset all replicas of a log have every marker; called on the loop."""
        self._logs = logs
        self._disk = disk
        self._clock = clock
        self._on_damaged = on_damaged
        self._bytes_per_second = bytes_per_second
        self._backoff_ms = backoff_ms
        self._dedupe_bytes = dedupe_bytes
        self._bound_of = bound_of
        self._markers_below_of = markers_below_of
        self._loop = asyncio.get_running_loop()
        self._next_look_ms = clock.monotonic_ms() + backoff_ms
        self._busy = False
        self._let_alone: dict[PartitionLog, float] = {}
        """Until when, by the monotonic clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a log is being chosen or compacted."""
        return self._busy

    def tick(self) -> None:
        """Look for a log to be compacted, if it is time; returns at once."""
        if not self._closed and not self._busy and self._clock.monotonic_ms() >= self._next_look_ms:
            self._choose()

    def _choose(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._let_alone = {log: until for log, until in self._let_alone.items() if until > now_ms and not log.closed}
        let_alone = frozenset(self._let_alone)

        def choose() -> None:
            plan = None
            try:
                plan = self._dirtiest(let_alone)
            except Exception:
                logger.exception("choosing a log to compact failed")
            self._loop.call_soon_threadsafe(self._chosen, plan)

        self._submit(choose)

    def _dirtiest(self, let_alone: frozenset[PartitionLog]) -> Plan | None:
        plans = []
        for log in self._logs.logs():
            if log.config.compacts and log not in let_alone:
                try:
                    plan = plan_cleaning(log, self._bound_of(log), self._clock.now_ms())
                except RaftlogError as error:  # closed meanwhile, or a disk that fails, which has its own way on
                    logger.debug("%r cannot be compacted: %s", log, error)
                    continue
                if plan is not None:
                    plans.append(plan)
        return dirtiest(plans)

    def _chosen(self, plan: Plan | None) -> None:
        self._busy = False
        if self._closed:
            return
        if plan is None:
            self._next_look_ms = self._clock.monotonic_ms() + self._backoff_ms
            return
        plan = plan._replace(markers_below=self._markers_below_of(plan.log))
        self._go_on(plan.log, clean(plan, dedupe_bytes=self._dedupe_bytes, clock=self._clock.now_ms))

    def _go_on(self, log: PartitionLog, pieces: Iterator[int]) -> None:
        self._timer = None
        if self._closed:
            return

        def work() -> None:
            result: int | Exception | None
            try:
                result = next(pieces, None)
            except Exception as error:  # judged on the loop
                result = error
            self._loop.call_soon_threadsafe(self._worked, log, pieces, result)

        self._submit(work)

    def _worked(self, log: PartitionLog, pieces: Iterator[int], result: int | Exception | None) -> None:
        self._busy = False
        if self._closed:
            return
        if isinstance(result, int):
            self._busy = True
            self._timer = self._loop.call_later(result / self._bytes_per_second, self._go_on, log, pieces)
            return
        if result is not None:
            self._failed(log, result)
        self._choose()

    def _failed(self, log: PartitionLog, error: Exception) -> None:
        self._let_alone[log] = self._clock.monotonic_ms() + FAILED_PAUSE_MS
        if isinstance(error, CleaningAbandoned) or log.closed:
            logger.info("compaction was abandoned: %s", error)
        elif isinstance(error, CorruptRecordError):
            self._on_damaged(log, error)
        elif isinstance(error, RaftlogError):
            logger.warning("%r is not compacted: %s", log, error)
        else:
            logger.error("compacting %r failed", log, exc_info=error)

    def _submit(self, work: Callable[[], None]) -> None:
        self._busy = True
        try:
            self._disk.submit(work)
        except RuntimeError:  # shut down
            self.close()

    def close(self) -> None:
        """Stop; what is half done comes to nothing, and its file goes at the next start."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
