"""Segments below the log start, and the snapshots that have to tell what those say of producers before they go."""

from __future__ import annotations

import errno
from random import Random

import pytest

from broker.log.config import LogConfig
from broker.log.producer_snapshots import snapshot_name, snapshot_offsets
from tests.support.log_driver import LOG_DIR, LogDriver
from tests.support.memory_storage import Fault, MemoryStorage, PowerLoss

DIRECTORY = f"{LOG_DIR}/topic-0"
CONFIG = LogConfig(segment_bytes=600, index_interval_bytes=0, retention_bytes=1_000, retention_ms=None)


def opened() -> LogDriver:
    driver = LogDriver(MemoryStorage(), CONFIG)
    driver.open()
    return driver


def snapshots(driver: LogDriver) -> list[int]:
    return snapshot_offsets(driver.storage.list_sizes(DIRECTORY))


def let_go_of_unwritten(how: str = "marks") -> LogDriver:
    """Return a log whose first segments lie below the durable log start, with no snapshot of what they say."""
    driver = opened()
    for _ in range(6):
        driver.append([0], 0)
    driver.crash(None)  # the snapshots that were due at the rolls are forgotten
    committed = driver.end
    driver.append([0], 0)
    driver.delete_records(committed)
    assert driver.log.segments[0].base_offset > 2
    if how == "a cut":
        driver.truncate(committed)
    else:
        assert driver.manager is not None
        driver.manager.checkpoint_marks()
    assert not snapshots(driver)
    return driver


def segments_on_disk(driver: LogDriver) -> int:
    return sum(name.endswith(".log") for name in driver.storage.list_sizes(DIRECTORY))


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("how", ["a cut", "marks"])
def test_segments_are_let_go_of_only_when_what_they_say_is_written(how: str, seed: int | None) -> None:
    """A cut, and marks between two checkpoints, write the log start too, so a start finds segments below it."""
    driver = let_go_of_unwritten(how)
    driver.crash(None if seed is None else Random(seed))
    driver.checkpoint()
    assert segments_on_disk(driver) == driver.log.segment_count
    driver.crash(None)
    driver.check()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_start_that_lets_go_of_segments_may_be_stopped_anywhere(seed: int | None) -> None:
    def start(driver: LogDriver) -> None:
        driver.open()
        assert driver.manager is not None
        driver.manager.run_housekeeping_once(driver.clock.now)

    def dice() -> Random | None:
        return None if seed is None else Random(seed)

    whole = let_go_of_unwritten()
    whole.storage.crash(dice())
    begun = whole.storage.operations
    start(whole)
    assert snapshots(whole)
    assert segments_on_disk(whole) == whole.log.segment_count
    count = whole.storage.operations - begun
    assert count > 15
    for crash_at in range(count):
        driver = let_go_of_unwritten()
        driver.storage.crash(dice())
        driver.storage.crash_at = driver.storage.operations + crash_at
        with pytest.raises(PowerLoss):
            start(driver)
        driver.crash(dice())
        assert len(driver.log.producers) == 2, crash_at
        driver.checkpoint()
        assert segments_on_disk(driver) == driver.log.segment_count
        driver.crash(dice())
        assert len(driver.log.producers) == 2, crash_at


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_start_on_a_full_disk_knows_what_lies_below_the_log_start(seed: int | None) -> None:
    driver = let_go_of_unwritten()
    fault = Fault("write", errno=errno.ENOSPC)
    driver.storage.faults.append(fault)
    for _ in range(2):
        driver.crash(None if seed is None else Random(seed))  # opens it, and compares what it knows
        assert not snapshots(driver)
        assert len(driver.log.producers) == 2
        assert segments_on_disk(driver) > driver.log.segment_count, "they are kept until there is space"
    driver.storage.faults.remove(fault)
    driver.checkpoint()
    assert snapshots(driver)
    assert segments_on_disk(driver) == driver.log.segment_count
    driver.crash(None if seed is None else Random(seed))
    assert len(driver.log.producers) == 2


