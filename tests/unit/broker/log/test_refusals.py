"""Running out of descriptors or memory is no verdict on a disk: everything goes on as soon as there are some again."""

from __future__ import annotations

import asyncio
import errno
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from broker.log.config import LogConfig
from broker.log.group_commit import GroupCommit
from raftlog.errors import StorageError
from tests.support.log_driver import LOG_DIR, TOPIC_ID, LogDriver, open_manager
from tests.support.memory_storage import Fault, MemoryStorage

REFUSALS = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]
CONFIG = LogConfig(segment_bytes=600, file_delete_delay_ms=0)
"""Two batches a segment."""


def opened(batches: int = 0) -> LogDriver:
    driver = LogDriver(config=CONFIG)
    driver.open()
    for _ in range(batches):
        driver.append()
    return driver


def offline(driver: LogDriver) -> list[str]:
    assert driver.manager is not None
    return list(driver.manager.offline_dirs)


@pytest.mark.parametrize("code", REFUSALS)
def test_a_flush_that_cannot_open_anything_leaves_it_to_the_next_one(code: int) -> None:
    driver = opened(5)
    driver.storage.faults.append(Fault("open", errno=code))
    with pytest.raises(StorageError, match="raise the limit"):
        driver.log.flush()
    assert driver.log.flushed_end_offset == 0
    assert driver.log.marks().recovery_point == 0
    assert offline(driver) == []
    driver.storage.faults.clear()
    driver.flush()
    driver.checkpoint()
    driver.crash(None)
    driver.check()


def test_indexes_that_could_not_be_opened_are_stored_by_the_next_checkpoint() -> None:
    driver = opened(5)
    driver.storage.faults.append(Fault("open", "*index", errno=errno.EMFILE))
    driver.flush()
    driver.storage.faults.clear()
    driver.checkpoint()
    names = driver.storage.list_sizes(driver.log.directory)
    for segment in driver.log.segments[:-1]:
        assert names[f"{segment.base_offset:020d}.index"] > 0


def test_leader_epochs_that_could_not_be_opened_hold_the_recovery_point_back() -> None:
    driver = opened(1)
    driver.flush()
    driver.epoch = 4
    driver.append()
    driver.storage.faults.append(Fault("open", "*leader-epoch*", errno=errno.EMFILE))
    driver.flush()
    assert driver.log.marks().recovery_point == 1
    driver.storage.faults.clear()
    driver.flush()
    assert driver.log.marks().recovery_point == 2


def test_those_who_wait_for_a_refused_flush_are_told_and_the_next_flush_covers_them() -> None:
    async def scenario() -> None:
        driver = opened(5)
        with ThreadPoolExecutor(1) as pool:
            commit = GroupCommit(pool)
            done: list[int] = []
            errors: list[BaseException] = []
            driver.storage.faults.append(Fault("open", errno=errno.EMFILE))
            commit.request(driver.log, done.append, errors.append)
            await commit.close()
            assert [type(error) for error in errors] == [StorageError]
            assert driver.manager is not None
            driver.manager.mark_dir_offline(LOG_DIR, errors[0])
            assert offline(driver) == []
            driver.storage.faults.clear()
            commit.request(driver.log, done.append, errors.append)
            await commit.close()
            assert done == [5]

    asyncio.run(scenario())


class NoNewThread(ThreadPoolExecutor):
    """As the real one: the work is queued, then the thread for it cannot be started; another may come to it later."""

    refuses = True

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        if self.refuses:
            raise RuntimeError("can't start new thread")
        return future


def test_a_thread_that_cannot_be_started_is_no_verdict_either() -> None:
    async def scenario() -> None:
        driver = opened(1)
        with NoNewThread(1) as pool:
            commit = GroupCommit(pool)
            done: list[int] = []
            errors: list[BaseException] = []
            commit.request(driver.log, done.append, errors.append)
            await commit.close()
            assert [type(error) for error in errors] == [StorageError]
            pool.refuses = False
            driver.append()
            commit.request(driver.log, done.append, errors.append)
            await commit.close()
            assert done == [2]
            assert len(errors) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("op", ["datasync", "sync_dir"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ENOMEM])
