"""Taking records away: retention and delete-records at the front, truncation of a follower at the back.

At the front nothing is removed before the new log start is durable: segments are first detached, then the manager
writes the checkpoint, then `sweep` renames the files and, after `file.delete.delay.ms`, removes them. At the back the
marks are lowered durably before a byte goes. So at any instant a crash leaves a log that recovery can tell from damage.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right

from broker.log.batch_scan import InvalidBatch, walk_headers
from broker.log.checkpoints import Marks
from broker.log.log_flush import FlushableLog
from broker.log.retention import expired_segments
from broker.log.segment import DELETED_SUFFIX, SUFFIXES, OpenSegment, Segment
from broker.log.segment_index import Boundary, SegmentIndex
from raftlog.errors import CorruptRecordError, OffsetOutOfRange


class TrimmableLog(FlushableLog):
    """A log whose ends can be moved inwards. All of it is blocking work, but for `delete_records`."""

    # Front

    def apply_retention(self, now_ms: int) -> int:
        """Detach segments that have outlived retention, and return how many.

        An active segment of which everything has expired is sealed first, so that a topic nobody writes to empties.
        """
        if not expired_segments(self._segments[1], self.config, self.high_watermark, now_ms):
            return 0
        with self._lock:  # now again, while nobody appends
            self._check_open()
            segments, high_watermark = self._segments[1], self.high_watermark
            count = expired_segments(segments, self.config, high_watermark, now_ms)
            if count == 0:
                return 0
            end_offset = segments[count - 1].next_offset
            assert end_offset <= high_watermark, "what may not be committed yet never expires"
            if count == len(segments):
                self.roll()
            self._advance_start(end_offset)
            return count

    def delete_records(self, offset: int) -> int:
        """Raise the log start to `offset` and return it; it never goes back.

        It is durable after the manager's next checkpoint.

        Raises:
            OffsetOutOfRange: above the high watermark.
        """
        with self._lock:
            self._check_open()
            if offset > self.high_watermark:
                raise OffsetOutOfRange(
                    f"{self.topic}-{self.partition}: cannot delete up to {offset}, the high watermark is "
                    f"{self.high_watermark}"
                )
            if offset > self.log_start_offset:
                self._advance_start(offset)
            return self.log_start_offset

    def _advance_start(self, offset: int) -> None:
        bases, segments = self._segments
        self.log_start_offset = max(self.log_start_offset, offset)
        count = bisect_right(bases, self.log_start_offset) - 1
        if count > 0:
            gone = segments[:count]
            self._detached += gone
            self._unflushed = [segment for segment in self._unflushed if segment not in gone]
            self._sealed_bytes -= sum(segment.size for segment in gone)
            self._set_segments(segments[count:])
        if self.leader_epochs.truncate_from_start(self.log_start_offset):
            self._epochs_version += 1

    def sweep(self, now_ms: int) -> None:
        """Rename the files of detached segments, remove those renamed long enough ago.

        Nothing happens to segments above the log start that the checkpoint has.
        """
        with self._file_lock:
            if self.closed or self.log_dir.offline_reason is not None:
                return
            marks = self.log_dir.marks_of((self.topic_id, self.partition))
            durable_start = 0 if marks is None else marks.log_start_offset
            with self._lock:
                gone = [segment for segment in self._detached if segment.next_offset <= durable_start]
                self._detached = [segment for segment in self._detached if segment.next_offset > durable_start]
            try:
                self._rename_away(gone, now_ms + self.config.file_delete_delay_ms)
                gone = []
                for deadline_ms, path in self._deleted_paths:
                    if deadline_ms <= now_ms:
                        self._storage.remove(path)
                self._deleted_paths = [entry for entry in self._deleted_paths if entry[0] > now_ms]
            except OSError as error:
                with self._lock:
                    self._detached = gone + self._detached  # for the next sweep
                raise self._error(error, "removing segments") from error

    def _rename_away(self, segments: list[Segment], deadline_ms: int) -> None:
        for segment in segments:
            for suffix in SUFFIXES:
                path = segment.stem + suffix
                with contextlib.suppress(FileNotFoundError):
                    self._storage.rename(path, path + DELETED_SUFFIX)
                    self._deleted_paths.append((deadline_ms, path + DELETED_SUFFIX))
            self._cache.forget(segment)
        if segments:
            self._storage.sync_dir(self.directory)

    # Back

    def truncate_to(self, offset: int, *, now_ms: int) -> int:
        """Drop every batch with a record at or above `offset`; return the new log end.

        Raises:
            OffsetOutOfRange: below the log start; `reset_to` starts over.
            StorageFull: nothing was changed.
        """
        with self._file_lock:
            self._check_open()
            if offset >= self._end:
                return self._end
            if offset < self.log_start_offset:
                raise OffsetOutOfRange(
                    f"{self.topic}-{self.partition}: cannot truncate to {offset}, "
                    f"the log starts at {self.log_start_offset}"
                )
            bases, segments = self._segments
            number = bisect_right(bases, offset) - 1
            segment = segments[number]
            try:
                opened = self._open_segment(segment)
                end = self._batch_begin(segment, opened, offset)
                self._marks_cap = end.offset
                self._lower_marks(end.offset)
                with self._lock:
                    self._cut(number, opened, end)
                self._rename_away(segments[:number:-1], now_ms + self.config.file_delete_delay_ms)
                opened.index.cut_files(self._storage, segment.stem)
                opened.file.datasync()
            except OSError as error:
                raise self._error(error, "truncating") from error
            finally:
                self._marks_cap = None
            return self._end

    def _batch_begin(self, segment: Segment, opened: OpenSegment, offset: int) -> Boundary:
        floor = segment.floor(opened, offset)
        try:
            for position, header in walk_headers(opened.file, floor.position, segment.size):
                if header.next_offset > offset:
                    return Boundary(header.base_offset, position)
        except InvalidBatch as error:
            raise CorruptRecordError(f"{segment.log_path} position {error.position}: {error.reason}") from None
        return Boundary(segment.next_offset, segment.size)

    def _lower_marks(self, end_offset: int) -> None:
        key = (self.topic_id, self.partition)
        stored = self.log_dir.marks_of(key)
        if stored is not None and max(stored) > end_offset:
            lowered = Marks(*(min(mark, end_offset) for mark in stored))
            self.log_dir.update_marks(lambda: {key: lowered})

    def _cut(self, number: int, opened: OpenSegment, end: Boundary) -> None:
        segments = self._segments[1]
        segment = segments[number]
        self._truncations += 1
        opened.file.truncate(end.position)
        opened.index.truncate(end.offset)
        self._cache.forget(segment)
        segment.opened = opened
        segment.recent = None
        segment.end = (end.offset, end.position)
        floor, segment.max_timestamp_ms = opened.index.floor_time(end.offset)
        for _, header in walk_headers(opened.file, floor.position, end.position):
            segment.max_timestamp_ms = max(segment.max_timestamp_ms, header.max_timestamp_ms)
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

    def reset_to(self, offset: int, *, now_ms: int) -> None:
        """Drop everything and start over at `offset`, which may lie beyond either end (a follower out of range)."""
        with self._file_lock:
            self._check_open()
            if self.log_start_offset <= offset < self._end:
                self.truncate_to(offset, now_ms=now_ms)
            key = (self.topic_id, self.partition)
            try:
                if self._active.base_offset != offset:
                    segment = Segment(self.directory, offset)
                    file = self._storage.open(segment.log_path, create=True)
                    segment.opened = OpenSegment(file, SegmentIndex(offset))
                    self._storage.sync_dir(self.directory)
                else:
                    segment = self._active
                self._marks_cap = offset
                self.log_dir.update_marks(lambda: {key: Marks(offset, offset, offset)})
            except OSError as error:
                self._marks_cap = None
                raise self._error(error, "starting over") from error
            with self._lock:
                self._truncations += 1
                old = [*self._detached, *(kept for kept in self._segments[1] if kept is not segment)]
                self._detached = []
                self._unflushed = []
                self._sealed_bytes = 0
                self._active = segment
                self._set_segments([segment])
                self._end = self._flushed_end = self.log_start_offset = self.high_watermark = offset
                self.leader_epochs.clear()
                self._epochs_version += 1
                self._unstored_epoch_start = offset
                self._marks_cap = None
            try:
                self._rename_away(old, now_ms + self.config.file_delete_delay_ms)
            except OSError as error:
                raise self._error(error, "starting over") from error
