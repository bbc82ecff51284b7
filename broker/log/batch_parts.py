"""What is left of compacted batches, and making one batch of several; Arrow, no Python loop over records.

A batch that is made here can be read by everyone: it passes `DEFAULT_LIMITS`, which every reader holds against it. What
comes out larger, or expands further, is split between its rows; where that cannot be, another codec is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from broker.log.source_batch import Int64s, SourceBatch
from raftlog.errors import InvalidRecord
from raftlog.format import (
    DEFAULT_LIMITS,
    HEADER_BYTES,
    HEADERS_TYPE,
    Attributes,
    BatchHeader,
    Buffer,
    Codec,
    Columns,
    parse_header,
)
from raftlog.format.batch import encode_batch
from raftlog.format.columns import decode_body
from raftlog.format.compression import claimed_inflated_size
from raftlog.format.header import CODEC_MASK, NO_PRODUCER_ID, build_batch

ROW_BYTES: Final = 24
"""What a row may take in a merged batch beside its own columns: offset, timestamp, places in the columns of others."""
_LOG_APPEND_TIME: Final = int(Attributes.LOG_APPEND_TIME)
_TIMESTAMP: Final = int(Attributes.TIMESTAMP)
_CONTROL: Final = int(Attributes.CONTROL)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)
_NO_VALUES: Final = pa.array([], pa.binary())


class EncodingFailed(Exception):
    """What is left of a batch cannot be written as one. The log is as good as it was: this is no damage."""


class CleanedBatch(NamedTuple):
    """A batch as it goes into the new segment; `is_copy`: as it lay in the old one."""

    data: Buffer
    base_offset: int
    next_offset: int
    max_timestamp_ms: int
    is_copy: bool


class Part(NamedTuple):
    """What is left of one batch. `data`: the batch itself, when that is everything; `columns` is None for no rows.

    `is_copy`: `data` is what lay in the log.
    """

    header: BatchHeader
    data: Buffer | None
    columns: Any
    offsets: Int64s
    bytes: int
    """Of its rows in a merged batch, at most."""
    is_copy: bool = True

    @property
    def rows(self) -> int:
        """How many rows are left."""
        return len(self.offsets)

    def detached(self) -> Part:
        """Return the same in memory of its own; what was filtered is that already."""
        if self.data is None:
            return self
        data, columns = bytes(self.data), self.columns
        if columns is not None and not self.header.attributes & CODEC_MASK:
            body = pa.py_buffer(data).slice(HEADER_BYTES, self.header.size - HEADER_BYTES)
            columns = decode_body(body, self.header.attributes, trusted=True)
        return self._replace(data=data, columns=columns, offsets=self.offsets.copy())

    def column(self, name: str) -> Any:
        """A column, nulls where the batch does without it."""
        index = self.columns.schema.get_field_index(name)
        if index >= 0:
            return self.columns.column(index)
        return pa.nulls(self.columns.num_rows, HEADERS_TYPE if name == "headers" else pa.binary())

    def copy(self) -> CleanedBatch:
        """Return the batch as one of its own."""
        assert self.data is not None
        header = self.header
        return CleanedBatch(self.data, header.base_offset, header.next_offset, header.max_timestamp_ms, self.is_copy)


_NO_OFFSETS: Final = np.zeros(0, np.int64)


def whole(batch: SourceBatch, offsets: Int64s | None = None) -> Part:
    """Return a batch of which everything is left; not taken apart without `offsets`.

    One that is transactional is that no more, under a new checksum.
    """
    header, data = batch.header, batch.data
    is_copy = header.attributes & (_TRANSACTIONAL | _CONTROL) != _TRANSACTIONAL
    if not is_copy:
        unmarked = header._replace(attributes=header.attributes & ~_TRANSACTIONAL)
        data = memoryview(build_batch(unmarked, data[HEADER_BYTES : header.size]))
        header = parse_header(data)
    if offsets is None or not len(offsets):
        return Part(header, data, None, _NO_OFFSETS, 0, is_copy)
    return Part(header, data, batch.columns, offsets, batch.columns.nbytes + ROW_BYTES * len(offsets), is_copy)


def emptied(batch: SourceBatch) -> Part:
    """Return a batch of which nothing is left."""
    return Part(batch.header, None, None, _NO_OFFSETS, 0)


def reduced(batch: SourceBatch, offsets: Int64s, keep: Any) -> Part:
    """Return the rows of a batch that `keep`, an array of booleans, names; they are copied."""
    columns = batch.columns.filter(pa.array(keep))
    return Part(batch.header, None, columns, offsets[keep], columns.nbytes + ROW_BYTES * columns.num_rows)


def kind_of(header: BatchHeader) -> tuple[int, int]:
    """What the rows of one batch have in common; log append time is one for all of them."""
    by_log = header.attributes & _LOG_APPEND_TIME
    return header.attributes & CODEC_MASK | by_log, header.base_timestamp_ms if by_log else 0


class Run:
    """Neighbours on their way into one batch. Those without rows leave nothing but their range and their age."""

    def __init__(self, first: Part) -> None:
        self.first = first.header
        self.next_offset = first.header.base_offset
        self.filled: list[Part] = []
        self.bytes = 0
        self._only: Part | None = first
        self._parts = 0
        self._is_changed = False
        self._emptied_ms = first.header.max_timestamp_ms
        self.add(first)

    def add(self, part: Part) -> None:
        """Take the next one in."""
        self.next_offset = part.header.next_offset
        self._emptied_ms = max(self._emptied_ms, part.header.max_timestamp_ms)
        self._parts += 1
        if self._parts > 1:
            self._is_changed |= self._only is not None and not self._only.rows
            self._is_changed |= part.data is None or not part.rows
            self._only = None
        else:
            self._is_changed = part.data is None
        if part.rows:
            self.filled.append(part)
            self.bytes += part.bytes

    def detach(self) -> None:
        """Let go of the memory that the batches were read into."""
        self.filled = [part.detached() for part in self.filled]
        if self._only is not None:
            self._only = self._only.detached()

    def batches(self, max_bytes: int, *, pinned: bool = False) -> Iterator[CleanedBatch]:
        """Yield what becomes of it: the same batches where nothing is gone, else one; several beyond the limits.

        `pinned`: one in any case.

        Raises:
            EncodingFailed: there is no such batch.
        """
        if not self._is_changed:
            for part in [self._only] if self._only is not None else self.filled:
                yield part.copy()
            return
        max_bytes = max([max_bytes, *(part.header.size for part in self.filled)])
        rows = rows_of(self.filled, self.first, self._emptied_ms, keeps_numbers=self._parts == 1)
        stretches = [(self.first.base_offset, self.next_offset, 0, len(rows.offsets))]
        while stretches:
            base_offset, next_offset, start, end = stretches.pop()
            if end - start < 2 or pinned:
                yield rows.encode_readable(base_offset, next_offset, start, end)
                continue
            made = rows.encode(base_offset, next_offset, start, end)
            if made is not None and len(made.data) <= max_bytes and is_readable(made.data, rows.header.codec):
                yield made
                continue
            middle = (start + end) // 2
            border = int(rows.offsets[middle])
            rows = rows._replace(keeps_numbers=False)
            stretches += [(border, next_offset, middle, end), (base_offset, border, start, middle)]


def is_readable(data: Buffer, codec: Codec) -> bool:
    """Whether a batch passes the limits that readers have."""
    inflated = claimed_inflated_size(data, codec)
    return DEFAULT_LIMITS.refusal(inflated, len(data) - HEADER_BYTES - 4) is None


class Rows(NamedTuple):
    """The rows that are left of some batches, and what their new batch gets from those."""

    columns: Columns
    offsets: Int64s
    header: BatchHeader
    keeps_numbers: bool
    emptied_ms: int
    """The timestamp of a batch without rows: retention goes by the newest record that was there."""

    def encode_readable(self, base_offset: int, next_offset: int, start: int, end: int) -> CleanedBatch:
        """Return rows `start` to `end` as one batch that can be read, whatever the codec.

        LZ4 never expands as far as the limit; without a codec there is none.

        Raises:
            EncodingFailed: the rows take more than 2 GiB.
        """
        for codec in (self.header.codec, Codec.LZ4, Codec.NONE):
            made = self.encode(base_offset, next_offset, start, end, codec)
            if made is not None and is_readable(made.data, codec):
                return made
        raise EncodingFailed(f"offsets {base_offset} to {next_offset - 1} do not fit into one batch any more")

    def encode(
        self, base_offset: int, next_offset: int, start: int, end: int, codec: Codec | None = None
    ) -> CleanedBatch | None:
        """Return rows `start` to `end` as a batch that covers the offsets given; None when they are too large."""
        header, columns = self.header, self.columns
        value, key, timestamps, headers = (
            None if column is None else column.slice(start, end - start)
            for column in (columns.value, columns.key, columns.timestamp_ms, columns.headers)
        )
        base_ms = header.base_timestamp_ms
        if start == end:
            base_ms = self.emptied_ms
            key = timestamps = headers = None
        elif timestamps is not None:
            base_ms = timestamps[0].as_py()
        deltas = pa.array((self.offsets[start:end] - base_offset).astype(np.uint32))
        numbers = header if self.keeps_numbers else None
        try:
            data = encode_batch(
                Columns(value, key, timestamps, headers, deltas),
                base_ms,
                codec=header.codec if codec is None else codec,
                attributes=header.attributes & _LOG_APPEND_TIME,
                producer_id=numbers.producer_id if numbers else NO_PRODUCER_ID,
                producer_epoch=numbers.producer_epoch if numbers else -1,
                base_sequence=numbers.base_sequence if numbers else -1,
                base_offset=base_offset,
                leader_epoch=header.leader_epoch,
                last_offset_delta=next_offset - base_offset - 1,
            )
        except InvalidRecord:
            return None
        max_ms = base_ms if timestamps is None else pc.max(timestamps).as_py()
        return CleanedBatch(data, base_offset, next_offset, max_ms, is_copy=False)


def rows_of(filled: Sequence[Part], first: BatchHeader, emptied_ms: int, *, keeps_numbers: bool) -> Rows:
    """Return the rows of `filled` side by side; as a column only what one of them has.

    `first` is the header of the first batch, for what is left without rows.
    """
    if not filled:
        return Rows(Columns(_NO_VALUES), _NO_OFFSETS, first, keeps_numbers, emptied_ms)
    header = filled[0].header

    def gather(name: str) -> Any:
        if all(part.columns.schema.get_field_index(name) < 0 for part in filled):
            return None
        return pa.concat_arrays([part.column(name) for part in filled])

    timestamps = None
    if not header.attributes & _LOG_APPEND_TIME:
        bases = {part.header.base_timestamp_ms for part in filled}
        if len(bases) > 1 or any(part.header.attributes & _TIMESTAMP for part in filled):
            timestamps = pa.concat_arrays([_timestamps(part) for part in filled])
    offsets = np.concatenate([part.offsets for part in filled])
    columns = Columns(gather("value"), gather("key"), timestamps, gather("headers"))
    return Rows(columns, offsets, header, keeps_numbers, emptied_ms)


def _timestamps(part: Part) -> Any:
    if part.header.attributes & _TIMESTAMP:
        return part.columns.column("timestamp_ms")
    return pa.array(np.full(part.rows, part.header.base_timestamp_ms, np.int64))
