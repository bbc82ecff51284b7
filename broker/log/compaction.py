"""Which records of a compacted log stay, and what becomes of their batches. Pure; no Python loop over records.

Of each key only the last record stays. `LastOffsets` holds the last offset of every key in the section that was written
since the last cleaning (the dirty section). A row goes

    when its key has a later offset there;
    when it is a tombstone (null value) that readers could see for `delete.retention.ms`;
    when it has no key: no later record could replace it (Kafka drops it as well).

Batches keep their place (docs/adr/0013): every batch begins where the one before ended. A batch that lost rows still
covers its whole range, with the column `offset_delta` (raftlog/format/columns.py), and the rest of neighbours is merged
into one batch that covers all their ranges, up to `MERGED_BYTES`.

    of an aborted transaction            no row stays; their keys replace no record
    of a committed transaction           as others, and transactional no more, even if every row stays
    control batches                      stay as they are, or go as a whole (`cleaner.py` says when)
    pinned: a producer's last ones       may lose rows, keep the numbers and range of their header, are not merged
    others, no loss nearby               byte for byte
    others                               merged with neighbours of the same epoch, codec and kind of timestamp

Compacted batches lie below the last stable offset, so it is known how each transaction there ended. After a cleaning no
batch is transactional any more: so markers may finally go, and a reader from the log start (recovery, a new follower)
finds no transaction open that was decided long ago.

A batch that is made here passes `DEFAULT_LIMITS`, so that every reader can read it. A batch that comes out larger, or
expands further, is split between its rows; where that is impossible, it gets another codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

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
    InflateLimits,
    decode_batch,
    parse_batch,
    parse_header,
)
from raftlog.format.aborted import AbortedRanges
from raftlog.format.batch import encode_batch
from raftlog.format.columns import decode_body
from raftlog.format.compression import claimed_inflated_size
from raftlog.format.header import CODEC_MASK, NO_PRODUCER_ID, build_batch

LIMITS: Final = InflateLimits(max_bytes=(1 << 31) - 1, max_ratio=1 << 31)
"""No limits: the leader has checked each batch against the topic's own limits."""
_SPARSE: Final = int(Attributes.SPARSE_OFFSETS)
_CONTROL: Final = int(Attributes.CONTROL)
NONE_ABORTED: Final = AbortedRanges(())

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


class SourceBatch(NamedTuple):
    """A batch of the log before compaction. `columns` is None where its rows do not matter.

    `is_pinned`: it stays a batch of its own. `is_over`: none of it stays, whatever its keys.
    """

    header: BatchHeader
    data: memoryview
    columns: Any
    is_pinned: bool
    is_over: bool = False

    @property
    def offsets(self) -> Int64s:
        """The offset of each row."""
        header = self.header
        if header.attributes & _SPARSE:
            deltas: Int64s = self.columns.column("offset_delta").to_numpy().astype(np.int64)
            return deltas + header.base_offset
        return np.arange(header.base_offset, header.next_offset, dtype=np.int64)


def column_of(columns: Any, name: str) -> Any:
    """Return a column of a batch, nulls where the batch lacks it."""
    index = columns.schema.get_field_index(name)
    if index >= 0:
        return columns.column(index)
    return pa.nulls(columns.num_rows, HEADERS_TYPE if name == "headers" else pa.binary())


IsPinned = Callable[[BatchHeader], bool]
"""Whether the state of a batch's producer needs its numbers."""
AreSpent = Callable[[BatchHeader, memoryview], bool]
"""Whether no reader and no replica needs the markers of a control batch any more."""


def read_batch(
    data: memoryview,
    header: BatchHeader,
    is_pinned: IsPinned,
    aborted: AbortedRanges = NONE_ABORTED,
    are_spent: AreSpent = lambda header, data: False,
) -> SourceBatch:
    """Decode one whole batch after checking its checksum, so that damaged bytes never get a new checksum.

    The contents were validated when the batch was produced. `aborted` must cover all transactions that have records in
    the batch.

    Raises:
        CorruptRecordError: it does not check or does not decode.
    """
    parse_batch(data)
    if header.attributes & _CONTROL:
        over = are_spent(header, data)
        return SourceBatch(header, data, None, not over, over)
    pinned = header.producer_id != NO_PRODUCER_ID and is_pinned(header)
    if aborted.hold(header):
        return SourceBatch(header, data, None, pinned, is_over=True)
    decoded = decode_batch(data, limits=LIMITS, check_checksum=False, trusted=True)
    return SourceBatch(header, data, decoded.columns, pinned)


