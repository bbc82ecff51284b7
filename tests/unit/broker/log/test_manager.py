"""Log directories: their owner, their content, removed logs, and what is said of a directory that fails."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from broker.log.config import LogConfig
from broker.log.flush import GroupCommit
from broker.log.log_dir import CLEAN_SHUTDOWN, LogDirLocked, store_marks
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog
from broker.log.producer_state import LIVE_MS
from broker.log.storage import OsStorage, replace_file
from raftlog.errors import CorruptRecordError, InvalidConfig, StorageError, StorageFull, UnsupportedVersion
from raftlog.format import parse_batch
from tests.support.batches import batch_of
from tests.support.log_driver import LOG_DIR, TOPIC_ID, FakeClock, LogDriver, append, append_and_flush, open_manager
from tests.support.memory_storage import Fault, MemoryStorage

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
    told: list[tuple[int, int, int]] = []
    LogManager(storage, [LOG_DIR], LogConfig(), FakeClock()).open(
        cluster_id="cluster", node_id=1, progress=lambda *step: told.append(step)
    )
    read, recovered = [(0, 0, 3), (1, 0, 3), (2, 0, 3)], [(3, 0, 3), (3, 1, 3), (3, 2, 3), (3, 3, 3)]
    assert told == read + recovered, "also while only the metadata is read, which takes long for many logs"


# Logs that are missing


def lose_log(storage: MemoryStorage, path: str) -> None:
    for name in storage.list_sizes(path):
        storage.remove(f"{path}/{name}")
    storage.remove_dir(path)


def stored_log(storage: MemoryStorage, *, log_dirs: tuple[str, ...] = (LOG_DIR,)) -> str:
    """Make a log with two records, stop cleanly, and return the log's directory."""
    manager = open_manager(storage, log_dirs=log_dirs)
    log = manager.create("t", TOPIC_ID, 0)
    append(log)
    manager.close()
    return log.directory


def test_a_log_that_the_checkpoint_lists_and_that_has_no_directory_is_missing_until_it_is_back() -> None:
    storage = MemoryStorage()
    directory = stored_log(storage)
    aside = f"{LOG_DIR}/~stray-aside"
    storage.rename(directory, aside)
    for _ in range(2):
        manager = open_manager(storage)
        assert manager.is_lost(TOPIC_ID, 0)
        with pytest.raises(CorruptRecordError, match="is missing; put its directory back"):
            manager.create("t", TOPIC_ID, 0)
        manager.close()
    storage.rename(aside, directory)
    log = open_manager(storage).get(TOPIC_ID, 0)
    assert log is not None
    assert log.log_end_offset == 2


def test_a_missing_log_begins_anew_once_it_was_set_aside() -> None:
    storage = MemoryStorage()
    lose_log(storage, stored_log(storage))
    manager = open_manager(storage)
    assert manager.set_aside(TOPIC_ID, 0) is None
    assert manager.create("t", TOPIC_ID, 0).log_end_offset == 0
    manager.close()
    assert not open_manager(storage).corrupt_logs


def test_an_operator_gives_the_records_of_a_missing_log_up_once() -> None:
    storage = MemoryStorage()
    directory = stored_log(storage)
    lose_log(storage, directory)
    storage.open(f"{directory}.begin-empty", create=True)
    manager = open_manager(storage)
    assert manager.is_given_up("t", 0)
    manager.set_aside(TOPIC_ID, 0)
    append(manager.create("t", TOPIC_ID, 0))
    assert not manager.is_given_up("t", 0)


