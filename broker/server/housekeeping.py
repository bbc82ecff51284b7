"""A broker's periodic work, beside its clients' requests.

every tick                                          flushes by time, retries of truncations that the disk refused
a quarter of replica.lag.time.max.ms                which replicas left or reached the ISR (a full disk: each tick)
RETRY_INTERVAL_MS                                   retries of logs that could not be opened
replica.high.watermark.checkpoint.interval.ms       the high watermark checkpoint, if one has moved
log.retention.check.interval.ms                     rolling, retention, all checkpoints, removal of files; while a disk
                                                    has no space, FULL_ROUND_INTERVAL_MS if that is shorter
log.cleaner.backoff.ms                              compaction (broker/log/cleaner.py)
log.scrub.interval.ms                               reading all logs for damage (broker/log/integrity.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Executor
from typing import Final

from broker.clock import Clock
from broker.config.config import BrokerConfig
from broker.log.cleaner import Cleaner
from broker.log.integrity import Scrub
from broker.log.manager import LogManager
from broker.replicas.replica_manager import ReplicaManager

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
"""The tick while a partition flushes by time."""
IDLE_TICK_S: Final = 0.5
RETRY_INTERVAL_MS: Final = 1_000
"""Between attempts to open a log that could not be opened, for example because the disk was full."""

FULL_ROUND_INTERVAL_MS: Final = 10_000
"""Between rounds while a disk refuses writes for want of space: what retention frees should be free soon."""


async def housekeep(
    config: BrokerConfig, clock: Clock, logs: LogManager, registry: ReplicaManager, disk: Executor
) -> None:
    """Do all periodic work; never returns."""
    scrub = Scrub(
        logs,
        disk,
        clock,
        registry.on_damaged,
        bytes_per_second=config.log_scrub_bytes_per_second,
        interval_ms=config.log_scrub_interval_ms,
    )
    cleaner = Cleaner(
        logs,
        disk,
        clock,
        registry.on_damaged,
        bytes_per_second=config.log_cleaner_io_max_bytes_per_second,
        backoff_ms=config.log_cleaner_backoff_ms,
        dedupe_bytes=config.log_cleaner_dedupe_buffer_size,
        markers_below_of=registry.durable_on_all,
    )
    loop = asyncio.get_running_loop()
    isr_interval_ms = config.replica_lag_time_max_ms / 4
    now_ms = clock.monotonic_ms()
    next_retry_ms = next_isr_ms = now_ms
    next_marks_ms = now_ms + config.replica_high_watermark_checkpoint_interval_ms
    last_round_ms = now_ms
    times_full = logs.times_full
    """As of the last round's beginning."""
    with contextlib.closing(scrub), contextlib.closing(cleaner):
        while True:
            await asyncio.sleep(min(TICK_S if registry.flushes_by_time else IDLE_TICK_S, isr_interval_ms / 1_000))
            registry.housekeep()
            now_ms = clock.monotonic_ms()
            try:
                if now_ms >= next_isr_ms or registry.has_full_followers:
                    next_isr_ms = now_ms + isr_interval_ms
                    registry.check_isr()
                if now_ms >= next_retry_ms:
                    next_retry_ms = now_ms + RETRY_INTERVAL_MS
                    scrub.tick()
                    if config.log_cleaner_enable:
                        cleaner.tick()
                    registry.retry_failed()
                round_interval_ms = config.log_retention_check_interval_ms
                if logs.times_full != times_full:
                    round_interval_ms = min(round_interval_ms, FULL_ROUND_INTERVAL_MS)
                if now_ms >= last_round_ms + round_interval_ms:
                    last_round_ms, times_full = now_ms, logs.times_full
                    await loop.run_in_executor(disk, logs.run_housekeeping_once, clock.now_ms())
                elif now_ms >= next_marks_ms:
                    next_marks_ms = now_ms + config.replica_high_watermark_checkpoint_interval_ms
                    await loop.run_in_executor(disk, logs.checkpoint_marks)
            except Exception:  # the next round may succeed
                logger.exception("housekeeping failed")
