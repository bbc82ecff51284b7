"""All logs of a broker: several log directories, opening them after any kind of stop, and housekeeping.

`log_table.py` says in which states a log can be.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from broker.log.checkpoints import (
    DAMAGED,
    PARTITION_METADATA,
    PartitionKey,
    PartitionMetadata,
    load_damage,
    load_partition_metadata,
)
from broker.log.config import LogConfig
from broker.log.faults import is_passing
from broker.log.layout import (
    DELETE_PREFIX,
    STRAY_PREFIX,
    find_logs,
    make_log,
)
from broker.log.log_dir import LogDir
from broker.log.log_table import CorruptLog, LogTable
from broker.log.partition_log import PartitionLog
from broker.log.recovery import recover_log
from broker.log.removed_logs import LeavingLog
from raftlog.errors import CorruptRecordError, RaftlogError, StorageError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, str], None]
"""(logs opened, logs in all, directory of the one just opened)"""


class LogManager(LogTable):
    """Thread-safe. `open`, `create`, `delete`, `checkpoint`, `run_housekeeping_once` and `close` wait for the disk."""

    # Start

    def open(self, *, cluster_id: str, node_id: int, progress: Progress | None = None) -> None:
        """Take the log directories and open every log in them.

        A directory that fails is taken offline, a log that is damaged is listed in `corrupt_logs`; the others go on.

        Raises:
            LogDirLocked, InvalidConfig, UnsupportedVersion: a directory that must not be used; nothing stays locked.
            StorageError: no directory works, or there are not enough descriptors.
        """
        try:
            found: list[tuple[LogDir, str]] = []
            for log_dir in self._dirs:
                try:
                    log_dir.open(cluster_id, node_id)
                    logs, leftovers = find_logs(self._storage, log_dir.path)
                    found += [(log_dir, path) for path in logs]
                    for path in leftovers:
                        self._removed.add_garbage(log_dir, path)
                except (OSError, CorruptRecordError) as error:
                    if is_passing(error):
                        raise log_dir.judge(error, f"opening {log_dir.path}") from error
                    log_dir.fail(error, "opening it")
            if all(log_dir.offline_reason is not None for log_dir in self._dirs):
                reasons = "; ".join(str(reason) for reason in self.offline_dirs.values())
                raise StorageError(f"no log directory works: {reasons}")
            for number, (log_dir, path) in enumerate(found, 1):
                if log_dir.offline_reason is None:
                    self._open_log(log_dir, path)
                if progress is not None:
                    progress(number, len(found), path)
            self._unread_dirs = [log_dir for log_dir in self._dirs if log_dir.offline_reason is not None]
            self.checkpoint()
        except BaseException:
            for log_dir in self._dirs:
                log_dir.release()
            raise

    def _open_log(self, log_dir: LogDir, path: str) -> None:
        metadata: PartitionMetadata | None = None
        try:
            metadata = load_partition_metadata(self._storage, path)
            if metadata is None:
                raise CorruptRecordError(f"{path} has no {PARTITION_METADATA} any more")
            key = (metadata.topic_id, metadata.partition)
            other = self._logs.get(key) or self.corrupt_logs.get(key)
            if other is not None:
                raise CorruptRecordError(
                    f"{path} and {other.directory} both claim to be {metadata.topic}-{metadata.partition}"
                )
            damage = load_damage(self._storage, path)
            if damage is not None:
                raise CorruptRecordError(
                    f"{damage} (found while it was online; once {path} is mended, remove {path}/{DAMAGED})"
                )
            self._logs[key] = self._recover(log_dir, path, metadata, self._defaults)
            self._log_counts[log_dir] += 1
        except CorruptRecordError as error:
            logger.error(
                "log is damaged and not served", extra={"event": "log_damaged", "path": path, "error": str(error)}
            )
            if metadata is None:
                log_dir.fail(error, f"opening {path}")
            else:
                key = (metadata.topic_id, metadata.partition)
                former = self._logs.pop(key, None)
                if former is not None:
                    self._log_counts[former.log_dir] -= 1
                self.corrupt_logs[key] = CorruptLog(metadata, path, error)
        except OSError as error:
            if is_passing(error):
                raise log_dir.judge(error, f"opening {path}") from error
            log_dir.fail(error, f"opening {path}")

    def _recover(self, log_dir: LogDir, path: str, metadata: PartitionMetadata, config: LogConfig) -> PartitionLog:
        marks = log_dir.marks_of((metadata.topic_id, metadata.partition))
        now_ms = self._clock.now_ms()
        recovered = recover_log(self._storage, path, marks, config.index_interval_bytes, self._producer_limits, now_ms)
        return PartitionLog(metadata, log_dir, path, config, recovered, self._cache, now_ms)

    # Making and removing logs

    def create(
        self, topic: str, topic_id: bytes, partition: int, config: LogConfig | None = None, *, is_new: bool = False
    ) -> PartitionLog:
        """Make an empty log in the directory with the fewest, durably; one that is there already is returned.

        `is_new` says that the partition has just come into being, so that it cannot lie in a log directory that was
        offline from the start. Without it, nothing is made while there is such a directory.

        Raises:
            CorruptRecordError: it is there, and damaged.
            StorageFull: no space.
            StorageError: it lies in a directory that is offline, or none works, or for want of descriptors; where it
                is possible later, trying again goes on from where this came to.
        """
        key, name = (topic_id, partition), f"{topic}-{partition}"
        with self._change_lock:
            self._await_making(key, name)
            self._check_open()
            present = self._logs.get(key)
            if present is not None:
                return present
            log_dir = self._dir_for(topic, key, is_new=is_new)
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
        return log

    def _await_making(self, *keys: PartitionKey | str) -> None:
        while not self._making.isdisjoint(keys):
            self._made.wait()

    def _dir_for(self, topic: str, key: PartitionKey, *, is_new: bool) -> LogDir:
        """Return the directory in which to make a log, if it may be made."""
        what = f"{topic}-{key[1]}"
        if key in self.corrupt_logs:
            raise self.corrupt_logs[key].error
        if self._unread_dirs and not is_new:
            raise StorageError(
                f"{what} may lie in {self._unread_dirs[0].path}, which is offline; "
                "an empty log elsewhere would hide its records"
            )
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
        """Take a log away, damaged or not; its files go at the next housekeeping. Return whether it was here.

        Raises:
            StorageError: the log directory is offline, or has no descriptors left.
            StorageFull: no space for the new name. In either case the log is closed, and housekeeping tries again.
        """
        taken = self._take_away(topic_id, partition, DELETE_PREFIX)
        return taken is not None or self._offline_logs.pop((topic_id, partition), None) is not None

    def set_aside(self, topic_id: bytes, partition: int) -> str | None:
        """Take away a log that the cluster does not know, files and all, and free its name; return where it lies now.

        None: it is not here. It is never opened or removed again, whoever turns out to have been wrong.

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
            if log is not None:
                log_dir, path = log.log_dir, log.directory
            elif corrupt is not None:
                path = corrupt.directory
                log_dir = next(d for d in self._dirs if path.startswith(d.path + "/"))
            else:
                return None
            with self._lock:
                if self._logs.pop(key, None) is not None:
                    self._log_counts[log_dir] -= 1
                self.corrupt_logs.pop(key, None)
            if log is not None:
                log.close()
            return self._removed.move_away(LeavingLog(log_dir, path, key, prefix))

    # Housekeeping

    def checkpoint(self) -> None:
        """Write log starts, recovery points and high watermarks, so that the next start has little to check.

        A log whose high watermark is ahead of its last fsync (flush.messages above 1) is flushed first: what the
        checkpoint calls committed must be on the disk. A directory without space or descriptors keeps its old
        checkpoint. Nothing happens after `close`.
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

    def _store_marks(self, log_dir: LogDir, logs: Sequence[PartitionLog]) -> bool:
        try:
            log_dir.update_marks(lambda: {(log.topic_id, log.partition): log.marks() for log in logs if not log.closed})
        except OSError as error:
            reason = log_dir.judge(error, "writing the checkpoint")
            if log_dir.offline_reason is None:
                logger.warning("the old checkpoint of %s stays: %s", log_dir.path, reason)
            return False
        return True

    def checkpoint_marks(self) -> None:
        """Write the marks as they are, where any has moved: one small file for each directory, and nothing is flushed.

        So that a high watermark does not go back far with a crash: a new leader begins with what it has kept.
        """
        with self._housekeeping_lock:
            for log_dir in self._dirs:
                if log_dir.offline_reason is None and not self._closing.is_set():
                    self._store_marks(log_dir, [log for log in self.logs() if log.log_dir is log_dir])

    def run_housekeeping_once(self, now_ms: int) -> None:
        """Roll by time, apply retention, checkpoint, and remove files whose time has come. Ends early when closing."""
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
                if self._checkpoint_dir(log_dir):
                    for log in here:
                        with self._reporting(log):
                            log.sweep(now_ms)
            if not self._closing.is_set():
                self._removed.remove_garbage()

    @contextlib.contextmanager
    def _reporting(self, log: PartitionLog) -> Iterator[None]:
        """Keep one log's trouble from the others; a directory that went offline has been reported already."""
        try:
            yield
        except RaftlogError as error:
            if log.log_dir.offline_reason is None and not log.closed:
                logger.warning("housekeeping of %r: %s", log, error)
        except Exception:  # a bug in one log must not take the others along
            logger.exception("housekeeping of %r failed", log)

    # End

    def close(self, *, clean: bool = True, broker_epoch: int | None = None) -> None:
        """Flush and checkpoint everything, mark the shutdown as clean, unlock. `clean=False` only unlocks.

        `broker_epoch` goes into the mark; a broker that registers with it has lost nothing since.

        What is under way in other threads is waited for; what comes later does nothing or raises `StorageError`.
        """
        self._closing.set()
        with self._housekeeping_lock, self._change_lock:
            while self._making:
                self._made.wait()
            if self._closed:
                return
            self._closed = True
            if clean:
                for log in self.logs():
                    with self._reporting(log):
                        log.flush()
                        log.store_indexes(closing=True)
                        log.store_producers(closing=True)
            stored = [clean and d.is_held and d.offline_reason is None and self._checkpoint_dir(d) for d in self._dirs]
            for log in self.logs():
                log.close()
            for log_dir, is_stored in zip(self._dirs, stored, strict=True):
                log_dir.close(clean=is_stored and not self._left_dirty(log_dir), broker_epoch=broker_epoch)

    def _left_dirty(self, log_dir: LogDir) -> bool:
        return any(log.needs_flush for log in self.logs() if log.log_dir is log_dir)
