"""One segment: a `.log` file of consecutive batches, its sparse indexes, and how both are read.

File names are the segment's base offset in 20 digits: `00000000000000000042.log`, `.index`, `.timeindex`, `.txnindex`;
files that are to be removed end in `.deleted`.

States: active (appended to; stays open) -> sealed (immutable; opened when needed, closed when the cache is full).

    SegmentIndex        both sparse indexes in memory, and how they are stored and loaded
    Segment             what is known without opening it; OpenSegment: its file and indexes
    SegmentCache        open sealed segments of all logs, so that a log of any length needs few descriptors
    read_segment        whole batches, cut at known boundaries instead of walking over headers
    cut_point           where a truncation cuts
    check_piece         compare batches with their checksums
    first_at_or_after, largest   offsets by time: sparse index, then headers, then one timestamp column

Look-ups by time find records only, never markers of transactions, although both count for the time index: the age of a
segment is that of its newest batch.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from broker.log.index import (
    OFFSET_ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    UNKNOWN_OFFSET,
    WALK_CHUNK_BYTES,
    InvalidBatch,
    ScannedBatch,
    TxnIndex,
    TxnScan,
    decode_offset_entries,
    decode_time_entries,
    encode_offset_entries,
    encode_time_entries,
    scan_batches,
    walk_headers,
)
from broker.log.storage import File, Storage, read_file, rewritten_anyway
from raftlog.errors import CorruptRecordError
from raftlog.format import HEADER_BYTES, LENGTH_END, Attributes, Buffer, decode_batch
from raftlog.types import OffsetAndTimestamp
from replication.leader_epochs import LeaderEpochCache

logger = logging.getLogger(__name__)

SUFFIXES: Final = (".log", ".index", ".timeindex", ".txnindex")
DELETED_SUFFIX: Final = ".deleted"
RECENT_BATCHES: Final = 1024
"""The last batches of an active segment whose boundaries are all known, so that readers at the tail never search."""


class Placed(NamedTuple):
    """One batch of an append, with its place in the log."""

    base_offset: int
    next_offset: int
    size: int
    max_timestamp_ms: int


def segment_stem(directory: str, base_offset: int) -> str:
    """Return the path of a segment's files without the suffix."""
    return f"{directory}/{base_offset:020d}"


_INDEX_FILES: Final = ((".index", OFFSET_ENTRY_BYTES), (".timeindex", TIME_ENTRY_BYTES))
BEFORE_ALL_TIME_MS: Final = -(1 << 63)
"""The largest timestamp of a segment without records."""


class Boundary(NamedTuple):
    """A batch begins (or the segment ends) at `position`; `offset` is its first offset (or the next one)."""

    offset: int
    position: int