ROW_BYTES: Final = 24
"""Bytes that a row takes in a merged batch beside its own columns: offset, timestamp, places in added columns."""
_LOG_APPEND_TIME: Final = int(Attributes.LOG_APPEND_TIME)
_TIMESTAMP: Final = int(Attributes.TIMESTAMP)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)
_NO_VALUES: Final = pa.nulls(0, pa.binary())


class EncodingFailed(Exception):
    """The rest of a batch cannot be written as one batch. The log is unchanged, and not damaged."""


class CleanedBatch(NamedTuple):
    """A batch of the new segment; `is_copy`: byte for byte as in the old one."""

    data: Buffer
    base_offset: int
    next_offset: int
    max_timestamp_ms: int
    is_copy: bool


class Part(NamedTuple):
    """The rest of one batch. `data`: the whole batch, if it lost no row; `columns`: None without rows.

    `is_copy`: `data` is byte for byte as in the log.
    """

    header: BatchHeader
    data: Buffer | None
    columns: Any
    offsets: Int64s
    bytes: int
    """The most bytes that its rows take in a merged batch."""
    is_copy: bool = True

    @property
    def rows(self) -> int:
        """Number of rows left."""
        return len(self.offsets)

    def detached(self) -> Part:
        """Return the same part in memory of its own, as filtered rows are already."""
        if self.data is None:
            return self
        data, columns = bytes(self.data), self.columns
        if columns is not None and not self.header.attributes & CODEC_MASK:
            body = pa.py_buffer(data).slice(HEADER_BYTES, self.header.size - HEADER_BYTES)
            columns = decode_body(body, self.header.attributes, trusted=True)
        return self._replace(data=data, columns=columns, offsets=self.offsets.copy())

    def copy(self) -> CleanedBatch:
        """Return the whole batch, unmerged."""
        assert self.data is not None
        header = self.header
        return CleanedBatch(self.data, header.base_offset, header.next_offset, header.max_timestamp_ms, self.is_copy)


_NO_OFFSETS: Final = np.zeros(0, np.int64)


def whole(batch: SourceBatch, offsets: Int64s | None = None) -> Part:
    """Return a batch that lost no row, with its rows if `offsets` are given.

    A transactional batch loses that attribute and gets a new checksum.
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
    """Return a batch that lost all rows."""
    return Part(batch.header, None, None, _NO_OFFSETS, 0)


def reduced(batch: SourceBatch, offsets: Int64s, keep: Any) -> Part:
    """Return a copy of the rows of a batch for which `keep`, an array of booleans, is true."""
    columns = batch.columns.filter(pa.array(keep))
    return Part(batch.header, None, columns, offsets[keep], columns.nbytes + ROW_BYTES * columns.num_rows)


def kind_of(header: BatchHeader) -> tuple[int, int]:
    """Return what the rows of one batch must share: codec, kind of timestamp, and a log append time."""
    by_log = header.attributes & _LOG_APPEND_TIME
    return header.attributes & CODEC_MASK | by_log, header.base_timestamp_ms if by_log else 0


class Run:
    """Neighbours that become one batch. Those without rows contribute only their range and their age."""

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
        """Add the next neighbour."""
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
        """Copy the parts, so that the memory that the batches were read into can be freed."""
        self.filled = [part.detached() for part in self.filled]
        if self._only is not None:
            self._only = self._only.detached()

    def batches(self, max_bytes: int, *, pinned: bool = False) -> Iterator[CleanedBatch]:
        """Yield the same batches if no row is gone, else one merged batch, or several where one exceeds the limits.

        `pinned`: one batch in any case.

        Raises:
            EncodingFailed: the rows do not fit into a batch.
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
    """Whether a batch passes the limits of readers."""
    inflated = claimed_inflated_size(data, codec)
    return DEFAULT_LIMITS.refusal(inflated, len(data) - HEADER_BYTES - 4) is None


class Rows(NamedTuple):
    """The rows left of some batches, and the header fields for their new batch."""

    columns: Columns
    offsets: Int64s
    header: BatchHeader
    keeps_numbers: bool
    emptied_ms: int
    """The timestamp of a batch without rows: that of the newest record that it had, for retention by time."""

    def encode_readable(self, base_offset: int, next_offset: int, start: int, end: int) -> CleanedBatch:
        """Return rows `start` to `end` as one batch that readers accept, in another codec if necessary.

        LZ4 never expands as far as the limit; without a codec there is none.

        Raises:
            EncodingFailed: the rows take more than 2 GiB.
        """
        for codec in (self.header.codec, Codec.LZ4, Codec.NONE):
            made = self.encode(base_offset, next_offset, start, end, codec)
            if made is not None and is_readable(made.data, codec):
                return made
        raise EncodingFailed(f"the rows of offsets {base_offset} to {next_offset - 1} no longer fit into one batch")

    def encode(
        self, base_offset: int, next_offset: int, start: int, end: int, codec: Codec | None = None
    ) -> CleanedBatch | None:
        """Return rows `start` to `end` as a batch that covers the given offsets; None if they are too large."""
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
    """Return the rows of `filled` together, with the columns that at least one of them has.

    `first` is the header of the first batch, which is used if `filled` is empty.
    """
    if not filled:
        return Rows(Columns(_NO_VALUES), _NO_OFFSETS, first, keeps_numbers, emptied_ms)
    header = filled[0].header

    def gather(name: str) -> Any:
        if all(part.columns.schema.get_field_index(name) < 0 for part in filled):
            return None
        return pa.concat_arrays([column_of(part.columns, name) for part in filled])

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


