"""Open sealed segments, the least recently used closed first: neither descriptors nor memory grow with a log."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from broker.log.batch_scan import InvalidBatch, scan_batches, walk_headers
from broker.log.segment import OpenSegment, Segment
from broker.log.segment_index import SegmentIndex
from broker.log.storage import Storage
from broker.log.txn_index import UNKNOWN_OFFSET, TxnIndex
from broker.log.txn_scan import TxnScan
from raftlog.errors import CorruptRecordError

logger = logging.getLogger(__name__)


class SegmentCache:
    """Shared by all logs of a broker. Thread-safe; opening happens outside the lock."""

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
        """Return the segment opened, its index rebuilt where it is missing or wrong. May wait for the disk.

        Raises:
            CorruptRecordError: the index had to be rebuilt and the log file has a batch that does not check.
        """
        opened = segment.opened
        if opened is None:
            file = self._storage.open(segment.log_path)
            opened = OpenSegment(file, SegmentIndex.load(self._storage, segment.stem, segment.base_offset))
            if not is_complete(opened.index, segment):
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
        """Take over the opened form of a sealed segment, and close others if there are too many now."""
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


def is_complete(index: SegmentIndex, segment: Segment) -> bool:
    """Whether the index ends in the closing entry of this sealed segment."""
    return len(index) > 0 and index.last == (segment.next_offset, segment.size)


def load_txn_index(storage: Storage, segment: Segment, opened: OpenSegment) -> None:
    """Read the index of aborted transactions of a sealed segment that has one; from its markers if need be.

    Raises:
        CorruptRecordError: the file does not check, and the segment neither.
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
        raise CorruptRecordError(f"{segment.log_path} position {error.position}: {error.reason}") from None
    opened.txn_index = scan.finish(segment.next_offset)
    assert opened.txn_index is not None, "where it is not known what is open before, something may be"


def rebuild_index(
    segment: Segment, opened: OpenSegment, index_interval_bytes: int, scan: TxnScan | None = None
) -> SegmentIndex:
    """Return the index of a sealed segment, made anew from its batches; checks them all on the way.

    `scan` is shown them, too.

    Raises:
        CorruptRecordError: a batch that does not check, or the segment ends at another offset than it should.
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
        raise CorruptRecordError(
            f"{segment.log_path} position {error.position}: {error.reason}; it lies below the recovery point, "
            "so it is damage and nothing is cut off"
        ) from None
    index.append(expected, segment.size, max_timestamp_ms)
    return index