class SegmentIndex:
    """Entries (offset, position, largest timestamp below the offset), ascending.

    New entries stay in memory until `store`: the files only save work, so an append does not wait for them.
    One thread appends while others look up: the offset of an entry is added last and makes it visible.
    """

    __slots__ = ("_max_timestamps_ms", "_offsets", "_positions", "_stored", "base_offset", "last_position")

    def __init__(self, base_offset: int) -> None:
        self.base_offset = base_offset
        self.last_position = 0
        self._offsets = array("I")  # relative to base_offset
        self._positions = array("I")
        self._max_timestamps_ms = array("q")
        self._stored = 0
        assert self._offsets.itemsize == 4, "array('I') is the u32 of the files"

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def memory_bytes(self) -> int:
        """Bytes held for entries."""
        return 16 * len(self._offsets)

    @property
    def last(self) -> Boundary:
        """The last entry, or the segment's begin."""
        return self._boundary(len(self._offsets) - 1)

    def _boundary(self, index: int) -> Boundary:
        """Return an entry; -1: the segment's begin."""
        if index < 0:
            return Boundary(self.base_offset, 0)
        return Boundary(self.base_offset + self._offsets[index], self._positions[index])

    @property
    def last_max_timestamp_ms(self) -> int:
        """Largest timestamp below the last entry."""
        return self._max_timestamps_ms[-1] if self._max_timestamps_ms else BEFORE_ALL_TIME_MS

    @property
    def entries(self) -> list[tuple[int, int, int]]:
        """All entries as (offset, position, max_timestamp_ms), for tests and tools."""
        return [
            (self.base_offset + offset, position, timestamp)
            for offset, position, timestamp in zip(self._offsets, self._positions, self._max_timestamps_ms, strict=True)
        ]

    def append(self, offset: int, position: int, max_timestamp_ms: int) -> None:
        """Add an entry for the batch at `position`; a boundary that is already the last entry is not added again."""
        relative = offset - self.base_offset
        if self._offsets and self._offsets[-1] == relative:
            return
        assert position > self.last_position, f"positions ascend: {position} after {self.last_position}"
        self.last_position = position
        self._max_timestamps_ms.append(max_timestamp_ms)
        self._positions.append(position)
        self._offsets.append(relative)

    def floor(self, offset: int) -> Boundary:
        """Return the last boundary at or below `offset`."""
        return self._boundary(bisect_right(self._offsets, offset - self.base_offset) - 1)

    def floor_position(self, position: int, end_offset: int) -> Boundary:
        """Return the last boundary that is neither beyond `position` nor above `end_offset`."""
        index = bisect_right(self._offsets, end_offset - self.base_offset)
        return self._boundary(bisect_right(self._positions, position, 0, index) - 1)

    def ceiling(self, position: int) -> Boundary | None:
        """Return the first boundary beyond `position`; None when no entry lies there."""
        index = bisect_right(self._positions, position)
        return None if index == len(self._positions) else self._boundary(index)

    def before_time(self, timestamp_ms: int) -> Boundary:
        """Return the last boundary below which every record is older than `timestamp_ms`."""
        return self._boundary(bisect_left(self._max_timestamps_ms, timestamp_ms) - 1)

    def floor_time(self, offset: int) -> tuple[Boundary, int]:
        """Return the last boundary at or below `offset` and the largest timestamp below that boundary."""
        index = bisect_right(self._offsets, offset - self.base_offset) - 1
        return self._boundary(index), BEFORE_ALL_TIME_MS if index < 0 else self._max_timestamps_ms[index]

    def truncate(self, end_offset: int) -> None:
        """Drop entries above `end_offset`, in memory only."""
        keep = bisect_right(self._offsets, end_offset - self.base_offset) if end_offset >= self.base_offset else 0
        del self._offsets[keep:], self._positions[keep:], self._max_timestamps_ms[keep:]
        self._stored = min(self._stored, keep)
        self.last_position = self._positions[-1] if keep else 0

    def store(self, storage: Storage, stem: str, count: int | None = None) -> bool:
        """Append those of the first `count` entries that the files lack; return whether there were any. Not fsynced."""
        end = len(self._offsets) if count is None else count
        start = self._stored
        if start >= end:
            return False
        offsets = self._offsets[start:end]
        offset_bytes = encode_offset_entries(self.base_offset, offsets, self._positions[start:end])
        time_bytes = encode_time_entries(self.base_offset, offsets, self._max_timestamps_ms[start:end])
        for (suffix, entry_bytes), data in zip(_INDEX_FILES, (offset_bytes, time_bytes), strict=True):
            file = storage.open(stem + suffix, create=True)
            file.truncate(start * entry_bytes)  # bytes beyond did not check
            file.write((data,), start * entry_bytes)
        self._stored = end
        return True

    def cut_files(self, storage: Storage, stem: str) -> None:
        """Cut both files to what this index holds, durably: an entry of a truncated record must never come back."""
        for suffix, entry_bytes in _INDEX_FILES:
            if storage.exists(stem + suffix):
                file = storage.open(stem + suffix)
                file.truncate(self._stored * entry_bytes)
                file.datasync()

    def fills(self, sizes: Mapping[str, int]) -> bool:
        """Whether the files, those of them that are among `sizes` (by name), end with the last entry of this index."""
        return all(
            sizes.get(f"{self.base_offset:020d}{suffix}") in (None, self._stored * entry_bytes)
            for suffix, entry_bytes in _INDEX_FILES
        )

    def sync(self, storage: Storage, stem: str) -> None:
        """Make both files durable. A start checks each entry, so a failure does not take the directory offline."""
        for suffix, _ in _INDEX_FILES:
            with rewritten_anyway():
                storage.open(stem + suffix, create=True).datasync()

    @staticmethod
    def load(storage: Storage, stem: str, base_offset: int) -> SegmentIndex:
        """Return the entries of both files as far as they check and agree; none where a file is missing."""
        offsets = decode_offset_entries(base_offset, read_file(storage, stem + ".index") or b"")
        times = decode_time_entries(base_offset, read_file(storage, stem + ".timeindex") or b"")
        count = _agreeing_entries(offsets, times)
        index = SegmentIndex(base_offset)
        index._offsets.frombytes(offsets["relative_offset"][:count].astype(np.uint32).tobytes())
        index._positions.frombytes(offsets["position"][:count].astype(np.uint32).tobytes())
        index._max_timestamps_ms.frombytes(times["max_timestamp_ms"][:count].astype(np.int64).tobytes())
        index._stored = count
        index.last_position = index._positions[-1] if count else 0
        return index


