"""What a broker does now and then, off the paths of its clients.

every tick                                          flushes by time, truncations that the disk had refused
a quarter of replica.lag.time.max.ms                who has fallen out of sync, or is back
RETRY_INTERVAL_MS                                   logs that could not be opened
replica.high.watermark.checkpoint.interval.ms       high watermarks, if any has moved
log.retention.check.interval.ms                     rolling, retention, all checkpoints, removal of files
log.cleaner.backoff.ms                              compaction (`cleaning.py`)
log.scrub.interval.ms                               reading everything again, to find damage (`scrub.py`)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from concurrent.futures import Executor
from typing import Final

from broker.cleaning import Cleaner
from broker.clock import Clock
from broker.config import BrokerConfig
from broker.log.manager import LogManager
from broker.registry import PartitionRegistry
from broker.scrub import Scrub

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
"""While a partition flushes by time."""
IDLE_TICK_S: Final = 0.5
RETRY_INTERVAL_MS: Final = 1_000
"""Between attempts to open partitions that could not be opened: the disk was full, descriptors had run out."""


async def housekeep(
    config: BrokerConfig, clock: Clock, logs: LogManager, registry: PartitionRegistry, disk: Executor
) -> None:
    """Do all of it; never returns."""
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
        markers_below_of=registry.held_by_all,
    )
    with contextlib.closing(scrub), contextlib.closing(cleaner):
        await _keep_going(config, clock, logs, registry, disk, scrub, cleaner)


async def _keep_going(
    config: BrokerConfig,
    clock: Clock,
    logs: LogManager,
    registry: PartitionRegistry,
    disk: Executor,
    scrub: Scrub,
    cleaner: Cleaner,
) -> None:
    loop = asyncio.get_running_loop()
    isr_interval_ms = config.replica_lag_time_max_ms / 4
    now_ms = clock.monotonic_ms()
    next_retry_ms = next_isr_ms = now_ms
    next_marks_ms = now_ms + config.replica_high_watermark_checkpoint_interval_ms
    next_round_ms = now_ms + config.log_retention_check_interval_ms
    while True:
        by_time = any(partition.flushes_by_time for partition in registry.partitions())
        await asyncio.sleep(min(TICK_S if by_time else IDLE_TICK_S, isr_interval_ms / 1_000))
        registry.housekeep()
        now_ms = clock.monotonic_ms()
        try:
            if now_ms >= next_isr_ms:
                next_isr_ms = now_ms + isr_interval_ms
                registry.check_isr()
            if now_ms >= next_retry_ms:
                next_retry_ms = now_ms + RETRY_INTERVAL_MS
                scrub.tick()
                if config.log_cleaner_enable:
                    cleaner.tick()
                registry.retry_failed()
            if now_ms >= next_round_ms:
                next_round_ms = now_ms + config.log_retention_check_interval_ms
                await loop.run_in_executor(disk, logs.run_housekeeping_once, clock.now_ms())
            elif now_ms >= next_marks_ms:
                next_marks_ms = now_ms + config.replica_high_watermark_checkpoint_interval_ms
                await loop.run_in_executor(disk, logs.checkpoint_marks)
        except Exception:  # the next round may succeed; the reason is in the log
            logger.exception("housekeeping failed")
