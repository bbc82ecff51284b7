"""Offsets by time: sparse index, then batch headers, then one timestamp column. Blocking; off the event loop.

Only records are found, never markers of transactions, though both count for the index: a segment is as old as whatever
was appended to it last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from broker.log.batch_scan import InvalidBatch, ScannedBatch, walk_headers
from broker.log.segment import OpenSegment, Segment
from broker.log.segment_index import BEFORE_ALL_TIME_MS, Boundary
from broker.log.storage import File
from raftlog.errors import CorruptRecordError
from raftlog.format import Attributes, decode_batch
from raftlog.types import OffsetAndTimestamp

_CONTROL: Final = int(Attributes.CONTROL)

Opener = Callable[[Segment], OpenSegment]


def _rows(file: File, batch: ScannedBatch, start_offset: int, end_offset: int) -> tuple[Any, Any]:
    """Return (offsets, timestamps) of the batch's records in [start_offset, end_offset) as int64 arrays."""
    header = batch.header
    decoded = decode_batch(file.read(header.size, batch.position))
    columns = decoded.columns
    if header.attributes & Attributes.SPARSE_OFFSETS:
        offsets = header.base_offset + columns.column("offset_delta").to_numpy().astype(np.int64)
    else:
        offsets = np.arange(header.base_offset, header.next_offset, dtype=np.int64)
    if header.attributes & Attributes.TIMESTAMP and not header.attributes & Attributes.LOG_APPEND_TIME:
        timestamps = columns.column("timestamp_ms").to_numpy()
    else:
        timestamps = np.full(len(offsets), header.base_timestamp_ms, dtype=np.int64)
    inside = (offsets >= start_offset) & (offsets < end_offset)
    return offsets[inside], timestamps[inside]


def first_at_or_after(
    segments: Sequence[Segment], open_segment: Opener, timestamp_ms: int, start_offset: int, end_offset: int
) -> OffsetAndTimestamp | None:
    """Return the first record in [start_offset, end_offset) whose timestamp is at least `timestamp_ms`, or None."""
    for segment in segments:
        if segment.max_timestamp_ms < timestamp_ms or segment.next_offset <= start_offset:
            continue
        if segment.base_offset >= end_offset:
            break
        opened = open_segment(segment)
        begin = max(opened.index.before_time(timestamp_ms), opened.index.floor(start_offset))
        for batch in _walk(segment, opened.file, begin):
            header = batch.header
            if header.base_offset >= end_offset:
                break
            if header.max_timestamp_ms < timestamp_ms or header.next_offset <= start_offset:
                continue
            if header.attributes & _CONTROL:
                continue
            offsets, timestamps = _rows(opened.file, batch, start_offset, end_offset)
            found = np.flatnonzero(timestamps >= timestamp_ms)
            if len(found):
                first = int(found[0])
                return OffsetAndTimestamp(int(offsets[first]), int(timestamps[first]), header.leader_epoch)
    return None


def largest(
    segments: Sequence[Segment], open_segment: Opener, start_offset: int, end_offset: int
) -> OffsetAndTimestamp | None:
    """Return the first record in [start_offset, end_offset) that has the largest timestamp there, or None."""
    best = BEFORE_ALL_TIME_MS
    for segment in segments:
        if segment.max_timestamp_ms > best and segment.next_offset > start_offset and segment.base_offset < end_offset:
            best = max(best, _largest_in(segment, open_segment(segment), start_offset, end_offset))
    if best == BEFORE_ALL_TIME_MS:
        return None
    found = first_at_or_after(segments, open_segment, best, start_offset, end_offset)
    if found is None:  # it is a marker's, or of a batch that compaction has emptied
        best = _largest_of_rows(segments, open_segment, start_offset, end_offset)
        found = first_at_or_after(segments, open_segment, best, start_offset, end_offset)
    return found


def _largest_of_rows(segments: Sequence[Segment], open_segment: Opener, start_offset: int, end_offset: int) -> int:
    """Return the largest timestamp of a record in [start_offset, end_offset): by headers, the newest segment first."""
    best = BEFORE_ALL_TIME_MS
    for segment in sorted(segments, key=lambda segment: segment.max_timestamp_ms, reverse=True):
        if segment.max_timestamp_ms <= best:
            break
        if segment.next_offset <= start_offset or segment.base_offset >= end_offset:
            continue
        opened = open_segment(segment)
        for batch in _walk(segment, opened.file, Boundary(segment.base_offset, 0)):
            header = batch.header
            if header.record_count and not header.attributes & _CONTROL and header.max_timestamp_ms > best:
                best = max(best, _largest_of(opened.file, batch, start_offset, end_offset))
    return best


def _largest_of(file: File, batch: ScannedBatch, start_offset: int, end_offset: int) -> int:
    header = batch.header
    if start_offset <= header.base_offset and header.next_offset <= end_offset:
        return header.max_timestamp_ms
    if header.base_offset >= end_offset or header.next_offset <= start_offset:
        return BEFORE_ALL_TIME_MS
    _, timestamps = _rows(file, batch, start_offset, end_offset)
    return int(timestamps.max()) if len(timestamps) else BEFORE_ALL_TIME_MS


def _largest_in(segment: Segment, opened: OpenSegment, start_offset: int, end_offset: int) -> int:
    best = BEFORE_ALL_TIME_MS
    begin = opened.index.floor(start_offset)
    if start_offset <= segment.base_offset:
        begin, best = opened.index.floor_time(end_offset)
    for batch in _walk(segment, opened.file, begin):
        header = batch.header
        if header.base_offset >= end_offset:
            break
        if header.max_timestamp_ms > best:
            best = max(best, _largest_of(opened.file, batch, start_offset, end_offset))
    return best


def _walk(segment: Segment, file: File, begin: Boundary) -> Any:
    try:
        yield from walk_headers(file, begin.position, segment.size)
    except InvalidBatch as error:
        raise CorruptRecordError(f"{segment.log_path} position {error.position}: {error.reason}") from None
