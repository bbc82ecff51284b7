"""Which logs a broker has, and in what state each of them is; the ground floor of `LogManager`.

    log_table.py      the tables, and what takes logs out of service
    removed_logs.py   directories of logs that were taken away
    manager.py        opening, making, housekeeping

A log is in one of these states:

    online    in `logs()`
    corrupt   its own files are damaged: in `corrupt_logs`, not opened, never repaired by itself
    offline   its log directory failed: named by `offline_dirs`
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from broker.clock import Clock
from broker.log.checkpoints import DAMAGED, PartitionKey, PartitionMetadata, store_damage
from broker.log.config import LogConfig
from broker.log.log_dir import LogDir
from broker.log.partition_log import PartitionLog
from broker.log.producer_state import ProducerLimits
from broker.log.removed_logs import RemovedLogs
from broker.log.segment_cache import SegmentCache
from broker.log.storage import Storage
from raftlog.errors import CorruptRecordError, RaftlogError, StorageError

logger = logging.getLogger(__name__)

OnDirOffline = Callable[[str, BaseException, Sequence[PartitionLog]], None]


class CorruptLog(NamedTuple):
    """A log that is not served because its files are damaged."""

    metadata: PartitionMetadata
    directory: str
    error: CorruptRecordError


class LogTable:
    """The logs of a broker, by state. Thread-safe."""

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
    ) -> None:
        self.on_dir_offline = on_dir_offline
        """Called once for a directory, in the thread that met the error, with the logs that were in it."""
        self._storage = storage
        self._defaults: Final = defaults
        self._clock = clock
        self._cache = self.segments = cache or SegmentCache(storage)
        self._producer_limits: Final = producer_limits or ProducerLimits()
        self._dirs = [LogDir(storage, path.rstrip("/"), self._dir_failed) for path in dict.fromkeys(log_dirs)]
        self._logs: dict[PartitionKey, PartitionLog] = {}
        self._offline_logs: dict[PartitionKey, PartitionLog] = {}
        self.corrupt_logs: dict[PartitionKey, CorruptLog] = {}
        self._unread_dirs: list[LogDir] = []
        """Failed before it was known which logs are in them."""
        self._lock = threading.Lock()
        """Guards the tables; never held while the disk works or another lock is taken."""
        self._log_counts: Counter[LogDir] = Counter()
        """Logs in each directory, online or being made."""
        self._change_lock = threading.Lock()
        """Guards which logs come and go, and the names of what goes: what follows here."""
        self._made = threading.Condition(self._change_lock)
        self._making: set[PartitionKey | str] = set()
        """Keys and names of logs that are being made, several at a time: the disk merges their fsyncs.

        Who wants one of these waits for `_made`.
        """
        self._removed = RemovedLogs(storage, self._change_lock)
        self._housekeeping_lock = threading.Lock()
        """Held by a checkpoint or a round of housekeeping, so that `close` waits for its end."""
        self._closing = threading.Event()
        self._closed = False

    # Facts

    def get(self, topic_id: bytes, partition: int) -> PartitionLog | None:
        """Return the log if it is here and online."""
        return self._logs.get((topic_id, partition))

    def logs(self) -> list[PartitionLog]:
        """Return all logs that are online."""
        with self._lock:
            return list(self._logs.values())

    @property
    def offline_dirs(self) -> dict[str, StorageError]:
        """Log directories that failed, with the reason."""
        return {log_dir.path: log_dir.offline_reason for log_dir in self._dirs if log_dir.offline_reason is not None}

    @property
    def unclean_dirs(self) -> list[str]:
        """Log directories whose last broker did not go down cleanly."""
        return [log_dir.path for log_dir in self._dirs if not log_dir.was_clean]

    @property
    def clean_broker_epoch(self) -> int | None:
        """The broker epoch in which every log directory was last left cleanly; None when one was not."""
        epochs = {log_dir.clean_broker_epoch for log_dir in self._dirs}
        return epochs.pop() if len(epochs) == 1 else None

    def is_lost(self, topic_id: bytes, partition: int) -> bool:
        """Whether a log is damaged, or lies (or may lie) in a directory that is offline: not before a restart here."""
        key = (topic_id, partition)
        if key in self._logs:
            return False
        return key in self.corrupt_logs or key in self._offline_logs or bool(self._unread_dirs)

    @property
    def directory_ids(self) -> dict[str, str]:
        """Path of each log directory to the id that is written in it."""
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

        A `RaftlogError` has been judged where it arose (no space or descriptors, a log that was deleted, or offline
        already), so it changes nothing: what takes a directory offline is what the operating system said of the disk.
        """
        if isinstance(error, RaftlogError):
            return
        for log_dir in self._dirs:
            if log_dir.path == path.rstrip("/"):
                log_dir.judge(error, "an operation on it")

    def mark_corrupt(self, log: PartitionLog, error: CorruptRecordError) -> None:
        """Take an online log whose files turned out to be damaged out of service, after a restart too.

        It is closed and listed in `corrupt_logs`, at once; what follows waits for the disk. One that is not online any
        more is passed over.
        """
        key = (log.topic_id, log.partition)
        corrupt = CorruptLog(PartitionMetadata(log.topic_id, log.topic, log.partition), log.directory, error)
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
            except OSError as refused:  # then the next start does not know, until somebody complains again
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
