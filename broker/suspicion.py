"""Looking at the disk where somebody says that a batch of ours does not check.

Whoever gets a damaged batch says so: a follower (`OpenReplica.damaged_offset`), a consumer
(`FetchPartition.damaged_offset`), our own reads. Any of them may be wrong, or lie, so what counts is the disk, and a
complaint costs next to nothing: one check at a time on the whole broker, of that batch, the one after it, and what lies
between them and the index entry before; one complaint of a log waits, a log is not looked at again within
`LOG_PAUSE_MS`, an offset not within `OFFSET_PAUSE_MS`. What is turned away is no loss: damage stays, and so does who
complains of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final

from broker.clock import Clock
from broker.log.partition_log import PartitionLog
from raftlog.errors import CorruptRecordError, RaftlogError

logger = logging.getLogger(__name__)

LOG_PAUSE_MS: Final = 250.0
OFFSET_PAUSE_MS: Final = 1_000.0
"""Well below what a consumer goes on asking for: what was whole a moment ago may be what it complains of now."""
MAX_WAITING: Final = 1_000
"""Logs that are complained of and not looked at yet."""

OnDamaged = Callable[[PartitionLog, CorruptRecordError], None]


class Suspicions:
    """Complaints about all logs of a broker. `on_damaged` is called on the loop, again for each complaint that is true.

    States of a log: unsuspected -> waiting (`suspect`) -> looked at, in a thread -> paused -> unsuspected.
    """

    def __init__(self, disk: Executor, clock: Clock, on_damaged: OnDamaged) -> None:
        self._disk = disk
        self._clock = clock
        self._on_damaged = on_damaged
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[PartitionLog, int] = {}
        self._looking = False
        self._closed = False
        self._checked_logs: dict[PartitionLog, float] = {}
        self._checked_offsets: dict[tuple[PartitionLog, int], float] = {}

    def suspect(self, log: PartitionLog, offset: int) -> None:
        """Have a log checked at an offset, unless that was done just now; returns at once. From any thread."""
        self._loop.call_soon_threadsafe(self._suspect, log, offset)

    def _suspect(self, log: PartitionLog, offset: int) -> None:
        now_ms = self._clock.monotonic_ms()
        _forget(self._checked_logs, now_ms - LOG_PAUSE_MS)
        _forget(self._checked_offsets, now_ms - OFFSET_PAUSE_MS)
        if log.closed or not log.log_start_offset <= offset < log.log_end_offset:
            return
        if log in self._waiting or log in self._checked_logs or (log, offset) in self._checked_offsets:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting[log] = offset
            self._look()

    def _look(self) -> None:
        if self._looking or self._closed or not self._waiting:
            return
        log = next(iter(self._waiting))
        offset = self._waiting.pop(log)
        now_ms = self._clock.monotonic_ms()
        self._checked_logs[log] = self._checked_offsets[log, offset] = now_ms
        self._looking = True

        def check() -> None:
            damage: CorruptRecordError | None = None
            try:
                found = log.check(offset, 1)
                log.check(found.next_offset, 1)  # of two that do not fit, the complaint may be about the wrong one
            except CorruptRecordError as error:
                damage = error
            except RaftlogError as error:  # closed meanwhile, or a disk that fails, which has its own way on
                logger.debug("offset %d of %r cannot be checked: %s", offset, log, error)
            except Exception:
                logger.exception("checking offset %d of %r failed", offset, log)
            self._loop.call_soon_threadsafe(self._looked, log, damage)

        try:
            self._disk.submit(check)
        except RuntimeError:  # shut down
            self._waiting.clear()

    def _looked(self, log: PartitionLog, damage: CorruptRecordError | None) -> None:
        self._looking = False
        try:
            if damage is not None and not log.closed and not self._closed:
                self._on_damaged(log, damage)
        finally:
            self._look()

    async def close(self) -> None:
        """Look at nothing any more."""
        self._closed = True
        self._waiting.clear()


def _forget(checked: dict[Any, float], before_ms: float) -> None:
    """Drop what was checked before; entries are in the order of their times."""
    while checked:
        first = next(iter(checked))
        if checked[first] > before_ms:
            return
        del checked[first]
