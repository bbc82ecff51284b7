"""Rolling and retention: what goes, what stays, and when the files do."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest

from broker.log import log_trim
from broker.log.config import LogConfig
from broker.log.retention import expired_segments
from raftlog.errors import OffsetOutOfRange
from tests.support.log_driver import LogDriver
from tests.support.memory_storage import Fault

CONFIG = LogConfig(segment_bytes=600, retention_ms=None, file_delete_delay_ms=100)
"""Two batches of 280 bytes and two records a segment."""


def driver_with(batches: int, config: LogConfig, step_ms: int = 10) -> LogDriver:
    driver = LogDriver(config=config)
    driver.open()
    for _ in range(batches):
        driver.append([driver.clock.now] * 2)
        driver.clock.now += step_ms
    driver.flush()
    return driver


def test_size_keeps_what_is_needed_to_have_that_much() -> None:
    driver = driver_with(10, replace(CONFIG, retention_bytes=1_200))
    assert driver.log.segment_count == 5
    assert driver.log.apply_retention(driver.clock.now) == 2
    assert driver.log.log_start_offset == 8
    assert driver.log.size_bytes == 6 * 280
    assert driver.log.apply_retention(driver.clock.now) == 0


def test_time_counts_from_the_largest_timestamp_of_a_segment() -> None:
    driver = driver_with(10, CONFIG)
    last_of_first = driver.chain[1].timestamps_ms[0]
    driver.log.update_config(replace(CONFIG, retention_ms=1_000))
    assert driver.log.apply_retention(last_of_first + 1_000) == 0
    assert driver.log.apply_retention(last_of_first + 1_001) == 1


def test_a_topic_nobody_writes_to_empties() -> None:
    driver = driver_with(3, replace(CONFIG, retention_ms=1_000))
    driver.clock.now += 10_000
    driver.checkpoint()
    assert driver.log.log_start_offset == driver.log.log_end_offset == 6
    assert driver.log.segment_count == 1
    driver.check()
    driver.crash(None)
    assert driver.log.log_end_offset == 6
    driver.append()
    driver.check()


def test_nothing_above_the_high_watermark_expires() -> None:
    driver = driver_with(6, replace(CONFIG, retention_bytes=0))
    driver.log.high_watermark = 7
    driver.log.apply_retention(driver.clock.now)
    assert driver.log.log_start_offset == 4


def test_records_without_timestamps_do_not_expire_by_time() -> None:
    driver = LogDriver(config=replace(CONFIG, retention_ms=1))
    driver.open()
    for _ in range(4):
        driver.append([-1])
    driver.flush()
    assert driver.log.apply_retention(10**15) == 0


def test_a_compacted_topic_does_not_expire() -> None:
    driver = driver_with(10, replace(CONFIG, retention_bytes=0, cleanup_policy="compact"))
    assert driver.log.apply_retention(10**15) == 0
    driver.log.update_config(replace(CONFIG, retention_bytes=0, cleanup_policy="compact,delete"))
    assert driver.log.apply_retention(10**15) > 0


def names(driver: LogDriver) -> set[str]:
    return set(driver.storage.list_sizes(driver.log.directory))


def test_files_are_renamed_first_and_removed_after_the_delay() -> None:
    driver = driver_with(4, CONFIG)
    driver.checkpoint()
    driver.delete_records(4)
    gone = f"{0:020d}.log"
    assert gone in names(driver)
    driver.checkpoint()
    assert gone not in names(driver)
    assert f"{gone}.deleted" in names(driver)
    driver.clock.now += 99
    driver.checkpoint()
    assert f"{gone}.deleted" in names(driver)
    driver.clock.now += 1
    driver.checkpoint()
    assert not any("deleted" in name or name.startswith(f"{0:020d}") for name in names(driver))


def test_no_file_goes_before_the_new_log_start_is_durable() -> None:
    driver = driver_with(4, CONFIG)
    driver.checkpoint()
    driver.delete_records(4)
    driver.storage.faults.append(Fault("rename", "*offset-checkpoint*", errno=28))
    driver.checkpoint()
    assert f"{0:020d}.log" in names(driver)
    driver.storage.faults.clear()
    driver.checkpoint()
    assert f"{0:020d}.log" not in names(driver)


def test_a_log_start_that_moved_after_the_checkpoint_waits_for_the_next_one() -> None:
    driver = driver_with(6, CONFIG)
    driver.delete_records(4)
    driver.checkpoint()
    driver.delete_records(8)
    driver.log.sweep(driver.clock.now)
    assert f"{4:020d}.log" in names(driver)
    driver.checkpoint()
    assert f"{4:020d}.log" not in names(driver)


def test_a_removed_offset_is_out_of_range_at_once() -> None:
    driver = driver_with(4, CONFIG)
    driver.delete_records(5)
    with pytest.raises(OffsetOutOfRange):
        driver.log.read(4, 100, 8, blocking=True)
    driver.check()
    assert driver.log.delete_records(3) == 5
    with pytest.raises(OffsetOutOfRange, match="high watermark is 8"):
        driver.log.delete_records(9)


def test_reads_of_a_detached_segment_go_on_or_say_out_of_range() -> None:
    driver = driver_with(6, CONFIG)
    driver.checkpoint()
    segment = driver.log.segments[0]
    segment.opened = None
    driver.delete_records(8)
    driver.checkpoint()
    with pytest.raises(OffsetOutOfRange, match="just been removed"):
        driver.log._open_segment(segment)


def test_segments_roll_by_size() -> None:
    driver = driver_with(5, CONFIG)
    assert [segment.size for segment in driver.log.segments] == [560, 560, 280]
    driver.append(value_bytes=5_000)  # larger than a segment: one of its own
    driver.append()
    assert [segment.base_offset for segment in driver.log.segments] == [0, 4, 8, 10, 11]


def test_segments_roll_by_age_of_their_first_append() -> None:
    driver = driver_with(1, replace(CONFIG, segment_ms=50), step_ms=49)
    assert not driver.log.maybe_roll(driver.clock.now)
    driver.clock.now += 1
    driver.append()
    assert driver.log.segment_count == 2
    driver.clock.now += 50
    assert driver.log.maybe_roll(driver.clock.now)
    assert not driver.log.maybe_roll(driver.clock.now + 1_000), "an empty segment has no age"
    driver.check()


# Races


def test_records_that_arrive_while_retention_judges_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The active segment has expired; before it is rolled, a fresh record gets into it and is acknowledged."""
    driver = driver_with(3, replace(CONFIG, retention_ms=1_000, segment_bytes=10_000))
    driver.clock.now += 10_000
    judged: list[int] = []

    def judge(*args: Any) -> int:
        count = expired_segments(*args)
        if not judged:
            driver.append()
            driver.flush()
        judged.append(count)
        return count

    monkeypatch.setattr(log_trim, "expired_segments", judge)
    driver.log.apply_retention(driver.clock.now)
    assert judged == [1, 0]
    assert driver.log.log_start_offset == 0
    driver.check()


