"""All logs of a broker: several log directories, opening them after any kind of stop, and housekeeping.

A log is in one of these states:

    online    in `logs()`
    corrupt   its own files are damaged: in `corrupt_logs`, not opened, never repaired on its own
    missing   a checkpoint lists it and its directory is gone: in `corrupt_logs` too, never begun anew on its own
    offline   its log directory failed: in `offline_dirs`

A corrupt or missing log is begun anew once another replica leads with its records (`set_aside`), or when an operator
gives its records up by a file TOPIC-PARTITION.begin-empty in a log directory.

Directories in a log directory:

    TOPIC-PARTITION             a log
    ~new-TOPICID-PARTITION      being made; meaningless after a restart
    ~delete-TOPICID-PARTITION   deleted; its files stay for file.delete.delay.ms, or until a restart
    ~stray-TOPICID-PARTITION    a log of a topic that the cluster does not know; never touched again

Topic names contain no `~`, so none of the last three can be taken for a log, nor a log for one of them.

A log is deleted in two steps, so that the caller does not wait for its files to go:

    deleted  -- renamed -->  garbage  -- names durable, housekeeping after file.delete.delay.ms -->  removed
             -- renaming refused -->  leaving  -- housekeeping, or before a log is made: tried again -->  garbage

A stray log is renamed likewise and never removed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Final, NamedTuple, TypeVar

from broker.clock import Clock
from broker.log.config import LogConfig
from broker.log.log_dir import (
    DAMAGED,
    PARTITION_METADATA,
    LogDir,
    PartitionKey,
    PartitionMetadata,
    is_passing,
    is_refusal,
    load_damage,
    load_partition_metadata,
    store_damage,
    store_partition_metadata,
)
from broker.log.partition_log import PartitionLog
from broker.log.producer_state import ProducerLimits, most_of_each
from broker.log.recovery import recover_log
from broker.log.segment import SegmentCache, segment_stem
from broker.log.storage import Storage
from raftlog.errors import CorruptRecordError, RaftlogError, StorageError

logger = logging.getLogger(__name__)

MOST_PRODUCERS: Final = 500_000
"""Producer ids that all logs together remember: 300 MB to 1 GB. They remember more only while none may be forgotten."""

T = TypeVar("T")
R = TypeVar("R")

_MARK: Final = "~"
NEW_PREFIX: Final = f"{_MARK}new-"
DELETE_PREFIX: Final = f"{_MARK}delete-"
STRAY_PREFIX: Final = f"{_MARK}stray-"
BEGIN_EMPTY_SUFFIX: Final = ".begin-empty"


def find_logs(storage: Storage, log_dir: str) -> tuple[list[str], list[str]]:
    """Return the paths of the logs in a log directory, and those of unfinished or deleted ones.

    Raises:
        CorruptRecordError: a directory with segments lacks `partition.metadata`.
        OSError: the disk.
    """
    logs, leftovers = [], []
    for name, size in sorted(storage.list_sizes(log_dir).items()):
        path = f"{log_dir}/{name}"
        if size >= 0 or name.startswith(STRAY_PREFIX):
            continue
        if name.startswith((NEW_PREFIX, DELETE_PREFIX)):
            leftovers.append(path)
        elif storage.exists(f"{path}/{PARTITION_METADATA}"):
            logs.append(path)
        elif any(entry.endswith(".log") for entry in storage.list_sizes(path)):
            raise CorruptRecordError(
                f"{path} holds segments but no {PARTITION_METADATA}, so its partition is unknown; "
                "put the file back, or move the directory away"
            )
    return logs, leftovers


def make_log(storage: Storage, log_dir: str, metadata: PartitionMetadata) -> str:
    """Make the directory of an empty log, all or nothing and durably; return its path.

    After an error the directory may exist, with an empty log; the next attempt uses it.

    Raises:
        StorageError: another log has the name.
        OSError: the disk.
    """
    path = f"{log_dir}/{metadata.topic}-{metadata.partition}"
    if storage.exists(path):
        other = load_partition_metadata(storage, path)
        if other == metadata:
            storage.sync_dir(log_dir)
            return path
        raise StorageError(
            f"{path} already exists, with topic id {other.topic_id.hex() if other else 'unknown'}; "
            "move it away if it is not needed"
        )
    aside = f"{log_dir}/{NEW_PREFIX}{metadata.topic_id.hex()}-{metadata.partition}"
    storage.make_dir(aside)
    store_partition_metadata(storage, aside, metadata)
    storage.open(segment_stem(aside, 0) + ".log", create=True)
    storage.sync_dir(aside)
    storage.rename(aside, path)
    storage.sync_dir(log_dir)
    return path


def unused_path(storage: Storage, log_dir: str, prefix: str, topic_id: bytes, partition: int) -> str:
    """Return a path with this prefix that does not exist yet. Raises OSError."""
    stem = f"{log_dir}/{prefix}{topic_id.hex()}-{partition}"
    number, path = 0, stem
    while storage.exists(path):
        number += 1
        path = f"{stem}-{number}"
    return path


class LeavingLog(NamedTuple):
    """A closed log whose directory is to be renamed."""

    log_dir: LogDir
    path: str
    key: PartitionKey
    prefix: str
    delay_ms: int
    """How long the files of a deleted log stay."""


class Garbage(NamedTuple):
    """A directory that was renamed to be removed."""

    log_dir: LogDir
    path: str
    due_ms: int = 0
    delay_ms: int = 0


class RemovedLogs:
    """Directories of deleted and stray logs, on their way out.

    Guarded by `lock`, which is the manager's: the caller holds it, except for `remove_garbage`, which takes it itself.
    """

    def __init__(self, storage: Storage, lock: threading.Lock, clock: Clock) -> None:
        self._storage = storage
        self._lock = lock
        self._clock = clock
        self._leaving: list[LeavingLog] = []
        """Logs whose renaming was refused."""
        self.garbage: list[Garbage] = []
        self._unsynced_dirs: set[LogDir] = set()
        """Log directories in which a renaming may not be durable yet."""

    def hold_up(self, key: PartitionKey, log_dir: LogDir) -> bool:
        """Whether a log that could not be renamed belongs to this partition, or lies in this directory."""
        return any(entry.key == key or entry.log_dir is log_dir for entry in self._leaving)

    def move_away(self, leaving: LeavingLog) -> str:
        """Rename the directory of a log and return its new path; `finish_leaving` repeats a refused renaming.

        Raises:
            StorageFull, StorageError: refused, or the log directory is offline.
        """
        log_dir, path, key, prefix, delay_ms = leaving
        try:
            self.forget_marks(log_dir, key)
            target = unused_path(self._storage, log_dir.path, prefix, *key)
            self._storage.rename(path, target)
        except OSError as error:
            if is_refusal(error):
                self._leaving.append(leaving)
            raise log_dir.judge(error, f"renaming {path}") from error
        self._unsynced_dirs.add(log_dir)
        if prefix == DELETE_PREFIX:
            self.garbage.append(Garbage(log_dir, target, self._clock.now_ms() + delay_ms, delay_ms))
        self._sync_names(log_dir)
        return target

    def finish_leaving(self) -> None:
        """Rename the logs whose renaming was refused."""
        leaving, self._leaving = self._leaving, []
        for entry in leaving:
            if entry.log_dir.offline_reason is None:
                try:
                    self.move_away(entry)
                except RaftlogError as error:
                    logger.warning("a deleted log is not removed yet: %s", error)

    def _sync_names(self, log_dir: LogDir) -> None:
        """Make renamings durable; only then may the renamed directories be removed."""
        try:
            self._storage.sync_dir(log_dir.path)
        except OSError as error:
            reason = log_dir.judge(error, f"fsync of {log_dir.path}")
            if log_dir.offline_reason is not None:
                raise reason from error
            logger.warning("the next housekeeping tries again: %s", reason)
        else:
            self._unsynced_dirs.discard(log_dir)

    def forget_marks(self, log_dir: LogDir, key: PartitionKey) -> None:
        """Remove a log from the checkpoint. A refusal is only logged: the log counts as missing after a restart."""
        try:
            log_dir.update_marks(dict, removed=[key])
        except OSError as error:
            if not is_refusal(error):
                raise
            logger.warning(
                "the checkpoint of %s is not written, and a deleted log stays in it: %s", log_dir.path, error
            )

    def remove_garbage(self, now_ms: int) -> None:
        """Remove the directories that are due and whose new names are durable. Waits for the disk."""
        with self._lock:
            self.finish_leaving()
            for log_dir in list(self._unsynced_dirs):
                with contextlib.suppress(StorageError):  # offline, which has been reported
                    self._sync_names(log_dir)
            # None later than that: the clock may have been set back since.
            garbage = [each._replace(due_ms=min(each.due_ms, now_ms + each.delay_ms)) for each in self.garbage]
            due: list[Garbage] = []
            self.garbage = []
            for each in garbage:
                is_due = each.due_ms <= now_ms and each.log_dir not in self._unsynced_dirs
                (due if is_due else self.garbage).append(each)
        refused = []
        for entry in due:
            log_dir, path, _, _ = entry
            if log_dir.offline_reason is not None:
                continue
            try:
                if self._storage.exists(path):
                    for name in self._storage.list_sizes(path):
                        self._storage.remove(f"{path}/{name}")
                    self._storage.remove_dir(path)
            except OSError as error:
                reason = log_dir.judge(error, f"removing {path}")
                if log_dir.offline_reason is None:
                    logger.warning("the next housekeeping tries again: %s", reason)
                    refused.append(entry)
        with self._lock:
            self.garbage += refused


Progress = Callable[[int, int, int], None]
"""(logs whose partition is known, logs opened, logs in all); damaged ones count too"""
OnDirOffline = Callable[[str, BaseException, Sequence[PartitionLog]], None]


class CorruptLog(NamedTuple):
    """A log that is not served because its files are damaged, or missing (`directory` is None)."""

    log_dir: LogDir
    directory: str | None
    error: CorruptRecordError


class _Identified(NamedTuple):
    """A log's directory that was found at the start, and the partition that it holds."""

    log_dir: LogDir
    path: str
    metadata: PartitionMetadata


