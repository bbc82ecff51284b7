"""Finding damage on the disk while another replica is whole.

`Scrub` reads every log again in the background. No client reads a follower's copy until it leads, and a start reads
only what lies above the recovery point: without a scrub, a flipped bit could stay until the other copies are gone.

    idle  -- a pass is due (`tick`) -->  checking a piece, in a thread  -->  pausing  --> ... -->  idle

The pauses keep to `log.scrub.bytes.per.second`; a batch counts as at least `BATCH_BYTES`, because many small batches
cost processor time rather than disk time.

`Suspicions` checks a batch that a reader complains of: a follower (`OpenReplica.damaged_offset`), a consumer
(`FetchPartition.damaged_offset`), or this broker's own reads. A complaint may be wrong or a lie, so only the disk
counts, and a complaint costs little: the broker checks one at a time, and only that batch, the next one, and those back
to the index entry before. One complaint of each log waits; a log is not checked again within `LOG_PAUSE_MS`, an offset
not within `OFFSET_PAUSE_MS`. Other complaints are dropped: if the damage is real, the reader complains again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final

from broker.clock import Clock
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.log.segment import CheckedPiece
from raftlog.errors import CorruptRecordError, RaftlogError

logger = logging.getLogger(__name__)

LOG_PAUSE_MS: Final = 250.0
OFFSET_PAUSE_MS: Final = 1_000.0
"""Well below the time for which a consumer repeats its complaint: a batch may be damaged right after a check."""
MAX_WAITING: Final = 1_000
"""Logs with a complaint that is not checked yet."""

OnDamaged = Callable[[PartitionLog, CorruptRecordError], None]


class Suspicions:
    """Complaints about all logs of a broker. `on_damaged` is called on the loop for each complaint that is true.

    States of a log: unsuspected -> waiting (`suspect`) -> being checked, in a thread -> paused -> unsuspected.
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
        """Have a log checked at an offset, unless it was checked just now. Returns at once; any thread may call."""
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
                log.check(found.next_offset, 1)  # the complaint may be about the wrong one of two that do not fit
            except CorruptRecordError as error:
                damage = error
            except RaftlogError as error:  # closed meanwhile, or a failing disk, which is reported elsewhere
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
        """Stop checking."""
        self._closed = True
        self._waiting.clear()


def _forget(checked: dict[Any, float], before_ms: float) -> None:
    """Drop entries up to `before_ms`; they are in the order of their times."""
    while checked:
        first = next(iter(checked))
        if checked[first] > before_ms:
            return
        del checked[first]


FIRST_PASS_MS: Final = 5 * 60_000.0
"""Time from the start of the broker, which is busy then, to the first pass."""
PIECE_BYTES: Final = 256 << 10
"""At most so much is checked without a pause."""
BATCH_BYTES: Final = 2 << 10


class ScrubPass:
    """Which piece is next, and how long to pause after it. Pure."""

    def __init__(self, logs: list[PartitionLog], bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._logs = deque(logs)
        self._offset: int | None = None
        self.piece_bytes = max(1, min(PIECE_BYTES, bytes_per_second // 4))
        self.piece_batches = max(1, self.piece_bytes // BATCH_BYTES)
        self.checked_bytes = 0

    def next(self) -> tuple[PartitionLog, int] | None:
        """Return the log and the offset of the next piece; None at the end of the pass."""
        while self._logs:
            log = self._logs[0]
            offset = max(log.log_start_offset, self._offset or 0)
            if not log.closed and offset < log.flushed_end_offset:
                return log, offset
            self.leave_log()
        return None

    def checked(self, piece: CheckedPiece) -> float:
        """Go on after a piece that is whole; return how many seconds to pause before the next."""
        self._offset = piece.next_offset
        self.checked_bytes += piece.size_bytes
        return max(piece.size_bytes, piece.batches * BATCH_BYTES) / self._bytes_per_second

    def leave_log(self) -> None:
        """Go on with the next log."""
        self._logs.popleft()
        self._offset = None


class Scrub:
    """Passes over all logs of a broker, one piece at a time. On the loop; `on_damaged` is called there."""

    def __init__(
        self,
        logs: LogManager,
        disk: Executor,
        clock: Clock,
        on_damaged: OnDamaged,
        *,
        bytes_per_second: int,
        interval_ms: float,
    ) -> None:
        self._logs = logs
        self._disk = disk
        self._clock = clock
        self._on_damaged = on_damaged
        self._bytes_per_second = bytes_per_second
        self._interval_ms = interval_ms
        self._loop = asyncio.get_running_loop()
        self._next_pass_ms = clock.monotonic_ms() + min(FIRST_PASS_MS, interval_ms)
        self._pass: ScrubPass | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def tick(self) -> None:
        """Begin a pass if one is due; returns at once."""
        now_ms = self._clock.monotonic_ms()
        if self._closed or not self._bytes_per_second or self._pass is not None or now_ms < self._next_pass_ms:
            return
        self._next_pass_ms = now_ms + self._interval_ms
        self._pass = ScrubPass(self._logs.logs(), self._bytes_per_second)
        self._go_on()

    def _go_on(self) -> None:
        self._timer = None
        current = self._pass
        if self._closed or current is None:
            return
        found = current.next()
        if found is None:
            self._pass = None
            if current.checked_bytes:
                logger.info("all logs were checked for damage", extra={"bytes": current.checked_bytes})
            return
        log, offset = found

        def check() -> None:
            try:
                result: CheckedPiece | CorruptRecordError | None = log.check(
                    offset, current.piece_bytes, max_batches=current.piece_batches
                )
            except CorruptRecordError as error:
                result = error
            except RaftlogError as error:  # closed meanwhile, or a failing disk, which is reported elsewhere
                logger.debug("%r cannot be checked: %s", log, error)
                result = None
            except Exception:
                logger.exception("checking %r failed", log)
                result = None
            self._loop.call_soon_threadsafe(self._checked, log, result)

        try:
            self._disk.submit(check)
        except RuntimeError:  # shut down
            self.close()

    def _checked(self, log: PartitionLog, result: CheckedPiece | CorruptRecordError | None) -> None:
        if self._closed or self._pass is None:
            return
        pause_s = 0.0
        if isinstance(result, CheckedPiece):
            pause_s = self._pass.checked(result)
        else:
            self._pass.leave_log()
            if result is not None and not log.closed:
                self._on_damaged(log, result)
        self._timer = self._loop.call_later(pause_s, self._go_on)

    def close(self) -> None:
        """Stop; the result of a check under way is dropped."""
        self._closed = True
        self._pass = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