def _agreeing_entries(offsets: Any, times: Any) -> int:
    """Return how many of the first entries ascend and have the same offset in both files."""
    count = min(len(offsets), len(times))
    if count == 0:
        return 0
    good = offsets["relative_offset"][:count] == times["relative_offset"][:count]
    good[0] &= bool(offsets["relative_offset"][0] > 0 and offsets["position"][0] > 0)
    if count > 1:
        for field in ("relative_offset", "position"):
            good[1:] &= offsets[field][1:count] > offsets[field][: count - 1]
        stamps = times["max_timestamp_ms"][:count]
        good[1:] &= stamps[1:] >= stamps[:-1]
    return count if good.all() else int(np.argmin(good))


class OpenSegment:
    """A segment's open file and loaded indexes."""

    __slots__ = ("file", "index", "txn_index", "txn_stored")

    def __init__(self, file: File, index: SegmentIndex, txn_index: TxnIndex | None = None) -> None:
        self.file = file
        self.index = index
        self.txn_index = txn_index
        """None: no transaction was aborted in the segment, and none is open at its end."""
        self.txn_stored = False
        """Whether the `.txnindex` file of a sealed segment matches `txn_index`."""

    @property
    def memory_bytes(self) -> int:
        """Bytes held for index entries."""
        return self.index.memory_bytes + (0 if self.txn_index is None else self.txn_index.memory_bytes)


