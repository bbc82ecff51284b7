"""Damage that is found while a log is online: what is checked, what is said, what becomes of the log."""

from __future__ import annotations

import pytest

from broker.log.config import LogConfig
from raftlog.errors import CorruptRecordError, StorageError
from tests.support.log_driver import LOG_DIR, TOPIC_ID, LogDriver, open_manager
from tests.support.memory_storage import MemoryStorage

BATCH_BYTES = 280
CRC_AT, EPOCH_AT, BODY_AT = 17, 12, 200


def driver_with(batches: int, config: LogConfig | None = None) -> LogDriver:
    """Batches of two records and 280 bytes, three in a segment."""
    driver = LogDriver(config=config or LogConfig(segment_bytes=900, index_interval_bytes=0))
    driver.open()
    for _ in range(batches):
        driver.append([driver.clock.now] * 2)
    driver.flush()
    return driver


def flip(driver: LogDriver, segment: int, position: int) -> str:
    """Flip a bit on the disk, and return the path of the file."""
    path = driver.log.segments[segment].log_path
    driver.storage.raw(path)[position] ^= 4
    return path


def check_all(driver: LogDriver, max_bytes: int = 1, max_batches: int | None = None) -> list[int]:
    """Check from the log start to the end; return where each piece ended."""
    ends = [driver.log.log_start_offset]
    while ends[-1] < driver.log.log_end_offset:
        ends.append(driver.log.check(ends[-1], max_bytes, max_batches=max_batches).next_offset)
    return ends


@pytest.mark.parametrize(
    ("max_bytes", "max_batches", "ends"),
    [
        (1, None, [0, 2, 4, 6, 8]),
        (BATCH_BYTES + 1, None, [0, 4, 6, 8]),
        (1 << 20, None, [0, 6, 8]),
        (1 << 20, 2, [0, 4, 6, 8]),
    ],
)
def test_a_whole_log_is_checked_piece_by_piece(max_bytes: int, max_batches: int | None, ends: list[int]) -> None:
    assert check_all(driver_with(4), max_bytes, max_batches) == ends


@pytest.mark.parametrize("byte", [0, 5, 8, EPOCH_AT, CRC_AT, 25, 40, BODY_AT])
@pytest.mark.parametrize(("segment", "batch"), [(0, 0), (0, 1), (0, 2), (1, 1), (2, 0)])
def test_any_flipped_bit_is_found_where_it_lies_and_nowhere_else(segment: int, batch: int, byte: int) -> None:
    driver = driver_with(8)
    path = flip(driver, segment, batch * BATCH_BYTES + byte)
    damaged = segment * 6 + batch * 2
    with pytest.raises(CorruptRecordError, match="are damaged on the disk") as caught:
        driver.log.check(damaged + 1, 1)
    assert f"{path} position {batch * BATCH_BYTES}: " in str(caught.value)
    assert f"offsets {damaged} to {damaged + 1} of topic-0" in str(caught.value)
    for offset in range(driver.end):
        if offset not in (damaged, damaged + 1):
            driver.log.check(offset, 1)


def test_damage_in_front_of_what_is_asked_for_is_found_where_no_entry_lies_between() -> None:
    driver = driver_with(6, LogConfig(index_interval_bytes=1 << 20))
    driver.close()
    driver.crash(None)  # the boundaries of the last batches are not known any more
    flip(driver, 0, BODY_AT)
    with pytest.raises(CorruptRecordError, match="offsets 0 to 11 of topic-0"):
        driver.log.check(9, 1)


def test_a_file_that_became_shorter_is_found() -> None:
    driver = driver_with(4)
    del driver.storage.raw(driver.log.segments[0].log_path)[500:]
    with pytest.raises(CorruptRecordError, match="offsets 2 to 3"):
        driver.log.check(2, 1)


