"""What a partition log is made of, and how it grows by segments; the ground floor of `PartitionLog`.

    log_state.py       segments, offsets, errors
    log_producers.py   which producers have written
    log_flush.py       what makes records durable
    log_trim.py        what takes records away at the front
    log_cut.py         what takes them away at the back
    damage.py          whether the bytes on the disk still are what was written
    log_swap.py        what puts compacted segments in the place of others
    partition_log.py   append and read

Who calls what. Appends, `begin_flush`/`finish_flush` and non-blocking reads run on the event loop; `FlushTicket.run`,
blocking reads, look-ups by time, retention, truncation and checkpoints run in threads. A short lock guards what both
change; nothing waits for the disk under it but the creation of a segment file and a truncation. A second lock keeps
file work in threads apart (flush, removal, truncation).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from broker.log.checkpoints import Marks, PartitionMetadata
from broker.log.config import LogConfig
from broker.log.log_dir import LogDir
from broker.log.producer_snapshots import SNAPSHOT_INTERVAL_BYTES
from broker.log.producer_state import FrozenProducers
from broker.log.recovery import RecoveredLog
from broker.log.segment import OpenSegment, Segment
from broker.log.segment_cache import SegmentCache
from broker.log.segment_index import SegmentIndex
from broker.log.txn_index import TxnIndex
from raftlog.errors import CorruptRecordError, OffsetOutOfRange, RaftlogError, StorageError
from replication.leader_epochs import LeaderEpochCache


class SegmentRemoved(OffsetOutOfRange):
    """A segment went between the moment it was chosen and its opening; choosing again finds what is there now."""


class LogBounds(NamedTuple):
    """Both ends and the leader epochs of a log at one moment."""

    log_start_offset: int
    log_end_offset: int
    leader_epochs: LeaderEpochCache


class LogState:
    """Segments and offsets of one log.

    Invariants: log_start_offset <= log_end_offset, flushed_end_offset <= log_end_offset; segments are contiguous;
    the last one is active and opened.
    """

    def __init__(
        self,
        metadata: PartitionMetadata,
        log_dir: LogDir,
        directory: str,
        config: LogConfig,
        recovered: RecoveredLog,
        cache: SegmentCache,
        now_ms: int,
    ) -> None:
        self.topic = metadata.topic
        self.topic_id = metadata.topic_id
        self.partition = metadata.partition
        self.directory = directory
        self.config = config
        self.log_dir = log_dir
        self.leader_epochs = recovered.leader_epochs
        self.log_start_offset = recovered.log_start_offset
        self.high_watermark = recovered.high_watermark
        self.closed = False
        self._cache = cache
        self._storage = log_dir.storage
        self._append_time = config.log_append_time
        self._lock = threading.RLock()
        self._file_lock = threading.RLock()
        self._storing = threading.Lock()
        """Held while a producer snapshot is written; taken before the other two."""
        self._segments: tuple[list[int], list[Segment]] = ([], [])
        self._set_segments(recovered.segments)
        self._active = recovered.segments[-1]
        self._active.first_append_ms = now_ms
        self._end = self._active.next_offset
        self._flushed_end = self._end
        self._sealed_bytes = sum(segment.size for segment in recovered.segments[:-1])
        self._unflushed: list[Segment] = []
        """Sealed, but not all fsynced or indexes not stored; kept open until then."""
        self._detached = recovered.detached
        """No longer part of the log; renamed once the new log start is durable, and what they say of producers."""
        self._told_offset = 0
        """What detached segments below say of producers was written, if there was space."""
        self._deleted_paths: list[tuple[int, str]] = [(now_ms, path) for path in recovered.leftover_paths]
        self._new_names = 0
        """Counts changes of the directory that a flush must make durable."""
        self._synced_names = 0
        self._epochs_version = 0 if recovered.epochs_stored else 1
        self._epochs_stored = 0
        self._unstored_epoch_start: int | None = None if recovered.epochs_stored else self.log_start_offset
        self._truncations = 0
        self._marks_to_be: Marks | None = None
        """While an empty log is about to go on elsewhere."""
        self._unfinished_cut = False
        """Memory is ahead of the disk: appends are refused until `finish_cut` has gone through."""
        self._cut_off: list[Segment] = []
        """No longer part of the log, and to be renamed by `finish_cut`."""
        self._delete_at_ms = now_ms
        """When what is cut off may be removed."""
        self.producers = recovered.producers
        """What is remembered of idempotent producers; see `log_producers.py`."""
        self._snapshots = recovered.snapshots
        """Offsets of the producer snapshots on the disk, in order."""
        self._snapshots_gone: list[int] = []
        """Of what was cut off: to be removed by `finish_cut`."""
        self._snapshot_due: tuple[int, FrozenProducers, TxnIndex | None] | None = None
        """Taken at a roll, to be written: offset, producers, what was aborted in the segment that ends there."""
        self._snapshot_offset = 0
        """Of the newest snapshot that is known to be durable."""
        self._unsure_snapshots = set(recovered.snapshots)
        """Found at the start: they may be torn, or not be durable (a clean stop does not fsync them)."""
        self._snapshot_bytes = 0
        """Appended since the last snapshot."""

    def __repr__(self) -> str:
        return f"PartitionLog({self.topic}-{self.partition}, {self.log_start_offset}..{self._end})"

    # Facts

    @property
    def log_end_offset(self) -> int:
        """Exclusive: the offset that the next record gets."""
        return self._end

    @property
    def flushed_end_offset(self) -> int:
        """Exclusive: everything below was fsynced."""
        return self._flushed_end

    @property
    def needs_flush(self) -> bool:
        """Whether anything was appended since the last finished flush."""
        return self._flushed_end < self._end

    @property
    def first_unstable_offset(self) -> int | None:
        """First offset of the oldest transaction that is open, or whose marker is not committed yet; None: none is."""
        if not self.producers.transactions.holds_back:
            return None
        with self._lock:
            return self.producers.transactions.first_unstable(self.high_watermark)

    @property
    def last_stable_offset(self) -> int:
        """Exclusive: below it everything is committed and decided; at least the log start. See `transactions.py`."""
        high_watermark = self.high_watermark
        first_unstable = self.first_unstable_offset
        if first_unstable is None or first_unstable >= high_watermark:
            return high_watermark
        return max(first_unstable, self.log_start_offset)

    def bounds(self) -> LogBounds:
        """Return what replicas compare, as it is at one moment, whatever retention or a truncation does meanwhile."""
        with self._lock:
            return LogBounds(self.log_start_offset, self._end, LeaderEpochCache(self.leader_epochs.entries))

    @property
    def size_bytes(self) -> int:
        """Bytes of all `.log` files."""
        return self._sealed_bytes + self._active.size

    @property
    def segment_count(self) -> int:
        """Segments, the active one included."""
        return len(self._segments[1])

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments, oldest first; for tools and tests."""
        return tuple(self._segments[1])

    def update_config(self, config: LogConfig) -> None:
        """Take another config from now on."""
        self.config = config
        self._append_time = config.log_append_time

    def marks(self) -> Marks:
        """Return what may be written to the checkpoint: nothing in it is ahead of the disk."""
        with self._lock:
            if self._marks_to_be is not None:
                return self._marks_to_be
            recovery_point = self._flushed_end
            log_start_offset = min(self.log_start_offset, recovery_point)  # else the next start would miss what follows
            if self._unstored_epoch_start is not None:
                recovery_point = max(min(recovery_point, self._unstored_epoch_start), log_start_offset)
            return Marks(log_start_offset, recovery_point, min(self.high_watermark, self._flushed_end))

    def _set_segments(self, segments: list[Segment]) -> None:
        self._segments = ([segment.base_offset for segment in segments], segments)

    def _check_open(self) -> None:
        reason = self.log_dir.offline_reason
        if reason is not None:
            raise reason
        if self.closed:
            raise self._closed_error()

    def _closed_error(self) -> StorageError:
        return StorageError(f"the log of {self.topic}-{self.partition} in {self.directory} is closed")

    def _error(self, error: OSError, doing: str, wanted_bytes: int = 0) -> RaftlogError:
        if isinstance(error, FileNotFoundError):
            if self.closed:  # deletion renames the directory while readers are under way
                return self._closed_error()
            try:
                own, whole = (self._storage.exists(path) for path in (self.directory, self.log_dir.path))
            except OSError as failure:
                return self.log_dir.judge(failure, f"{doing} in {self.directory}")
            if whole and not own:
                return StorageError(
                    f"{doing} failed: {self.directory} is gone, though nobody deleted the partition; put it back and "
                    "restart the broker, or delete the topic"
                )
        return self.log_dir.judge(error, f"{doing} in {self.directory}", wanted_bytes)

    # Segments

    def _roll(self) -> Segment:
        """Seal the active segment and begin another; on an error nothing has changed."""
        old = self._active
        segment = Segment(self.directory, old.next_offset)
        file = self._storage.open(segment.log_path, create=True)
        file.truncate(0)
        segment.opened = OpenSegment(file, SegmentIndex(segment.base_offset))
        old.seal()
        self._close_txn_index(old)
        self._unflushed.append(old)
        self._sealed_bytes += old.size
        self._new_names += 1
        if self.producers.may_freeze:
            self._snapshot_due = self._take_snapshot(old)
            self._snapshot_bytes = 0
        else:  # many rolls since the last flush: the next one writes what is known then
            self._snapshot_due = None
            self._snapshot_bytes = SNAPSHOT_INTERVAL_BYTES
        self._set_segments([*self._segments[1], segment])
        self._active = segment
        return segment

    def _close_txn_index(self, segment: Segment) -> None:
        """Note how a segment ends: which transactions are open then."""
        first_open = self.producers.transactions.first_open
        assert segment.opened is not None
        if first_open is not None or segment.opened.txn_index is not None:
            index = self._txn_index_of(segment)
            index.end_stable_offset = segment.next_offset if first_open is None else first_open

    @staticmethod
    def _txn_index_of(segment: Segment) -> TxnIndex:
        """Return the index of aborted transactions of the active segment, made if there is none."""
        assert segment.opened is not None
        if segment.opened.txn_index is None:
            segment.opened.txn_index = TxnIndex(segment.base_offset)
            segment.has_txn_index = True
        return segment.opened.txn_index

    def _take_snapshot(self, last: Segment) -> tuple[int, FrozenProducers, TxnIndex | None]:
        """Return what is known where `last`, the last segment with records, ends."""
        opened = last.opened
        txn_index = None if opened is None or opened.txn_index is None else opened.txn_index.copy()
        return last.next_offset, self.producers.freeze(), txn_index

    def roll(self) -> bool:
        """Seal the active segment, if it has records, and begin another; return whether that happened."""
        with self._lock:
            self._check_open()
            if not self._active.size:
                return False
            try:
                self._roll()
            except OSError as error:
                raise self._error(error, "rolling a segment") from error
            return True

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll if the active segment's first append is `segment.ms` ago (or `max.compaction.lag.ms`, if compacted)."""
        active = self._active
        return active.size > 0 and now_ms - active.first_append_ms >= self.config.roll_ms and self.roll()

    def _open_segment(self, segment: Segment) -> OpenSegment:
        """Return the segment opened; the log may be closed, or the segment removed, at any moment meanwhile.

        Either frees the path for another file, so that neither an error nor a success counts before both were ruled
        out.

        Raises:
            SegmentRemoved: by retention or a truncation.
            StorageError: the log is closed, or the disk.
        """
        opened = segment.opened
        if opened is not None:
            return opened
        try:
            opened = self._cache.open(segment, self.config.index_interval_bytes)
        except (FileNotFoundError, CorruptRecordError) as error:
            self._check_present(segment)
            if isinstance(error, CorruptRecordError):
                raise
            raise self._error(error, "opening a segment") from error
        except OSError as error:
            raise self._error(error, "opening a segment") from error
        self._check_present(segment)
        return opened

    def _check_present(self, segment: Segment) -> None:
        bases, segments = self._segments
        number = bisect_left(bases, segment.base_offset)
        if not self.closed and number < len(segments) and segments[number] is segment:
            return
        self._cache.forget(segment)
        self._check_open()
        raise SegmentRemoved(
            f"{self.topic}-{self.partition}: offset {segment.base_offset} has just been removed, "
            f"the log starts at {self.log_start_offset}"
        )

    def close(self) -> None:
        """Let go of all files; every later call raises."""
        with self._file_lock, self._lock:
            self.closed = True
            for segment in [*self._segments[1], *self._detached, *self._cut_off]:
                self._cache.forget(segment)
