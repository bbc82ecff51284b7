"""What a broker does now and then: flush by time, retry what could not be opened, roll, retain, checkpoint."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from typing import Final

from broker.clock import Clock
from broker.config import BrokerConfig
from broker.log.manager import LogManager
from broker.registry import PartitionRegistry

logger = logging.getLogger(__name__)

TICK_S: Final = 0.05
"""While a partition flushes by time."""
IDLE_TICK_S: Final = 0.5
RETRY_INTERVAL_MS: Final = 1_000
"""Between attempts to open partitions that could not be opened: the disk was full, descriptors had run out."""


async def housekeep(
    config: BrokerConfig, clock: Clock, logs: LogManager, registry: PartitionRegistry, disk: Executor
) -> None:
    """Flush what flush.ms says; roll, retain, checkpoint every `log.retention.check.interval.ms`. Never returns."""
    loop = asyncio.get_running_loop()
    next_retry_ms = clock.monotonic_ms()
    next_round_ms = clock.monotonic_ms() + config.log_retention_check_interval_ms
    while True:
        partitions = registry.partitions()
        await asyncio.sleep(TICK_S if any(partition.flushes_by_time for partition in partitions) else IDLE_TICK_S)
        for partition in registry.partitions():
            partition.flush_if_due()
        if clock.monotonic_ms() >= next_retry_ms:
            next_retry_ms = clock.monotonic_ms() + RETRY_INTERVAL_MS
            registry.retry_failed()
        if clock.monotonic_ms() < next_round_ms:
            continue
        next_round_ms = clock.monotonic_ms() + config.log_retention_check_interval_ms
        try:
            await loop.run_in_executor(disk, logs.run_housekeeping_once, clock.now_ms())
        except Exception:  # the next round may succeed; the reason is in the log
            logger.exception("housekeeping failed")