def test_a_log_that_was_moved_to_another_log_directory_is_not_missing(tmp_path: Path) -> None:
    dirs = [str(tmp_path / name) for name in ("one", "two")]

    def opened() -> LogManager:
        manager = LogManager(OsStorage(), dirs, LogConfig(), FakeClock())
        manager.open(cluster_id="c", node_id=1)
        return manager

    manager = opened()
    log = manager.create("t", TOPIC_ID, 0)
    append(log)
    manager.close()
    other = next(path for path in dirs if not log.directory.startswith(path))
    Path(log.directory).rename(f"{other}/t-0")
    manager = opened()
    moved = manager.get(TOPIC_ID, 0)
    assert moved is not None
    assert (moved.log_end_offset, manager.corrupt_logs) == (2, {})
    manager.close()


def test_a_log_in_a_log_directory_that_was_replaced_is_missing() -> None:
    storage = MemoryStorage()
    directory = stored_log(storage, log_dirs=TWO_DIRS)
    replaced = directory.rpartition("/")[0]
    storage.rename(replaced, "/elsewhere")
    left = tuple(path for path in TWO_DIRS if path != replaced)
    for log_dirs in (TWO_DIRS, left, left, TWO_DIRS):  # it stays missing, also where the directory is given up
        manager = open_manager(storage, log_dirs=log_dirs)
        assert manager.is_lost(TOPIC_ID, 0)
        with pytest.raises(CorruptRecordError, match="is missing"):
            manager.create("t", TOPIC_ID, 0)
        manager.close()
    manager = open_manager(storage, log_dirs=left)
    manager.set_aside(TOPIC_ID, 0)
    manager.create("t", TOPIC_ID, 0)
    manager.close()
    assert not open_manager(storage, log_dirs=left).corrupt_logs


def test_a_log_directory_without_its_checkpoint_makes_no_empty_log_for_an_old_partition() -> None:
    storage = MemoryStorage()
    lose_log(storage, stored_log(storage))
    storage.remove(f"{LOG_DIR}/offset-checkpoint")
    for why in ("which the lost checkpoint of", "which a checkpoint in"):  # the next start finds it listed as missing
        manager = open_manager(storage)
        with pytest.raises(CorruptRecordError, match=why):
            manager.create("t", TOPIC_ID, 0)
        assert manager.is_lost(TOPIC_ID, 0)
        manager.create("new", OTHER_TOPIC_ID, 0, is_new=True)
        manager.create("elsewhere", OTHER_TOPIC_ID, 1, is_elsewhere=True)
        manager.close()


# The owner of a directory


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
    assert manager.clean_broker_epoch is None
    manager.close(broker_epoch=7)
    manager = open_manager(storage)
    assert manager.clean_broker_epoch == 7
    storage.crash(None)
    manager = open_manager(storage)
    assert manager.clean_broker_epoch is None
    manager.close(clean=False, broker_epoch=7)
    assert open_manager(storage).clean_broker_epoch is None


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
    with pytest.raises(StorageError, match="no longer locked"):
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


# What an unclean end may lose


UNSYNCED = LogConfig(flush_messages=1_000)


def killed(storage: MemoryStorage) -> LogManager:
    """Open the log directory again after the end of its process."""
    storage.crash(None)
    return open_manager(storage)


def test_a_process_that_serves_is_known_to_the_next_one_however_it_ends() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    assert manager.synced_broker_epoch is None
    manager.serve(7)
    manager = killed(storage)
    assert manager.synced_broker_epoch == 7
    manager.close()
    manager = open_manager(storage)
    assert manager.synced_broker_epoch == 7, "a process that did not serve must not change the synced broker epoch"
    manager.serve(9)
    assert killed(storage).synced_broker_epoch == 9


def test_all_log_directories_have_to_know_the_process() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, log_dirs=TWO_DIRS)
    manager.serve(7)
    storage.crash(None)
    manager = open_manager(storage, log_dirs=TWO_DIRS)
    assert manager.synced_broker_epoch == 7
    storage.remove("/two/served")
    storage.crash(None)
    assert open_manager(storage, log_dirs=TWO_DIRS).synced_broker_epoch is None


