"""The log of one partition: append and read. What lies beneath is in `log_state.py`, which also says who calls what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from broker.log import time_lookup
from broker.log.damage import CheckableLog
from broker.log.log_flush import FlushTicket
from broker.log.log_state import SegmentRemoved
from broker.log.offset_index import MAX_RELATIVE_OFFSET
from broker.log.segment import Segment
from broker.log.segment_reader import ReadResult, read_segment
from raftlog.errors import CorruptRecordError, InvalidRecord, OffsetOutOfRange, UnsupportedVersion
from raftlog.format import (
    HEADER_BYTES,
    STAMP_BYTES,
    BatchHeader,
    Buffer,
    pack_stamp,
    parse_batch,
    with_append_time,
)
from raftlog.types import OffsetAndTimestamp

__all__ = ["AppendResult", "FlushTicket", "PartitionLog", "ReadResult"]

_NO_TIMESTAMP: Final = -1


class AppendResult(NamedTuple):
    """Where a batch went. `timestamp_ms` is -1 unless the broker stamped its own time."""

    base_offset: int
    last_offset: int
    timestamp_ms: int
    appended_bytes: int


class PartitionLog(CheckableLog):
    """Made by `LogManager`. `high_watermark` is set by whoever leads or follows the partition."""

    # Append

    def append(self, batch: Buffer, header: BatchHeader, *, leader_epoch: int, now_ms: int) -> AppendResult:
        """Append a batch that `validate_produced` has passed, as the leader of `leader_epoch`.

        The batch is written as it is but for its first 16 bytes (64 with log append time).

        Raises:
            StorageFull: no space; nothing was appended.
            StorageError: the log directory is offline.
        """
        with self._lock:
            if self.closed or self._unfinished_cut or self.log_dir.offline_reason is not None:
                self._check_appendable()
            epochs = self.leader_epochs
            base_offset = self._end
            next_offset = base_offset + header.last_offset_delta + 1
            size = len(batch)
            stamp = pack_stamp(base_offset, header.batch_length, leader_epoch)
            buffers: tuple[Buffer, ...]
            if self._append_time:
                stamped = memoryview(with_append_time(header, batch, now_ms))
                buffers = (stamp, stamped[STAMP_BYTES:], memoryview(batch)[HEADER_BYTES:])
                timestamp_ms = max_timestamp_ms = now_ms
            else:
                buffers = (stamp, memoryview(batch)[STAMP_BYTES:])
                timestamp_ms, max_timestamp_ms = _NO_TIMESTAMP, header.max_timestamp_ms
            self._write(buffers, size, base_offset, next_offset, max_timestamp_ms, now_ms)
            if leader_epoch != epochs.latest_epoch:
                self._assign_epoch(leader_epoch, base_offset)
            self._end = next_offset
            return AppendResult(base_offset, next_offset - 1, timestamp_ms, size)

    def append_stamped(self, data: Buffer, *, now_ms: int, max_epoch: int | None = None) -> AppendResult:
        """Append batches as their leader stamped them; a follower's append.

        Raises:
            CorruptRecordError: a batch is cut short or does not check.
            InvalidRecord: it does not follow the log's end, or its epoch goes back, or beyond `max_epoch`.
            StorageFull, StorageError: as `append`. Batches before the refused one were appended.
        """
        view = memoryview(data)
        position, first_offset = 0, self._end
        while position < len(view):
            try:
                header = parse_batch(view, position)
            except UnsupportedVersion as error:  # a flipped bit, unless the leader is newer, which then finds nothing
                raise CorruptRecordError(str(error)) from error
            with self._lock:
                self._check_appendable()
                if header.base_offset != self._end:
                    raise InvalidRecord(f"offset {header.base_offset} does not follow the log end {self._end}")
                if header.leader_epoch < self.leader_epochs.latest_epoch:
                    raise InvalidRecord(
                        f"leader epoch {header.leader_epoch} after epoch {self.leader_epochs.latest_epoch}"
                    )
                if max_epoch is not None and header.leader_epoch > max_epoch:
                    raise InvalidRecord(f"leader epoch {header.leader_epoch} from the leader of epoch {max_epoch}")
                piece = view[position : position + header.size]
                self._write(
                    (piece,),
                    header.size,
                    header.base_offset,
                    header.next_offset,
                    header.max_timestamp_ms,
                    now_ms,
                )
                self._assign_epoch(header.leader_epoch, header.base_offset)
                self._end = header.next_offset
            position += header.size
        return AppendResult(first_offset, self._end - 1, _NO_TIMESTAMP, position)

    def _check_appendable(self) -> None:
        self._check_open()
        if self._unfinished_cut:
            raise self._refuse_unfinished()

    def _write(
        self,
        buffers: Sequence[Buffer],
        size: int,
        base_offset: int,
        next_offset: int,
        max_timestamp_ms: int,
        now_ms: int,
    ) -> None:
        active, config = self._active, self.config
        try:
            position = active.end[1]
            if position:
                if (
                    position + size > config.segment_bytes
                    or now_ms - active.first_append_ms >= config.segment_ms
                    or next_offset - active.base_offset > MAX_RELATIVE_OFFSET
                ):
                    active = self._roll()
                    active.first_append_ms = now_ms
            else:
                active.first_append_ms = now_ms
            active.append(buffers, size, base_offset, next_offset, max_timestamp_ms, config.index_interval_bytes)
        except OSError as error:
            raise self._error(error, "append", size) from error

    def _assign_epoch(self, leader_epoch: int, start_offset: int) -> None:
        if self.leader_epochs.assign(leader_epoch, start_offset):
            self._epochs_version += 1
            if self._unstored_epoch_start is None:
                self._unstored_epoch_start = start_offset

    # Read

    def read(self, offset: int, max_bytes: int, end_offset: int, *, blocking: bool) -> ReadResult | None:
        """Return whole batches as they are on disk, the first one holding `offset`, none at or above `end_offset`.

        At least one batch, even if larger than `max_bytes`; never beyond a segment's end. None: it would have to wait
        for the disk; call again with `blocking` off the event loop. Nothing there below `end_offset`: empty records.

        Raises:
            OffsetOutOfRange: below the log start or above the log end.
            CorruptRecordError: the bytes on the disk contradict themselves.
            StorageError: the log directory is offline.
        """
        if self.closed or self.log_dir.offline_reason is not None:
            self._check_open()
        end_offset = min(end_offset, self._end)
        if offset >= end_offset or offset < self.log_start_offset:
            if not self.log_start_offset <= offset <= self._end:
                raise OffsetOutOfRange(
                    f"{self.topic}-{self.partition}: offset {offset} is out of range, "
                    f"the log has {self.log_start_offset} to {self._end}"
                )
            return ReadResult(b"", offset)
        bases, segments = self._segments
        number = bisect_right(bases, offset) - 1
        if number < 0:  # retention was quicker
            raise OffsetOutOfRange(f"{self.topic}-{self.partition}: offset {offset} has just been removed")
        while True:
            segment = segments[number]
            opened = segment.opened
            if opened is None:
                if not blocking:
                    return None
                try:
                    opened = self._open_segment(segment)
                except SegmentRemoved:
                    return self.read(offset, max_bytes, end_offset, blocking=True)
            elif segment is not self._active:
                self._cache.touch(segment)
            try:
                result = read_segment(segment, opened, offset, max_bytes, end_offset, blocking=blocking)
            except OSError as error:
                raise self._error(error, "reading") from error
            if result is None or result.records or number + 1 == len(segments):
                return result
            number += 1
            if bases[number] >= end_offset:
                return result

    def offset_for_time(self, timestamp_ms: int, end_offset: int | None = None) -> OffsetAndTimestamp | None:
        """Return the first record at or after `timestamp_ms` below `end_offset` (default: high watermark). Blocking."""
        end = self.high_watermark if end_offset is None else end_offset
        return self._look_up(
            lambda segments: time_lookup.first_at_or_after(
                segments, self._open_segment, timestamp_ms, self.log_start_offset, end
            )
        )

    def max_timestamp(self, end_offset: int | None = None) -> OffsetAndTimestamp | None:
        """Return the first record with the largest timestamp below `end_offset` (KIP-734). Blocking."""
        end = self.high_watermark if end_offset is None else end_offset
        return self._look_up(
            lambda segments: time_lookup.largest(segments, self._open_segment, self.log_start_offset, end)
        )

    def _look_up(self, find: Callable[[Sequence[Segment]], OffsetAndTimestamp | None]) -> OffsetAndTimestamp | None:
        while True:
            self._check_open()
            try:
                return find(self._segments[1])
            except SegmentRemoved:
                continue  # what is left answers
            except OSError as error:
                raise self._error(error, "looking up a time") from error