class Segment:
    """What is known of a segment without opening it, and its opened form while it is open.

    An append sets `end` last, as one tuple: a reader in another thread that sees an offset finds its bytes.
    """

    __slots__ = (
        "base_offset",
        "end",
        "first_append_ms",
        "has_txn_index",
        "max_timestamp_ms",
        "opened",
        "recent",
        "stem",
    )

    def __init__(self, directory: str, base_offset: int) -> None:
        self.base_offset = base_offset
        self.stem = segment_stem(directory, base_offset)
        self.end = (base_offset, 0)
        """(next offset, size in bytes)"""
        self.max_timestamp_ms = BEFORE_ALL_TIME_MS
        self.first_append_ms = 0
        """Wall clock of the first append, or of the start of the broker; meaningless while the segment is empty."""
        self.has_txn_index = False
        """Whether the segment, opened, has a `txn_index`."""
        self.opened: OpenSegment | None = None
        self.recent: tuple[list[int], list[int]] | None = None
        """(positions, base offsets) of the last batches appended; an append adds the offset last."""

    @property
    def next_offset(self) -> int:
        """The first offset after the segment's records."""
        return self.end[0]

    @property
    def size(self) -> int:
        """Bytes of the `.log` file."""
        return self.end[1]

    @property
    def log_path(self) -> str:
        """Path of the `.log` file."""
        return self.stem + ".log"

    def create(self, storage: Storage) -> None:
        """Make an empty `.log` file and open the segment. Raises OSError."""
        file = storage.open(self.log_path, create=True)
        file.truncate(0)
        self.opened = OpenSegment(file, SegmentIndex(self.base_offset))

    def append(self, buffers: Sequence[Buffer], batches: Sequence[Placed], index_interval_bytes: int) -> None:
        """Append stamped batches, in one write; `buffers` are their bytes, in any pieces.

        Raises:
            OSError: nothing was appended. After ENOSPC the file is as before; any other error is final.
        """
        opened = self.opened
        assert opened is not None, "only an opened segment is appended to"
        position = self.end[1]
        try:
            opened.file.write(buffers, position)
        except OSError:
            try:
                opened.file.truncate(position)
            except OSError as error:  # a partial batch stays behind: that is worse than a full disk
                raise OSError(errno.EIO, f"a partial write could not be taken back: {error}") from error
            raise
        index = opened.index
        recent = self.recent
        if recent is None or len(recent[1]) >= 2 * RECENT_BATCHES:
            kept = recent or ([], [])
            recent = self.recent = (kept[0][-RECENT_BATCHES:], kept[1][-RECENT_BATCHES:])
        for base_offset, _, size, max_timestamp_ms in batches:
            if position - index.last_position >= index_interval_bytes and position:
                index.append(base_offset, position, self.max_timestamp_ms)
            if max_timestamp_ms > self.max_timestamp_ms:
                self.max_timestamp_ms = max_timestamp_ms
            recent[0].append(position)
            recent[1].append(base_offset)
            position += size
        self.end = (batches[-1].next_offset, position)

    def floor(self, opened: OpenSegment, offset: int) -> Boundary:
        """Return the last known boundary at or below `offset`."""
        recent = self.recent
        if recent is not None:
            positions, offsets = recent
            index = bisect_right(offsets, offset) - 1
            if index >= 0:
                return Boundary(offsets[index], positions[index])
        return opened.index.floor(offset)

    def floor_position(self, opened: OpenSegment, position: int, end_offset: int) -> Boundary:
        """Return the last known boundary that is neither beyond `position` nor above `end_offset`."""
        next_offset, size = self.end
        if end_offset >= next_offset and position >= size:
            return Boundary(next_offset, size)
        recent = self.recent
        if recent is not None:
            positions, offsets = recent
            index = bisect_right(offsets, end_offset)
            index = bisect_right(positions, position, 0, index) - 1
            if index >= 0:
                return Boundary(offsets[index], positions[index])
        return opened.index.floor_position(position, end_offset)

    def seal(self) -> None:
        """End appending: add the closing entry to the index, which the next flush stores."""
        assert self.opened is not None
        assert self.size > 0, "an empty segment is never sealed"
        self.opened.index.append(self.next_offset, self.size, self.max_timestamp_ms)
        self.recent = None

    def remove_index(self, storage: Storage) -> bool:
        """Remove the index files, which are rebuilt when needed; return whether there were any. Raises OSError."""
        paths = [path for suffix, _ in _INDEX_FILES if storage.exists(path := self.stem + suffix)]
        for path in paths:
            storage.remove(path)
        return bool(paths)

    def own_txn_index(self) -> TxnIndex:
        """Return the index of aborted transactions of an open segment, made if it has none."""
        assert self.opened is not None
        if self.opened.txn_index is None:
            self.opened.txn_index = TxnIndex(self.base_offset)
            self.has_txn_index = True
        return self.opened.txn_index

    def close_txn_index(self, first_open: int | None) -> None:
        """Note at the end of appending from which offset on a transaction is open (None: none is)."""
        assert self.opened is not None
        if first_open is not None or self.opened.txn_index is not None:
            self.own_txn_index().end_stable_offset = self.next_offset if first_open is None else first_open

    def cut(self, opened: OpenSegment, end: Boundary, max_timestamp_ms: int) -> None:
        """End the segment at `end` and make it active again, in memory only; see `cut_point`."""
        self.opened = opened
        self.recent = None
        self.end = (end.offset, end.position)
        opened.index.truncate(end.offset)
        opened.txn_stored = False
        if opened.txn_index is not None:
            opened.txn_index.truncate(end.offset)
        self.max_timestamp_ms = max_timestamp_ms