@pytest.mark.parametrize(
    "damaged", [b"", b"served 1\n1 00000000\nbroker_epoch 7\n", b"served 9\n0 00000000\n", b"\xff"]
)
def test_a_damaged_file_vouches_for_nothing(damaged: bytes) -> None:
    storage = MemoryStorage()
    open_manager(storage).serve(7)
    replace_file(storage, LOG_DIR, "served", damaged)
    manager = killed(storage)
    assert manager.synced_broker_epoch is None
    manager.serve(8)
    assert killed(storage).synced_broker_epoch == 8


def test_records_count_before_an_fsync_only_once_the_directory_says_so() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    manager.serve(7)
    log = manager.create("t", TOPIC_ID, 0)
    log.update_config(UNSYNCED)
    assert log.flush_messages == 1
    assert killed(storage).unsynced_topic_ids == frozenset()
    manager = open_manager(MemoryStorage())
    log = manager.create("t", TOPIC_ID, 0)
    log.update_config(UNSYNCED)
    manager.checkpoint_marks()
    assert log.flush_messages == 1_000


def test_a_disk_that_refuses_the_note_keeps_records_fsynced() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    log = manager.create("t", TOPIC_ID, 0)
    log.update_config(UNSYNCED)
    storage.faults = [Fault("open", "*/served*", errno=errno.ENOSPC)]
    manager.note_unsynced(log)
    manager.serve(7)
    assert log.flush_messages == 1
    storage.faults = []
    manager.checkpoint_marks()
    assert log.flush_messages == 1_000
    manager = killed(storage)
    assert manager.synced_broker_epoch == 7
    assert manager.unsynced_topic_ids == {TOPIC_ID}


def test_a_topic_is_forgotten_once_all_its_records_are_fsynced() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    manager.serve(7)
    log = manager.create("t", TOPIC_ID, 0)
    log.update_config(UNSYNCED)
    manager.note_unsynced(log)
    append(log)
    log.update_config(LogConfig())
    manager.checkpoint_marks()
    assert log.log_dir.unsynced_topic_ids == {TOPIC_ID}, (
        "the topic must stay noted while two of its records are not fsynced"
    )
    log.flush()
    manager.checkpoint_marks()
    assert log.log_dir.unsynced_topic_ids == frozenset()
    assert killed(storage).unsynced_topic_ids == frozenset()


def test_what_the_last_process_left_is_not_forgotten_before_the_controllers_know_of_it() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    manager.serve(7)
    manager.note_unsynced(manager.create("t", TOPIC_ID, 0))
    manager = killed(storage)
    manager.checkpoint()
    assert killed(storage).unsynced_topic_ids == {TOPIC_ID}
    manager = killed(storage)
    manager.serve(9)
    manager.checkpoint()
    assert killed(storage).unsynced_topic_ids == frozenset()


def syncs_of_a_start(storage: MemoryStorage) -> tuple[list[str], LogManager]:
    """Open the logs; return which of their files and directories were fsynced for that."""
    syncs: list[str] = []
    storage.on_step = lambda op, path: syncs.append(path) if op in ("datasync", "sync_dir") else None
    manager = open_manager(storage)
    storage.on_step = lambda op, path: None
    return sorted(path.removeprefix(f"{LOG_DIR}/") for path in syncs if "-0" in path), manager


