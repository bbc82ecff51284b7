"""Frames on their way out: from whole batches as they rest on disk to the rows that are wanted."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raftlog.errors import CorruptRecordError, RaftlogError
from raftlog.format import Attributes, BatchHeader, Buffer, decode_batch, parse_batch, parse_header
from raftlog.format.aborted import AbortedRanges
from raftlog.format.header import check_header
from raftlog.types import Record, TopicPartition

_new_record = tuple.__new__
_PLACE: Final = struct.Struct("<q4xi")
"""base_offset and leader_epoch of a batch"""
_CONTROL: Final = int(Attributes.CONTROL)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one batch, all wanted. The columns share the memory of the frame.

    `columns` begins at the first wanted row; `first_offset` is its offset; with sparse offsets `offsets` has them all.
    """

    topic_partition: TopicPartition
    header: BatchHeader
    columns: Any
    first_offset: int
    offsets: NDArray[np.int64] | None

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    @property
    def timestamp_ms(self) -> int | None:
        """The timestamp of all rows, None when each has its own."""
        attributes = self.header.attributes
        if attributes & Attributes.LOG_APPEND_TIME or not attributes & Attributes.TIMESTAMP:
            return self.header.base_timestamp_ms
        return None

    def column(self, name: str) -> Any:
        """Return a column, None when the batch does without."""
        index = self.columns.schema.get_field_index(name)
        return self.columns.column(index) if index >= 0 else None

    def head(self, rows: int) -> Rows:
        """Return the first rows."""
        offsets = self.offsets[:rows] if self.offsets is not None else None
        return Rows(self.topic_partition, self.header, self.columns.slice(0, rows), self.first_offset, offsets)

    def tail(self, rows: int) -> Rows:
        """Return what is left after the first rows."""
        offsets = self.offsets[rows:] if self.offsets is not None else None
        first = int(offsets[0]) if offsets is not None else self.first_offset + rows
        return Rows(self.topic_partition, self.header, self.columns.slice(rows), first, offsets)

    def offset_after(self, rows: int) -> int:
        """Return the position after the first rows."""
        if rows == len(self):
            return self.header.next_offset
        return int(self.offsets[rows - 1]) + 1 if self.offsets is not None else self.first_offset + rows

    def records(self) -> list[Record]:
        """Return the rows as records."""
        count = len(self)
        at_ms = self.timestamp_ms
        key, headers = self.column("key"), self.column("headers")
        row = zip(
            repeat(self.topic_partition.topic, count),
            repeat(self.topic_partition.partition),
            range(self.first_offset, self.first_offset + count) if self.offsets is None else self.offsets.tolist(),
            repeat(at_ms) if at_ms is not None else self.column("timestamp_ms").to_pylist(),
            repeat(None) if key is None else key.to_pylist(),
            self.column("value").to_pylist(),
            repeat(()) if headers is None else map(_headers, headers.to_pylist()),
            strict=False,
        )
        return list(map(_new_record, repeat(Record), row))  # as Record._make, without a call in Python for each


class Skipped(NamedTuple):
    """Offsets without a row to hand out: the position moves on behind them."""

    next_offset: int
    leader_epoch: int


def _headers(pairs: list[tuple[str, bytes | None]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple(pairs) if pairs else ()


def wanted_rows(
    topic_partition: TopicPartition,
    records: Buffer,
    position: int,
    *,
    check_crcs: bool,
    end_offset: int | None = None,
    aborted: AbortedRanges | None = None,
) -> Iterator[Rows | Skipped]:
    """Yield the rows from `position` on, batch by batch.

    What lies before the position in the first batch is dropped; control batches, batches of transactions that are
    `aborted`, and those that compaction has emptied are passed over. The position never goes back, whatever the frame
    holds.

    What says that a batch is to be passed over is under its checksum, so that is looked at there as well. A checksum
    covers neither the batch's offset nor its leader epoch: these are held against its neighbours', and the offset
    against `end_offset`, at or above which nothing can have been sent.

    Raises:
        CorruptRecordError: a batch that is cut short, does not match its checksum, lies where it cannot or does not
            decode; names where.
    """
    at, end, reached = 0, len(records), (0, -1)
    while at < end:
        try:
            header = parse_header(records, at)
            check_header(header)
            if header.size > end - at:
                raise CorruptRecordError(f"the batch claims {header.size} bytes, {end - at} are there")
            reached = _check_place(header, reached, records, at + header.size, end_offset)
            wanted = header.next_offset > position
            if wanted:
                passed_over = header.attributes & _CONTROL or (aborted is not None and aborted.hold(header))
                if not passed_over:
                    decoded = decode_batch(records, at, check_checksum=check_crcs)
                elif check_crcs:
                    parse_batch(records, at)
        except RaftlogError as error:
            raise type(error)(f"{topic_partition} at offset {position}: {error}") from None
        at += header.size
        if not wanted:
            continue
        if passed_over:
            position = header.next_offset
            yield Skipped(position, header.leader_epoch)
            continue
        rows = _from(topic_partition, header, decoded.columns, position)
        position = header.next_offset
        yield rows if len(rows) else Skipped(position, header.leader_epoch)


def _check_place(
    header: BatchHeader, reached: tuple[int, int], records: Buffer, end: int, end_offset: int | None
) -> tuple[int, int]:
    """Return the next offset and the epoch that a batch reaches, which neither goes back itself nor makes others do.

    `reached`: the same of the batch before. The one after it begins at `end`.
    """
    next_offset, epoch = header.next_offset, header.leader_epoch
    if header.base_offset < reached[0]:
        raise CorruptRecordError(f"offset {header.base_offset} where {reached[0]} or more must follow")
    if 0 <= epoch < reached[1]:
        raise CorruptRecordError(f"leader epoch {epoch} after epoch {reached[1]}")
    if end_offset is not None and next_offset > end_offset:
        raise CorruptRecordError(f"offset {header.base_offset} where nothing lies beyond {end_offset}")
    leaps, rises = header.base_offset > reached[0], epoch > reached[1]
    if (leaps or rises) and end + _PLACE.size <= len(records):
        following, following_epoch = _PLACE.unpack_from(records, end)
        if leaps and following < next_offset:
            raise CorruptRecordError(f"offset {header.base_offset} in front of offset {following}")
        if rises and 0 <= following_epoch < epoch:
            raise CorruptRecordError(f"leader epoch {epoch} in front of epoch {following_epoch}")
    return next_offset, epoch


def _from(topic_partition: TopicPartition, header: BatchHeader, columns: Any, position: int) -> Rows:
    base = header.base_offset
    if header.attributes & Attributes.SPARSE_OFFSETS:
        offsets = np.asarray(columns.column("offset_delta")).astype(np.int64) + base
        skip = int(np.searchsorted(offsets, position))
        offsets = offsets[skip:]
        first = int(offsets[0]) if len(offsets) else position
        return Rows(topic_partition, header, columns.slice(skip), first, offsets)
    skip = max(0, position - base)
    return Rows(topic_partition, header, columns.slice(skip) if skip else columns, base + skip, None)
