"""The log of one partition: append and read. What lies beneath is in `log_state.py`, which also says who calls what."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple, overload

from broker.log import time_lookup
from broker.log.compaction import cut_front
from broker.log.log_flush import FlushTicket
from broker.log.log_state import SegmentRemoved
from broker.log.log_swap import SwappableLog
from broker.log.offset_index import MAX_RELATIVE_OFFSET
from broker.log.segment import Segment
from broker.log.segment_index import BEFORE_ALL_TIME_MS
from broker.log.segment_reader import ReadResult, read_segment
from broker.log.transactions import NO_COORDINATOR, AbortedTransaction, OpenTransaction, decision_epoch
from raftlog.errors import CorruptRecordError, InvalidRecord, OffsetOutOfRange, UnsupportedVersion
from raftlog.format import (
    HEADER_BYTES,
    STAMP_BYTES,
    Attributes,
    BatchHeader,
    Buffer,
    pack_stamp,
    parse_batch,
    parse_header,
    with_append_time,
)
from raftlog.format.control import NO_OFFSET, Marker, PlacedMarker, encode_control, placed_markers
from raftlog.types import OffsetAndTimestamp

__all__ = ["AppendResult", "FlushTicket", "PartitionLog", "ReadResult"]

logger = logging.getLogger(__name__)

_NO_TIMESTAMP: Final = -1
_MAX_OFFSET: Final = (1 << 63) - 1
_SPARSE: Final = int(Attributes.SPARSE_OFFSETS)
_CONTROL: Final = int(Attributes.CONTROL)


class AppendResult(NamedTuple):
    """Where a batch went. `timestamp_ms` is -1 unless the broker stamped its own time."""

    base_offset: int
    last_offset: int
    timestamp_ms: int
    appended_bytes: int


class PartitionLog(SwappableLog):
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
            self._snapshot_bytes += size
            if header.producer_id >= 0:
                self.producers.note_appended(header, base_offset, timestamp_ms, now_ms)
            return AppendResult(base_offset, next_offset - 1, timestamp_ms, size)

    def append_markers(self, markers: Sequence[Marker], *, leader_epoch: int, now_ms: int) -> AppendResult:
        """Append one control batch as the leader of `leader_epoch`: each marker ends its producer's transaction.

        Only what `check_markers` lets pass. The markers are told where the transactions begin. One that is not of the
        transaction that is open does not decide on it: that was over for its coordinator before, so it is aborted
        first, by a marker of its own. Raises as `append`.
        """
        with self._lock:
            told, seen = [], set()
            for marker in markers:
                found = None if marker.producer_id in seen else self.producers.transactions.get(marker.producer_id)
                seen.add(marker.producer_id)
                if found is not None and marker.producer_epoch != decision_epoch(found.epoch):
                    told.append(self._abort_stray(found, marker))
                    found = None
                told.append(marker._replace(first_offset=NO_OFFSET if found is None else found.first_offset))
            batch = encode_control(told, now_ms)
            result = self.append(batch, parse_header(batch), leader_epoch=leader_epoch, now_ms=now_ms)
            self._note_markers([PlacedMarker(*place) for place in enumerate(told, result.base_offset)], now_ms)
            return result

    def _abort_stray(self, found: OpenTransaction, marker: Marker) -> Marker:
        """Return the marker of a transaction that is still open when one of the producer's next ones ends."""
        epoch, first_offset = decision_epoch(found.epoch), found.first_offset
        logger.error(
            "%s-%d: producer id %d has had a transaction of epoch %d open since offset %d, and a later one has ended "
            "(epoch %d): nobody decides on the earlier one any more, so it is aborted",
            self.topic,
            self.partition,
            marker.producer_id,
            found.epoch,
            first_offset,
            marker.producer_epoch,
        )
        return Marker(
            marker.producer_id, epoch, commit=False, coordinator_epoch=NO_COORDINATOR, first_offset=first_offset
        )

    def _note_markers(self, markers: Sequence[PlacedMarker], now_ms: int) -> None:
        aborted = self.producers.note_markers(markers, now_ms)
        if aborted:
            index = self._txn_index_of(self._active)
            for entry in aborted:
                index.append(entry)

    def append_stamped(self, data: Buffer, *, now_ms: int, max_epoch: int | None = None) -> AppendResult:
        """Append batches as their leader stamped them; a follower's append.

        Raises:
            CorruptRecordError: a batch is cut short or does not check.
            MarkerMissing: this log lacks a marker, so what it holds of a transaction can never be decided on.
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
                size = header.size
                piece = view[position : position + size]
                markers = placed_markers(piece, check_checksum=False) if header.attributes & _CONTROL else ()
                if markers:
                    self.producers.transactions.check_followed(markers, self.log_start_offset)
                if header.attributes & _SPARSE and header.base_offset < self._end < header.next_offset:
                    piece = memoryview(cut_front(piece, self._end))  # the leader has merged across this log's end
                    header = parse_batch(piece)
                if header.base_offset != self._end:
                    raise InvalidRecord(f"offset {header.base_offset} does not follow the log end {self._end}")
                if header.leader_epoch < 0:
                    raise InvalidRecord(f"leader epoch {header.leader_epoch}: no leader has stamped this batch")
                if header.next_offset > _MAX_OFFSET:
                    raise InvalidRecord(f"offsets end at {_MAX_OFFSET}, the batch at {header.base_offset} goes beyond")
                if header.leader_epoch < self.leader_epochs.latest_epoch:
                    raise InvalidRecord(
                        f"leader epoch {header.leader_epoch} after epoch {self.leader_epochs.latest_epoch}"
                    )
                if max_epoch is not None and header.leader_epoch > max_epoch:
                    raise InvalidRecord(f"leader epoch {header.leader_epoch} from the leader of epoch {max_epoch}")
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
                self._snapshot_bytes += header.size
                if header.producer_id >= 0:
                    self.producers.note(header, now_ms)
                elif markers:
                    self._note_markers(markers, now_ms)
            position += size
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

    @overload
    def aborted_transactions(self, first_offset: int, end_offset: int) -> Sequence[AbortedTransaction]: ...
    @overload
    def aborted_transactions(
        self, first_offset: int, end_offset: int, *, blocking: bool
    ) -> Sequence[AbortedTransaction] | None: ...
    def aborted_transactions(
        self, first_offset: int, end_offset: int, *, blocking: bool = True
    ) -> Sequence[AbortedTransaction] | None:
        """Return the transactions that were aborted and have records in [`first_offset`, `end_offset`).

        `end_offset`: not above the last stable offset, else those still open are missing. None: it would have to wait
        for the disk; call again with `blocking` off the event loop. It costs nothing where there are none.

        Raises:
            CorruptRecordError, StorageError: as `read`.
        """
        while True:
            bases, segments = self._segments
            found: list[AbortedTransaction] = []
            try:
                for segment in islice(segments, max(0, bisect_right(bases, first_offset) - 1), None):
                    if not segment.has_txn_index:  # and so none is open at its end
                        if segment.next_offset >= end_offset:
                            return found
                        continue
                    opened = segment.opened
                    if opened is None:
                        if not blocking:
                            return None
                        opened = self._open_segment(segment)
                    if opened.txn_index is not None:
                        found += opened.txn_index.lookup(first_offset, end_offset)
                        if opened.txn_index.settles(end_offset):
                            return found
            except SegmentRemoved:
                continue
            return found

    def offset_for_time(self, timestamp_ms: int, end_offset: int | None = None) -> OffsetAndTimestamp | None:
        """Return the first record at or after `timestamp_ms` below `end_offset` (default: high watermark). Blocking."""
        end = self.high_watermark if end_offset is None else end_offset
        return self._look_up(
            lambda segments: time_lookup.first_at_or_after(
                segments, self._open_segment, timestamp_ms, self.log_start_offset, end
            )
        )

    def first_from(self, offset: int, end_offset: int | None = None) -> OffsetAndTimestamp | None:
        """Return the first record at or after `offset` below `end_offset` (default: high watermark). Blocking."""
        end = self.high_watermark if end_offset is None else end_offset
        return self._look_up(
            lambda segments: time_lookup.first_at_or_after(
                segments, self._open_segment, BEFORE_ALL_TIME_MS, max(offset, self.log_start_offset), end
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