class LogManager:
    """The logs of a broker. Thread-safe.

    `open`, `create`, `delete`, `checkpoint`, `run_housekeeping_once` and `close` wait for the disk.
    """

    def __init__(
        self,
        storage: Storage,
        log_dirs: Sequence[str],
        defaults: LogConfig,
        clock: Clock,
        *,
        on_dir_offline: OnDirOffline | None = None,
        cache: SegmentCache | None = None,
        producer_limits: ProducerLimits | None = None,
        threads: int = 1,
    ) -> None:
        """`threads`: how many logs are opened, or made durable at the end, at a time; 1: in the caller's thread."""
        self._threads = threads
        self.on_dir_offline = on_dir_offline
        """Called once for each failed directory with the logs in it, in the thread that met the error."""
        self._storage = storage
        self._defaults: Final = defaults
        self._clock = clock
        self._cache = self.segments = cache or SegmentCache(storage)
        self._producer_limits: Final = producer_limits or ProducerLimits()
        self.most_producers = MOST_PRODUCERS
        self._dirs = [LogDir(storage, path.rstrip("/"), self._dir_failed) for path in dict.fromkeys(log_dirs)]
        self._logs: dict[PartitionKey, PartitionLog] = {}
        self._offline_logs: dict[PartitionKey, PartitionLog] = {}
        self.corrupt_logs: dict[PartitionKey, CorruptLog] = {}
        self._unread_dirs: list[LogDir] = []
        """Directories that failed before their logs were known."""
        self._lock = threading.Lock()
        """Guards the tables; never held while the disk works or another lock is taken."""
        self._log_counts: Counter[LogDir] = Counter()
        """Logs in each directory, online or being made."""
        self._change_lock = threading.Lock()
        """Guards making and deleting logs, which includes `_making` and `_removed`."""
        self._made = threading.Condition(self._change_lock)
        self._making: set[PartitionKey | str] = set()
        """Keys and names of logs that are being made, several at a time: the disk merges their fsyncs.

        A caller that needs one of these waits for `_made`.
        """
        self._removed = RemovedLogs(storage, self._change_lock, clock)
        self._broker_epoch: int | None = None
        self._housekeeping_lock = threading.Lock()
        """Held by a checkpoint or a round of housekeeping, so that `close` waits for its end."""
        self._closing = threading.Event()
        self._closed = False

    # Facts

    def get(self, topic_id: bytes, partition: int) -> PartitionLog | None:
        """Return the log if this broker has it online."""
        return self._logs.get((topic_id, partition))

    def logs(self) -> list[PartitionLog]:
        """Return all logs that are online."""
        with self._lock:
            return list(self._logs.values())

    @property
    def offline_dirs(self) -> dict[str, StorageError]:
        """Path of each log directory that failed to the reason."""
        return {log_dir.path: log_dir.offline_reason for log_dir in self._dirs if log_dir.offline_reason is not None}

    @property
    def times_full(self) -> int:
        """How many operations were refused for want of space, in all log directories."""
        return sum(log_dir.times_full for log_dir in self._dirs)

    @property
    def clean_broker_epoch(self) -> int | None:
        """The broker epoch in which all log directories were last closed cleanly, None if there is no such epoch."""
        epochs = {log_dir.clean_broker_epoch for log_dir in self._dirs}
        return epochs.pop() if len(epochs) == 1 else None

    @property
    def synced_broker_epoch(self) -> int | None:
        """The broker epoch that the last process noted in all log directories (`Served`), None if there is none."""
        epochs = {log_dir.left_by.broker_epoch for log_dir in self._dirs}
        return epochs.pop() if len(epochs) == 1 else None

    @property
    def unsynced_topic_ids(self) -> frozenset[bytes]:
        """The topics whose records the last process may have acknowledged before they were fsynced."""
        return frozenset().union(*(log_dir.left_by.unsynced_topic_ids for log_dir in self._dirs))

    def is_lost(self, topic_id: bytes, partition: int) -> bool:
        """Whether a log is damaged or may lie in an offline directory, so that only a restart can bring it back."""
        key = (topic_id, partition)
        if key in self._logs:
            return False
        return key in self.corrupt_logs or key in self._offline_logs or bool(self._unread_dirs)

    @property
    def directory_ids(self) -> dict[str, str]:
        """Path of each log directory to its directory id."""
        return {log_dir.path: log_dir.directory_id for log_dir in self._dirs}

    def dir_of(self, log: PartitionLog) -> str:
        """Return the path of the log directory that holds `log`."""
        return log.log_dir.path

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise StorageError("the logs are closed: the broker is stopping")

    # Trouble

    def mark_dir_offline(self, path: str, error: BaseException) -> None:
        """Take a log directory offline for good; a second call does nothing.

        Only an error of the operating system does so. A `RaftlogError` was judged where it arose (no space or
        descriptors, a deleted log, or offline already), so it changes nothing.
        """
        if isinstance(error, RaftlogError):
            return
        for log_dir in self._dirs:
            if log_dir.path == path.rstrip("/"):
                log_dir.judge(error, "an operation on it")

    def mark_corrupt(self, log: PartitionLog, error: CorruptRecordError) -> None:
        """Take an online log whose files are damaged out of service, also after a restart.

        It is closed and listed in `corrupt_logs` at once; then this waits for the disk. Does nothing if the log is not
        online any more.
        """
        key = (log.topic_id, log.partition)
        corrupt = CorruptLog(log.log_dir, log.directory, error)
        with self._lock:
            if self._logs.get(key) is not log:
                return
            del self._logs[key]
            self._log_counts[log.log_dir] -= 1
            self.corrupt_logs[key] = corrupt
        logger.error(
            "log is damaged and not served", extra={"event": "log_damaged", "path": log.directory, "error": str(error)}
        )
        log.close()
        with self._change_lock:
            if self.corrupt_logs.get(key) is not corrupt or self._closed:
                return
            try:
                store_damage(self._storage, log.directory, str(error))
            except OSError as refused:  # the next start serves the log until a reader finds the damage again
                reason = log.log_dir.judge(refused, f"writing {log.directory}/{DAMAGED}")
                logger.warning("the damage of %s is not noted on the disk: %s", log.directory, reason)

    def _dir_failed(self, log_dir: LogDir, error: BaseException) -> None:
        with self._lock:
            lost = {key: log for key, log in self._logs.items() if log.log_dir is log_dir}
            for key in lost:
                del self._logs[key]
            self._offline_logs.update(lost)
        if self.on_dir_offline is not None:
            self.on_dir_offline(log_dir.path, error, list(lost.values()))

    # Start

    def open(self, *, cluster_id: str, node_id: int, progress: Progress | None = None) -> None:
        """Lock the log directories and open every log in them.

        A directory that fails is taken offline, a damaged log is listed in `corrupt_logs`; the others are opened.

        Raises:
            LogDirLocked, InvalidConfig, UnsupportedVersion: a directory must not be used; none stays locked.
            StorageError: no directory works, or the process has too few descriptors.
        """
        try:
            in_dirs: list[list[tuple[LogDir, str]]] = []
            for log_dir in self._dirs:
                try:
                    log_dir.open(cluster_id, node_id)
                    logs, leftovers = find_logs(self._storage, log_dir.path)
                    in_dirs.append([(log_dir, path) for path in logs])
                    self._removed.garbage += [Garbage(log_dir, path) for path in leftovers]
                except (OSError, CorruptRecordError) as error:
                    if is_passing(error):
                        raise log_dir.judge(error, f"opening {log_dir.path}") from error
                    log_dir.fail(error, "opening it")
            if all(log_dir.offline_reason is not None for log_dir in self._dirs):
                reasons = "; ".join(str(reason) for reason in self.offline_dirs.values())
                raise StorageError(f"no log directory works: {reasons}")
            # The directories take turns, so that all disks have work from the beginning.
            found = [each for turn in zip_longest(*in_dirs) for each in turn if each is not None]
            told = progress or (lambda identified, opened, total: None)
            identified = self._identify(found, told)
            others = len(found) - len(identified)
            told(len(found), others, len(found))
            # Closed, so that no thread works on once the directories are released.
            with contextlib.closing(self._each(self._open_log, identified)) as opened:
                for number, ((log_dir, _, metadata), log) in enumerate(zip(identified, opened, strict=True), 1):
                    if log is not None:
                        self._add(log_dir, metadata, log)
                    told(len(found), others + number, len(found))
            self._unread_dirs = [log_dir for log_dir in self._dirs if log_dir.offline_reason is not None]
            self._list_missing()
            self._remove_used_marks()
            self.checkpoint()
        except BaseException:
            for log_dir in self._dirs:
                log_dir.release()
            raise

    def _identify(self, found: Sequence[tuple[LogDir, str]], told: Progress) -> list[_Identified]:
        """Return the logs that are to be opened: neither known to be damaged nor claimed by two directories."""
        good: dict[PartitionKey, _Identified] = {}
        for number, (log_dir, path) in enumerate(found):
            told(number, 0, len(found))
            metadata: PartitionMetadata | None = None
            if log_dir.offline_reason is not None:
                continue
            try:
                metadata = load_partition_metadata(self._storage, path)
                if metadata is None:
                    raise CorruptRecordError(f"{path} has lost its {PARTITION_METADATA}")
                key = (metadata.topic_id, metadata.partition)
                corrupt, other = self.corrupt_logs.get(key), good.pop(key, None)
                first = other.path if other is not None else corrupt and corrupt.directory
                if first is not None:
                    raise CorruptRecordError(
                        f"{path} and {first} both claim to be {metadata.topic}-{metadata.partition}"
                    )
                damage = load_damage(self._storage, path)
                if damage is not None:
                    raise CorruptRecordError(
                        f"{damage} (found while the log was online; once {path} is mended, remove {path}/{DAMAGED})"
                    )
                good[key] = _Identified(log_dir, path, metadata)
            except (CorruptRecordError, OSError) as error:
                self._cannot_open(log_dir, path, metadata, error)
        return list(good.values())

    def _open_log(self, found: _Identified) -> PartitionLog | None:
        """Recover a log; None: it cannot be opened, which was reported. Several at a time."""
        log_dir, path, metadata = found
        if log_dir.offline_reason is not None:
            return None
        try:
            return self._recover(log_dir, path, metadata, self._defaults, was_clean=log_dir.was_clean)
        except (CorruptRecordError, OSError) as error:
            self._cannot_open(log_dir, path, metadata, error)
            return None

    def _add(self, log_dir: LogDir, metadata: PartitionMetadata, log: PartitionLog) -> None:
        """Put a log online, unless another thread has taken its directory offline."""
        with self._lock:  # which `_dir_failed` takes after the directory has its reason
            if log_dir.offline_reason is None:
                self._logs[metadata.topic_id, metadata.partition] = log
                self._log_counts[log_dir] += 1

    def _cannot_open(
        self, log_dir: LogDir, path: str, metadata: PartitionMetadata | None, error: CorruptRecordError | OSError
    ) -> None:
        """List a log as damaged, or take its directory offline.

        Raises:
            StorageError: the process has too few descriptors or too little memory, which says nothing about the disk.
        """
        if isinstance(error, OSError):
            if is_passing(error):
                raise log_dir.judge(error, f"opening {path}") from error
            log_dir.fail(error, f"opening {path}")
            return
        logger.error("log is damaged and not served", extra={"event": "log_damaged", "path": path, "error": str(error)})
        if metadata is None:
            log_dir.fail(error, f"opening {path}")
        else:
            self.corrupt_logs[metadata.topic_id, metadata.partition] = CorruptLog(log_dir, path, error)

    def _each(self, work: Callable[[T], R], items: Sequence[T]) -> Generator[R]:
        """Yield the results in order. Several are at work at a time, as each waits for the disk most of the time."""
        if self._threads == 1:
            yield from map(work, items)
            return
        with ThreadPoolExecutor(self._threads, thread_name_prefix="recovery") as pool:
            yield from pool.map(work, items)

    def _list_missing(self) -> None:
        """List the logs as missing that a checkpoint names and no directory has."""
        if self._unread_dirs:
            return  # they may lie there, and `is_lost` covers them
        for log_dir in self._dirs:
            for key in sorted(log_dir.listed_logs - self._logs.keys() - self.corrupt_logs.keys()):
                self.corrupt_logs[key] = self._missing(log_dir, key, f"which a checkpoint in {log_dir.path} lists")

    def _missing(self, log_dir: LogDir, key: PartitionKey, why: str) -> CorruptLog:
        error = CorruptRecordError(
            f"the log of partition {key[1]} of topic id {key[0].hex()}, {why}, is missing; put its directory back and "
            f"restart the broker. Where no other replica has its records and they are given up, make an empty file "
            f"{log_dir.path}/TOPIC-PARTITION{BEGIN_EMPTY_SUFFIX} and restart"
        )
        logger.warning("log is missing", extra={"event": "log_missing", "path": log_dir.path, "error": str(error)})
        return CorruptLog(log_dir, None, error)

    def _remove_used_marks(self) -> None:
        """Remove the marks of logs given up that have been begun anew since."""
        for log in self._logs.values():
            self._remove_given_up_marks(log.topic, log.partition)

    def _recover(
        self,
        log_dir: LogDir,
        path: str,
        metadata: PartitionMetadata,
        config: LogConfig,
        *,
        was_clean: bool = False,
    ) -> PartitionLog:
        marks = log_dir.marks_of((metadata.topic_id, metadata.partition))
        now_ms = self._clock.now_ms()
        recovered = recover_log(
            self._storage,
            path,
            marks,
            config.index_interval_bytes,
            self._producer_limits,
            now_ms,
            was_clean=was_clean,
        )
        return PartitionLog(metadata, log_dir, path, config, recovered, self._cache, now_ms)

    def serve(self, broker_epoch: int) -> None:
        """Note in all log directories that this process serves from them; a refusal is repeated with each checkpoint.

        Call it before a replica counts for anything. Waits for the disk.
        """
        with self._housekeeping_lock:
            self._broker_epoch = broker_epoch
            for log_dir in self._dirs:
                if log_dir.offline_reason is None:
                    try:
                        log_dir.serve(broker_epoch)
                    except OSError as error:
                        reason = log_dir.judge(error, "noting the broker epoch")
                        logger.warning("an unclean end would count as a loss of records: %s", reason)

    def note_unsynced(self, log: PartitionLog) -> None:
        """Let records of the log's topic count before they are fsynced, once its directory says so. Waits for the disk.

        If the disk refuses, the log is fsynced as with flush.messages=1, and the next checkpoint tries again.
        """
        try:
            log.log_dir.note_unsynced({log.topic_id})
        except OSError as error:
            logger.warning("%r is fsynced at every append: %s", log, log.log_dir.judge(error, "noting its topic"))

    # Making and removing logs

    def create(
        self,
        topic: str,
        topic_id: bytes,
        partition: int,
        config: LogConfig | None = None,
        *,
        is_new: bool = False,
        is_elsewhere: bool = False,
    ) -> PartitionLog:
        """Make an empty log, durably, in the directory with the fewest; if the log is online already, return it.

        `is_new`: the partition was just created, so that it cannot lie in a log directory that was offline from the
        start. Otherwise no log is made while such a directory exists. `is_elsewhere`: another broker leads with all its
        records, so that an empty log does no harm where a lost checkpoint may have listed one.

        Raises:
            CorruptRecordError: the log exists and is damaged, or is missing.
            StorageFull: no space.
            StorageError: the log lies in an offline directory, no directory works, or descriptors are lacking. If
                another attempt can succeed, it continues where this one stopped.
        """
        key, name = (topic_id, partition), f"{topic}-{partition}"
        with self._change_lock:
            self._await_making(key, name)
            self._check_open()
            present = self._logs.get(key)
            if present is not None:
                return present
            log_dir = self._dir_for(topic, key, is_new=is_new, is_elsewhere=is_elsewhere)
            self._making |= {key, name}
            self._log_counts[log_dir] += 1
        log: PartitionLog | None = None
        try:
            log = self._make(log_dir, PartitionMetadata(topic_id, topic, partition), config or self._defaults)
        finally:
            with self._change_lock:
                self._making -= {key, name}
                with self._lock:
                    if log is None:
                        self._log_counts[log_dir] -= 1
                    else:
                        self._logs[key] = log
                self._made.notify_all()
        self._remove_given_up_marks(topic, partition)
        return log

    def _await_making(self, *keys: PartitionKey | str) -> None:
        while not self._making.isdisjoint(keys):
            self._made.wait()

    def _dir_for(self, topic: str, key: PartitionKey, *, is_new: bool, is_elsewhere: bool) -> LogDir:
        """Return the directory in which to make a log, if it may be made."""
        what = f"{topic}-{key[1]}"
        if key in self.corrupt_logs:
            raise self.corrupt_logs[key].error
        if self._unread_dirs and not is_new:
            raise StorageError(
                f"{what} may lie in {self._unread_dirs[0].path}, which is offline; "
                "an empty log elsewhere would hide its records"
            )
        forgetful = next((log_dir for log_dir in self._dirs if log_dir.checkpoint_lost), None)
        if forgetful is not None and not (is_new or is_elsewhere or self.is_given_up(topic, key[1])):
            why = f"which the lost checkpoint of {forgetful.path} may have listed"
            self.corrupt_logs[key] = self._missing(forgetful, key, why)
            raise self.corrupt_logs[key].error
        if key in self._offline_logs:
            offline = self._offline_logs[key].log_dir.offline_reason
            assert offline is not None
            raise offline
        self._removed.finish_leaving()
        log_dir = self._emptiest_dir()
        if self._removed.hold_up(key, log_dir):
            raise StorageError(f"deleted logs in {log_dir.path} could not be renamed yet; try again later")
        return log_dir

    def _make(self, log_dir: LogDir, metadata: PartitionMetadata, config: LogConfig) -> PartitionLog:
        key = (metadata.topic_id, metadata.partition)
        try:
            if log_dir.marks_of(key) is not None:
                log_dir.update_marks(dict, removed=[key])
            path = make_log(self._storage, log_dir.path, metadata)
            return self._recover(log_dir, path, metadata, config)
        except OSError as error:
            raise log_dir.judge(error, f"making the log of {metadata.topic}-{metadata.partition}") from error

    def _emptiest_dir(self) -> LogDir:
        working = [log_dir for log_dir in self._dirs if log_dir.offline_reason is None]
        if not working:
            raise StorageError("no log directory works: " + "; ".join(map(str, self.offline_dirs.values())))
        return min(working, key=self._log_counts.__getitem__)

    def delete(self, topic_id: bytes, partition: int) -> bool:
        """Delete a log, damaged or not; return whether this broker had it.

        Housekeeping removes its files, `file.delete.delay.ms` later at the earliest.

        Raises:
            StorageError: the log directory is offline, or descriptors are lacking.
            StorageFull: no space for the new name. In either case the log is closed, and housekeeping tries again.
        """
        taken = self._take_away(topic_id, partition, DELETE_PREFIX)
        return taken is not None or self._offline_logs.pop((topic_id, partition), None) is not None

    def is_given_up(self, topic: str, partition: int) -> bool:
        """Whether an operator lets a damaged or missing log begin anew, without its records. Raises OSError."""
        return any(self._storage.exists(path) for path in self._given_up_marks(topic, partition))

    def _given_up_marks(self, topic: str, partition: int) -> list[str]:
        return [f"{d.path}/{topic}-{partition}{BEGIN_EMPTY_SUFFIX}" for d in self._dirs if d.offline_reason is None]

    def _remove_given_up_marks(self, topic: str, partition: int) -> None:
        for path in self._given_up_marks(topic, partition):
            with contextlib.suppress(OSError):  # the next start tries again
                if self._storage.exists(path):
                    self._storage.remove(path)

    def set_aside(self, topic_id: bytes, partition: int) -> str | None:
        """Take a log out of the broker: rename its directory and return the new path, None if it has no directory.

        This broker never opens or removes the directory again. A missing log counts as missing no longer.

        Raises:
            StorageError, StorageFull: as `delete`.
        """
        return self._take_away(topic_id, partition, STRAY_PREFIX)

    def _take_away(self, topic_id: bytes, partition: int, prefix: str) -> str | None:
        key = (topic_id, partition)
        with self._change_lock:
            self._await_making(key)
            self._check_open()
            log = self._logs.get(key)
            corrupt = self.corrupt_logs.get(key)
            found = log or corrupt
            if found is None:
                return None
            log_dir, path = found.log_dir, found.directory
            with self._lock:
                if self._logs.pop(key, None) is not None:
                    self._log_counts[log_dir] -= 1
                self.corrupt_logs.pop(key, None)
            if log is not None:
                log.close()
            if path is None:
                for each in self._dirs:
                    if each.offline_reason is None and each.marks_of(key) is not None:
                        self._removed.forget_marks(each, key)
                return None
            delay_ms = (self._defaults if log is None else log.config).file_delete_delay_ms
            return self._removed.move_away(LeavingLog(log_dir, path, key, prefix, delay_ms))

    # Housekeeping

    def checkpoint(self) -> None:
        """Write log starts, recovery points and high watermarks, so that the next start has little to check.

        A log whose high watermark is ahead of its last fsync (flush.messages above 1) is flushed first: records that
        the checkpoint calls committed must be on the disk. A directory without space or descriptors keeps its old
        checkpoint. Does nothing after `close`.
        """
        with self._housekeeping_lock:
            for log_dir in self._dirs:
                if log_dir.offline_reason is None and not self._closing.is_set():
                    self._checkpoint_dir(log_dir)

    def _checkpoint_dir(self, log_dir: LogDir) -> bool:
        logs = []
        for log in self.logs():
            if log.log_dir is not log_dir:
                continue
            try:
                log.store_indexes()
                log.store_producers()
                if log.high_watermark > log.flushed_end_offset:
                    log.flush()
                logs.append(log)
            except RaftlogError as error:
                if log_dir.offline_reason is not None:
                    return False
                logger.warning("no checkpoint of %r: %s", log, error)
            except Exception:  # a bug in one log must not take the others' checkpoints along
                logger.exception("no checkpoint of %r", log)
        return self._store_marks(log_dir, logs)

    def _checkpoint_making_room(self, log_dir: LogDir, logs: Sequence[PartitionLog]) -> bool:
        """Write the checkpoint; if the disk is too full for it, in place of indexes that the logs can spare.

        Otherwise a full disk would stay full: retention removes no file before the checkpoint has the new log start.
        """
        while True:
            times_full = log_dir.times_full
            if self._checkpoint_dir(log_dir):
                return True
            if log_dir.times_full == times_full or self._closing.is_set():
                return False
            has_room = False
            for log in logs:
                with self._reporting(log):
                    has_room |= log.make_room()
            if not has_room:
                return False

    def _store_marks(self, log_dir: LogDir, logs: Sequence[PartitionLog]) -> bool:
        try:
            self._store_served(log_dir)
            log_dir.update_marks(lambda: {(log.topic_id, log.partition): log.marks() for log in logs if not log.closed})
            if not self._unread_dirs:  # otherwise the old list names logs that this process cannot know
                log_dir.store_other_logs(self._logs_outside(log_dir))
        except OSError as error:
            reason = log_dir.judge(error, "writing the checkpoint")
            if log_dir.offline_reason is None:
                logger.warning("the old checkpoint of %s stays: %s", log_dir.path, reason)
            return False
        return True

    def _store_served(self, log_dir: LogDir) -> None:
        """Bring the list of topics with records that count before an fsync up to date. Raises OSError."""
        if self._broker_epoch is not None:
            log_dir.serve(self._broker_epoch)
        unsynced = {log.topic_id for log in self.logs() if log.log_dir is log_dir and log.config.flush_messages > 1}
        log_dir.note_unsynced(unsynced)
        log_dir.forget_unsynced(log_dir.unsynced_topic_ids - unsynced, self._is_synced)

    def _is_synced(self, topic_id: bytes) -> bool:
        with self._lock:
            known = {key[0] for logs in (self._offline_logs, self.corrupt_logs) for key in logs}
        return topic_id not in known and not any(
            log.topic_id == topic_id and (log.config.flush_messages > 1 or log.flushed_end_offset < log.log_end_offset)
            for log in self.logs()
        )

    def _logs_outside(self, log_dir: LogDir) -> frozenset[PartitionKey]:
        """Return the logs that this directory lists for the others, and all missing ones, so that they stay known."""
        with self._lock:
            dirs = {key: log.log_dir for logs in (self._offline_logs, self._logs) for key, log in logs.items()}
            corrupt = self.corrupt_logs.copy()
        dirs.update((key, each.log_dir) for key, each in corrupt.items())
        missing = frozenset(key for key, each in corrupt.items() if each.directory is None)
        return missing.union(key for key, holder in dirs.items() if holder is not log_dir)

    def checkpoint_marks(self) -> None:
        """Write the marks that have moved: one small file for each directory, without a flush.

        So a high watermark does not go back far with a crash, and a new leader begins close to where the old one was.
        """
        with self._housekeeping_lock:
            for log_dir in self._dirs:
                if log_dir.offline_reason is None and not self._closing.is_set():
                    self._store_marks(log_dir, [log for log in self.logs() if log.log_dir is log_dir])

    def run_housekeeping_once(self, now_ms: int) -> None:
        """Roll by time, apply retention, checkpoint, and remove files that are due. Ends early when closing."""
        with self._housekeeping_lock:
            for log_dir in self._dirs:
                if log_dir.offline_reason is not None or self._closing.is_set():
                    continue
                here = [log for log in self.logs() if log.log_dir is log_dir]
                for log in here:
                    if self._closing.is_set():
                        return
                    with self._reporting(log):
                        log.maybe_roll(now_ms)
                        log.apply_retention(now_ms)
                        log.expire_producers(now_ms)
                if self._checkpoint_making_room(log_dir, here):
                    for log in here:
                        with self._reporting(log):
                            log.sweep(now_ms)
            if not self._closing.is_set():
                self._forget_idle_producers(now_ms)
                self._removed.remove_garbage(now_ms)

    def _forget_idle_producers(self, now_ms: int) -> None:
        """Have the logs with the most producers forget idle ones, if all logs together remember too many."""
        counts = {log: len(log.producers) for log in self.logs()}
        if sum(counts.values()) <= self.most_producers:
            return
        keep = most_of_each(counts.values(), self.most_producers)
        forgotten = 0
        for log, count in counts.items():
            if count > keep and not self._closing.is_set():
                with self._reporting(log):
                    forgotten += log.forget_idle_producers(keep, now_ms)
        if forgotten:
            logger.info(
                "idle producers were forgotten before they expired",
                extra={"event": "producers_forgotten", "count": forgotten, "of": sum(counts.values())},
            )

    @contextlib.contextmanager
    def _reporting(self, log: PartitionLog) -> Iterator[None]:
        """Log one log's error, so that the others go on; an offline directory was reported already."""
        try:
            yield
        except RaftlogError as error:
            if log.log_dir.offline_reason is None and not log.closed:
                logger.warning("housekeeping of %r: %s", log, error)
        except Exception:  # a bug in one log must not take the others along
            logger.exception("housekeeping of %r failed", log)

    # End

    def _make_durable(self, log: PartitionLog) -> None:
        with self._reporting(log):
            log.flush()
            log.store_indexes(closing=True)
            log.store_producers(closing=True)

    def close(self, *, clean: bool = True, broker_epoch: int | None = None) -> None:
        """Flush and checkpoint everything, mark the shutdown as clean, unlock. `clean=False` only unlocks.

        `broker_epoch` goes into the mark; a broker that registers with it has lost no record since.

        This waits for calls under way in other threads; later calls do nothing or raise `StorageError`.
        """
        self._closing.set()
        with self._housekeeping_lock, self._change_lock:
            while self._making:
                self._made.wait()
            if self._closed:
                return
            self._closed = True
            if clean:
                for _ in self._each(self._make_durable, self.logs()):
                    pass
            stored = [clean and d.is_held and d.offline_reason is None and self._checkpoint_dir(d) for d in self._dirs]
            for log in self.logs():
                log.close()
            for log_dir, is_stored in zip(self._dirs, stored, strict=True):
                is_dirty = any(log.needs_flush for log in self.logs() if log.log_dir is log_dir)
                log_dir.close(clean=is_stored and not is_dirty, broker_epoch=broker_epoch)
