"""Directories of logs that were taken away: renamed, at once or when the disk lets it, and removed by housekeeping.

    taken away  -- renamed -->  garbage  -- names durable, next housekeeping -->  removed
                -- renaming refused -->  leaving  -- tried again: housekeeping, or before a log is made -->  garbage

What is set aside (`STRAY_PREFIX`) is renamed likewise and never removed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import NamedTuple

from broker.log.checkpoints import PartitionKey
from broker.log.faults import is_refusal
from broker.log.layout import DELETE_PREFIX, remove_log, unused_path
from broker.log.log_dir import LogDir
from broker.log.storage import Storage
from raftlog.errors import RaftlogError, StorageError

logger = logging.getLogger(__name__)


class LeavingLog(NamedTuple):
    """A closed log whose directory is to be renamed."""

    log_dir: LogDir
    path: str
    key: PartitionKey
    prefix: str


class RemovedLogs:
    """Guarded by `lock`, the manager's: whoever calls holds it, but for `remove_garbage`, which takes it itself."""

    def __init__(self, storage: Storage, lock: threading.Lock) -> None:
        self._storage = storage
        self._lock = lock
        self._leaving: list[LeavingLog] = []
        """Taken away, but the renaming was refused."""
        self._garbage: list[tuple[LogDir, str]] = []
        """Directories that were renamed to be removed."""
        self._unsynced_dirs: set[LogDir] = set()
        """Those in which a renaming may not be durable yet."""

    def add_garbage(self, log_dir: LogDir, path: str) -> None:
        """Take over what an earlier process has renamed."""
        self._garbage.append((log_dir, path))

    def hold_up(self, key: PartitionKey, log_dir: LogDir) -> bool:
        """Whether a log that could not be renamed is of this partition, or in this directory."""
        return any(entry.key == key or entry.log_dir is log_dir for entry in self._leaving)

    def move_away(self, leaving: LeavingLog) -> str:
        """Rename the directory of a log and return its new path; what is refused is tried again by `finish_leaving`.

        Raises:
            StorageFull, StorageError: refused, or the log directory is offline.
        """
        log_dir, path, key, prefix = leaving
        try:
            self._forget_marks(log_dir, key)
            target = unused_path(self._storage, log_dir.path, prefix, *key)
            self._storage.rename(path, target)
        except OSError as error:
            if is_refusal(error):
                self._leaving.append(leaving)
            raise log_dir.judge(error, f"renaming {path}") from error
        self._unsynced_dirs.add(log_dir)
        if prefix == DELETE_PREFIX:
            self._garbage.append((log_dir, target))
        self._sync_names(log_dir)
        return target

    def finish_leaving(self) -> None:
        """Rename what could not be renamed when it was taken away."""
        leaving, self._leaving = self._leaving, []
        for entry in leaving:
            if entry.log_dir.offline_reason is None:
                try:
                    self.move_away(entry)
                except RaftlogError as error:
                    logger.warning("a deleted log is not removed yet: %s", error)

    def _sync_names(self, log_dir: LogDir) -> None:
        """Make renamings durable; until they are, nothing that was renamed is removed."""
        try:
            self._storage.sync_dir(log_dir.path)
        except OSError as error:
            reason = log_dir.judge(error, f"fsync of {log_dir.path}")
            if log_dir.offline_reason is not None:
                raise reason from error
            logger.warning("the next housekeeping tries again: %s", reason)
        else:
            self._unsynced_dirs.discard(log_dir)

    def _forget_marks(self, log_dir: LogDir, key: PartitionKey) -> None:
        try:
            log_dir.update_marks(dict, removed=[key])
        except OSError as error:
            if not is_refusal(error):
                raise
            logger.warning("no checkpoint of %s; a deleted log stays in it: %s", log_dir.path, error)

    def remove_garbage(self) -> None:
        """Remove the directories whose new names are durable. Waits for the disk."""
        with self._lock:
            self.finish_leaving()
            for log_dir in list(self._unsynced_dirs):
                with contextlib.suppress(StorageError):  # offline, which has been reported
                    self._sync_names(log_dir)
            garbage = [entry for entry in self._garbage if entry[0] not in self._unsynced_dirs]
            self._garbage = [entry for entry in self._garbage if entry[0] in self._unsynced_dirs]
        left = []
        for log_dir, path in garbage:
            if log_dir.offline_reason is not None:
                continue
            try:
                remove_log(self._storage, path)
            except OSError as error:
                reason = log_dir.judge(error, f"removing {path}")
                if log_dir.offline_reason is None:
                    logger.warning("the next housekeeping tries again: %s", reason)
                    left.append((log_dir, path))
        with self._lock:
            self._garbage += left
