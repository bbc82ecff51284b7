"""The index files of a segment, and walks over the batches of its `.log` file.

A `.log` file holds nothing but record batches (docs/format.md), one after the other from byte 0. `scan_batches` checks
every batch; `walk_headers` reads headers only.

Index files hold entries of a fixed size without a header, little-endian. Each ends in a checksum: the CRC-32C of the
segment's base offset (i64) followed by the entry's other bytes. So an index that is torn, half zero, or of another
segment is good up to the first entry that does not check, and needs no fsync before it is used.

`.index`, sparse, offset to position:

    position  size  field
           0     4  relative_offset  u32 offset of a batch's first record minus the segment's base offset
           4     4  position         u32 byte in the `.log` file where that batch begins
           8     4  crc32c           u32

Offsets and positions ascend. The first batch has no entry: it is at position 0. When a segment is sealed, and at a
clean shutdown, a closing entry (next offset, size of the log file) is added; a sealed segment whose index does not end
in it has its indexes rebuilt.

`.timeindex`, sparse, timestamp to offset, one entry for each entry of the `.index` file:

    position  size  field
           0     8  max_timestamp_ms  i64 largest timestamp of the segment's records below the offset
           8     4  relative_offset   u32 that offset minus the segment's base offset
          12     4  crc32c            u32

Timestamps never descend, offsets ascend. So records at or after `t` are not below the offset of the last entry whose
timestamp is less than `t`, in whatever order the records' own timestamps are. The closing entry of a sealed segment
gives its largest timestamp.

`.txnindex` of a sealed segment: the transactions whose abort markers lie in it, in the order of the markers:

    position  size  field
           0     8  producer_id         i64
           8     8  first_offset        i64 first record of the transaction, in this segment or an earlier one
          16     8  last_offset         i64 offset of its abort marker
          24     8  last_stable_offset  i64 first offset of the oldest transaction open after the marker, or the next
                                            offset; -1: unknown
          32     4  crc32c              u32

The closing entry has producer_id -1, first_offset the base offset of the segment, last_offset the segment's next
offset, last_stable_offset that at the segment's end. A file without it, or with an entry that does not check, is
rebuilt from the markers, which say where their transactions began (raftlog/format/control.py).

A segment without aborted transactions, and without an open one at its end, has no file. As the file is durable before
the closing entries of the other indexes are written, a segment that has those and no `.txnindex` needs none.

A reader of committed records looks up the transactions that overlap what it reads, and drops their records. Their
markers may lie in later segments: it goes on to the first segment before whose end everything it reads was decided.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np

from broker.log.storage import File, Storage, read_file
from broker.log.transactions import AbortedTransaction
from raftlog.errors import CorruptRecordError, RaftlogError
from raftlog.format import HEADER_BYTES, Attributes, BatchHeader, parse_batch, parse_header
from raftlog.format.control import PlacedMarker, placed_markers

SCAN_CHUNK_BYTES: Final = 1 << 20
WALK_CHUNK_BYTES: Final = 8 << 10


class ScannedBatch(NamedTuple):
    """A batch and where it begins."""

    position: int
    header: BatchHeader

    @property
    def end_position(self) -> int:
        """The first byte after it."""
        return self.position + self.header.size


class InvalidBatch(Exception):
    """The bytes at `position` are no batch that may follow; all batches before it are good."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"position {position}: {reason}")
        self.position = position
        self.reason = reason


def scan_batches(file: File, position: int, size: int) -> Iterator[ScannedBatch]:
    """Yield every batch from `position` to `size` after checking its checksum.

    Raises:
        InvalidBatch: the first bytes that are no whole batch or do not check.
    """
    chunk, start = b"", position
    while position < size:
        offset = position - start
        if len(chunk) - offset < HEADER_BYTES:
            chunk, start, offset = file.read(min(SCAN_CHUNK_BYTES, size - position), position), position, 0
        try:
            header = parse_header(chunk, offset)
            if header.size > size - position:
                raise CorruptRecordError(f"the header claims {header.size} bytes, {size - position} are left")
            if header.size > len(chunk) - offset:
                chunk, start, offset = (
                    file.read(max(header.size, min(SCAN_CHUNK_BYTES, size - position)), position),
                    position,
                    0,
                )
            header = parse_batch(chunk, offset)
        except RaftlogError as error:
            raise InvalidBatch(position, str(error)) from None
        yield ScannedBatch(position, header)
        position += header.size


