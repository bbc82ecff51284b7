"""One of `log.dirs`: its lock, whose it is, its offset checkpoint, and whether it still works.

    .lock                 flock, held as long as the broker runs
    meta.properties       cluster, node and directory id (checkpoints.py)
    clean-shutdown        there only between a clean shutdown and the next start; has the broker epoch that ended
    offset-checkpoint     log start, recovery point and high watermark of each log (checkpoints.py)
    and the logs          layout.py

States: online -> offline, at the first error that `judge` finds final, and for good.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from broker.log.checkpoints import (
    CLEAN_SHUTDOWN,
    Marks,
    MetaProperties,
    PartitionKey,
    load_clean_shutdown,
    load_marks,
    load_meta_properties,
    store_clean_shutdown,
    store_marks,
    store_meta_properties,
)
from broker.log.faults import full, is_full, is_passing, passing
from broker.log.storage import DirectoryLock, Storage, make_dir_durably
from raftlog.errors import InvalidConfig, RaftlogError, StorageError

logger = logging.getLogger(__name__)

LOCK_FILE: Final = ".lock"


class LogDirLocked(StorageError):
    """Another process uses the log directory."""


class LogDir:
    """A log directory. Thread-safe where it is shared: marks and the state."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        on_offline: Callable[[LogDir, BaseException], None] = lambda _dir, _error: None,
    ) -> None:
        self.storage = storage
        self.path = path
        self.directory_id = ""
        self.was_clean = False
        """Whether the last process to use it went down cleanly."""
        self.clean_broker_epoch: int | None = None
        """The broker epoch of that process, if the mark that it left says so."""
        self.offline_reason: StorageError | None = None
        self._on_offline = on_offline
        self._lock_file: DirectoryLock | None = None
        self._marks: dict[PartitionKey, Marks] = {}
        self._marks_stored = False
        self._marks_lock = threading.Lock()
        self._state_lock = threading.Lock()

    def open(self, cluster_id: str, node_id: int) -> None:
        """Take the directory: lock it, check that it is ours, read the checkpoint, remove the clean-shutdown mark.

        Raises:
            LogDirLocked: another process has it.
            InvalidConfig: it belongs to another cluster or node.
            UnsupportedVersion: a newer raftlog wrote it.
            CorruptRecordError: one of its own files is damaged.
            OSError: the disk.
        """
        make_dir_durably(self.storage, self.path)
        try:
            self._lock_file = self.storage.lock(f"{self.path}/{LOCK_FILE}")
        except BlockingIOError:
            raise LogDirLocked(
                f"log directory {self.path} is in use by another process; stop it, or give this broker its own log.dirs"
            ) from None
        self._check_owner(cluster_id, node_id)
        marks = load_marks(self.storage, self.path)
        self._marks = marks or {}
        self._marks_stored = marks is not None
        mark = f"{self.path}/{CLEAN_SHUTDOWN}"
        self.was_clean = self.storage.exists(mark)
        if self.was_clean:
            self.clean_broker_epoch = load_clean_shutdown(self.storage, self.path)
            self.storage.remove(mark)
            self.storage.sync_dir(self.path)

    def _check_owner(self, cluster_id: str, node_id: int) -> None:
        meta = load_meta_properties(self.storage, self.path)
        if meta is None:
            names = self.storage.list_sizes(self.path)
            logs = [
                n
                for n, size in names.items()
                if size < 0 and self.storage.exists(f"{self.path}/{n}/partition.metadata")
            ]
            if logs:
                raise InvalidConfig(
                    f"log directory {self.path} holds logs ({logs[0]}, …) but no meta.properties: "
                    "it is not known whose they are; put the file back, or use an empty directory"
                )
            meta = MetaProperties(cluster_id, node_id, uuid.uuid4().hex)
            store_meta_properties(self.storage, self.path, meta)
        if (meta.cluster_id, meta.node_id) != (cluster_id, node_id):
            raise InvalidConfig(
                f"log directory {self.path} belongs to node {meta.node_id} of cluster {meta.cluster_id!r}, "
                f"this is node {node_id} of cluster {cluster_id!r}; correct log.dirs"
            )
        self.directory_id = meta.directory_id

    @property
    def is_held(self) -> bool:
        """Whether the directory is locked for us."""
        return self._lock_file is not None

    def close(self, *, clean: bool, broker_epoch: int | None = None) -> None:
        """Let the directory go; `clean` leaves the mark, so everything must have been flushed and checkpointed."""
        if clean and self.offline_reason is None:
            try:
                store_clean_shutdown(self.storage, self.path, broker_epoch)
            except OSError as error:  # the next start takes a little longer, that is all
                logger.warning("no clean-shutdown mark in %s: %s", self.path, error)
        self.release()

    def release(self) -> None:
        """Unlock. From then on the checkpoint is somebody else's: `update_marks` refuses."""
        with self._marks_lock:
            if self._lock_file is not None:
                self._lock_file.release()
                self._lock_file = None

    # Marks

    def marks_of(self, key: PartitionKey) -> Marks | None:
        """Return what the checkpoint says of a log, None when it does not know it."""
        return self._marks.get(key)

    def update_marks(
        self, changes: Callable[[], Mapping[PartitionKey, Marks]], removed: Iterable[PartitionKey] = ()
    ) -> None:
        """Make the marks that `changes` returns durable, if they differ; the other logs' stay as they are.

        `changes` is asked under the lock, so that no truncation comes between its answer and the disk.

        Raises:
            OSError: the old checkpoint is still in place.
            StorageError: the directory was released.
        """
        with self._marks_lock:
            if not self.is_held:
                raise StorageError(f"log directory {self.path} is not ours any more, the broker has closed it")
            marks = {**self._marks, **changes()}
            for key in removed:
                marks.pop(key, None)
            if marks == self._marks and self._marks_stored:
                return
            self._marks_stored = False  # after an error in the middle it may be either that stands there
            store_marks(self.storage, self.path, marks)
            self._marks = marks
            self._marks_stored = True

    # Trouble

    def judge(self, error: BaseException, doing: str, wanted_bytes: int = 0) -> RaftlogError:
        """Return what to raise for an error of the disk.

        A directory that refuses (no space, no descriptors, no memory) works again later, and this changes nothing;
        any other error takes it offline for good.
        """
        if is_full(error):
            return full(self.path, wanted_bytes)
        if is_passing(error):
            return passing(error, doing)
        return self.fail(error, doing)

    def fail(self, error: BaseException, doing: str) -> StorageError:
        """Take the directory offline for good and return what to raise; the first error is the one that counts."""
        with self._state_lock:
            first = self.offline_reason is None
            if self.offline_reason is None:
                self.offline_reason = StorageError(
                    f"log directory {self.path} is offline: {doing} failed: {error}; "
                    "repair the disk and restart the broker"
                )
            reason = self.offline_reason
        if first:
            logger.error(
                "log directory goes offline",
                extra={"event": "log_dir_offline", "path": self.path, "doing": doing, "error": str(error)},
            )
            self._on_offline(self, error)
        return reason
