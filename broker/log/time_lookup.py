"""Offsets by time: sparse index, then batch headers, then one timestamp column. Blocking; off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from broker.log.batch_scan import InvalidBatch, ScannedBatch, walk_headers
from broker.log.segment import OpenSegment, Segment
from broker.log.segment_index import BEFORE_ALL_TIME_MS, Boundary
from broker.log.storage import File
from raftlog.errors import CorruptRecordError
from raftlog.format import Attributes, decode_batch
from raftlog.types import OffsetAndTimestamp

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
    return first_at_or_after(segments, open_segment, best, start_offset, end_offset)


def _largest_in(segment: Segment, opened: OpenSegment, start_offset: int, end_offset: int) -> int:
    best = BEFORE_ALL_TIME_MS
    begin = opened.index.floor(start_offset)
    if start_offset <= segment.base_offset:
        begin, best = opened.index.floor_time(end_offset)
    for batch in _walk(segment, opened.file, begin):
        header = batch.header
        if header.base_offset >= end_offset:
            break
        if header.max_timestamp_ms <= best or header.next_offset <= start_offset:
            continue
        if header.base_offset >= start_offset and header.next_offset <= end_offset:
            best = header.max_timestamp_ms
            continue
        _, timestamps = _rows(opened.file, batch, start_offset, end_offset)
        if len(timestamps):
            best = max(best, int(timestamps.max()))
    return best


def _walk(segment: Segment, file: File, begin: Boundary) -> Any:
    try:
        yield from walk_headers(file, begin.position, segment.size)
    except InvalidBatch as error:
        raise CorruptRecordError(f"{segment.log_path} position {error.position}: {error.reason}") from None
