"""Cutting a follower's log back, or starting it over.

The order, so that a crash at any instant leaves the log as it was, as it will be, or something in between that is a
prefix of what it was; and so that an error in the middle leaves nothing half-done behind:

    1. everything that has to be read is read                                   an error: nothing has changed
    2. the log ends where it should, in memory; it takes no append now
    3. `finish_cut`: marks, names of dropped segments, the cut file, its        an error: appends are refused until
       indexes, fsync                                                           `finish_cut` has gone through

`reset_to` first cuts the log back to nothing, which makes it an empty log at its own start, and then moves that.
"""

from __future__ import annotations

from bisect import bisect_right

from broker.log.batch_scan import InvalidBatch, walk_headers
from broker.log.checkpoints import Marks
from broker.log.log_state import SegmentRemoved
from broker.log.log_trim import TrimmableLog
from broker.log.producer_state import ProducerStates
from broker.log.segment import OpenSegment, Segment
from broker.log.segment_index import Boundary, SegmentIndex
from broker.log.txn_index import drop_txn_file
from raftlog.errors import CorruptRecordError, OffsetOutOfRange, StorageError


class CuttableLog(TrimmableLog):
    """A log whose end can be moved back. All of it is blocking work; nobody appends meanwhile."""

    @property
    def has_unfinished_cut(self) -> bool:
        """Whether a cut was refused half-way by the disk, so that appends are refused until `finish_cut`."""
        return self._unfinished_cut

    def _refuse_unfinished(self) -> StorageError:
        return StorageError(
            f"the log of {self.topic}-{self.partition} was being truncated when {self.log_dir.path} refused; "
            "that is tried again soon"
        )

    def truncate_to(self, offset: int, *, now_ms: int) -> int:
        """Drop every batch with a record at or above `offset`; return the new log end.

        Trying again after an error is safe, and needed: it may have come half-way.

        Raises:
            OffsetOutOfRange: below the log start; `reset_to` starts over.
            StorageFull, StorageError: refused; `has_unfinished_cut` says whether anything was changed.
        """
        with self._file_lock:
            self._check_open()
            self._delete_at_ms = now_ms + self.config.file_delete_delay_ms
            self.finish_cut()
            while offset < self._end:
                if offset < self.log_start_offset:
                    raise OffsetOutOfRange(
                        f"{self.topic}-{self.partition}: cannot truncate to {offset}, "
                        f"the log starts at {self.log_start_offset}"
                    )
                if self._cut_at(offset, now_ms):
                    self.finish_cut()
                    break
            return self._end

    def _cut_at(self, offset: int, now_ms: int) -> bool:
        """Do steps 1 and 2; False when retention or a roll came between, and another attempt is needed."""
        bases, segments = self._segments
        number = bisect_right(bases, offset) - 1
        if number < 0:
            return False
        segment = segments[number]
        try:
            opened = self._open_segment(segment)
            end = self._batch_begin(segment, opened, offset)
            max_timestamp_ms = self._max_timestamp_below(opened, end)
            producers = self._producers_below(segments[: number + 1], end.offset, now_ms)
            with self._lock:
                if segment not in self._segments[1]:
                    return False
                self._cut(segment, opened, end, max_timestamp_ms)
                self._cut_producers(producers, end.offset)
            return True
        except SegmentRemoved:
            return False
        except InvalidBatch as error:
            raise CorruptRecordError(f"{segment.log_path} position {error.position}: {error.reason}") from None
        except OSError as error:
            raise self._error(error, "truncating") from error

    def _batch_begin(self, segment: Segment, opened: OpenSegment, offset: int) -> Boundary:
        floor = segment.floor(opened, offset)
        for position, header in walk_headers(opened.file, floor.position, segment.size):
            if header.next_offset > offset:
                return Boundary(header.base_offset, position)
        return Boundary(segment.next_offset, segment.size)

    def _max_timestamp_below(self, opened: OpenSegment, end: Boundary) -> int:
        floor, max_timestamp_ms = opened.index.floor_time(end.offset)
        for _, header in walk_headers(opened.file, floor.position, end.position):
            max_timestamp_ms = max(max_timestamp_ms, header.max_timestamp_ms)
        return max_timestamp_ms

    def _cut(self, segment: Segment, opened: OpenSegment, end: Boundary, max_timestamp_ms: int) -> None:
        segments = self._segments[1]
        number = segments.index(segment)
        self._unfinished_cut = True
        self._truncations += 1
        self._cut_off += segments[:number:-1]
        self._cache.forget(segment)
        segment.opened = opened
        segment.recent = None
        segment.end = (end.offset, end.position)
        opened.index.truncate(end.offset)
        opened.txn_stored = False
        if opened.txn_index is not None:
            opened.txn_index.truncate(end.offset)
        segment.max_timestamp_ms = max_timestamp_ms
        self._unflushed = [kept for kept in self._unflushed if kept in segments[:number]]
        self._sealed_bytes = sum(kept.size for kept in segments[:number])
        self._active = segment
        self._set_segments(segments[: number + 1])
        self._move_end(end.offset)

    def _move_end(self, offset: int) -> None:
        self._end = offset
        self._flushed_end = min(self._flushed_end, offset)
        self.high_watermark = min(self.high_watermark, offset)
        self.log_start_offset = min(self.log_start_offset, offset)
        if self.leader_epochs.truncate_from_end(offset):
            self._epochs_version += 1
            # the stored entries beyond `offset` must be gone before the recovery point passes it again
            unstored = self._unstored_epoch_start
            self._unstored_epoch_start = offset if unstored is None else min(unstored, offset)

    def finish_cut(self) -> None:
        """Bring the disk to where a cut has the log already; nothing happens where none is unfinished.

        Raises:
            StorageFull, StorageError: refused; try again.
        """
        with self._file_lock:
            if not self._unfinished_cut:
                return
            self._check_open()
            segment, opened = self._active, self._active.opened
            assert opened is not None, "the active segment is opened"
            key = (self.topic_id, self.partition)
            try:
                self.log_dir.update_marks(lambda: {key: self.marks()})
                self._rename_away(self._cut_off, self._delete_at_ms)
                self._cut_off = []
                self._drop_snapshots()
                opened.file.truncate(segment.size)
                opened.index.cut_files(self._storage, segment.stem)
                drop_txn_file(self._storage, segment.stem)
                opened.file.datasync()
            except OSError as error:
                raise self._error(error, "truncating") from error
            self._unfinished_cut = False

    def reset_to(self, offset: int, *, now_ms: int) -> None:
        """Drop everything and start over at `offset`, which may lie beyond either end (a follower out of range).

        Trying again after an error is safe, and needed: the log may be empty already.

        Raises:
            StorageFull, StorageError: refused.
        """
        with self._file_lock:
            self._check_open()
            self._delete_at_ms = now_ms + self.config.file_delete_delay_ms
            self.finish_cut()
            self._empty(now_ms)
            if self._end != offset:
                self._move_empty(offset)

    def _empty(self, now_ms: int) -> None:
        """Cut the log back to nothing at the base of its first segment, and let go of what lies below."""
        while True:
            base = self._segments[0][0]
            if base == self._end or self._cut_at(base, now_ms):
                break
        with self._lock:  # in what is empty, nothing is committed or older
            self._unfinished_cut = True
            self._flushed_end = self.high_watermark = self._end
            self._cut_off = [*self._detached, *self._cut_off]
            self._detached = []
            self._truncations += 1
            self.leader_epochs.clear()
            self._cut_producers(ProducerStates(self.producers.limits), 0)
            self._epochs_version += 1
            self._unstored_epoch_start = self._end
        self.finish_cut()

    def _move_empty(self, offset: int) -> None:
        """Go on at another offset, in a segment of its own; the log is empty, and its directory has no other one."""
        key = (self.topic_id, self.partition)
        segment = Segment(self.directory, offset)
        try:
            file = self._storage.open(segment.log_path, create=True)
            file.truncate(0)
            segment.opened = OpenSegment(file, SegmentIndex(offset))
            segment.opened.index.cut_files(self._storage, segment.stem)
            self._storage.sync_dir(self.directory)
            self._marks_to_be = Marks(offset, offset, offset)
            self.log_dir.update_marks(lambda: {key: self.marks()})
            with self._lock:
                self._unfinished_cut = True
                self._truncations += 1
                self._cut_off = [self._active]
                self._active = segment
                self._set_segments([segment])
                self._end = self._flushed_end = self.log_start_offset = self.high_watermark = offset
                self._epochs_version += 1
                self._unstored_epoch_start = offset
        except OSError as error:
            with self._lock:  # the new file, and marks on the disk that may be the new ones, have to go
                self._unfinished_cut = True
                self._cut_off = [segment]
            raise self._error(error, "starting over") from error
        finally:
            self._marks_to_be = None
        self.finish_cut()