@pytest.mark.parametrize("end", ["clean", "no mark", "no checkpoint of a log", "longer than its recovery point"])
def test_after_a_clean_stop_logs_are_not_fsynced_again(end: str) -> None:
    """Thousands of logs would need as many fsyncs at a start. After any other end each log needs them."""
    storage = MemoryStorage()
    manager = open_manager(storage)
    log = manager.create("t", TOPIC_ID, 0)
    append(log)
    manager.create("empty", OTHER_TOPIC_ID, 0)
    if end == "no mark":
        log.flush()
        manager.checkpoint()
        manager.close(clean=False)
    else:
        manager.close()
    segment = f"{log.directory}/{0:020d}.log"
    synced = segment.removeprefix(f"{LOG_DIR}/")
    storage.crash(None)
    if end == "longer than its recovery point":
        content = bytes(storage.content(segment))
        storage.open(segment).write([content[: len(content) // 2]], len(content))
    if end == "no checkpoint of a log":
        store_marks(storage, LOG_DIR, {})
    syncs, manager = syncs_of_a_start(storage)
    empty = [f"empty-0/{0:020d}.log", "empty-0"]
    match end:
        case "clean":
            assert syncs == []
        case "longer than its recovery point":
            assert synced in syncs
            assert not set(syncs) & set(empty)
        case _:
            assert set(syncs) >= {synced, *empty}
    reopened = manager.get(TOPIC_ID, 0)
    assert reopened is not None
    assert reopened.log_end_offset == log.log_end_offset > 0


def test_a_log_that_is_made_after_a_clean_stop_is_fsynced() -> None:
    storage = MemoryStorage()
    open_manager(storage).close()
    manager = open_manager(storage)
    append_and_flush(manager.create("t", TOPIC_ID, 0))
    storage.crash(None)
    assert open_manager(storage).get(TOPIC_ID, 0) is not None


# Several at a time


class MeetingStorage(MemoryStorage):
    """Fsyncs of directories with a text in their path wait until as many are under way as are expected."""

    def __init__(self, expected: int, where: str = "~new-") -> None:
        super().__init__()
        self.where = where
        self.meeting = threading.Barrier(expected, timeout=60)

    def sync_dir(self, path: str) -> None:
        """Wait for the others."""
        if self.where in path:
            self.meeting.wait()
        super().sync_dir(path)


def test_logs_are_made_durable_and_recovered_several_at_a_time() -> None:
    storage = MeetingStorage(4, "nowhere")
    manager = open_manager(storage, threads=4)
    for partition in range(8):
        append(manager.create("t", TOPIC_ID, partition))
        manager.create("empty", OTHER_TOPIC_ID, partition)
    storage.where = f"{LOG_DIR}/t-"  # whose leader epochs are to be stored
    manager.close()
    storage.remove(f"{LOG_DIR}/{CLEAN_SHUTDOWN}")
    storage.sync_dir(LOG_DIR)
    storage.crash(None)
    storage.where = f"{LOG_DIR}/empty-"  # which are made durable before they are served
    told: list[int] = []
    manager = LogManager(storage, [LOG_DIR], LogConfig(), FakeClock(), threads=4)
    manager.open(cluster_id="cluster", node_id=1, progress=lambda identified, opened, total: told.append(opened))
    assert [number for number in told if number] == list(range(1, 17))
    assert sum(log.log_end_offset for log in manager.logs()) == 16


@pytest.mark.parametrize("threads", [1, 4])
def test_one_damaged_log_is_listed_and_all_others_are_opened(threads: int) -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, threads=threads)
    for partition in range(8):
        append(manager.create("t", TOPIC_ID, partition))
    manager.close()
    storage.raw(f"{LOG_DIR}/t-3/{0:020d}.log").clear()
    manager = open_manager(storage, threads=threads)
    assert list(manager.corrupt_logs) == [(TOPIC_ID, 3)]
    assert [log.partition for log in manager.logs()] == [0, 1, 2, 4, 5, 6, 7]
    manager.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_directory_that_fails_while_logs_are_opened_or_made_durable_leaves_the_others(threads: int) -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, log_dirs=TWO_DIRS, threads=threads)
    for partition in range(16):
        append(manager.create("t", TOPIC_ID, partition))
    bad = manager.get(TOPIC_ID, 6)
    assert bad is not None
    broken = bad.log_dir.path
    storage.faults.append(Fault("datasync", f"{bad.directory}/*"))
    manager.close(broker_epoch=7)
    storage.faults.clear()
    storage.crash(None)
    assert open_manager(storage, log_dirs=TWO_DIRS, threads=threads).clean_broker_epoch is None, (
        "the stop must not count as clean, as one of two directories is unclean"
    )
    storage.crash(None)
    storage.faults.append(Fault("datasync", f"{bad.directory}/*"))
    manager = open_manager(storage, log_dirs=TWO_DIRS, threads=threads)
    assert list(manager.offline_dirs) == [broken]
    assert {log.log_dir.path for log in manager.logs()} == set(TWO_DIRS) - {broken}
    assert len(manager.logs()) == 8
    assert all(
        manager.is_lost(TOPIC_ID, partition) for partition in range(16) if manager.get(TOPIC_ID, partition) is None
    )


def test_of_two_directories_that_claim_to_be_one_partition_neither_is_served() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, log_dirs=TWO_DIRS)
    logs = [manager.create("t", TOPIC_ID, partition) for partition in range(2)]
    manager.close()
    first, second = (log.directory for log in logs)
    storage.raw(f"{second}/partition.metadata")[:] = storage.raw(f"{first}/partition.metadata")
    manager = open_manager(storage, log_dirs=TWO_DIRS)
    assert not manager.logs()
    assert "both claim to be t-0" in str(manager.corrupt_logs[TOPIC_ID, 0].error)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_log_that_finds_no_descriptor_ends_the_start_and_condemns_nothing(threads: int) -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, threads=threads)
    for partition in range(8):
        append(manager.create("t", TOPIC_ID, partition))
    manager.close()
    storage.faults.append(Fault("open", f"*/t-5/{0:020d}.log", errno=errno.EMFILE))
    with pytest.raises(StorageError, match="raise the limit"):
        open_manager(storage, threads=threads)
    assert not storage.locked
    storage.faults.clear()
    assert len(open_manager(storage, threads=threads).logs()) == 8


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
    assert deleted == [True], "the deletion must not wait while another log is created"
    closing = threading.Thread(target=manager.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "closing must wait for the work that is in progress"
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
        assert under_way.acquire(blocking=False), "two logs of the same name are being created at once"
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
    assert ["already exists" in error for error in errors] == [True]
    assert not manager.offline_dirs


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


def fill_up(driver: LogDriver) -> None:
    """Append until the disk has no byte left."""
    for _ in range(20):
        driver.append()
    driver.flush()
    assert driver.manager is not None
    driver.manager.run_housekeeping_once(driver.clock.now)
    driver.storage.capacity_bytes = driver.storage.used_bytes()
    with pytest.raises(StorageFull):
        driver.append()


@pytest.mark.parametrize("crash", [False, True], ids=["", "crash before the round"])
def test_retention_frees_a_disk_without_a_byte_left_for_the_checkpoint(crash: bool) -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=300, file_delete_delay_ms=1_000))
    driver.open()
    fill_up(driver)
    if crash:
        driver.crash(None)
    assert driver.manager is not None
    driver.log.high_watermark = driver.log.log_end_offset
    driver.log.update_config(LogConfig(segment_bytes=300, retention_bytes=300, file_delete_delay_ms=1_000))
    driver.manager.run_housekeeping_once(driver.clock.now)
    assert driver.log.log_start_offset > 0
    driver.manager.run_housekeeping_once(driver.clock.now + 1_000)
    driver.append()


