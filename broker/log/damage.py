"""Checking what a log has on its disk, while it is served: every batch of a piece, by its checksum and its place.

Nothing here holds up appends or reads. What looks damaged is looked at once more while no truncation or removal can be
under way: half-cut bytes are no damage.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from broker.log.batch_scan import InvalidBatch, scan_batches
from broker.log.log_cut import CuttableLog
from broker.log.log_state import SegmentRemoved
from broker.log.segment import OpenSegment, Segment
from broker.log.segment_index import Boundary
from raftlog.errors import CorruptRecordError


class CheckedPiece(NamedTuple):
    """What was checked, and is whole. `next_offset`: where to go on."""

    next_offset: int
    size_bytes: int
    batches: int


class CheckableLog(CuttableLog):
    """A log whose bytes can be checked."""

    def check(self, offset: int, max_bytes: int, *, max_batches: int | None = None) -> CheckedPiece:
        """Check the batch that holds `offset`, and whole batches behind it up to `max_bytes` or the segment's end.

        It begins at the last index entry before that, so a little in front is checked as well. What has gone or is not
        there yet is passed over. Blocking.

        Raises:
            CorruptRecordError: what is there is damaged; names file, position and the offsets that cannot be read.
            StorageError: the log is closed, or its directory offline.
        """
        while True:
            self._check_open()
            offset = max(offset, self.log_start_offset)
            if offset >= self._end:
                return CheckedPiece(self._end, 0, 0)
            truncations = self._truncations
            bases, segments = self._segments
            number = bisect_right(bases, offset) - 1
            if number < 0:
                continue
            segment = segments[number]
            try:
                opened = self._open_segment(segment)
                return self._check_piece(segment, opened, offset, max_bytes, max_batches)
            except SegmentRemoved:
                continue
            except OSError as error:
                raise self._error(error, "checking") from error
            except InvalidBatch:
                with self._file_lock:
                    self._check_open()
                    if truncations != self._truncations or segment not in self._segments[1]:
                        continue
                    self._check_again(segment, opened, offset, max_bytes, max_batches)

    def _check_again(
        self, segment: Segment, opened: OpenSegment, offset: int, max_bytes: int, max_batches: int | None
    ) -> None:
        try:
            self._check_piece(segment, opened, offset, max_bytes, max_batches)
        except InvalidBatch as error:
            first, last = self._beyond_reach(segment, opened, error.position)
            raise CorruptRecordError(
                f"{segment.log_path} position {error.position}: {error.reason}; offsets {first} to {last} of "
                f"{self.topic}-{self.partition} are damaged on the disk"
            ) from None
        except OSError as error:
            raise self._error(error, "checking") from error

    def _check_piece(
        self, segment: Segment, opened: OpenSegment, offset: int, max_bytes: int, max_batches: int | None
    ) -> CheckedPiece:
        next_offset, size = segment.end
        epochs = self.bounds().leader_epochs  # after the end was looked at: so they know of everything below it
        floor = segment.floor(opened, offset)
        expected, reached, batches = floor.offset, floor.position, 0
        for position, header in scan_batches(opened.file, floor.position, size):
            if header.base_offset != expected:
                raise InvalidBatch(position, f"offset {header.base_offset} where {expected} must follow")
            epoch = epochs.epoch_for(expected)
            if epoch not in (-1, header.leader_epoch):
                raise InvalidBatch(position, f"leader epoch {header.leader_epoch} where it was {epoch}")
            expected, reached, batches = header.next_offset, position + header.size, batches + 1
            enough = reached - floor.position >= max_bytes or (max_batches is not None and batches >= max_batches)
            if enough and expected > offset:
                break
        if reached == size and expected != next_offset:
            raise InvalidBatch(size, f"the segment ends at offset {expected}, not at {next_offset}")
        return CheckedPiece(expected, reached - floor.position, batches)

    @staticmethod
    def _beyond_reach(segment: Segment, opened: OpenSegment, position: int) -> tuple[int, int]:
        """Return the first and the last offset that are lost with a batch, as far as the index tells."""
        begin = segment.floor_position(opened, position, segment.next_offset)
        end = opened.index.ceiling(position) or Boundary(*segment.end)
        return begin.offset, end.offset - 1