_MERGE_BYTES: Final = 16 << 20
"""Keys are collected up to at least this size before duplicates are removed."""
_NO_KEYS: Final = pa.nulls(0, pa.binary())


class LastOffsets:
    """The last offset of every key, of batches that are added in the order of the log; Arrow does the work."""

    def __init__(self) -> None:
        self._keys: Any = _NO_KEYS
        self._last: Int64s = np.zeros(0, np.int64)
        self._new_keys: list[Any] = []
        self._new_offsets: list[Int64s] = []
        self._new_bytes = 0

    def __len__(self) -> int:
        self._merge()
        return len(self._keys)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the keys take; keys that were added since the last merge may count twice."""
        return self._keys_bytes + self._new_bytes

    @property
    def _keys_bytes(self) -> int:
        return int(self._keys.nbytes) + 8 * len(self._last)

    def add(self, batches: Sequence[SourceBatch]) -> None:
        """Add the rows of batches, except those without a key.

        The keys are copied: a view would keep all memory that was read with them.
        """
        new_keys: list[Any] = []
        new_offsets: list[Int64s] = []
        for batch in batches:
            if batch.columns is None or not batch.header.record_count:
                continue
            keys, offsets = column_of(batch.columns, "key"), batch.offsets
            if keys.null_count:
                valid = keys.is_valid()
                keys, offsets = keys.filter(valid), offsets[valid.to_numpy(zero_copy_only=False)]
            new_keys.append(keys)
            new_offsets.append(offsets)
        if not new_keys:
            return
        self._new_keys.append(pa.concat_arrays(new_keys))
        self._new_offsets.append(np.concatenate(new_offsets))
        self._new_bytes += self._new_keys[-1].nbytes + 8 * len(self._new_keys[-1])
        if self._new_bytes > max(_MERGE_BYTES, self._keys_bytes):
            self._merge()

    def is_full(self, max_bytes: int) -> bool:
        """Whether the keys take `max_bytes` or more."""
        if self.memory_bytes >= max_bytes:
            self._merge()
        return self.memory_bytes >= max_bytes

    def _merge(self) -> None:
        if not self._new_keys:
            return
        encoded = pa.chunked_array([self._keys, *self._new_keys], pa.binary()).combine_chunks().dictionary_encode()
        places = encoded.indices.to_numpy()
        last = np.zeros(len(encoded.dictionary), np.int64)
        last[places] = np.concatenate(
            [self._last, *self._new_offsets]
        )  # offsets ascend, so the last one of each key stays
        self._keys, self._last = encoded.dictionary, last
        self._new_keys, self._new_offsets, self._new_bytes = [], [], 0

    def superseded(self, keys: Any, offsets: Int64s) -> Bools:
        """Return for each row whether its key has a later offset; never for null keys."""
        self._merge()
        if not len(self._keys) or not len(offsets):
            return np.zeros(len(offsets), np.bool_)
        places = pc.index_in(keys, value_set=self._keys).fill_null(-1).to_numpy()
        found: Bools = (self._last[places] > offsets) & (places >= 0)
        return found


MERGED_BYTES: Final = DEFAULT_LIMITS.ratio_floor_bytes * 15 // 16
"""Uncompressed bytes of columns at which a merged batch is closed; smaller batches pass any expansion ratio."""
MAX_PARTS: Final = 4096
"""The most batches whose rows are merged into one; bounds the memory of their headers."""
MAX_SPAN: Final = (1 << 31) - 1
"""The most offsets that a merged batch covers: relative offsets in the index and in the header are u32."""


class Compactor:
    """Takes batches in the order of the log, without gaps, and yields batches likewise.

    Between two calls it holds back a copy of at most `MERGED_BYTES` of rows, or one batch.
    """

    def __init__(self, last_offsets: LastOffsets, *, tombstones_below: int = 0, max_batch_bytes: int = 1 << 30) -> None:
        self._last_offsets = last_offsets
        self._tombstones_below = tombstones_below
        self._max_batch_bytes = max_batch_bytes
        self._merged_bytes = min(MERGED_BYTES, max_batch_bytes)
        self._run: Run | None = None
        self.rows_in = 0
        self.rows_out = 0

    @property
    def pending_bytes(self) -> int:
        """Uncompressed bytes of the rows that are held back."""
        return self._run.bytes if self._run is not None else 0

    def compact(self, batches: Sequence[SourceBatch]) -> Iterator[CleanedBatch]:
        """Take the next batches and yield the finished ones; the batch that is being merged is held back.

        Raises:
            EncodingFailed: the rest of a batch cannot be written.
        """
        for part, is_pinned in self._parts(batches):
            yield from self._take(part, is_pinned)
        if self._run is not None:
            self._run.detach()

    def finish(self) -> Iterator[CleanedBatch]:
        """Yield what was held back. Raises as `compact`."""
        run, self._run = self._run, None
        if run is not None:
            yield from run.batches(self._max_batch_bytes)

    def _parts(self, batches: Sequence[SourceBatch]) -> Iterator[tuple[Part, bool]]:
        readable = [batch for batch in batches if batch.columns is not None]
        offsets = np.concatenate([batch.offsets for batch in readable]) if readable else np.zeros(0, np.int64)
        keep = self._keep(readable, offsets)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
        start = 0
        for batch in batches:
            if batch.columns is None:
                yield emptied(batch) if batch.is_over else whole(batch), batch.is_pinned
                continue
            end = start + batch.header.record_count
            rows = int(before[end] - before[start])
            self.rows_in += end - start
            self.rows_out += rows
            if rows == end - start:
                yield whole(batch, offsets[start:end]), batch.is_pinned
            elif rows:
                yield reduced(batch, offsets[start:end], keep[start:end]), batch.is_pinned
            else:
                yield emptied(batch), batch.is_pinned
            start = end

    def _keep(self, batches: Sequence[SourceBatch], offsets: Int64s) -> Bools:
        if not batches:
            return np.zeros(0, np.bool_)
        keys = pa.chunked_array([column_of(batch.columns, "key") for batch in batches], pa.binary())
        keep = ~self._last_offsets.superseded(keys, offsets)
        if keys.null_count:
            keep &= keys.is_valid().to_numpy()
        if batches[0].header.base_offset < self._tombstones_below:
            values = pa.chunked_array([column_of(batch.columns, "value") for batch in batches], pa.binary())
            if values.null_count:
                keep &= values.is_valid().to_numpy() | (offsets >= self._tombstones_below)
        return keep

    def _take(self, part: Part, is_pinned: bool) -> Iterator[CleanedBatch]:
        if is_pinned:
            yield from self.finish()
            yield from Run(part).batches(self._max_batch_bytes, pinned=True)
            return
        if self._run is not None and not self._fits(self._run, part):
            yield from self.finish()
        if self._run is None:
            self._run = Run(part)
        else:
            self._run.add(part)
        if self._run.bytes >= self._merged_bytes:
            yield from self.finish()

    def _fits(self, run: Run, part: Part) -> bool:
        """Whether a batch may join the run. Without rows only its epoch and the span count."""
        header = part.header
        if header.leader_epoch != run.first.leader_epoch or header.next_offset - run.first.base_offset > MAX_SPAN:
            return False
        if not run.filled or not part.rows:
            return True
        if run.bytes + part.bytes > self._merged_bytes or len(run.filled) >= MAX_PARTS:
            return False
        return kind_of(run.filled[0].header) == kind_of(header)


def cut_front(batch: Buffer, offset: int) -> bytes:
    """Return the part of a batch from `offset` on, as a batch of no producer that begins there.

    For a follower whose log ends within the range of a batch of its leader. It holds the lower offsets: in the batches
    before its leader has merged them, or in the first part of a batch that an earlier leader has compacted and split.
    So the batch lies below what was the last stable offset, and if it is transactional here, it was committed.

    Raises:
        CorruptRecordError: the batch does not decode.
    """
    decoded = decode_batch(batch, limits=LIMITS)
    header = decoded.header
    assert header.base_offset < offset < header.next_offset
    source = SourceBatch(header, memoryview(batch), decoded.columns, is_pinned=False)
    part = reduced(source, source.offsets, source.offsets >= offset)
    rows = rows_of([part] if part.rows else [], header, header.max_timestamp_ms, keeps_numbers=False)
    return bytes(rows.encode_readable(offset, header.next_offset, 0, part.rows).data)


__all__ = [
    "MAX_PARTS",
    "MAX_SPAN",
    "MERGED_BYTES",
    "CleanedBatch",
    "Compactor",
    "EncodingFailed",
    "LastOffsets",
    "SourceBatch",
    "cut_front",
    "read_batch",
]