def test_segments_whose_indexes_made_room_are_whole_if_the_checkpoint_fails_all_the_same() -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=300))
    driver.open()
    fill_up(driver)
    assert driver.manager is not None
    driver.log.high_watermark = driver.log.log_end_offset
    driver.log.delete_records(driver.log.log_end_offset - 1)
    driver.storage.faults.append(Fault("write", "*offset-checkpoint*", errno=errno.ENOSPC))
    driver.manager.run_housekeeping_once(driver.clock.now)
    assert not driver.manager.offline_dirs
    driver.storage.faults.clear()
    driver.crash(None)
    driver.storage.capacity_bytes = None
    driver.check()


def test_a_refusal_that_is_not_about_space_removes_no_index() -> None:
    driver = LogDriver(config=LogConfig(segment_bytes=300))
    driver.open()
    for _ in range(20):
        driver.append()
    driver.flush()
    assert driver.manager is not None
    driver.log.high_watermark = driver.log.log_end_offset
    driver.log.delete_records(driver.log.log_end_offset - 1)
    before = {name for name in driver.storage.list_sizes(driver.log.directory) if "index" in name}
    driver.storage.faults.append(Fault("open", "*offset-checkpoint*", errno=errno.EMFILE))
    driver.manager.run_housekeeping_once(driver.clock.now)
    assert before <= set(driver.storage.list_sizes(driver.log.directory))


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
    deleted_ms = FakeClock().now_ms()
    manager.run_housekeeping_once(deleted_ms + 59_999)
    assert any(name.startswith("~delete-") for name in storage.list_sizes(LOG_DIR)), "file.delete.delay.ms: a minute"
    manager.run_housekeeping_once(deleted_ms + 60_000)
    assert sorted(storage.list_sizes(LOG_DIR)) == [".lock", "meta.properties", "offset-checkpoint", "t-0"]
    manager.close()
    assert [log.topic_id for log in open_manager(storage).logs()] == [bytes(16)]