def test_what_is_not_there_is_passed_over() -> None:
    driver = driver_with(8)
    assert driver.log.check(16, 1).next_offset == driver.log.check(99, 1).next_offset == 16
    driver.delete_records(7)
    driver.checkpoint()
    assert driver.log.check(0, 1).next_offset == 8


def test_a_closed_log_is_not_checked() -> None:
    driver = driver_with(2)
    driver.log.close()
    with pytest.raises(StorageError, match="is closed"):
        driver.log.check(0, 1)


def test_bytes_that_a_truncation_takes_away_meanwhile_are_no_damage() -> None:
    driver = driver_with(8)
    path, log = driver.log.segments[1].log_path, driver.log

    def truncate(op: str, at: str) -> None:
        if op == "read" and at == path:
            driver.storage.on_step = None
            log.truncate_to(6, now_ms=0)

    driver.storage.on_step = truncate
    assert log.check(8, 1).next_offset == 6


# A log that turns corrupt


def test_a_log_found_damaged_is_closed_and_listed_and_its_name_is_free_once_it_is_set_aside() -> None:
    driver = driver_with(4)
    manager, log = driver.manager, driver.log
    assert manager is not None
    error = CorruptRecordError("the batch at 4")
    manager.mark_corrupt(log, error)
    assert log.closed
    assert manager.get(TOPIC_ID, 0) is None
    assert manager.is_lost(TOPIC_ID, 0)
    assert manager.corrupt_logs[TOPIC_ID, 0].error is error
    with pytest.raises(CorruptRecordError, match="the batch at 4"):
        manager.create("topic", TOPIC_ID, 0)
    assert manager.set_aside(TOPIC_ID, 0) == f"{LOG_DIR}/~stray-{TOPIC_ID.hex()}-0"
    fresh = manager.create("topic", TOPIC_ID, 0)
    assert fresh.log_end_offset == 0


def test_what_was_found_damaged_is_not_served_after_a_restart_either() -> None:
    driver = driver_with(4)
    assert driver.manager is not None
    flip(driver, 0, BODY_AT)
    driver.manager.mark_corrupt(driver.log, CorruptRecordError("the batch at 4"))
    driver.manager.close()
    driver.storage.crash(None)
    again = open_manager(driver.storage, config=driver.config)
    assert again.get(TOPIC_ID, 0) is None
    found = again.corrupt_logs[TOPIC_ID, 0].error
    assert "the batch at 4" in str(found)
    assert f"{LOG_DIR}/topic-0/damaged" in str(found), "says what to do when it was mended"


def test_a_log_that_is_gone_or_another_one_by_now_is_not_marked() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    old = manager.create("topic", TOPIC_ID, 0)
    manager.delete(TOPIC_ID, 0)
    manager.mark_corrupt(old, CorruptRecordError("late"))
    assert not manager.corrupt_logs
    new = manager.create("topic", TOPIC_ID, 0)
    manager.mark_corrupt(old, CorruptRecordError("late"))
    assert manager.get(TOPIC_ID, 0) is new
    assert not new.closed


def test_a_disk_that_refuses_the_mark_does_not_keep_the_log_online() -> None:
    driver = driver_with(2)
    assert driver.manager is not None

    def refuse(op: str, path: str) -> None:
        if path.endswith("damaged.tmp"):
            raise OSError(28, "No space left on device", path)

    driver.storage.on_step = refuse
    driver.manager.mark_corrupt(driver.log, CorruptRecordError("x"))
    assert driver.manager.get(TOPIC_ID, 0) is None
    assert (TOPIC_ID, 0) in driver.manager.corrupt_logs
    assert not driver.manager.offline_dirs


def test_a_follower_calls_a_version_that_it_does_not_know_damage() -> None:
    driver = driver_with(1)
    batch = bytearray(driver.chain[0].data)
    batch[16] ^= 32
    with pytest.raises(CorruptRecordError, match="magic 33"):
        driver.log.append_stamped(bytes(batch), now_ms=0)
