"""Log directories that fail: errors of the disk, damage, descriptors and space that run out."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from broker.log.config import LogConfig
from broker.log.partition_log import PartitionLog
from raftlog.errors import StorageError, StorageFull
from tests.support.log_driver import (
    LOG_DIR,
    TOPIC_ID,
    LogDriver,
    append,
    append_and_flush,
    open_manager,
)
from tests.support.memory_storage import Fault, MemoryStorage

TWO_DIRS = ("/one", "/two")


# A directory that fails


@pytest.mark.parametrize("op", ["datasync", "write"])
def test_an_io_error_takes_one_directory_offline_for_good(op: str) -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, log_dirs=TWO_DIRS)
    bad, good = (manager.create("t", TOPIC_ID, partition) for partition in range(2))
    told: list[tuple[str, Sequence[PartitionLog]]] = []
    manager.on_dir_offline = lambda path, error, logs: told.append((path, logs))
    append(bad)
    fault = Fault(op, manager.dir_of(bad) + "/t-*")
    storage.faults.append(fault)
    with pytest.raises(StorageError, match="is offline"):
        append_and_flush(bad)
    storage.faults.remove(fault)
    for use in (lambda: append(bad), bad.flush, lambda: bad.read(0, 100, 1, blocking=True), bad.begin_flush):
        with pytest.raises(StorageError, match="is offline"):
            use()
    assert told == [(manager.dir_of(bad), [bad])]
    assert list(manager.offline_dirs) == [manager.dir_of(bad)]
    assert manager.get(TOPIC_ID, 0) is None
    with pytest.raises(StorageError, match="is offline"):
        manager.create("t", TOPIC_ID, 0)  # an empty one elsewhere would be a lost log
    append(good)
    assert good.flush() == 2
    assert manager.dir_of(manager.create("t", TOPIC_ID, 2)) == manager.dir_of(good)
    manager.run_housekeeping_once(1_000)
    manager.close()


def test_an_fsync_error_is_never_retried() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    log = manager.create("t", TOPIC_ID, 0)
    append(log)
    storage.faults.append(Fault("datasync", errno=errno.ENOSPC))  # even this one: the pages are gone
    ticket = log.begin_flush()
    assert ticket is not None
    with pytest.raises(StorageError, match="is offline"):
        ticket.run()
    syncs: list[str] = []
    storage.on_step = lambda op, path: syncs.append(op)
    with pytest.raises(StorageError):
        ticket.run()
    manager.run_housekeeping_once(1_000)
    manager.close()
    assert "datasync" not in syncs
    assert "write" not in syncs


def test_a_directory_that_cannot_be_opened_leaves_the_others_working() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, log_dirs=TWO_DIRS)
    logs = [manager.create("t", TOPIC_ID, partition) for partition in range(2)]
    manager.close()
    broken = logs[0].log_dir.path
    storage.faults.append(Fault("open", f"{broken}/*"))
    manager = open_manager(storage, log_dirs=TWO_DIRS)
    assert list(manager.offline_dirs) == [broken]
    assert [log.partition for log in manager.logs()] == [1]
    with pytest.raises(StorageError, match=f"may lie in {broken}"):
        manager.create("t", TOPIC_ID, 0)  # an empty one elsewhere would be a lost log
    assert manager.create("t", TOPIC_ID, 9, is_new=True).log_dir.path != broken
    storage.faults.append(Fault("open"))
    storage.crash(None)
    with pytest.raises(StorageError, match="no log directory works"):
        open_manager(storage, log_dirs=TWO_DIRS)


def test_a_damaged_checkpoint_takes_its_directory_offline_instead_of_guessing() -> None:
    driver = LogDriver()
    driver.open()
    driver.append()
    driver.close()
    driver.storage.raw(f"{LOG_DIR}/offset-checkpoint")[-2] ^= 1
    with pytest.raises(StorageError, match="offset-checkpoint is damaged"):
        open_manager(driver.storage)


def test_too_many_open_files_say_nothing_about_the_disk() -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=400))
    driver.open()
    driver.append()
    driver.append()
    fault = Fault("open", errno=errno.EMFILE)
    driver.storage.faults.append(fault)
    with pytest.raises(StorageError, match="raise the limit"):
        driver.append()
    driver.storage.faults.remove(fault)
    driver.append()
    driver.check()


# No space


def test_a_full_disk_refuses_writes_serves_reads_and_recovers() -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=1_000))
    driver.open()
    for _ in range(5):
        driver.append()
    driver.flush()
    for room in range(0, 260, 7):  # every kind of partial write
        driver.storage.capacity_bytes = driver.storage.used_bytes() + room
        with pytest.raises(StorageFull, match=f"{LOG_DIR}.* bytes could not be written"):
            driver.append([1, 2])
        driver.check()
        driver.flush()
    assert driver.manager is not None
    driver.manager.run_housekeeping_once(driver.clock.now)
    assert not driver.manager.offline_dirs
    driver.storage.capacity_bytes = None
    for _ in range(6):
        driver.append()
    driver.flush()
    driver.check()


def test_a_broker_starts_on_a_full_disk() -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=1_000))
    driver.open()
    for _ in range(9):
        driver.append()
    driver.flush()
    driver.storage.capacity_bytes = driver.storage.used_bytes()
    driver.crash(None)
    with pytest.raises(StorageFull):
        driver.append()
    driver.storage.capacity_bytes = None
    driver.append()
    driver.check()


def test_no_space_for_a_new_log_is_told_and_leaves_nothing_behind_that_matters() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    storage.capacity_bytes = storage.used_bytes() + 10
    with pytest.raises(StorageFull):
        manager.create("t", TOPIC_ID, 0)
    storage.capacity_bytes = None
    append(manager.create("t", TOPIC_ID, 0))


def test_a_partial_write_that_cannot_be_taken_back_is_the_disks_end() -> None:
    driver = LogDriver()
    driver.open()
    driver.append()
    driver.storage.capacity_bytes = driver.storage.used_bytes() + 50
    driver.storage.faults.append(Fault("truncate"))
    with pytest.raises(StorageError, match="could not be taken back"):
        driver.append()
    assert driver.manager is not None
    assert list(driver.manager.offline_dirs) == [LOG_DIR]


def test_leader_epochs_that_cannot_be_stored_hold_the_recovery_point_back() -> None:
    driver = LogDriver()
    driver.open()
    driver.append()
    driver.flush()
    driver.storage.faults.append(Fault("write", "*leader-epoch*", errno=errno.ENOSPC))
    driver.epoch = 4
    driver.append()
    driver.flush()
    assert driver.log.flushed_end_offset == 2
    assert driver.log.marks().recovery_point == 1
    driver.storage.faults.clear()
    driver.flush()
    assert driver.log.marks().recovery_point == 2