def test_a_clock_that_is_set_back_keeps_the_files_of_a_deleted_log_no_longer() -> None:
    storage = MemoryStorage()
    manager = open_manager(storage)
    manager.create("t", TOPIC_ID, 0)
    assert manager.delete(TOPIC_ID, 0)
    manager.run_housekeeping_once(0)
    manager.run_housekeeping_once(60_000)
    assert not any(name.startswith("~delete-") for name in storage.list_sizes(LOG_DIR))


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
    assert len(log._cache) == 0, "a deleted log must leave no open files in the cache"


def test_a_partition_whose_directory_somebody_removed_does_not_condemn_the_others() -> None:
    driver = cold_log()
    manager = driver.manager
    assert manager is not None
    driver.storage.rename(driver.log.directory, LOG_DIR + "/elsewhere")
    with pytest.raises(StorageError, match="is gone although the partition was not deleted"):
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


async def test_those_who_wait_for_a_refused_flush_are_told_and_the_next_flush_covers_them() -> None:
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


class NoNewThread(ThreadPoolExecutor):
    """As the real one: the work is queued, then the thread for it cannot be started; another may come to it later."""

    refuses = True

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        if self.refuses:
            raise RuntimeError("can't start new thread")
        return future


async def test_a_thread_that_cannot_be_started_is_no_verdict_either() -> None:
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
    raise AssertionError("creating a log still failed when its 20th open was refused")


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


def test_logs_with_the_most_producers_forget_idle_ones_once_all_together_have_too_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each partition had 100,000 for a day: a topic of 500 partitions took 30 GB."""
    caplog.set_level("INFO")
    manager = open_manager(MemoryStorage())
    manager.most_producers = 100
    logs = [manager.create("t", TOPIC_ID, partition) for partition in range(3)]
    batch = parse_batch(batch_of(b"", producer_id=0, producer_epoch=0, base_sequence=0))
    for log, count in zip(logs, (10, 200, 300), strict=True):
        for producer_id in range(count):
            log.producers.note(batch._replace(producer_id=producer_id), 1_000)
    manager.run_housekeeping_once(1_000 + LIVE_MS)
    assert [len(log.producers) for log in logs] == [10, 200, 300], "all of them are live"
    manager.run_housekeeping_once(1_001 + LIVE_MS)
    assert [len(log.producers) for log in logs] == [10, 45, 45]
    (line,) = [record for record in caplog.records if getattr(record, "event", "") == "producers_forgotten"]
    assert (line.count, line.of) == (410, 510)  # type: ignore[attr-defined] # fields of the event
    manager.close()
