"""Power loss and kill -9 at every storage operation of a day in a log's life."""

from __future__ import annotations

from random import Random

import pytest

from broker.log.config import LogConfig
from raftlog.errors import StorageFull
from tests.support.log_driver import LogDriver
from tests.support.memory_storage import MemoryStorage, PowerLoss

CONFIG = LogConfig(segment_bytes=2_000, index_interval_bytes=500, file_delete_delay_ms=10)


def live(driver: LogDriver) -> None:
    """Append over several segments and epochs, flush, checkpoint, delete, truncate, restart, append again."""
    driver.open()
    for epoch in (1, 2):
        driver.epoch = epoch
        for _ in range(5):
            driver.append([driver.clock.now, driver.clock.now + 1], value_bytes=100)
            driver.clock.now += 5
        driver.flush()
        driver.append(value_bytes=300)
        driver.checkpoint()
    driver.append(value_bytes=900)
    driver.flush()
    driver.delete_records(9)
    driver.checkpoint()
    driver.truncate(19)
    driver.append(value_bytes=700)
    driver.append(value_bytes=700)
    driver.flush()
    driver.clock.now += 20
    driver.checkpoint()
    driver.close()
    driver.open()
    driver.append()
    driver.flush()
    driver.truncate(14)
    driver.append()
    driver.check()
    for offset in (40, 43, 12):  # beyond the end, inside, below the start
        driver.start_over(offset)
        for _ in range(5):
            driver.append(value_bytes=700)
        driver.flush()
        driver.delete_records(offset + 2)  # detaches the first segment, whose file stays until the next checkpoint
        driver.append()
    driver.start_over(12)
    driver.append()
    driver.flush()
    driver.check()


def _operations() -> int:
    driver = LogDriver(MemoryStorage(), CONFIG)
    live(driver)
    return driver.storage.operations


OPERATIONS = _operations()


def test_the_script_is_worth_crashing() -> None:
    driver = LogDriver(MemoryStorage(), CONFIG)
    live(driver)
    assert driver.log.log_start_offset == 12
    assert driver.log.log_end_offset == 13
    assert OPERATIONS > 300


@pytest.mark.parametrize("part", range(4))
def test_power_loss_at_every_operation_keeps_what_was_flushed(part: int) -> None:
    for crash_at in range(part, OPERATIONS, 4):
        for seed in range(6):
            driver = LogDriver(MemoryStorage(crash_at=crash_at), CONFIG)
            with pytest.raises(PowerLoss):
                live(driver)
            driver.crash(Random(seed))
            driver.epoch = max(driver.epoch, driver.log.leader_epochs.latest_epoch)
            driver.append()
            driver.flush()
            driver.crash(Random(seed + 1))


def test_kill_9_at_every_operation_loses_nothing() -> None:
    for crash_at in range(OPERATIONS):
        driver = LogDriver(MemoryStorage(crash_at=crash_at), CONFIG)
        with pytest.raises(PowerLoss):
            live(driver)
        appended = list(driver.chain)
        driver.other_chain = driver.other_chain or appended[:-1]  # the append under way may or may not be there
        driver.crash(None)
        driver.check()


@pytest.mark.parametrize("seed", range(6))
def test_power_loss_after_kill_9_keeps_what_recovery_found(seed: int) -> None:
    """Recovered records count as held, although the process that wrote them never fsynced them or their names."""
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    for _ in range(20):
        driver.append(value_bytes=300)
    assert driver.log.segment_count > 3
    driver.crash(None)
    assert driver.durable_end == 20
    driver.crash(Random(seed))


@pytest.mark.parametrize("seed", range(20))
def test_power_loss_after_a_refused_write_at_the_end_of_a_segment(seed: int) -> None:
    """The partial write may be on the disk and its removal not, in a segment that ends at the recovery point."""
    driver = LogDriver(MemoryStorage(), LogConfig(segment_bytes=300))
    driver.open()
    driver.append()
    driver.flush()
    driver.checkpoint()
    driver.log.update_config(LogConfig(segment_bytes=100_000))
    driver.storage.capacity_bytes = driver.storage.used_bytes() + 30
    with pytest.raises(StorageFull):
        driver.append()
    driver.storage.capacity_bytes = None
    driver.log.roll()
    driver.append()
    driver.crash(Random(seed))
    driver.append()
    driver.flush()
    driver.crash(Random(seed))


def test_power_loss_during_recovery_from_power_loss() -> None:
    for crash_at in range(40, OPERATIONS, 7):
        for second in range(0, 30, 2):
            driver = LogDriver(MemoryStorage(crash_at=crash_at), CONFIG)
            with pytest.raises(PowerLoss):
                live(driver)
            dice = Random(crash_at * 100 + second)
            driver.storage.crash(dice)
            driver.storage.crash_at = driver.storage.operations + second
            try:
                driver.open()
            except PowerLoss:
                driver.crash(dice)