def test_a_sync_that_fails_is_final_whatever_it_says(op: str, code: int) -> None:
    driver = opened(5)
    driver.storage.faults.append(Fault(op, driver.log.directory + "*", errno=code))
    with pytest.raises(StorageError, match="is offline"):
        driver.log.flush()
    assert offline(driver) == [LOG_DIR]


@pytest.mark.parametrize("code", REFUSALS)
def test_a_checkpoint_that_is_refused_keeps_the_old_one(code: int) -> None:
    driver = opened(1)
    driver.flush()
    driver.storage.faults.append(Fault("open", errno=code))
    driver.checkpoint()
    assert offline(driver) == []
    driver.storage.faults.clear()
    driver.checkpoint()
    assert driver.log.log_dir.marks_of((TOPIC_ID, 0)) == (0, 1, 1)


def test_creating_again_goes_on_from_wherever_it_was_refused() -> None:
    for skip in range(20):
        storage = MemoryStorage()
        manager = open_manager(storage)
        fault = Fault("open", errno=errno.EMFILE, skip=skip)
        storage.faults.append(fault)
        try:
            manager.create("t", TOPIC_ID, 0)
        except StorageError as error:
            assert "raise the limit" in str(error)  # noqa: PT017 # the last round does not raise
            refused = True
        else:
            refused = False
        assert manager.offline_dirs == {}
        storage.faults.clear()
        assert manager.create("t", TOPIC_ID, 0).log_end_offset == 0
        if not refused:
            assert skip > 5
            return
    raise AssertionError("creating a log opens that many files?")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("open", errno=errno.EMFILE),
        Fault("rename", LOG_DIR + "/topic-0", errno=errno.ENOMEM),
        Fault("remove", errno=errno.ENOMEM),
    ],
)
def test_what_is_refused_of_a_deletion_is_done_by_a_later_housekeeping(fault: Fault) -> None:
    driver = opened(3)
    driver.flush()
    driver.checkpoint()
    manager, storage = driver.manager, driver.storage
    assert manager is not None
    storage.faults.append(fault)
    try:
        assert manager.delete(TOPIC_ID, 0)
    except StorageError:
        assert fault.op == "rename"  # the others do not raise
        with pytest.raises(StorageError, match="could not be renamed yet"):
            manager.create("topic", TOPIC_ID, 0)
    assert manager.get(TOPIC_ID, 0) is None
    manager.run_housekeeping_once(1_000)
    assert manager.offline_dirs == {}
    assert any("topic" in name or "delete" in name for name in storage.list_sizes(LOG_DIR))
    storage.faults.clear()
    manager.run_housekeeping_once(1_000)
    assert sorted(storage.list_sizes(LOG_DIR)) == [".lock", "meta.properties", "offset-checkpoint"]


def test_a_start_without_descriptors_fails_and_condemns_nothing() -> None:
    storage = MemoryStorage()
    open_manager(storage).close()
    storage.faults.append(Fault("open", "*/offset-checkpoint", errno=errno.EMFILE))
    with pytest.raises(StorageError, match="raise the limit"):
        open_manager(storage)
    assert not storage.locked
    storage.faults.clear()
    open_manager(storage)


def test_what_the_operating_system_refused_does_not_mark_a_directory_offline() -> None:
    manager = open_manager(MemoryStorage())
    manager.mark_dir_offline(LOG_DIR, OSError(errno.EMFILE, "Too many open files"))
    manager.mark_dir_offline(LOG_DIR, MemoryError())
    assert manager.offline_dirs == {}
    manager.mark_dir_offline(LOG_DIR, OSError(errno.EIO, "bad sector"))
    assert list(manager.offline_dirs) == [LOG_DIR]
