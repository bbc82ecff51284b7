"""Taking records away at the front: retention and delete-records.

Nothing is removed before the new log start is durable: segments are first detached, then the manager has what they say
of producers written (`store_producers`) and writes the checkpoint, then `sweep` renames the files and, after
`file.delete.delay.ms`, removes them. So at any instant a crash leaves a log that recovery can tell from damage. A start
that finds segments below the log start detaches them again: other writers of marks do not wait for what these say.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right

from broker.log.log_flush import FlushableLog
from broker.log.retention import expired_segments
from broker.log.segment import DELETED_SUFFIX, SUFFIXES, Segment
from raftlog.errors import OffsetOutOfRange


class TrimmableLog(FlushableLog):
    """A log whose start can be moved. All of it is blocking work, but for `delete_records`."""

    def apply_retention(self, now_ms: int) -> int:
        """Detach segments that have outlived retention, and return how many.

        An active segment of which everything has expired is sealed first, so that a topic nobody writes to empties.
        """
        if not expired_segments(self._segments[1], self.config, self.last_stable_offset, now_ms):
            return 0
        with self._lock:  # now again, while nobody appends
            self._check_open()
            segments, last_stable_offset = self._segments[1], self.last_stable_offset
            count = expired_segments(segments, self.config, last_stable_offset, now_ms)
            if count == 0:
                return 0
            end_offset = segments[count - 1].next_offset
            assert end_offset <= last_stable_offset, "what may not be committed or decided yet never expires"
            if count == len(segments):
                self.roll()
            self._advance_start(end_offset)
            return count

    def delete_records(self, offset: int) -> int:
        """Raise the log start to `offset` and return it; it never goes back, and passes open transactions.

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

        Nothing happens to segments above the log start that the checkpoint has, or that were detached since the last
        `store_producers`.
        """
        with self._file_lock:
            if self.closed or self.log_dir.offline_reason is not None:
                return
            marks = self.log_dir.marks_of((self.topic_id, self.partition))
            with self._lock:
                end_offset = 0 if marks is None else min(marks.log_start_offset, self._told_offset)
                gone = [segment for segment in self._detached if segment.next_offset <= end_offset]
                self._detached = [segment for segment in self._detached if segment.next_offset > end_offset]
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