def test_retention_never_passes_the_high_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_with(3, replace(CONFIG, retention_ms=1_000, segment_bytes=10_000))
    driver.clock.now += 10_000
    judged: list[int] = []

    def judge(*args: Any) -> int:
        count = expired_segments(*args)
        if not judged:
            driver.append([driver.clock.now - 5_000])  # expired, but not committed
        judged.append(count)
        return count

    monkeypatch.setattr(log_trim, "expired_segments", judge)
    driver.log.apply_retention(driver.clock.now)
    assert driver.log.log_start_offset <= driver.log.high_watermark == 6


def remove_at_open_of(driver: LogDriver, base_offset: int, new_start: int) -> None:
    """Have retention remove everything below `new_start` when that segment is about to be opened."""

    def on_step(op: str, path: str) -> None:
        if op == "open" and path.endswith(f"{base_offset:020d}.log"):
            driver.storage.on_step = None
            driver.delete_records(new_start)
            driver.checkpoint()

    for segment in driver.log.segments[:-1]:
        driver.log._cache.forget(segment)
    driver.storage.on_step = on_step


def test_a_look_up_by_time_that_races_retention_answers_from_what_is_left() -> None:
    driver = driver_with(8, CONFIG)
    driver.checkpoint()
    remove_at_open_of(driver, 0, 4)
    found = driver.log.offset_for_time(0)
    assert found is not None
    assert found.offset == 4
    remove_at_open_of(driver, 4, 8)
    assert driver.log.max_timestamp() is not None
    assert driver.manager is not None
    assert not driver.manager.offline_dirs


def test_a_cold_read_that_races_retention_is_out_of_range() -> None:
    driver = driver_with(8, CONFIG)
    driver.checkpoint()
    remove_at_open_of(driver, 0, 4)
    with pytest.raises(OffsetOutOfRange, match="the log has 4 to 16"):
        driver.log.read(0, 100, 16, blocking=True)


def test_files_that_could_not_be_removed_go_at_the_next_sweep() -> None:
    driver = driver_with(4, CONFIG)
    driver.checkpoint()
    driver.delete_records(4)
    fault = Fault("open", driver.log.directory, errno=errno.EMFILE)
    driver.storage.faults.append(fault)
    driver.checkpoint()
    driver.storage.faults.clear()
    driver.clock.now += 100
    removed: list[str] = []
    driver.storage.on_step = lambda op, path: removed.append(op) if op in ("remove", "sync_dir") else None
    driver.checkpoint()
    assert removed[0] == "sync_dir", "the names must be durable first"
    assert "remove" in removed
    assert not any(name.startswith(f"{0:020d}") for name in names(driver))
    assert driver.manager is not None
    assert not driver.manager.offline_dirs