class SegmentCache:
    """The open sealed segments of all logs of a broker; it closes the least recently used ones first.

    Thread-safe; opening happens outside the lock.
    """

    def __init__(self, storage: Storage, *, max_segments: int = 512, max_index_bytes: int = 64 << 20) -> None:
        self._storage = storage
        self._max_segments = max_segments
        self._max_index_bytes = max_index_bytes
        self._lock = threading.Lock()
        self._opened: OrderedDict[Segment, int] = OrderedDict()
        self._index_bytes = 0

    @property
    def index_bytes(self) -> int:
        """Bytes of index entries held."""
        return self._index_bytes

    def __len__(self) -> int:
        return len(self._opened)

    def open(self, segment: Segment, index_interval_bytes: int) -> OpenSegment:
        """Return the segment opened; rebuild an index that is missing or wrong. May wait for the disk.

        Raises:
            CorruptRecordError: the index had to be rebuilt and the log file has a batch that does not check.
        """
        opened = segment.opened
        if opened is None:
            file = self._storage.open(segment.log_path)
            opened = OpenSegment(file, SegmentIndex.load(self._storage, segment.stem, segment.base_offset))
            if not len(opened.index) or opened.index.last != segment.end:  # without closing entry
                scan = TxnScan(segment.base_offset, UNKNOWN_OFFSET if segment.has_txn_index else None)
                opened.index = rebuild_index(segment, opened, index_interval_bytes, scan)
                opened.txn_index = scan.finish(segment.next_offset)
            elif segment.has_txn_index:
                load_txn_index(self._storage, segment, opened)
            else:
                opened.txn_stored = True
            self.adopt(segment, opened)
        return opened

    def touch(self, segment: Segment) -> None:
        """Note that a sealed segment was used."""
        with self._lock:
            if segment in self._opened:
                self._opened.move_to_end(segment)

    def adopt(self, segment: Segment, opened: OpenSegment) -> None:
        """Take over a sealed segment that is open, and close others beyond the limits."""
        with self._lock:
            segment.opened = opened
            segment.has_txn_index = opened.txn_index is not None
            self._index_bytes += opened.memory_bytes - self._opened.pop(segment, 0)
            self._opened[segment] = opened.memory_bytes
            while len(self._opened) > self._max_segments or (
                self._index_bytes > self._max_index_bytes and len(self._opened) > 1
            ):
                oldest, index_bytes = self._opened.popitem(last=False)
                self._index_bytes -= index_bytes
                oldest.opened = None

    def forget(self, segment: Segment) -> None:
        """Close a segment; readers that hold its file go on undisturbed."""
        with self._lock:
            self._index_bytes -= self._opened.pop(segment, 0)
            segment.opened = None


def load_txn_index(storage: Storage, segment: Segment, opened: OpenSegment) -> None:
    """Load the index of aborted transactions of a sealed segment that has one; rebuild it if the file is damaged.

    Raises:
        CorruptRecordError: neither the file nor the segment checks.
    """
    opened.txn_index = TxnIndex.load(storage, segment.stem, segment.base_offset, segment.next_offset)
    if opened.txn_index is not None:
        opened.txn_stored = True
        return
    logger.warning("%s.txnindex is missing or damaged; the markers are read instead", segment.stem)
    scan = TxnScan(segment.base_offset, UNKNOWN_OFFSET)
    try:
        for position, header in walk_headers(opened.file, 0, segment.size):
            scan.add(opened.file, position, header)
    except InvalidBatch as error:
        raise _corrupt(segment, error.position, error.reason) from None
    opened.txn_index = scan.finish(segment.next_offset)
    assert opened.txn_index is not None, "an unknown open transaction makes an index necessary"


def rebuild_index(
    segment: Segment, opened: OpenSegment, index_interval_bytes: int, scan: TxnScan | None = None
) -> SegmentIndex:
    """Return the index of a sealed segment, rebuilt from its batches, each of which is checked and shown to `scan`.

    Raises:
        CorruptRecordError: a batch does not check, or the segment ends at another offset than it should.
    """
    index = SegmentIndex(segment.base_offset)
    expected = segment.base_offset
    max_timestamp_ms = index.last_max_timestamp_ms
    try:
        for position, header in scan_batches(opened.file, 0, segment.size):
            if header.base_offset != expected:
                raise InvalidBatch(position, f"offset {header.base_offset} where {expected} must follow")
            if position - index.last_position >= index_interval_bytes and position:
                index.append(header.base_offset, position, max_timestamp_ms)
            max_timestamp_ms = max(max_timestamp_ms, header.max_timestamp_ms)
            expected = header.next_offset
            if scan is not None:
                scan.add(opened.file, position, header)
        if expected != segment.next_offset:
            raise InvalidBatch(segment.size, f"the segment ends at offset {expected}, not at {segment.next_offset}")
    except InvalidBatch as error:
        reason = f"{error.reason}; it lies below the recovery point, so it is damage and nothing is cut off"
        raise _corrupt(segment, error.position, reason) from None
    index.append(expected, segment.size, max_timestamp_ms)
    return index


