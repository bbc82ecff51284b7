"""Logs that go: deleted while somebody reads or flushes, removed by hand, damaged."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from broker.log.config import LogConfig
from broker.log.partition_log import PartitionLog
from raftlog.errors import StorageError
from tests.support.log_driver import (
    LOG_DIR,
    TOPIC_ID,
    LogDriver,
    append,
    append_and_flush,
    open_manager,
)
from tests.support.memory_storage import Fault, MemoryStorage

# Removing


def test_a_deleted_log_is_gone_and_its_name_is_free() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    log = manager.create("t", TOPIC_ID, 0)
    append(log)
    log.flush()
    manager.checkpoint()
    assert manager.delete(TOPIC_ID, 0)
    assert not manager.delete(TOPIC_ID, 0)
    with pytest.raises(StorageError, match="is closed"):
        append(log)
    again = manager.create("t", bytes(16), 0)
    assert again.log_end_offset == 0
    manager.run_housekeeping_once(1_000)
    assert sorted(storage.list_sizes(LOG_DIR)) == [".lock", "meta.properties", "offset-checkpoint", "t-0"]
    manager.close()
    assert [log.topic_id for log in open_manager(storage).logs()] == [bytes(16)]


@pytest.mark.parametrize("full", [False, True])
def test_a_log_made_again_after_deletion_does_not_inherit_its_marks(full: bool) -> None:
    """A partition that moves away and back keeps its topic id: stale marks would call the new log damaged."""
    storage = MemoryStorage()
    manager = open_manager(storage)
    log = manager.create("t", TOPIC_ID, 0)
    append(log)
    log.flush()
    manager.checkpoint()
    if full:
        storage.faults.append(Fault("write", "*offset-checkpoint*", errno=errno.ENOSPC))
    manager.delete(TOPIC_ID, 0)
    storage.faults.clear()
    manager.create("t", TOPIC_ID, 0)
    storage.crash(None)
    manager = open_manager(storage)
    assert manager.corrupt_logs == {}
    assert manager.get(TOPIC_ID, 0) is not None


def test_a_flush_under_way_survives_the_deletion_of_its_log() -> None:
    manager = open_manager(MemoryStorage())
    log = manager.create("t", TOPIC_ID, 0)
    append(log)
    ticket = log.begin_flush()
    assert ticket is not None
    manager.delete(TOPIC_ID, 0)
    with pytest.raises(StorageError, match="is closed"):
        ticket.run()
    assert manager.offline_dirs == {}


def cold_log(batches: int = 6) -> LogDriver:
    driver = LogDriver(config=LogConfig(segment_bytes=400))
    driver.open()
    for _ in range(batches):
        driver.append()
    driver.flush()
    for segment in driver.log.segments[:-1]:
        driver.log._cache.forget(segment)
    return driver


@pytest.mark.parametrize("again", [False, True], ids=["gone", "made again under the same name"])
@pytest.mark.parametrize(
    "use",
    [
        lambda log: log.read(0, 100, 6, blocking=True),
        lambda log: log.offset_for_time(0),
        lambda log: log.max_timestamp(),
    ],
    ids=["read", "offset_for_time", "max_timestamp"],
)
def test_a_deletion_in_the_middle_of_a_cold_read_takes_nothing_offline(
    use: Callable[[PartitionLog], object], again: bool
) -> None:
    driver = cold_log()
    manager, log = driver.manager, driver.log
    assert manager is not None

    def delete(op: str, path: str) -> None:
        if op == "open" and path.endswith(".log"):
            driver.storage.on_step = None
            manager.delete(TOPIC_ID, 0)
            if again:
                append_and_flush(manager.create("topic", bytes(16), 0))

    driver.storage.on_step = delete
    with pytest.raises(StorageError, match="is closed"):
        use(log)
    assert manager.offline_dirs == {}
    assert len(log._cache) == 0, "nobody closes what a deleted log opens"


def test_a_partition_whose_directory_somebody_removed_does_not_condemn_the_others() -> None:
    driver = cold_log()
    manager = driver.manager
    assert manager is not None
    driver.storage.rename(driver.log.directory, LOG_DIR + "/elsewhere")
    with pytest.raises(StorageError, match="is gone, though nobody deleted the partition"):
        driver.log.read(0, 100, 6, blocking=True)
    assert manager.offline_dirs == {}


def test_a_segment_that_vanished_from_its_directory_is_the_disks_fault() -> None:
    driver = cold_log()
    assert driver.manager is not None
    driver.storage.remove(driver.log.segments[0].log_path)
    with pytest.raises(StorageError, match="is offline"):
        driver.log.read(0, 100, 6, blocking=True)
    assert list(driver.manager.offline_dirs) == [LOG_DIR]


def test_a_corrupt_log_can_be_deleted() -> None:
    driver = LogDriver()
    driver.open()
    driver.append()
    driver.close()
    driver.storage.raw(f"{LOG_DIR}/topic-0/{0:020d}.log").clear()
    manager = open_manager(driver.storage)
    assert list(manager.corrupt_logs) == [(TOPIC_ID, 0)]
    assert manager.delete(TOPIC_ID, 0)
    assert manager.create("topic", TOPIC_ID, 0).log_end_offset == 0
