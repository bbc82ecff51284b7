"""Log directories: whose they are, what is found in them, how they are left, logs made at once."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from broker.log.config import LogConfig
from broker.log.log_dir import LogDirLocked
from broker.log.manager import LogManager
from broker.log.os_storage import OsStorage
from broker.log.partition_log import PartitionLog
from broker.log.storage import replace_file
from raftlog.errors import InvalidConfig, StorageError, StorageFull, UnsupportedVersion
from tests.support.log_driver import (
    LOG_DIR,
    TOPIC_ID,
    FakeClock,
    LogDriver,
    append,
    open_manager,
)
from tests.support.memory_storage import MemoryStorage

OTHER_TOPIC_ID = bytes(reversed(range(16)))
TWO_DIRS = ("/one", "/two")


def test_new_logs_go_where_the_fewest_are() -> None:
    manager = open_manager(MemoryStorage(), log_dirs=TWO_DIRS)
    dirs = [manager.dir_of(manager.create("t", TOPIC_ID, partition)) for partition in range(4)]
    assert sorted(dirs) == ["/one", "/one", "/two", "/two"]
    assert dirs[0] != dirs[1]


def test_creating_twice_is_creating_once() -> None:
    manager = open_manager(MemoryStorage())
    assert manager.create("t", TOPIC_ID, 0) is manager.create("t", TOPIC_ID, 0)


def test_logs_are_found_again_with_their_config_of_the_moment() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    append(manager.create("a-b", TOPIC_ID, 7))
    manager.close()
    storage.crash(None)
    manager = open_manager(storage)
    log = manager.get(TOPIC_ID, 7)
    assert log is not None
    assert (log.topic, log.topic_id, log.partition, log.log_end_offset) == ("a-b", TOPIC_ID, 7, 2)
    log.update_config(LogConfig(segment_bytes=100))
    append(log)
    assert log.segment_count == 2


def test_progress_is_told() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    for partition in range(3):
        manager.create("t", TOPIC_ID, partition)
    manager.close()
    told: list[tuple[int, int, str]] = []
    LogManager(storage, [LOG_DIR], LogConfig(), FakeClock()).open(
        cluster_id="cluster", node_id=1, progress=lambda *step: told.append(step)
    )
    assert [step[:2] for step in told] == [(1, 3), (2, 3), (3, 3)]


# Whose directory


def test_two_managers_do_not_share_a_real_directory(tmp_path: Path) -> None:
    def manager() -> LogManager:
        return LogManager(OsStorage(), [str(tmp_path / "logs")], LogConfig(), FakeClock())

    first = manager()
    first.open(cluster_id="c", node_id=1)
    append(first.create("t", TOPIC_ID, 0))
    with pytest.raises(LogDirLocked, match="in use by another process"):
        manager().open(cluster_id="c", node_id=1)
    first.close()
    second = manager()
    second.open(cluster_id="c", node_id=1)
    log = second.get(TOPIC_ID, 0)
    assert log is not None
    assert log.log_end_offset == 2
    second.close()


@pytest.mark.parametrize(("cluster_id", "node_id"), [("other", 1), ("cluster", 2)])
def test_a_directory_of_another_owner_is_refused_and_not_left_locked(cluster_id: str, node_id: int) -> None:
    storage = MemoryStorage()
    open_manager(storage).close()
    with pytest.raises(InvalidConfig, match="belongs to node 1 of cluster 'cluster'"):
        LogManager(storage, [LOG_DIR], LogConfig(), FakeClock()).open(cluster_id=cluster_id, node_id=node_id)
    assert not storage.locked


@pytest.mark.parametrize("path", ["meta.properties", "topic-0/partition.metadata", "offset-checkpoint"])
def test_a_newer_format_is_refused(path: str) -> None:
    driver = LogDriver()
    driver.open()
    driver.append()
    driver.close()
    data = driver.storage.raw(f"{LOG_DIR}/{path}")
    first_line = bytes(data).split(b"\n")[0]
    data[: len(first_line)] = first_line.replace(b" 1", b" 9")
    with pytest.raises(UnsupportedVersion, match="format version 9"):
        open_manager(driver.storage)
    assert not driver.storage.locked


def test_logs_without_meta_properties_are_nobodys() -> None:
    driver = LogDriver()
    driver.open()
    driver.close()
    driver.storage.remove(f"{LOG_DIR}/meta.properties")
    with pytest.raises(InvalidConfig, match=r"no meta\.properties"):
        open_manager(driver.storage)


def test_the_clean_shutdown_mark_is_there_only_between_a_clean_stop_and_the_next_start() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    assert manager.unclean_dirs == [LOG_DIR]
    manager.close()
    manager = open_manager(storage)
    assert manager.unclean_dirs == []
    storage.crash(None)
    manager = open_manager(storage)
    assert manager.unclean_dirs == [LOG_DIR]
    manager.close(clean=False)
    assert open_manager(storage).unclean_dirs == [LOG_DIR]


def test_foreign_names_in_a_log_directory_are_left_alone() -> None:
    storage = MemoryStorage()
    open_manager(storage).close()
    storage.make_dir(f"{LOG_DIR}/lost+found")
    manager = open_manager(storage)
    assert manager.logs() == []
    assert storage.exists(f"{LOG_DIR}/lost+found")


# Stopping


def test_close_waits_for_housekeeping_and_nothing_is_written_after_it() -> None:
    driver = LogDriver()
    driver.open()
    driver.append()
    driver.flush()
    manager, storage = driver.manager, driver.storage
    assert manager is not None
    entered, leave = threading.Event(), threading.Event()
    log: list[str] = []

    def on_step(op: str, path: str) -> None:
        if op == "open" and "offset-checkpoint" in path and not entered.is_set():
            entered.set()
            assert leave.wait(60)
        log.append(f"{op} {path}")

    storage.on_step = on_step
    housekeeping = threading.Thread(target=manager.run_housekeeping_once, args=(1_000,))
    housekeeping.start()
    assert entered.wait(60)
    closing = threading.Thread(target=manager.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    assert storage.locked
    leave.set()
    housekeeping.join(60)
    closing.join(60)
    assert not storage.locked
    log.clear()
    manager.run_housekeeping_once(2_000)
    manager.checkpoint()
    manager.close()
    for use in (lambda: manager.delete(TOPIC_ID, 0), lambda: manager.create("t", TOPIC_ID, 1)):
        with pytest.raises(StorageError, match="the broker is stopping"):
            use()
    with pytest.raises(StorageError, match="not ours any more"):
        driver.log.log_dir.update_marks(dict, removed=[(TOPIC_ID, 0)])
    assert log == []


def test_the_clean_shutdown_mark_says_in_which_broker_epoch_it_was_left() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    assert manager.clean_broker_epoch is None
    manager.close(broker_epoch=17)
    manager = open_manager(storage)
    assert manager.clean_broker_epoch == 17
    storage.crash(None)
    assert open_manager(storage).clean_broker_epoch is None


@pytest.mark.parametrize("mark", [b"", b"clean-shutdown 1\n0 00000000\n", b"clean-shutdown 9\n0 00000000\n", b"\xff"])
def test_a_mark_of_an_old_form_or_a_damaged_one_vouches_for_nothing(mark: bytes) -> None:
    storage = MemoryStorage()
    open_manager(storage).close(broker_epoch=17)
    replace_file(storage, LOG_DIR, "clean-shutdown", mark)
    assert open_manager(storage).clean_broker_epoch is None


# Several at a time


class MeetingStorage(MemoryStorage):
    """Fsyncs of new logs' directories wait until as many are under way as are expected."""

    def __init__(self, expected: int) -> None:
        super().__init__()
        self.meeting = threading.Barrier(expected, timeout=60)

    def sync_dir(self, path: str) -> None:
        """Wait for the others."""
        if "~new-" in path:
            self.meeting.wait()
        super().sync_dir(path)


