"""Log directories: whose they are, one that fails, space that runs out, logs that come and go."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
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
from raftlog.format import validate_produced
from tests.support.log_driver import LOG_DIR, TOPIC_ID, FakeClock, LogDriver, open_manager, timed_batch
from tests.support.memory_storage import Fault, MemoryStorage

OTHER_TOPIC_ID = bytes(reversed(range(16)))
TWO_DIRS = ("/one", "/two")
BATCH = timed_batch([5, 6])
HEADER = validate_produced(BATCH)


def append(log: PartitionLog) -> None:
    log.append(BATCH, HEADER, leader_epoch=1, now_ms=1_000)


def append_and_flush(log: PartitionLog) -> None:
    append(log)
    log.flush()


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
            assert leave.wait(10)
        log.append(f"{op} {path}")

    storage.on_step = on_step
    housekeeping = threading.Thread(target=manager.run_housekeeping_once, args=(1_000,))
    housekeeping.start()
    assert entered.wait(10)
    closing = threading.Thread(target=manager.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    assert storage.locked
    leave.set()
    housekeeping.join(10)
    closing.join(10)
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
        self.meeting = threading.Barrier(expected, timeout=10)

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
        assert go_on.wait(10)
        return make(*arguments)

    monkeypatch.setattr(manager, "_make", slowly)
    made: list[PartitionLog] = []
    makers = [threading.Thread(target=lambda: made.append(manager.create("t", TOPIC_ID, 0))) for _ in range(2)]
    deleted: list[bool] = []
    deleting = threading.Thread(target=lambda: deleted.append(manager.delete(TOPIC_ID, 0)))
    makers[0].start()
    assert begun.wait(10)
    makers[1].start()
    go_on.set()
    for maker in makers:
        maker.join()
    assert made[0] is made[1]
    begun.clear()
    go_on.clear()
    other = threading.Thread(target=manager.create, args=("u", OTHER_TOPIC_ID, 0))
    other.start()
    assert begun.wait(10)
    deleting.start()
    deleting.join(10)
    assert deleted == [True], "one that is made does not hold up another's end"
    closing = threading.Thread(target=manager.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "what is under way is waited for"
    go_on.set()
    closing.join(10)
    other.join(10)
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