_SKIPPED_BYTES: Final = 4 + 1 + 4 + 2
"""leader_epoch, magic, crc32c, attributes"""
_FRONT = struct.Struct(f"<qI{_SKIPPED_BYTES}xI")
"""base_offset, batch_length, last_offset_delta of a batch header."""


class ReadResult(NamedTuple):
    """`records`: whole batches as they are on disk, one after the other. `next_offset`: where the next read begins."""

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
    """Return whole batches from the one that holds `offset`, below `end_offset`; at most `max_bytes`, or one batch.

    None: the read would wait for the disk, and `blocking` is False. Empty records: the segment holds no record from
    `offset` on below `end_offset`.

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
    """Read a range that holds no known boundary, and cut after its last whole batch."""
    size = segment.size
    data = _read(file, min(max(max_bytes, HEADER_BYTES), size - start), start, blocking)
    at, reached = 0, offset
    while at + HEADER_BYTES <= len(data):
        _, batch_bytes, next_offset = _front(segment, data, at, start + at)
        if next_offset > end_offset:
            break
        if at + batch_bytes > len(data):
            if at == 0:  # the first batch is returned even when it is larger than asked for
                if start + batch_bytes > size:
                    raise _corrupt(
                        segment, start, f"a batch of {batch_bytes} bytes reaches beyond the segment's {size}"
                    )
                return ReadResult(_read(file, batch_bytes, start, blocking), next_offset)
            break
        at += batch_bytes
        reached = next_offset
    return ReadResult(data[:at], reached)


def cut_point(segment: Segment, opened: OpenSegment, offset: int) -> tuple[Boundary, int]:
    """Return where the batch that holds `offset` begins, and the largest timestamp below that.

    The segment's end where it holds no batch above `offset`.

    Raises:
        InvalidBatch: a header does not fit.
        OSError: the disk.
    """
    end = Boundary(*segment.end)
    for position, header in walk_headers(opened.file, segment.floor(opened, offset).position, segment.size):
        if header.next_offset > offset:
            end = Boundary(header.base_offset, position)
            break
    floor, max_timestamp_ms = opened.index.floor_time(end.offset)
    for _, header in walk_headers(opened.file, floor.position, end.position):
        max_timestamp_ms = max(max_timestamp_ms, header.max_timestamp_ms)
    return end, max_timestamp_ms


class CheckedPiece(NamedTuple):
    """Batches that were checked and are whole. `next_offset`: where the next piece begins."""

    next_offset: int
    size_bytes: int
    batches: int


def check_piece(
    segment: Segment,
    opened: OpenSegment,
    epochs_now: Callable[[], LeaderEpochCache],
    offset: int,
    max_bytes: int,
    max_batches: int | None,
) -> CheckedPiece:
    """Check the batch that holds `offset`, and whole batches after it up to either limit or the segment's end.

    The check begins at the last known boundary at or below `offset`. It compares checksums, and offsets and leader
    epochs with those that must follow. `epochs_now` is called after the segment's end was read, so that the epochs
    cover every batch below that end.

    Raises:
        InvalidBatch: the first batch that is damaged.
        OSError: the disk.
    """
    next_offset, size = segment.end
    epochs = epochs_now()
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
    if found is None:  # the timestamp is that of a marker, or of a batch that compaction has emptied
        best = _largest_of_rows(segments, open_segment, start_offset, end_offset)
        found = first_at_or_after(segments, open_segment, best, start_offset, end_offset)
    return found


def _largest_of_rows(segments: Sequence[Segment], open_segment: Opener, start_offset: int, end_offset: int) -> int:
    """Return the largest timestamp of a record in [start_offset, end_offset), by headers, newest segment first."""
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


def _walk(segment: Segment, file: File, begin: Boundary) -> Iterator[ScannedBatch]:
    try:
        yield from walk_headers(file, begin.position, segment.size)
    except InvalidBatch as error:
        raise _corrupt(segment, error.position, error.reason) from None
