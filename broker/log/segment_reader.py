"""Reading whole batches out of a segment, with boundaries from what is known instead of a walk over headers."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from broker.log.batch_scan import WALK_CHUNK_BYTES
from broker.log.segment import OpenSegment, Segment
from broker.log.storage import File
from raftlog.errors import CorruptRecordError
from raftlog.format import HEADER_BYTES, LENGTH_END

_SKIPPED_BYTES: Final = 4 + 1 + 4 + 2
"""leader_epoch, magic, crc32c, attributes"""
_FRONT = struct.Struct(f"<qI{_SKIPPED_BYTES}xI")
"""base_offset, batch_length, last_offset_delta of a batch header."""


class ReadResult(NamedTuple):
    """`records`: whole batches as they are on disk, one after the other. `next_offset`: where to go on."""

    records: bytes
    next_offset: int


class _WouldBlock(Exception):
    pass


def _read(file: File, size: int, position: int, blocking: bool) -> bytes:
    if blocking:
        return file.read(size, position)
    data = file.read_nowait(size, position)
    if data is None:
        raise _WouldBlock
    return data


def _corrupt(segment: Segment, position: int, reason: str) -> CorruptRecordError:
    return CorruptRecordError(f"{segment.log_path} position {position}: {reason}")


def _front(segment: Segment, data: bytes, at: int, position: int) -> tuple[int, int, int]:
    """Return (base offset, size, next offset) of the batch at `at` in `data`, which is `position` in the file."""
    base_offset, batch_length, last_offset_delta = _FRONT.unpack_from(data, at)
    size = LENGTH_END + batch_length
    next_offset = base_offset + last_offset_delta + 1
    if size < HEADER_BYTES or base_offset < segment.base_offset or next_offset > segment.next_offset:
        raise _corrupt(
            segment,
            position,
            f"no batch of this segment begins here (offsets from {base_offset} to before {next_offset}, {size} bytes)",
        )
    return base_offset, size, next_offset


def _find(segment: Segment, opened: OpenSegment, offset: int, size: int, blocking: bool) -> int:
    """Return the position of the first batch that ends above `offset`, or `size` when there is none."""
    floor = segment.floor(opened, offset)
    if floor.offset == offset or floor.position >= size:
        return floor.position
    position, chunk, start = floor.position, b"", floor.position
    while position < size:
        at = position - start
        if at + HEADER_BYTES > len(chunk):
            chunk, start, at = (
                _read(opened.file, min(WALK_CHUNK_BYTES, size - position), position, blocking),
                position,
                0,
            )
        if len(chunk) - at < HEADER_BYTES:
            raise _corrupt(segment, position, "the file is shorter than it was")
        _, batch_bytes, next_offset = _front(segment, chunk, at, position)
        if next_offset > offset:
            return position
        position += batch_bytes
    return size


def read_segment(
    segment: Segment, opened: OpenSegment, offset: int, max_bytes: int, end_offset: int, *, blocking: bool
) -> ReadResult | None:
    """Return whole batches from the one that holds `offset`, below `end_offset`, at most `max_bytes` unless it is one.

    None when it would have to wait for the disk and may not. Empty records: nothing from `offset` on is in this
    segment below `end_offset`.

    Raises:
        CorruptRecordError: the file contradicts the index; names file and position.
    """
    size = segment.size
    try:
        start = _find(segment, opened, offset, size, blocking)
        if start >= size:
            return ReadResult(b"", offset)
        end = segment.floor_position(opened, start + max_bytes, end_offset)
        if end.position > start:
            data = _read(opened.file, end.position - start, start, blocking)
            if len(data) < end.position - start:
                raise _corrupt(segment, start + len(data), "the file is shorter than it was")
            base_offset, _, next_offset = _front(segment, data, 0, start)
            if not base_offset <= offset < next_offset and base_offset < offset:
                raise _corrupt(segment, start, f"expected the batch that holds offset {offset}, found {base_offset}")
            return ReadResult(data, end.offset)
        return _read_by_headers(segment, opened.file, start, offset, max_bytes, end_offset, blocking)
    except _WouldBlock:
        return None


def _read_by_headers(
    segment: Segment, file: File, start: int, offset: int, max_bytes: int, end_offset: int, blocking: bool
) -> ReadResult:
    """No known boundary lies in the range: read it and cut behind its last whole batch."""
    size = segment.size
    data = _read(file, min(max(max_bytes, HEADER_BYTES), size - start), start, blocking)
    at, reached = 0, offset
    while at + HEADER_BYTES <= len(data):
        _, batch_bytes, next_offset = _front(segment, data, at, start + at)
        if next_offset > end_offset:
            break
        if at + batch_bytes > len(data):
            if at == 0:  # the first batch goes out even when it is larger than asked for
                if start + batch_bytes > size:
                    raise _corrupt(
                        segment, start, f"a batch of {batch_bytes} bytes reaches beyond the segment's {size}"
                    )
                return ReadResult(_read(file, batch_bytes, start, blocking), next_offset)
            break
        at += batch_bytes
        reached = next_offset
    return ReadResult(data[:at], reached)