def test_a_cut_before_the_snapshot_is_written_reads_what_lies_below_the_log_start() -> None:
    driver = let_go_of_unwritten()
    driver.storage.faults.append(Fault("write", "*.snapshot*", errno.ENOSPC))
    driver.crash(None)
    end = driver.end
    for _ in range(2):
        driver.append([0], 0)
    driver.truncate(end)
    driver.check()
    assert len(driver.log.producers) == 2


def test_what_lies_below_the_log_start_and_is_damaged_goes() -> None:
    driver = let_go_of_unwritten()
    first, *_, last = sorted(name for name in driver.storage.list_sizes(DIRECTORY) if name.endswith(".log"))
    assert int(last[:20]) == driver.log.segments[0].base_offset
    driver.storage.lose_durably(f"{DIRECTORY}/{first}", 70)
    driver.storage.crash(None)
    driver.open()
    assert segments_on_disk(driver) == driver.log.segment_count
    assert f"{first}.deleted" in driver.storage.list_sizes(DIRECTORY)
    driver.append([0], 0)
    driver.flush()
    assert [offset for offset, _ in driver.stored_batches()] == [6, 7]


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_of_a_clean_stop_is_made_durable_before_segments_go(seed: int) -> None:
    """A clean stop does not fsync it. It may become the only one that tells of them: a cut takes what is newer."""
    driver = opened()
    for _ in range(5):
        driver.append([0], 0)
    driver.flush()
    committed = driver.end
    driver.close()
    driver.crash(None)
    driver.append([0], 0)
    driver.delete_records(committed)
    driver.checkpoint()
    assert segments_on_disk(driver) == driver.log.segment_count
    driver.truncate(committed)
    assert snapshots(driver)[-1] == committed
    driver.crash(Random(seed))
    assert len(driver.log.producers) == 2


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_snapshot_does_not_count_as_the_one_that_tells_of_segments(seed: int) -> None:
    driver = opened()
    for _ in range(5):
        driver.append([0], 0)
    driver.flush()
    committed = driver.end
    driver.close()
    driver.storage.lose_durably(f"{DIRECTORY}/{snapshot_name(committed)}", 20)
    driver.crash(None)
    driver.append([0], 0)
    driver.delete_records(committed)
    driver.checkpoint()
    driver.truncate(committed)
    driver.crash(Random(seed))
    assert len(driver.log.producers) == 2
    assert committed not in snapshots(driver)


@pytest.mark.parametrize("seed", range(6))
def test_the_marks_have_no_log_start_beyond_what_is_durable(seed: int) -> None:
    """With flush.messages above 1 records are committed, and deleted, before they are fsynced here."""
    driver = opened()
    for _ in range(2):
        driver.append([0], 0)
    driver.flush()
    for _ in range(6):
        driver.append([0], 0)
    driver.log.high_watermark = driver.end
    driver.delete_records(driver.end - 1)
    assert driver.manager is not None
    driver.manager.checkpoint_marks()
    driver.crash(Random(seed))
    assert 2 <= driver.log.log_start_offset <= driver.log.log_end_offset


def test_segments_that_go_in_the_middle_of_a_checkpoint_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = opened()
    for _ in range(6):
        driver.append([0], 0)
    driver.crash(None)  # the snapshots that were due at the rolls are forgotten
    log, store = driver.log, driver.log.store_producers

    def store_and_delete(*, closing: bool = False) -> None:
        store(closing=closing)
        log.delete_records(driver.end)

    monkeypatch.setattr(log, "store_producers", store_and_delete)
    driver.checkpoint()
    assert driver.start == driver.end
    driver.crash(None)
    assert len(driver.log.producers) == 2
    driver.checkpoint()
    assert segments_on_disk(driver) == driver.log.segment_count
    driver.crash(Random(1))
    assert len(driver.log.producers) == 2