def walk_headers(file: File, position: int, size: int) -> Iterator[ScannedBatch]:
    """Yield the headers of the batches from `position` to `size`, bodies unread; for bytes known to be good.

    Raises:
        InvalidBatch: a header that is cut short or reaches beyond `size`.
    """
    chunk, start = b"", position
    while position < size:
        offset = position - start
        if offset + HEADER_BYTES > len(chunk):
            chunk, start, offset = file.read(min(WALK_CHUNK_BYTES, size - position), position), position, 0
        if len(chunk) - offset < HEADER_BYTES:
            raise InvalidBatch(position, f"a header has {HEADER_BYTES} bytes, {size - position} are left")
        header = parse_header(chunk, offset)
        if header.size < HEADER_BYTES or header.size > size - position:
            raise InvalidBatch(position, f"the header claims {header.size} bytes, {size - position} are left")
        yield ScannedBatch(position, header)
        position += header.size


_I64 = struct.Struct("<q")
_POLYNOMIAL: Final = 0x82F63B78


def _make_table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE: Final = _make_table()


_FEW_ROWS: Final = 100
"""Up to here a call for each row certainly takes less time than one table look-up for each byte of a row: both took as
long at some 300 rows."""


def _checksums(base_offset: int, entries: Any, checked_bytes: int) -> Any:
    """Return the CRC-32C of every row's first `checked_bytes`; of many rows by one table look-up per byte column."""
    seed = int(google_crc32c.value(_I64.pack(base_offset)))
    if len(entries) <= _FEW_ROWS:
        data, size = entries.tobytes(), entries.dtype.itemsize
        each = (google_crc32c.extend(seed, data[at : at + checked_bytes]) for at in range(0, len(data), size))
        return np.fromiter(each, np.uint32, len(entries))
    seed ^= 0xFFFFFFFF
    rows = entries.view(np.uint8).reshape(len(entries), entries.dtype.itemsize)
    crc = np.full(len(entries), seed, dtype=np.uint32)
    for column in range(checked_bytes):
        crc = _TABLE[(crc ^ rows[:, column]) & 0xFF] ^ (crc >> 8)
    return ~crc


def seal_entries(base_offset: int, entries: Any) -> bytes:
    """Return the bytes of a structured array whose last field is `crc32c`, with that field filled in."""
    entries["crc32c"] = _checksums(base_offset, entries, entries.dtype.itemsize - 4)
    return bytes(entries.tobytes())


def open_entries(base_offset: int, data: bytes, dtype: Any) -> Any:
    """Return the entries in `data` up to the first that is cut short or does not check."""
    entries = np.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)
    if len(entries) == 0:
        return entries
    good = _checksums(base_offset, entries, dtype.itemsize - 4) == entries["crc32c"]
    return entries if good.all() else entries[: int(np.argmin(good))]


OFFSET_ENTRY: Final = np.dtype([("relative_offset", "<u4"), ("position", "<u4"), ("crc32c", "<u4")])
OFFSET_ENTRY_BYTES: Final = 12
MAX_RELATIVE_OFFSET: Final = (1 << 32) - 1

assert OFFSET_ENTRY.itemsize == OFFSET_ENTRY_BYTES


def encode_offset_entries(base_offset: int, relative_offsets: array[int], positions: array[int]) -> bytes:
    """Return the bytes of these entries."""
    entries = np.zeros(len(relative_offsets), dtype=OFFSET_ENTRY)
    entries["relative_offset"] = relative_offsets
    entries["position"] = positions
    return seal_entries(base_offset, entries)


def decode_offset_entries(base_offset: int, data: bytes) -> Any:
    """Return the entries in `data` that can be trusted: a prefix."""
    return open_entries(base_offset, data, OFFSET_ENTRY)


TIME_ENTRY: Final = np.dtype([("max_timestamp_ms", "<i8"), ("relative_offset", "<u4"), ("crc32c", "<u4")])
TIME_ENTRY_BYTES: Final = 16

assert TIME_ENTRY.itemsize == TIME_ENTRY_BYTES


