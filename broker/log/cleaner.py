"""Compacting a log: whether it is worth it, how far, and piece by piece; the rules are in `compaction.py`.

    clean  (first_dirty_offset)  dirty                      (bound) active segment, or not committed
    |-- no key twice ------------|-- written since then ----|-------------------------------------->

Only whole sealed segments below the bound are rewritten. The keys of the dirty section are read first, as far as the
memory for them goes; then everything from the begin up to there is rewritten, segment by segment, each put in place
before the next (`log_swap.py`). Neighbours that have shrunk become one segment; one of which nothing goes is left
alone.
What was reached is noted last, so that a crash costs a repetition and no more.

The bound lies at the last stable offset at most, so it is known of every transaction below how it ended. Its markers
are there for those who read the log from its begin while its batches are still transactional, and for what recovery
makes of the log. So a control batch goes

    when it lies below a point up to which the log was clean `delete.retention.ms` ago: then all batches that it decides
        on have been cleaned, and nobody is on the way between them and it (as with tombstones),
    when no producer snapshot is left from before it, which may know one of its transactions as open,
    when the last that is known of none of its producers comes from it: else one that is fenced would be no more,
    when every assigned replica holds it durably, as their leader has heard in its present term (`Plan.markers_below`).
        So only the leader of a partition lets markers go; a follower keeps its own until it leads.

The last is for a follower that was away. It may have batches of a transaction as they were produced, and not the
marker: then it goes on in a log that was cleaned, and needs the marker, the one thing there that still tells how those
end. With the marker it is safe, whatever else was cleaned meanwhile:

    the rest of the transaction comes as batches that are transactional no more: they lie behind its first one, so the
        transaction stays open there until the marker, which says where it began
    rows of an aborted transaction are gone: the marker says abort, of those that the follower has, too
    records that others have replaced are gone, and so is what replaced them: as without transactions

So neither clearing the attribute nor dropping rows has to wait for the follower. A replica that begins anew gets no
batch that is transactional and lies below a marker that went: all of those were cleaned before. One that has lost its
disk and copies from a leader whose log was not cleaned, then from one whose was, can still miss a marker; so can one
that was taken from the replicas, and given back with its old log, or that lost what `flush.messages` had left
unflushed. Whoever misses one notices at the producer's next marker (`OpenTransactions.check_followed`), and is copied
anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from broker.log.cleaned import Cleaned
from broker.log.compaction import CleanedBatch, Compactor, LastOffsets, SourceBatch, read_batch
from broker.log.log_state import SegmentRemoved
from broker.log.log_swap import SealedSegments
from broker.log.offset_index import MAX_RELATIVE_OFFSET
from broker.log.partition_log import PartitionLog
from broker.log.segment import OpenSegment, Segment
from broker.log.segment_index import BEFORE_ALL_TIME_MS, SegmentIndex
from broker.log.storage import File
from broker.log.txn_index import TxnIndex
from raftlog.errors import CorruptRecordError, RaftlogError
from raftlog.format import HEADER_BYTES, BatchHeader, Buffer, parse_header
from raftlog.format.aborted import AbortedRanges
from raftlog.format.control import placed_markers

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 16 << 20
"""Read and rewritten in one go, at least; more when there are many keys, to look them up less often."""
MAX_PIECE_BYTES: Final = 64 << 20
SYNC_BYTES: Final = 64 << 20
"""Written between two fsyncs: a larger heap of dirty pages would hold up those of the producers."""

WallClock = Callable[[], int]


class Plan(NamedTuple):
    """What a cleaning would do. `is_due`: whether it should be done now."""

    log: PartitionLog
    sealed: SealedSegments
    cleaned: Cleaned
    first_dirty_offset: int
    dirty_ratio: float
    is_due: bool
    markers_below: int = 0
    """Markers at or above it stay: what lies below is on the disk of every replica."""


class CleaningAbandoned(Exception):
    """The log was cut, trimmed or closed meanwhile; nothing is lost but the work."""


def plan_cleaning(log: PartitionLog, bound: int, now_ms: int) -> Plan | None:
    """Look at a compacted log; None when nothing in it is both dirty and sealed below `bound`. Blocking.

    Due when more than `min.cleanable.dirty.ratio` of what is below the bound is dirty, or the first dirty record is
    older than `max.compaction.lag.ms`.

    Raises:
        StorageError: the log is closed, or the disk.
    """
    config = log.config
    sealed = log.sealed_below(bound)
    first_dirty = max(log.cleaned.first_dirty_offset, log.log_start_offset)
    segments: list[Segment] = []
    clean_bytes = dirty_bytes = 0
    for segment in sealed.segments:
        dirty = segment.next_offset > first_dirty
        if dirty and config.min_compaction_lag_ms and now_ms - segment.max_timestamp_ms < config.min_compaction_lag_ms:
            break
        segments.append(segment)
        clean_bytes += 0 if dirty else segment.size
        dirty_bytes += segment.size if dirty else 0
    if not dirty_bytes:
        return None
    ratio = dirty_bytes / (clean_bytes + dirty_bytes)
    due = ratio > config.min_cleanable_dirty_ratio or _is_too_old(log, segments, first_dirty, now_ms)
    return Plan(log, SealedSegments(segments, sealed.truncations), log.cleaned, first_dirty, ratio, due)


def _is_too_old(log: PartitionLog, segments: Sequence[Segment], first_dirty: int, now_ms: int) -> bool:
    limit_ms = log.config.max_compaction_lag_ms
    if limit_ms is None:
        return False
    for segment in segments:
        if segment.next_offset > first_dirty:
            first = parse_header(log.read_source(log.open_source(segment), HEADER_BYTES, 0))
            return now_ms - first.max_timestamp_ms > limit_ms
    return False


def clean(plan: Plan, *, dedupe_bytes: int, clock: WallClock) -> Iterator[int]:
    """Do it, yielding after each piece how many bytes were read and written. Blocking.

    Raises:
        CleaningAbandoned: the log has changed; plan anew.
        CorruptRecordError: a batch is damaged; names file and position.
        StorageFull, StorageError: refused. What is in place already stays; the rest comes with the next cleaning.
    """
    return _Cleaning(plan, dedupe_bytes, clock).run()


class _Cleaning:
    def __init__(self, plan: Plan, dedupe_bytes: int, clock: WallClock) -> None:
        self._plan = plan
        self._log = plan.log
        self._config = plan.log.config
        self._dedupe_bytes = dedupe_bytes
        self._clock = clock
        self._last_offsets = LastOffsets()
        self._output: _Output | None = None
        self._markers_below = 0
        """Control batches below may go."""
        self._spent: set[int] = set()
        """Offsets of markers that go."""

    def run(self) -> Iterator[int]:
        end_offset = self._plan.sealed.segments[-1].next_offset
        for batches, size in self._dirty_pieces():
            self._last_offsets.add(batches)
            yield size
            if self._last_offsets.is_full(self._dedupe_bytes):
                end_offset = batches[-1].header.next_offset
                break
        tombstones_below = self._plan.cleaned.tombstones_below(self._clock(), self._config.delete_retention_ms)
        self._markers_below = min(
            self._plan.markers_below, tombstones_below, self._log.oldest_snapshot_offset(tombstones_below)
        )
        compactor = Compactor(
            self._last_offsets,
            tombstones_below=tombstones_below,
            max_batch_bytes=self._config.max_message_bytes,
        )
        before = sum(segment.size for segment in self._plan.sealed.segments)
        try:
            yield from self._rewrite(compactor, end_offset)
        finally:
            if self._output is not None:
                self._output.discard()
        reached = self._plan.cleaned.reached(end_offset, self._clock(), self._config.delete_retention_ms)
        self._log.note_cleaned(reached, self._plan.sealed.truncations)
        logger.info(
            "log was compacted",
            extra={
                "partition": f"{self._log.topic}-{self._log.partition}",
                "to_offset": end_offset,
                "records": compactor.rows_in,
                "records_left": compactor.rows_out,
                "bytes_before": before,
                "bytes_after": sum(s.size for s in self._log.segments if s.base_offset < end_offset),
            },
        )

    @property
    def _piece_bytes(self) -> int:
        return min(max(PIECE_BYTES, self._last_offsets.memory_bytes // 2), MAX_PIECE_BYTES)

    def _dirty_pieces(self) -> Iterator[tuple[list[SourceBatch], int]]:
        for segment in self._plan.sealed.segments:
            if segment.next_offset > self._plan.first_dirty_offset:
                yield from self._pieces(segment, self._open(segment), self._plan.first_dirty_offset)

    def _open(self, segment: Segment) -> File:
        if self._log.closed or segment not in self._log.segments:
            raise CleaningAbandoned(f"{segment.log_path} is no part of {self._log!r} any more")
        try:
            return self._log.open_source(segment)
        except SegmentRemoved as error:
            raise CleaningAbandoned(str(error)) from error
        except CorruptRecordError as error:
            self._check_unchanged(segment, error)
            raise

    def _check_unchanged(self, segment: Segment, error: RaftlogError) -> None:
        """What looks damaged may be a file that was just cut. Raises CleaningAbandoned."""
        if not self._log.is_unchanged(segment, self._plan.sealed.truncations):
            raise CleaningAbandoned(f"{self._log!r} was cut or trimmed: {error}") from error

    def _pieces(self, segment: Segment, file: File, from_offset: int = 0) -> Iterator[tuple[list[SourceBatch], int]]:
        """Yield the batches of a segment that end above `from_offset`, some at a time, with the bytes read for them."""
        position, expected, size = 0, segment.base_offset, segment.size
        aborted = AbortedRanges(self._log.aborted_transactions(segment.base_offset, segment.next_offset))
        wanted = 0
        while position < size:
            data = memoryview(
                self._log.read_source(file, max(wanted, min(self._piece_bytes, size - position)), position)
            )
            batches: list[SourceBatch] = []
            at = inflated = 0
            try:
                while len(data) - at >= HEADER_BYTES and inflated <= MAX_PIECE_BYTES:
                    header = parse_header(data, at)
                    wanted = header.size
                    if header.base_offset != expected or not HEADER_BYTES <= wanted <= size - position - at:
                        raise CorruptRecordError(f"offset {header.base_offset} where {expected} must follow")
                    if wanted > len(data) - at:
                        break
                    expected = header.next_offset
                    if expected > from_offset:
                        batch = data[at : at + wanted]
                        batches.append(read_batch(batch, header, self._log.remembers, aborted, self._are_spent))
                        inflated += batches[-1].columns.nbytes if batches[-1].columns is not None else 0
                    at += wanted
                    wanted = 0
                if not at and len(data) < max(wanted, HEADER_BYTES):
                    if len(data) < min(self._piece_bytes, size - position) or size - position < HEADER_BYTES:
                        raise CorruptRecordError(f"{len(data)} bytes are there, {size - position} should be")
                    continue
            except RaftlogError as error:  # another magic is a flipped bit: this broker has written the file
                self._check_unchanged(segment, error)
                raise CorruptRecordError(f"{segment.log_path} position {position + at}: {error}") from error
            position += at
            del data
            if batches:
                yield batches, at
                batches.clear()

    def _are_spent(self, header: BatchHeader, data: memoryview) -> bool:
        if header.next_offset > self._markers_below:
            return False
        markers = placed_markers(data, check_checksum=False)
        if any(self._log.needs_epoch(placed.marker.producer_id, placed.marker.producer_epoch) for placed in markers):
            return False
        self._spent.update(placed.offset for placed in markers)
        return True

    def _rewrite(self, compactor: Compactor, end_offset: int) -> Iterator[int]:
        for segment in self._plan.sealed.segments:
            if segment.base_offset >= end_offset:
                break
            output = self._output
            if output is not None and not output.has_room_for(segment, compactor.pending_bytes):
                yield self._close(compactor)
                output = None
            file = self._open(segment)
            if output is None:
                output = self._output = _Output(self._log, segment, file)
            else:
                yield output.join(segment)
            for batches, size in self._pieces(segment, file):
                yield size + output.add(compactor.compact(batches))
        if self._output is not None:
            yield self._close(compactor)

    def _close(self, compactor: Compactor) -> int:
        output = self._output
        assert output is not None
        written = output.add(compactor.finish())
        if output.is_changed:
            old = SealedSegments(output.segments, self._plan.sealed.truncations)
            try:
                new = output.finish(self._spent)
            except SegmentRemoved as error:
                raise CleaningAbandoned(str(error)) from error
            if not self._log.swap(old, new, now_ms=self._clock()):
                raise CleaningAbandoned(f"{self._log!r} was cut or trimmed")
        self._output = None
        self._spent.clear()
        return written


class _Output:
    """What becomes of some segments. Nothing is written as long as the first one stays as it is."""

    def __init__(self, log: PartitionLog, first: Segment, source: File) -> None:
        self._log = log
        self.segments: list[Segment] = [first]
        self._source = source
        self._file: File | None = None
        self._index = SegmentIndex(first.base_offset)
        self._size = 0
        self._synced_size = 0
        self._max_timestamp_ms = BEFORE_ALL_TIME_MS

    @property
    def is_changed(self) -> bool:
        """Whether anything differs from the first segment."""
        return self._file is not None

    def has_room_for(self, segment: Segment, pending_bytes: int) -> bool:
        """Whether another one fits, should nothing of it go, behind `pending_bytes` that are still to be written."""
        span = segment.next_offset - self.segments[0].base_offset
        size = self._size + pending_bytes + segment.size
        return size <= self._log.config.segment_bytes and span <= MAX_RELATIVE_OFFSET

    def join(self, segment: Segment) -> int:
        """Take another segment in; return the bytes read and written."""
        moved = self._write_first()
        self.segments.append(segment)
        return moved

    def _write_first(self) -> int:
        """Copy what was as it is so far; return the bytes read and written."""
        if self._file is not None:
            return 0
        self._file = self._log.create_aside(self.segments[0].base_offset)
        for position in range(0, self._size, PIECE_BYTES):
            data = self._log.read_source(self._source, min(PIECE_BYTES, self._size - position), position)
            self._log.write_aside(self._file, (data,), position)
        return 2 * self._size

    def add(self, batches: Iterable[CleanedBatch]) -> int:
        """Put batches at the end; return the bytes that this has moved."""
        interval = self._log.config.index_interval_bytes
        start, moved = self._size, 0
        waiting: list[Buffer] = []
        for batch in batches:
            if self._file is None and not batch.is_copy:
                moved += self._write_first()
                start = self._size
            if self._size and self._size - self._index.last_position >= interval:
                self._index.append(batch.base_offset, self._size, self._max_timestamp_ms)
            self._max_timestamp_ms = max(self._max_timestamp_ms, batch.max_timestamp_ms)
            self._size += len(batch.data)
            if self._file is not None:
                waiting.append(batch.data)
        if self._file is not None and waiting:
            self._log.write_aside(self._file, waiting, start)
            moved += self._size - start
            if self._size - self._synced_size >= SYNC_BYTES:
                self._log.sync_aside(self._file)
                self._synced_size = self._size
        return moved

    def finish(self, spent: Container[int]) -> Segment:
        """Return the new segment, opened; without the markers at the offsets `spent`."""
        assert self._file is not None
        segment = Segment(self._log.directory, self.segments[0].base_offset)
        segment.end = (self.segments[-1].next_offset, self._size)
        segment.max_timestamp_ms = self._max_timestamp_ms
        self._index.append(segment.next_offset, self._size, self._max_timestamp_ms)
        segment.opened = OpenSegment(self._file, self._index, self._txn_index(spent))
        segment.has_txn_index = segment.opened.txn_index is not None
        return segment

    def _txn_index(self, spent: Container[int]) -> TxnIndex | None:
        """What the old ones said, as long as its markers are there: who read them a moment ago may ask for it."""
        made = TxnIndex(self.segments[0].base_offset)
        for segment in self.segments:
            made.end_stable_offset = segment.next_offset
            index = self._log.txn_index_of(segment)
            if index is not None:
                made.end_stable_offset = index.end_stable_offset
                for entry in index.entries:
                    if entry.last_offset not in spent:
                        made.append(entry)
        return made if len(made) or made.end_stable_offset < self.segments[-1].next_offset else None

    def discard(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            try:
                self._log.forget_aside(self.segments[0].base_offset)
            except RaftlogError as error:  # the next start does
                logger.warning("what was compacted in vain stays for now: %s", error)


def dirtiest(plans: Sequence[Plan]) -> Plan | None:
    """Return the plan that is due and has the largest share to clean."""
    return max((plan for plan in plans if plan.is_due), key=lambda plan: plan.dirty_ratio, default=None)
