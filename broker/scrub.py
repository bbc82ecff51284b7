"""Reading every log again in the background, so that damage is found while another replica is whole.

A follower's copy is read by nobody until it leads, and a start reads only what lies behind the recovery point: without
this, a flipped bit would wait there until the other copies are gone.

    idle  -- a pass is due (`tick`) -->  checking a piece, in a thread  -->  pausing  --> ... -->  idle

The pauses keep to `log.scrub.bytes.per.second`; a batch counts for at least `BATCH_BYTES`, because many small ones are
work for the processor more than for the disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import Executor
from typing import Final

from broker.clock import Clock
from broker.log.damage import CheckedPiece
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.suspicion import OnDamaged
from raftlog.errors import CorruptRecordError, RaftlogError

logger = logging.getLogger(__name__)

FIRST_PASS_MS: Final = 5 * 60_000.0
"""After the start of the broker, which has other things to do then."""
PIECE_BYTES: Final = 256 << 10
"""Checked without a pause."""
BATCH_BYTES: Final = 2 << 10


class ScrubPass:
    """Which piece is next, and how long to pause behind it; no clock, no disk."""

    def __init__(self, logs: list[PartitionLog], bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._logs = deque(logs)
        self._offset: int | None = None
        self.piece_bytes = max(1, min(PIECE_BYTES, bytes_per_second // 4))
        self.piece_batches = max(1, self.piece_bytes // BATCH_BYTES)
        self.checked_bytes = 0

    def next(self) -> tuple[PartitionLog, int] | None:
        """Return a log, and the offset at which to check a piece; None at the end of the pass."""
        while self._logs:
            log = self._logs[0]
            offset = max(log.log_start_offset, self._offset or 0)
            if not log.closed and offset < log.flushed_end_offset:
                return log, offset
            self.leave_log()
        return None

    def checked(self, piece: CheckedPiece) -> float:
        """Go on behind a piece that is whole; return how many seconds to pause before that."""
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
            except RaftlogError as error:  # closed meanwhile, or a disk that fails, which has its own way on
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
        """Stop; a piece that is being checked comes to nothing."""
        self._closed = True
        self._pass = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