def encode_time_entries(base_offset: int, relative_offsets: array[int], max_timestamps_ms: array[int]) -> bytes:
    """Return the bytes of these entries."""
    entries = np.zeros(len(relative_offsets), dtype=TIME_ENTRY)
    entries["max_timestamp_ms"] = max_timestamps_ms
    entries["relative_offset"] = relative_offsets
    return seal_entries(base_offset, entries)


def decode_time_entries(base_offset: int, data: bytes) -> Any:
    """Return the entries in `data` that can be trusted: a prefix."""
    return open_entries(base_offset, data, TIME_ENTRY)


TXN_SUFFIX: Final = ".txnindex"
TXN_ENTRY: Final = np.dtype(
    [
        ("producer_id", "<i8"),
        ("first_offset", "<i8"),
        ("last_offset", "<i8"),
        ("last_stable_offset", "<i8"),
        ("crc32c", "<u4"),
    ]
)
TXN_ENTRY_BYTES: Final = 36
UNKNOWN_OFFSET: Final = -1
_CLOSING_ID: Final = -1
_COLUMNS: Final = AbortedTransaction._fields

assert TXN_ENTRY.itemsize == TXN_ENTRY_BYTES
assert TXN_ENTRY.names == (*_COLUMNS, "crc32c")

__all__ = ["TXN_ENTRY_BYTES", "TXN_SUFFIX", "UNKNOWN_OFFSET", "AbortedTransaction", "TxnIndex", "drop_txn_file"]