def test_logs_are_made_several_at_a_time_and_share_the_directories() -> None:
    manager = open_manager(MeetingStorage(4), log_dirs=TWO_DIRS)
    makers = [threading.Thread(target=manager.create, args=("t", TOPIC_ID, number)) for number in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert sorted(manager.dir_of(log) for log in manager.logs()) == ["/one", "/one", "/two", "/two"]


def test_a_log_that_is_being_made_is_made_once_and_deleted_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_manager(MemoryStorage())
    begun, go_on = threading.Event(), threading.Event()
    make = manager._make

    def slowly(*arguments: Any) -> PartitionLog:
        begun.set()
        assert go_on.wait(60)
        return make(*arguments)

    monkeypatch.setattr(manager, "_make", slowly)
    made: list[PartitionLog] = []
    makers = [threading.Thread(target=lambda: made.append(manager.create("t", TOPIC_ID, 0))) for _ in range(2)]
    deleted: list[bool] = []
    deleting = threading.Thread(target=lambda: deleted.append(manager.delete(TOPIC_ID, 0)))
    makers[0].start()
    assert begun.wait(60)
    makers[1].start()
    go_on.set()
    for maker in makers:
        maker.join()
    assert made[0] is made[1]
    begun.clear()
    go_on.clear()
    other = threading.Thread(target=manager.create, args=("u", OTHER_TOPIC_ID, 0))
    other.start()
    assert begun.wait(60)
    deleting.start()
    deleting.join(60)
    assert deleted == [True], "one that is made does not hold up another's end"
    closing = threading.Thread(target=manager.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "what is under way is waited for"
    go_on.set()
    closing.join(60)
    other.join(60)
    assert manager._log_counts == {manager._dirs[0]: 1}


def test_a_log_that_cannot_be_made_does_not_count() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, log_dirs=TWO_DIRS)

    def refuse(op: str, path: str) -> None:
        if "~new-" in path:
            raise OSError(errno.ENOSPC, "no space", path)

    storage.on_step = refuse
    for partition in range(3):
        with pytest.raises(StorageFull):
            manager.create("t", TOPIC_ID, partition)
    storage.on_step = None
    dirs = [manager.dir_of(manager.create("t", TOPIC_ID, partition)) for partition in range(4)]
    assert sorted(dirs) == ["/one", "/one", "/two", "/two"]
    for log in manager.logs():
        if manager.dir_of(log) == "/one":
            manager.delete(TOPIC_ID, log.partition)
    assert {manager.dir_of(manager.create("u", OTHER_TOPIC_ID, partition)) for partition in range(2)} == {"/one"}


def test_two_topics_of_one_name_are_not_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_manager(MemoryStorage())
    make, under_way = manager._make, threading.Lock()

    def alone(*arguments: Any) -> PartitionLog:
        assert under_way.acquire(blocking=False), "one after the other"
        try:
            threading.Event().wait(0.02)
            return make(*arguments)
        finally:
            under_way.release()

    monkeypatch.setattr(manager, "_make", alone)
    errors: list[str] = []

    def create(topic_id: bytes) -> None:
        try:
            manager.create("t", topic_id, 0)
        except StorageError as error:
            errors.append(str(error))

    makers = [threading.Thread(target=create, args=(topic_id,)) for topic_id in (TOPIC_ID, OTHER_TOPIC_ID)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(manager.logs()) == 1
    assert ["is there already" in error for error in errors] == [True]
    assert not manager.offline_dirs