class TxnIndex:
    """The aborted transactions whose markers lie in one segment.

    One thread appends while others look up: an entry is visible once its `last_offset` is there, which is added last.
    """

    __slots__ = ("_columns", "_lasts", "base_offset", "end_stable_offset")

    def __init__(self, base_offset: int, entries: Iterable[AbortedTransaction] = ()) -> None:
        self.base_offset = base_offset
        self.end_stable_offset = UNKNOWN_OFFSET
        """First offset of the oldest transaction that is open at the segment's end, or that end; -1: unknown."""
        self._columns = tuple(array("q") for _ in _COLUMNS)
        self._lasts = self._columns[_COLUMNS.index("last_offset")]
        for entry in entries:
            self.append(entry)

    def __len__(self) -> int:
        return len(self._lasts)

    @property
    def memory_bytes(self) -> int:
        """Bytes held for entries."""
        return 32 * len(self._lasts)

    @property
    def entries(self) -> tuple[AbortedTransaction, ...]:
        """All entries, in order of `last_offset`."""
        return tuple(self._made(0, len(self._lasts)))

    def append(self, aborted: AbortedTransaction) -> None:
        """Add the transaction whose abort marker has just been appended."""
        assert not self._lasts or aborted.last_offset > self._lasts[-1], "markers ascend"
        for column, value in zip(self._columns, aborted, strict=True):
            if column is not self._lasts:
                column.append(value)
        self._lasts.append(aborted.last_offset)

    def lookup(self, fetch_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """Return the transactions with records in [`fetch_offset`, `end_offset`)."""
        count = len(self._lasts)
        start = bisect_left(self._lasts, fetch_offset, 0, count)
        if start == count:
            return []
        firsts = np.frombuffer(self._columns[1][start:count], np.int64)
        return [entry for number in np.flatnonzero(firsts < end_offset) for entry in self._made(start + int(number), 1)]

    def _made(self, start: int, count: int) -> Iterable[AbortedTransaction]:
        return map(AbortedTransaction, *(column[start : start + count] for column in self._columns))

    def settles(self, end_offset: int) -> bool:
        """Whether every transaction with records below `end_offset` was decided before the segment's end."""
        return self.end_stable_offset >= end_offset

    def truncate(self, end_offset: int) -> None:
        """Forget transactions whose marker is at or above `end_offset`, and the state at the end; in memory only."""
        keep = bisect_left(self._lasts, end_offset)
        del self._lasts[keep:]
        for column in self._columns:
            del column[keep:]
        self.end_stable_offset = UNKNOWN_OFFSET

    def copy(self) -> TxnIndex:
        """Return a copy of the present entries, without the state at the end."""
        index, count = TxnIndex(self.base_offset), len(self._lasts)
        for mine, its in zip(self._columns, index._columns, strict=True):
            its.extend(mine[:count])
        return index

    # The file, once the segment is sealed

    def store(self, storage: Storage, stem: str, next_offset: int) -> None:
        """Write the file of a segment that ends at `next_offset`, durably. Raises OSError."""
        rows: Any = np.zeros(len(self._lasts) + 1, dtype=TXN_ENTRY)
        for name, column in zip(_COLUMNS, self._columns, strict=True):
            rows[name][:-1] = column
        for name, value in zip(
            _COLUMNS, (_CLOSING_ID, self.base_offset, next_offset, self.end_stable_offset), strict=True
        ):
            rows[name][-1] = value
        data = seal_entries(self.base_offset, rows)
        file = storage.open(stem + TXN_SUFFIX, create=True)
        file.truncate(0)
        file.write((data,), 0)
        file.datasync()

    @staticmethod
    def load(storage: Storage, stem: str, base_offset: int, next_offset: int) -> TxnIndex | None:
        """Return the index of a sealed segment, or None if its file does not check as a whole. Raises OSError."""
        data = read_file(storage, stem + TXN_SUFFIX) or b""
        rows = open_entries(base_offset, data, TXN_ENTRY)
        if len(rows) * TXN_ENTRY_BYTES != len(data) or not len(rows):
            return None
        closing = AbortedTransaction(*(int(rows[-1][name]) for name in _COLUMNS))
        if closing[:3] != (_CLOSING_ID, base_offset, next_offset):
            return None
        index = TxnIndex(base_offset)
        for name, column in zip(_COLUMNS, index._columns, strict=True):
            column.frombytes(rows[name][:-1].astype(np.int64).tobytes())
        index.end_stable_offset = closing.last_stable_offset
        return index


def drop_txn_file(storage: Storage, stem: str) -> None:
    """Remove the `.txnindex` file so that no crash brings back its contents. Raises OSError."""
    path = stem + TXN_SUFFIX
    if storage.exists(path):
        file = storage.open(path)
        file.truncate(0)
        file.datasync()
        storage.remove(path)


_CONTROL: Final = int(Attributes.CONTROL)
_TRANSACTIONAL: Final = int(Attributes.TRANSACTIONAL)


def read_markers(file: File, position: int, header: BatchHeader) -> list[PlacedMarker]:
    """Return the markers of the control batch at `position` of a segment.

    Raises:
        InvalidBatch: it does not check.
    """
    try:
        return placed_markers(file.read(header.size, position))
    except RaftlogError as error:
        raise InvalidBatch(position, str(error)) from None


class TxnScan:
    """Rebuilds the `.txnindex` of a segment from its batches, given in order.

    Of transactions that began in earlier segments it knows only `carried` and what the markers say. So the last stable
    offset at the end may come out too low, and then readers search further than they need to.
    """

    def __init__(self, base_offset: int, carried: int | None) -> None:
        """`carried`: first offset of the oldest transaction open at the segment's begin; None: none is; -1: unknown."""
        self._index = TxnIndex(base_offset)
        self._carried = carried
        self._open: dict[int, int] = {}

    def add(self, file: File, position: int, header: BatchHeader) -> None:
        """Take the next batch. Raises InvalidBatch if a control batch does not decode; OSError."""
        if header.attributes & _CONTROL:
            for offset, marker in read_markers(file, position, header):
                self._open.pop(marker.producer_id, None)
                if not marker.commit and marker.first_offset >= 0:
                    stable = UNKNOWN_OFFSET if self._carried is not None else self._first_open(offset + 1)
                    self._index.append(AbortedTransaction(marker.producer_id, marker.first_offset, offset, stable))
        elif header.attributes & _TRANSACTIONAL and header.producer_id >= 0:
            self._open.setdefault(header.producer_id, header.base_offset)

    def _first_open(self, end_offset: int) -> int:
        return min(self._open.values(), default=end_offset)

    def finish(self, next_offset: int) -> TxnIndex | None:
        """Return the index of the segment, which ends at `next_offset`; None: the segment needs none."""
        index, first_open = self._index, self._first_open(next_offset)
        if self._carried is not None:
            first_open = min(first_open, self._carried)
        index.end_stable_offset = first_open
        return index if len(index) or first_open < next_offset else None
