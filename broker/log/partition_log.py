"""The log of one partition: append, read, flush, retention, truncation and compaction over a list of segments.

`PartitionLog` owns the segments, the leader epochs and what the log remembers of producers, and decides in which order
their files change. The sections of the class:

    facts        offsets, sizes, the marks for the checkpoint
    append       as the leader, and as a follower
    read         whole batches, aborted transactions, offsets by time
    check        compare the bytes on the disk with their checksums
    segments     roll, open, close
    flush        make appended records and indexes durable
    producers    check, expire and store what is remembered of producers
    retention    remove segments at the front
    truncation   cut the log back, or start it over
    compaction   replace segments by compacted ones
    errors       judge what the disk says

Threads. Appends, `begin_flush`, `finish_flush` and non-blocking reads run on the event loop; `FlushTicket.run`,
blocking reads, look-ups by time, retention, truncation and checkpoints run in threads. `_lock` guards what both change;
its holders write to the page cache and create segment files, but never wait for an fsync.
`_file_lock` serialises file work in threads (flush, removal, truncation, swap). `_storing` serialises snapshots.
Lock order: `_storing`, `_file_lock`, `_lock`.

Flush. A ticket covers everything appended before it was drawn: segment contents, names of new segment files, leader
epochs, and the indexes of segments sealed since the last flush.

Producer snapshots (`producer_state.py`) save the next start from reading the whole log, and keep what segments say
before retention removes them (KIP-360):

    append            the batch is noted in memory, under `_lock`
    roll              the state is frozen; the next flush writes it
    flush             a snapshot is written after `SNAPSHOT_INTERVAL_BYTES` of new log
    checkpoint        likewise, and before detached segments go; superfluous snapshots of clean stops are removed
    clean stop        a snapshot is written, so that the next start reads no log for it
    truncation        the state is rebuilt from a lower snapshot and the batches after it; higher snapshots are removed

A snapshot that the disk refuses for want of space is skipped: the log says the same. While detached segments wait, the
attempt is repeated. There may be very many producers, so no append waits while they are encoded.

Removal at the front. Segments are first detached, then `store_producers` writes what they say of producers and the
manager writes the new log start to the checkpoint, and only then `sweep` renames the files; it removes them after
`file.delete.delay.ms`. So after a crash at any instant recovery can tell a removal from damage. A start that finds
segments below the log start detaches them again. On a disk without space for the checkpoint, `make_room` first removes
indexes of detached segments.

Truncation, in an order in which a crash leaves a prefix of the log, and an error leaves nothing half-done unnoticed:

    1. read everything that is needed                                           an error changes nothing
    2. cut the log in memory; it takes no append from now on
    3. `finish_cut`: store marks, rename dropped segments away, cut the file    after an error appends are refused until
       and its indexes, fsync                                                   `finish_cut` succeeds

`reset_to` first cuts the log back to nothing at its own start, and then moves that start.

Compaction. `swap` puts a compacted segment in the place of others:

    written aside -> renamed to its `.swap` name: decided -> part of the log in memory
                  -> name synced, old files renamed away, new file under its final name -> done

Readers that hold an old file go on with it; a reader that finds its segment gone chooses again (`SegmentRemoved`). If
the disk refuses a step, the next truncation, sweep or swap repeats it; meanwhile the new file is read under the `.swap`
name, and a restart would finish the swap as well (`recovery.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, Self, overload

from broker.log.compaction import cut_front
from broker.log.config import LogConfig
from broker.log.index import MAX_RELATIVE_OFFSET, InvalidBatch, TxnIndex, drop_txn_file
from broker.log.log_dir import LogDir, Marks, PartitionMetadata, is_refusal, store_leader_epochs
from broker.log.producer_state import (
    NO_TIMESTAMP,
    SNAPSHOT_INTERVAL_BYTES,
    Duplicate,
    FrozenProducers,
    ProducerState,
    ProducerStates,
    SnapshotFiles,
    encode_producers,
    rebuild_producers,
)
from broker.log.recovery import Cleaned, RecoveredLog, Swap, cleaned_path, load_cleaned, store_cleaned
from broker.log.segment import (
    BEFORE_ALL_TIME_MS,
    DELETED_SUFFIX,
    SUFFIXES,
    Boundary,
    CheckedPiece,
    OpenSegment,
    Placed,
    ReadResult,
    Segment,
    SegmentCache,
    check_piece,
    cut_point,
    first_at_or_after,
    largest,
    read_segment,
)
from broker.log.storage import File
from broker.log.transactions import NO_COORDINATOR, AbortedTransaction, MarkerFate, OpenTransaction, decision_epoch
from raftlog.errors import (
    CorruptRecordError,
    InvalidRecord,
    OffsetOutOfRange,
    RaftlogError,
    StorageError,
    UnsupportedVersion,
)
from raftlog.format import (
    HEADER_BYTES,
    STAMP_BYTES,
    Attributes,
    BatchHeader,
    Buffer,
    pack_stamp,
    parse_batch,
    parse_header,
    with_append_time,
)
from raftlog.format.control import NO_OFFSET, Marker, PlacedMarker, encode_control, placed_markers
from raftlog.types import OffsetAndTimestamp
from replication.leader_epochs import EpochEntry, LeaderEpochCache

__all__ = ["AppendResult", "FlushTicket", "PartitionLog", "ReadResult"]

logger = logging.getLogger(__name__)

EXPIRED_AT_ONCE: Final = 1_000
"""Producers that `expire_producers` forgets under one hold of the lock."""
_PAUSE_S: Final = 0.0005
_MAX_OFFSET: Final = (1 << 63) - 1
_CONTROL: Final = int(Attributes.CONTROL)


def expired_segments(segments: Sequence[Segment], config: LogConfig, last_stable_offset: int, now_ms: int) -> int:
    """Return how many of the oldest segments retention removes. Pure.

    Only segments wholly below the last stable offset go: later records may not be committed or decided yet. By time, a
    segment goes when its largest timestamp is older than `retention_ms`; a segment without timestamps stays. By size,
    the oldest segment goes as long as the others alone hold `retention_bytes`. Empty segments stay.
    """
    if not config.deletes:
        return 0
    left_bytes = sum(segment.size for segment in segments)
    count = 0
    for segment in segments:
        if segment.size == 0 or segment.next_offset > last_stable_offset:
            break
        too_old = (
            config.retention_ms is not None
            and segment.max_timestamp_ms >= 0
            and now_ms - segment.max_timestamp_ms > config.retention_ms
        )
        too_much = config.retention_bytes is not None and left_bytes - segment.size >= config.retention_bytes
        if not too_old and not too_much:
            break
        left_bytes -= segment.size
        count += 1
    return count


def _runs(data: memoryview) -> Iterator[list[BatchHeader]]:
    """Yield the headers of stamped batches, in runs that can be checked and written as one.

    A run's batches continue each other in one leader epoch. A control batch is alone.

    Raises:
        CorruptRecordError: a batch is cut short or does not check; all before it were yielded.
    """
    run: list[BatchHeader] = []
    position = 0
    while position < len(data):
        try:
            header = parse_batch(data, position)
        except (CorruptRecordError, UnsupportedVersion) as error:
            if run:
                yield run
            if isinstance(error, CorruptRecordError):
                raise
            # An unknown version is a flipped bit; if the leader is newer, its check finds no damage.
            raise CorruptRecordError(str(error)) from error
        if run and not _continues(run[-1], header):
            yield run
            run = []
        run.append(header)
        position += header.size
    if run:
        yield run


def _continues(last: BatchHeader, header: BatchHeader) -> bool:
    return (
        header.base_offset == last.next_offset
        and header.leader_epoch == last.leader_epoch
        and header.next_offset <= _MAX_OFFSET
        and not (last.attributes | header.attributes) & _CONTROL
    )


class SegmentRemoved(OffsetOutOfRange):
    """A segment was removed after a reader chose it and before it was opened; the reader chooses again."""


class LogBounds(NamedTuple):
    """Both ends and the leader epochs of a log at one moment."""

    log_start_offset: int
    log_end_offset: int
    leader_epochs: LeaderEpochCache


class AppendResult(NamedTuple):
    """Where a batch went. `timestamp_ms` is -1 unless the broker stamped its own time."""

    base_offset: int
    last_offset: int
    timestamp_ms: int
    appended_bytes: int


class SealedSegments(NamedTuple):
    """Segments that compaction may rewrite, oldest first; `truncations` shows later whether the log was cut since."""

    segments: Sequence[Segment]
    truncations: int


@dataclass(frozen=True, slots=True, eq=False)
class FlushTicket:
    """A flush that has begun: `run` it in a thread, then give it to `finish_flush`."""

    log: PartitionLog
    end_offset: int
    sealed: Sequence[Segment]
    """Sealed when the ticket was drawn; this flush is their last."""
    active: Segment | None
    """The active segment when the ticket was drawn, if it had records; it may have grown and been sealed since."""
    names: int
    epochs: tuple[EpochEntry, ...] | None
    """Leader epochs to store; None: the stored ones are up to date."""
    epochs_version: int
    truncations: int

    def run(self) -> None:
        """Wait for the disk. A failing fsync takes the log directory offline: dirty pages are never synced again.

        Raises:
            StorageError: the log directory is offline, by this flush or before; or the flush could not begin for a
                reason that passes (no descriptors), and the next flush covers its records.
        """
        self.log._run_flush(self)

    def tidy(self) -> None:
        """Store the producer snapshot that is due; no caller waits for it. Raises nothing."""
        try:
            self.log.store_producers()
        except RaftlogError as error:  # the directory is offline, which is reported elsewhere, or the log is closed
            logger.debug("no producer snapshot of %s: %s", self.log.directory, error)
        except Exception:  # recovery reads the log instead
            logger.exception("no producer snapshot of %s", self.log.directory)


class _DueSnapshot(NamedTuple):
    """A producer snapshot to be written: everything below `offset`.

    `txn_index`: the transactions aborted in the segment that ends there.
    """

    offset: int
    producers: FrozenProducers
    txn_index: TxnIndex | None


@dataclass(slots=True)
class _UnfinishedSwap:
    """A swap that has been decided. `steps_done` counts the steps of `PartitionLog.finish_swap`."""

    swap: Swap
    old: list[Segment]
    new: Segment
    delete_at_ms: int
    steps_done: int = 0


class _Segments(NamedTuple):
    """The segments of a log and their base offsets, oldest first.

    A roll adds one in place, so that it costs the same however many there are; every other change replaces the whole.
    So a reader without the lock sees bases and segments that fit: each base has its segment, but the last segment may
    not have its base yet.
    """

    bases: list[int]
    all: list[Segment]

    @classmethod
    def of(cls, segments: list[Segment]) -> Self:
        """Return the list with its base offsets."""
        return cls([segment.base_offset for segment in segments], segments)

    def number_of(self, offset: int) -> int:
        """Return the index of the segment whose range holds `offset`; -1: it lies below the first segment."""
        return bisect_right(self.bases, offset) - 1

    def holds(self, segment: Segment) -> bool:
        """Whether a segment is one of these."""
        number = self.number_of(segment.base_offset)
        return self.all[max(0, number)] is segment or self.all[-1] is segment

    def grow(self, segment: Segment) -> None:
        """Add the segment that follows the last one."""
        self.all.append(segment)  # before its base, see above
        self.bases.append(segment.base_offset)


class PartitionLog:
    """One log, made by `LogManager`; the module says how its parts work together.

    The leader or follower of the partition sets `high_watermark`.
    """

    def __init__(
        self,
        metadata: PartitionMetadata,
        log_dir: LogDir,
        directory: str,
        config: LogConfig,
        recovered: RecoveredLog,
        cache: SegmentCache,
        now_ms: int,
    ) -> None:
        self.topic = metadata.topic
        self.topic_id = metadata.topic_id
        self.partition = metadata.partition
        self.directory = directory
        self.config = config
        self.log_dir = log_dir
        self.leader_epochs = recovered.leader_epochs
        self.log_start_offset = recovered.log_start_offset
        self.high_watermark = recovered.high_watermark
        self.producers = recovered.producers
        self.closed = False
        self._cache = cache
        self._storage = log_dir.storage
        self._key = (metadata.topic_id, metadata.partition)
        self._append_time = config.log_append_time
        self._lock = threading.RLock()
        self._file_lock = threading.RLock()
        self._storing = threading.Lock()

        self._segments = _Segments.of(list(recovered.segments))
        self._active = recovered.segments[-1]
        self._active.first_append_ms = now_ms
        self._end = self._active.next_offset
        self._sealed_bytes = sum(segment.size for segment in recovered.segments[:-1])

        self._flushed_end = self._end
        self._unflushed: list[Segment] = []
        """Sealed segments that are not fsynced or whose indexes are not stored; kept open until then."""
        self._new_names = 0
        """Counts changes of the directory that a flush must make durable."""
        self._synced_names = 0
        self._epochs_version = 0 if recovered.epochs_stored else 1
        self._epochs_stored = 0
        """The version of the leader epochs on the disk."""
        self._unstored_epoch_start: int | None = None if recovered.epochs_stored else self.log_start_offset
        """Start offset of the first leader epoch that the disk lacks; the recovery point waits for it."""

        self._snapshots = SnapshotFiles(self._storage, directory, recovered.snapshots, self._lock)
        self._snapshot_due: _DueSnapshot | None = None
        """The state at the last roll, which the next flush writes."""
        self._snapshot_bytes = 0
        """Bytes appended since the last snapshot."""

        self._detached = recovered.detached
        """Segments below the log start, oldest first; `sweep` renames them once their contents are expendable."""
        self._told_offset = 0
        """Offset below which a snapshot has what detached segments say of producers, if the disk had space for it."""
        self._deleted_paths: list[tuple[int, str]] = [(now_ms, path) for path in recovered.leftover_paths]
        """(time of removal in ms, path) of renamed files."""

        self._truncations = 0
        """Counts truncations, so that work outside the lock notices one that came between."""
        self._unfinished_cut = False
        """Memory is ahead of the disk: appends are refused until `finish_cut` succeeds."""
        self._cut_off: list[Segment] = []
        """Removed from the log by a truncation; `finish_cut` renames them."""
        self._delete_at_ms = now_ms
        """When the files of `_cut_off` may be removed."""
        self._marks_to_be: Marks | None = None
        """The marks of an empty log that is about to move to another offset."""

        self._swap: _UnfinishedSwap | None = None
        self._cleaned: Cleaned | None = None
        """Read from the disk on first use."""

    def __repr__(self) -> str:
        return f"PartitionLog({self.topic}-{self.partition}, {self.log_start_offset}..{self._end})"

    # Facts

    @property
    def log_end_offset(self) -> int:
        """Exclusive: the offset that the next record gets."""
        return self._end

    @property
    def flushed_end_offset(self) -> int:
        """Exclusive: every record below it was fsynced."""
        return self._flushed_end

    @property
    def needs_flush(self) -> bool:
        """Whether records were appended since the last finished flush."""
        return self._flushed_end < self._end

    @property
    def has_unflushed_segments(self) -> bool:
        """Whether there are sealed segments that the last finished flush did not cover; their files are open."""
        return bool(self._unflushed)

    @property
    def active_base_offset(self) -> int:
        """First offset of the active segment."""
        return self._active.base_offset

    @property
    def first_unstable_offset(self) -> int | None:
        """First offset of the oldest transaction that is open, or whose marker is not committed yet; None: none is."""
        if not self.producers.transactions.holds_back:
            return None
        with self._lock:
            return self.producers.transactions.first_unstable(self.high_watermark)

    @property
    def last_stable_offset(self) -> int:
        """Exclusive: below it every record is committed and decided; at least the log start. See `transactions.py`."""
        high_watermark = self.high_watermark
        first_unstable = self.first_unstable_offset
        if first_unstable is None or first_unstable >= high_watermark:
            return high_watermark
        return max(first_unstable, self.log_start_offset)

    @property
    def size_bytes(self) -> int:
        """Bytes of all `.log` files."""
        return self._sealed_bytes + self._active.size

    @property
    def segment_count(self) -> int:
        """Number of segments, the active one included."""
        return len(self._segments.all)

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments, oldest first."""
        return tuple(self._segments.all)

    def bounds(self) -> LogBounds:
        """Return both ends and the leader epochs, consistent although retention or a truncation may be under way."""
        with self._lock:
            return LogBounds(self.log_start_offset, self._end, LeaderEpochCache(self.leader_epochs.entries))

    def marks(self) -> Marks:
        """Return the marks for the checkpoint; none of them is ahead of the disk."""
        with self._lock:
            if self._marks_to_be is not None:
                return self._marks_to_be
            recovery_point = self._flushed_end
            log_start_offset = min(self.log_start_offset, recovery_point)  # else the next start would miss records
            if self._unstored_epoch_start is not None:
                recovery_point = max(min(recovery_point, self._unstored_epoch_start), log_start_offset)
            return Marks(log_start_offset, recovery_point, min(self.high_watermark, self._flushed_end))

    @property
    def flush_messages(self) -> int:
        """flush.messages as it is in effect: 1 until the log directory has noted that more may be lost."""
        flush_messages = self.config.flush_messages
        if flush_messages > 1 and self.topic_id not in self.log_dir.unsynced_topic_ids:
            return 1
        return flush_messages

    def update_config(self, config: LogConfig) -> None:
        """Use another config from now on."""
        self.config = config
        self._append_time = config.log_append_time

    # Append

    def append(self, batch: Buffer, header: BatchHeader, *, leader_epoch: int, now_ms: int) -> AppendResult:
        """Append a batch that `validate_produced` has passed, as the leader of `leader_epoch`.

        Only the first 16 bytes of the batch change (64 with log append time).

        Raises:
            StorageFull: no space; nothing was appended.
            StorageError: the log directory is offline.
        """
        with self._lock:
            if self.closed or self._unfinished_cut or self.log_dir.offline_reason is not None:
                self._check_appendable()
            base_offset = self._end
            next_offset = base_offset + header.last_offset_delta + 1
            size = len(batch)
            stamp = pack_stamp(base_offset, header.batch_length, leader_epoch)
            buffers: tuple[Buffer, ...]
            if self._append_time:
                stamped = memoryview(with_append_time(header, batch, now_ms))
                buffers = (stamp, stamped[STAMP_BYTES:], memoryview(batch)[HEADER_BYTES:])
                timestamp_ms = max_timestamp_ms = now_ms
            else:
                buffers = (stamp, memoryview(batch)[STAMP_BYTES:])
                timestamp_ms, max_timestamp_ms = NO_TIMESTAMP, header.max_timestamp_ms
            placed = Placed(base_offset, next_offset, size, max_timestamp_ms)
            self._write(buffers, (placed,), size, leader_epoch, now_ms)
            if header.producer_id >= 0:
                self.producers.note_appended(header, base_offset, timestamp_ms, now_ms)
            return AppendResult(base_offset, next_offset - 1, timestamp_ms, size)

    def append_markers(self, markers: Sequence[Marker], *, leader_epoch: int, now_ms: int) -> AppendResult:
        """Append one control batch as the leader of `leader_epoch`: each marker ends its producer's transaction.

        The caller passes only markers that `check_markers` allows. Each gets the first offset of its transaction. If
        the open transaction is an earlier one than the marker's, its coordinator has already finished with it: it is
        aborted first, by a marker of its own. Raises as `append`.
        """
        with self._lock:
            told, seen = [], set()
            for marker in markers:
                found = None if marker.producer_id in seen else self.producers.transactions.get(marker.producer_id)
                seen.add(marker.producer_id)
                if found is not None and marker.producer_epoch != decision_epoch(found.epoch):
                    told.append(self._abort_stray(found, marker))
                    found = None
                told.append(marker._replace(first_offset=NO_OFFSET if found is None else found.first_offset))
            batch = encode_control(told, now_ms)
            result = self.append(batch, parse_header(batch), leader_epoch=leader_epoch, now_ms=now_ms)
            self._note_markers([PlacedMarker(*place) for place in enumerate(told, result.base_offset)], now_ms)
            return result

    def _abort_stray(self, found: OpenTransaction, marker: Marker) -> Marker:
        """Return the abort marker of a transaction that is still open when a later one of its producer ends."""
        epoch, first_offset = decision_epoch(found.epoch), found.first_offset
        logger.error(
            "%s-%d: a transaction of producer id %d with epoch %d is open since offset %d, and a later one has ended "
            "(epoch %d): no coordinator decides on the earlier one any more, so it is aborted",
            self.topic,
            self.partition,
            marker.producer_id,
            found.epoch,
            first_offset,
            marker.producer_epoch,
        )
        return Marker(
            marker.producer_id, epoch, commit=False, coordinator_epoch=NO_COORDINATOR, first_offset=first_offset
        )

    def _note_markers(self, markers: Sequence[PlacedMarker], now_ms: int) -> None:
        aborted = self.producers.note_markers(markers, now_ms)
        if aborted:
            index = self._active.own_txn_index()
            for entry in aborted:
                index.append(entry)

    def append_stamped(self, data: Buffer, *, now_ms: int, max_epoch: int | None = None) -> AppendResult:
        """Append batches as their leader stamped them; a follower's append. Plain batches in a row are one write.

        Raises:
            CorruptRecordError: a batch is cut short or does not check.
            MarkerMissing: this log lacks a marker, so one of its transactions can never be decided.
            InvalidRecord: a batch does not follow the log end, or its epoch goes back, or lies above `max_epoch`.
            StorageFull, StorageError: as `append`; nothing of the failed write is in the log.
            Batches before the refused one were appended.
        """
        view = memoryview(data)
        position, first_offset = 0, self._end
        for run in _runs(view):
            size = sum(header.size for header in run)
            with self._lock:
                self._check_appendable()
                self._append_run(view[position : position + size], run, now_ms, max_epoch)
            position += size
        return AppendResult(first_offset, self._end - 1, NO_TIMESTAMP, position)

    def _append_run(self, data: memoryview, run: list[BatchHeader], now_ms: int, max_epoch: int | None) -> None:
        """Append one of `_runs` as `append_stamped` does, under the lock."""
        header = run[0]
        markers = placed_markers(data, check_checksum=False) if header.attributes & _CONTROL else ()
        if markers:
            self.producers.transactions.check_followed(markers, self.log_start_offset)
        if 0 <= header.base_offset < self._end < header.next_offset and not header.attributes & _CONTROL:
            # Compaction has merged across this log's end, or an earlier leader had split there.
            rest = cut_front(data[: header.size], self._end)
            data = memoryview(rest + data[header.size :])
            header = parse_batch(data)
            run = [header, *run[1:]]
        if header.base_offset != self._end:
            raise InvalidRecord(f"offset {header.base_offset} does not follow the log end {self._end}")
        if header.leader_epoch < 0:
            raise InvalidRecord(f"leader epoch {header.leader_epoch}: no leader has stamped this batch")
        if header.next_offset > _MAX_OFFSET:
            raise InvalidRecord(f"offsets end at {_MAX_OFFSET}, the batch at {header.base_offset} goes beyond")
        if header.leader_epoch < self.leader_epochs.latest_epoch:
            raise InvalidRecord(f"leader epoch {header.leader_epoch} after epoch {self.leader_epochs.latest_epoch}")
        if max_epoch is not None and header.leader_epoch > max_epoch:
            raise InvalidRecord(f"leader epoch {header.leader_epoch} from the leader of epoch {max_epoch}")
        while run:
            batches, size = self._fitting(run)
            self._write((data[:size],), batches, size, header.leader_epoch, now_ms)
            written, run, data = run[: len(batches)], run[len(batches) :], data[size:]
            for header in written:
                if header.producer_id >= 0:
                    self.producers.note(header, now_ms)
        if markers:
            self._note_markers(markers, now_ms)

    def _fitting(self, run: Sequence[BatchHeader]) -> tuple[list[Placed], int]:
        """Return the first batches of a run, as many as the next write's segment has room for, and their bytes."""
        segment_bytes = self.config.segment_bytes
        room = segment_bytes - self._active.size
        if run[0].size > room:
            room = segment_bytes  # a new segment
        fitting: list[Placed] = []
        size = 0
        for header in run:
            if fitting and size + header.size > room:
                break
            fitting.append(Placed(header.base_offset, header.next_offset, header.size, header.max_timestamp_ms))
            size += header.size
        return fitting, size

    def _check_appendable(self) -> None:
        self._check_open()
        if self._unfinished_cut:
            raise StorageError(
                f"the log of {self.topic}-{self.partition} was being truncated when {self.log_dir.path} refused; "
                "that is tried again soon"
            )

    def _write(
        self, buffers: Sequence[Buffer], batches: Sequence[Placed], size: int, leader_epoch: int, now_ms: int
    ) -> None:
        """Write batches, of `size` bytes in all, that the leader of one epoch has stamped."""
        active, config = self._active, self.config
        base_offset, next_offset = batches[0].base_offset, batches[-1].next_offset
        if now_ms < active.first_append_ms:  # the clock was set back
            active.first_append_ms = now_ms
        try:
            position = active.end[1]
            if position:
                if (
                    position + size > config.segment_bytes
                    or now_ms - active.first_append_ms >= config.segment_ms
                    or next_offset - active.base_offset > MAX_RELATIVE_OFFSET
                ):
                    active = self._roll()
                    active.first_append_ms = now_ms
            else:
                active.first_append_ms = now_ms
            active.append(buffers, batches, config.index_interval_bytes)
        except OSError as error:
            raise self._error(error, "append", size) from error
        if leader_epoch != self.leader_epochs.latest_epoch and self.leader_epochs.assign(leader_epoch, base_offset):
            self._epochs_version += 1
            if self._unstored_epoch_start is None:
                self._unstored_epoch_start = base_offset
        self._end = next_offset
        self._snapshot_bytes += size

    # Read

    def read(self, offset: int, max_bytes: int, end_offset: int, *, blocking: bool) -> ReadResult | None:
        """Return whole batches as they are on disk, from the batch that holds `offset`, below `end_offset`.

        At least one batch, even if larger than `max_bytes`; never beyond a segment's end. None: the read would wait for
        the disk; call again with `blocking` off the event loop. Empty records: the log has none below `end_offset`.

        Raises:
            OffsetOutOfRange: below the log start or above the log end.
            CorruptRecordError: the bytes on the disk contradict themselves.
            StorageError: the log directory is offline.
        """
        if self.closed or self.log_dir.offline_reason is not None:
            self._check_open()
        end_offset = min(end_offset, self._end)
        if offset >= end_offset or offset < self.log_start_offset:
            if not self.log_start_offset <= offset <= self._end:
                raise OffsetOutOfRange(
                    f"{self.topic}-{self.partition}: offset {offset} is out of range, "
                    f"the log has {self.log_start_offset} to {self._end}"
                )
            return ReadResult(b"", offset)
        bases, segments = self._segments
        number = bisect_right(bases, offset) - 1
        if number < 0:  # retention was quicker
            raise OffsetOutOfRange(f"{self.topic}-{self.partition}: offset {offset} has just been removed")
        while True:
            segment = segments[number]
            opened = segment.opened
            if opened is None:
                if not blocking:
                    return None
                try:
                    opened = self.open_segment(segment)
                except SegmentRemoved:
                    return self.read(offset, max_bytes, end_offset, blocking=True)
            elif segment is not self._active:
                self._cache.touch(segment)
            try:
                result = read_segment(segment, opened, offset, max_bytes, end_offset, blocking=blocking)
            except OSError as error:
                raise self._error(error, "reading") from error
            if result is None or result.records or number + 1 == len(segments):
                return result
            number += 1
            if segments[number].base_offset >= end_offset:
                return result

    @overload
    def aborted_transactions(self, first_offset: int, end_offset: int) -> Sequence[AbortedTransaction]: ...
    @overload
    def aborted_transactions(
        self, first_offset: int, end_offset: int, *, blocking: bool
    ) -> Sequence[AbortedTransaction] | None: ...
    def aborted_transactions(
        self, first_offset: int, end_offset: int, *, blocking: bool = True
    ) -> Sequence[AbortedTransaction] | None:
        """Return the aborted transactions that have records in [`first_offset`, `end_offset`).

        `end_offset` is at most the last stable offset, else transactions that are still open would be missing. None:
        the look-up would wait for the disk; call again with `blocking` off the event loop. Free of charge where no
        transaction was aborted.

        Raises:
            OffsetOutOfRange: the segment of `first_offset` was removed, perhaps after the caller had read its records:
                with it went the transactions whose markers it held.
            CorruptRecordError, StorageError: as `read`.
        """
        while True:
            segments = self._segments
            number = segments.number_of(first_offset)
            if number < 0:
                raise OffsetOutOfRange(
                    f"{self.topic}-{self.partition}: offset {first_offset} has just been removed, and with it which "
                    "transactions were aborted"
                )
            found: list[AbortedTransaction] = []
            try:
                for segment in islice(segments.all, number, None):
                    if not segment.has_txn_index:  # so no transaction is open at its end
                        if segment.next_offset >= end_offset:
                            return found
                        continue
                    opened = segment.opened
                    if opened is None:
                        if not blocking:
                            return None
                        opened = self.open_segment(segment)
                    if opened.txn_index is not None:
                        found += opened.txn_index.lookup(first_offset, end_offset)
                        if opened.txn_index.settles(end_offset):
                            return found
            except SegmentRemoved:
                continue
            return found

    def offset_for_time(self, timestamp_ms: int, end_offset: int | None = None) -> OffsetAndTimestamp | None:
        """Return the first record at or after `timestamp_ms` below `end_offset` (default: high watermark). Blocking."""
        return self._look_up(partial(first_at_or_after, timestamp_ms=timestamp_ms), end_offset)

    def first_from(self, offset: int, end_offset: int | None = None) -> OffsetAndTimestamp | None:
        """Return the first record at or after `offset` below `end_offset` (default: high watermark). Blocking."""
        return self._look_up(partial(first_at_or_after, timestamp_ms=BEFORE_ALL_TIME_MS), end_offset, offset)

    def max_timestamp(self, end_offset: int | None = None) -> OffsetAndTimestamp | None:
        """Return the first record with the largest timestamp below `end_offset` (KIP-734). Blocking."""
        return self._look_up(largest, end_offset)

    def _look_up(
        self, find: Callable[..., OffsetAndTimestamp | None], end_offset: int | None, from_offset: int = 0
    ) -> OffsetAndTimestamp | None:
        end_offset = self.high_watermark if end_offset is None else end_offset
        while True:
            self._check_open()
            try:
                with self.judging("looking up a time"):
                    return find(
                        self._segments.all,
                        self.open_segment,
                        start_offset=max(from_offset, self.log_start_offset),
                        end_offset=end_offset,
                    )
            except SegmentRemoved:
                continue  # the remaining segments answer

    # Check

    def check(self, offset: int, max_bytes: int, *, max_batches: int | None = None) -> CheckedPiece:
        """Check the batch that holds `offset`, and whole batches after it up to `max_bytes` or the segment's end.

        The check begins at the last index entry at or below `offset`. Appends and reads go on meanwhile. Offsets that
        were removed or are not appended yet are skipped. A batch that looks damaged is checked again while no
        truncation or removal can be under way, as half-cut bytes are no damage. Blocking.

        Raises:
            CorruptRecordError: a batch is damaged; names file, position and the offsets that cannot be read.
            StorageError: the log is closed, or its directory offline.
        """
        while True:
            self._check_open()
            offset = max(offset, self.log_start_offset)
            if offset >= self._end:
                return CheckedPiece(self._end, 0, 0)
            truncations = self._truncations
            segments = self._segments
            number = segments.number_of(offset)
            if number < 0:
                continue
            segment = segments.all[number]
            try:
                with self.judging("checking"):
                    opened = self.open_segment(segment)
                    return check_piece(segment, opened, self._epochs_now, offset, max_bytes, max_batches)
            except SegmentRemoved:
                continue
            except InvalidBatch:
                with self._file_lock:
                    self._check_open()
                    if truncations == self._truncations and self._segments.holds(segment):
                        self._check_again(segment, opened, offset, max_bytes, max_batches)

    def _epochs_now(self) -> LeaderEpochCache:
        return self.bounds().leader_epochs

    def _check_again(
        self, segment: Segment, opened: OpenSegment, offset: int, max_bytes: int, max_batches: int | None
    ) -> None:
        try:
            with self.judging("checking"):
                check_piece(segment, opened, self._epochs_now, offset, max_bytes, max_batches)
        except InvalidBatch as error:
            begin = segment.floor_position(opened, error.position, segment.next_offset)
            end_offset = (opened.index.ceiling(error.position) or segment.end)[0]
            raise CorruptRecordError(
                f"{segment.log_path} position {error.position}: {error.reason}; offsets {begin.offset} to "
                f"{end_offset - 1} of {self.topic}-{self.partition} are damaged on the disk"
            ) from None

    # Segments

    def _roll(self) -> Segment:
        """Seal the active segment and begin another; an error changes nothing. Raises OSError."""
        old = self._active
        segment = Segment(self.directory, old.next_offset)
        segment.create(self._storage)
        old.seal()
        old.close_txn_index(self.producers.transactions.first_open)
        self._unflushed.append(old)
        self._sealed_bytes += old.size
        self._new_names += 1
        if self.producers.may_freeze:
            self._snapshot_due = self._freeze_producers(old)
            self._snapshot_bytes = 0
        else:  # many rolls since the last flush: the next flush takes a new snapshot
            self._snapshot_due = None
            self._snapshot_bytes = SNAPSHOT_INTERVAL_BYTES
        self._segments.grow(segment)
        self._active = segment
        return segment

    def roll(self) -> bool:
        """Seal the active segment, if it has records, and begin another; return whether that happened."""
        with self._lock:
            self._check_open()
            if not self._active.size:
                return False
            with self.judging("rolling a segment"):
                self._roll()
            return True

    def maybe_roll(self, now_ms: int) -> bool:
        """Roll if the active segment's first append is `segment.ms` ago (or `max.compaction.lag.ms`, if compacted)."""
        active = self._active
        active.first_append_ms = min(active.first_append_ms, now_ms)  # the clock may have been set back
        return active.size > 0 and now_ms - active.first_append_ms >= self.config.roll_ms and self.roll()

    def open_segment(self, segment: Segment) -> OpenSegment:
        """Return the segment opened. May wait for the disk.

        The log may be closed, or the segment removed, at any moment meanwhile, and then its path may belong to another
        file. So neither an error nor a success counts before both were ruled out.

        Raises:
            SegmentRemoved: retention, a truncation or a swap has removed the segment.
            CorruptRecordError: its index had to be rebuilt, and a batch does not check.
            StorageError: the log is closed, or the disk failed.
        """
        opened = segment.opened
        if opened is not None:
            return opened
        try:
            opened = self._cache.open(segment, self.config.index_interval_bytes)
        except (FileNotFoundError, CorruptRecordError) as error:
            self._check_present(segment)
            if isinstance(error, CorruptRecordError):
                raise
            raise self._error(error, "opening a segment") from error
        except OSError as error:
            raise self._error(error, "opening a segment") from error
        self._check_present(segment)
        return opened

    def _check_present(self, segment: Segment) -> None:
        if not self.closed and self._segments.holds(segment):
            return
        self._cache.forget(segment)
        self._check_open()
        raise SegmentRemoved(
            f"{self.topic}-{self.partition}: offset {segment.base_offset} has just been removed, "
            f"the log starts at {self.log_start_offset}"
        )

    def close(self) -> None:
        """Close all files; later appends, reads and flushes raise `StorageError`."""
        with self._file_lock, self._lock:
            self.closed = True
            for segment in [*self._segments.all, *self._detached, *self._cut_off]:
                self._cache.forget(segment)

    # Flush

    def begin_flush(self) -> FlushTicket | None:
        """Draw a ticket for everything appended so far, or None when all of it is durable."""
        with self._lock:
            self._check_open()
            epochs_due = self._unstored_epoch_start is not None
            if self._flushed_end == self._end and not self._unflushed and not epochs_due:
                return None
            return FlushTicket(
                self,
                self._end,
                list(self._unflushed),
                self._active if self._active.size else None,
                self._new_names,
                self.leader_epochs.entries if epochs_due else None,
                self._epochs_version,
                self._truncations,
            )

    def _run_flush(self, ticket: FlushTicket) -> None:
        with self._file_lock:
            self._check_open()
            with self.judging("fsync"):
                for segment in (*ticket.sealed, ticket.active):
                    opened = None if segment is None else segment.opened
                    if opened is not None:  # None: another ticket has flushed it, and it was closed since
                        opened.file.datasync()
            if ticket.truncations == self._truncations:  # else a segment may be cut off, and its name reused
                for segment in ticket.sealed:
                    self._store_index(segment, durably=True)
                if ticket.epochs is not None:
                    self._store_epochs(ticket.epochs, ticket.epochs_version)
            if ticket.names > self._synced_names:
                with self.judging("fsync of the names"):
                    self._storage.sync_dir(self.directory)

    def finish_flush(self, ticket: FlushTicket) -> int:
        """Count what a ticket that ran made durable, and return the flushed end offset."""
        with self._lock:
            self._synced_names = max(self._synced_names, ticket.names)
            if ticket.truncations == self._truncations and not self.closed:
                self._flushed_end = max(self._flushed_end, ticket.end_offset)
                sealed = set(ticket.sealed)
                done = [segment for segment in self._unflushed if segment in sealed]
                self._unflushed = [segment for segment in self._unflushed if segment not in sealed]
                for segment in done:
                    if segment.opened is not None:
                        self._cache.adopt(segment, segment.opened)
            return self._flushed_end

    def flush(self) -> int:
        """Make everything appended so far durable, and return the flushed end offset. Blocking.

        Raises:
            StorageError: as `FlushTicket.run`.
        """
        ticket = self.begin_flush()
        if ticket is not None:
            ticket.run()
            self.finish_flush(ticket)
            self.store_producers()
        return self._flushed_end

    def _store_epochs(self, entries: tuple[EpochEntry, ...], version: int) -> None:
        if version <= self._epochs_stored:
            return
        try:
            store_leader_epochs(self._storage, self.directory, entries)
        except OSError as error:
            if not is_refusal(error):
                raise self._error(error, "writing leader epochs") from error
            logger.warning("leader epochs of %s not stored, the recovery point waits: %s", self.directory, error)
            return
        with self._lock:
            self._epochs_stored = version
            last_stored = entries[-1].leader_epoch if entries else -1
            later = [start for epoch, start in self.leader_epochs.entries if epoch > last_stored]
            self._unstored_epoch_start = later[0] if later else None

    def _store_index(self, segment: Segment, *, durably: bool, closing: bool = False) -> None:
        opened = segment.opened
        if opened is None:
            return
        with self._lock:  # a roll would add the closing entry
            count = len(opened.index)
            ends = closing or segment is not self._active
        try:
            if ends and not opened.txn_stored:  # first: the closing entries of the others rely on it
                if opened.txn_index is not None:
                    opened.txn_index.store(self._storage, segment.stem, segment.next_offset)
                else:
                    drop_txn_file(self._storage, segment.stem)
                opened.txn_stored = True
            if opened.index.store(self._storage, segment.stem, count) and durably:
                opened.index.sync(self._storage, segment.stem)
        except OSError as error:
            if not is_refusal(error):
                raise self._error(error, "writing indexes") from error
            logger.warning("indexes of %s not stored, they are rebuilt when needed: %s", segment.log_path, error)

    def store_indexes(self, *, closing: bool = False) -> None:
        """Write the index entries that are only in memory; `closing` adds the closing entry of the active segment.

        They save the next start work. A start checks each entry, so those of the active segment are not fsynced.

        Raises:
            StorageError: the log is closed, or its directory offline.
        """
        with self._file_lock:
            self._check_open()
            self.finish_swap()
            active = self._active
            if closing and active.size and active.opened is not None:
                active.opened.index.append(active.next_offset, active.size, active.max_timestamp_ms)
                active.close_txn_index(self.producers.transactions.first_open)
            self._store_index(active, durably=False, closing=closing)
            unflushed = set(self._unflushed)
            for segment in self._segments.all[:-1]:  # sealed ones that were refused space or descriptors before
                if segment.opened is not None and segment not in unflushed:
                    self._store_index(segment, durably=True)

    # Producers

    def check_producer(self, header: BatchHeader, now_ms: int, session_epoch: int = -1) -> Duplicate | None:
        """Return where a batch was appended before, or None if it may be appended now. Only a leader asks.

        Raises:
            RaftlogError: the batch may not be appended, see `ProducerStates.check`.
        """
        with self._lock:  # housekeeping may be forgetting producers
            return self.producers.check(header, now_ms, session_epoch)

    def check_markers(self, markers: Sequence[Marker], now_ms: int) -> list[MarkerFate | RaftlogError]:
        """Return what becomes of each marker; see `ProducerStates.check_markers`. Only a leader asks."""
        with self._lock:
            return self.producers.check_markers(markers, now_ms)

    def producers_now(self) -> list[tuple[int, ProducerState]]:
        """Return (producer id, state) of all producers, the longest idle first."""
        with self._lock:
            return list(self.producers.items())

    def expire_producers(self, now_ms: int) -> int:
        """Forget the producers that have been idle for longer than `producer.id.expiration.ms`; return how many.

        It pauses after every `EXPIRED_AT_ONCE` producers, so that the event loop gets the lock in between.
        """
        if self.producers.newest_append_ms > now_ms:
            self._set_producers_back(now_ms)
        return self._forget_producers(lambda at_most: self.producers.expire(now_ms, at_most))

    def _set_producers_back(self, now_ms: int) -> None:
        with self._lock:
            ahead = self.producers.ahead_of(now_ms)
        for at in range(0, len(ahead), EXPIRED_AT_ONCE):
            with self._lock:
                self.producers.set_back(ahead[at : at + EXPIRED_AT_ONCE], now_ms)
            time.sleep(_PAUSE_S)

    def forget_idle_producers(self, keep: int, now_ms: int) -> int:
        """Forget idle producers until `keep` are left; return how many. It pauses as `expire_producers` does."""
        return self._forget_producers(lambda at_most: self.producers.forget_idle(keep, now_ms, at_most))

    def _forget_producers(self, some: Callable[[int], int]) -> int:
        count = 0
        while True:
            with self._lock:
                forgotten = some(EXPIRED_AT_ONCE)
            count += forgotten
            if forgotten < EXPIRED_AT_ONCE:
                return count
            time.sleep(_PAUSE_S)

    def store_producers(self, *, closing: bool = False) -> None:
        """Write the producer snapshot that is due, if any; `closing` writes one if anything is new.

        The caller must not hold `_file_lock`. A snapshot written at a clean stop is not fsynced unless segments are
        about to go: there may be thousands of logs, and the next start skips a torn snapshot.

        Raises:
            StorageError: the log is closed, or its directory offline.
        """
        with self._storing:
            self._check_open()
            many = self._snapshot_bytes >= SNAPSHOT_INTERVAL_BYTES
            has_spare = not closing and self._snapshots.has_spare  # clean stops have left them
            if not closing and (many or self._snapshot_due is not None or self._detached or has_spare):
                with self.judging("reading a producer snapshot"):
                    self._snapshots.verify(self.producers.limits)
            if has_spare:
                with self._file_lock:
                    self._check_open()
                    with self.judging("removing a producer snapshot"):
                        self._snapshots.remove_spare(self.high_watermark)
            with self._lock:
                due = self._snapshot_due
                leaves = self._detached[-1].next_offset if self._detached else 0
                newest = self._snapshots.offsets[-1] if self._snapshots.offsets else 0
                if (
                    self._snapshot_bytes >= SNAPSHOT_INTERVAL_BYTES
                    or (due is None and leaves > self._snapshots.newest_durable)
                    or (closing and self._end != newest)
                ):
                    due = self._freeze_producers(self._active)
                    self._snapshot_bytes = 0
                self._snapshot_due = None
                truncations = self._truncations
            if due is not None:
                frozen = due.producers
                together = frozen.together()
                aborted = () if due.txn_index is None else due.txn_index.entries
                data = encode_producers(together, frozen.undecided, aborted)
                # The disk keeps no other copy of what departing segments say.
                durably = not closing or leaves > self._snapshots.newest_durable
                self._store_snapshot(due.offset, data, truncations, durably=durably)
                with self._lock:
                    self.producers.replace_layers(frozen, together)
                frozen.release()
            if leaves > self._snapshots.newest_committed(self.high_watermark):
                with self._file_lock:
                    self._check_open()
                    self._store_leaving()
            with self._lock:
                if truncations == self._truncations:
                    self._told_offset = leaves

    def _freeze_producers(self, last: Segment) -> _DueSnapshot:
        """Return what is known at the end of `last`, the last segment with records."""
        opened = last.opened
        txn_index = None if opened is None or opened.txn_index is None else opened.txn_index.copy()
        return _DueSnapshot(last.next_offset, self.producers.freeze(), txn_index)

    def _store_leaving(self) -> None:
        """Write what detached segments say: a truncation may remove every snapshot that has it. Raises StorageError."""
        with self._lock:
            detached = list(self._detached)
            newest_ms, limits = self.producers.newest_append_ms, self.producers.limits
            if not detached or not self.producers:
                return
        offset = detached[-1].next_offset
        txn_index = TxnIndex(detached[-1].base_offset)
        try:
            with self.judging("reading what segments say of producers"):
                producers = rebuild_producers(
                    self._storage,
                    self.directory,
                    self._snapshots.offsets,
                    detached,
                    offset,
                    limits,
                    newest_ms,
                    txn_index,
                )
        except InvalidBatch as error:  # the damaged segment goes anyway
            logger.warning("no producer snapshot of %s at offset %d: %s", self.directory, offset, error)
            return
        data = encode_producers(producers, producers.transactions.undecided, txn_index.entries)
        self._store_snapshot(offset, data, self._truncations, durably=True)

    def _store_snapshot(self, offset: int, data: bytes, truncations: int, *, durably: bool) -> None:
        """Write a snapshot, unless the log was cut since there were `truncations`; then remove superfluous ones."""
        self._check_open()
        try:
            self._snapshots.write(offset, data, durably=durably)
            with self._file_lock:
                self._check_open()
                if truncations != self._truncations:  # the next start removes the temporary file
                    return
                self._snapshots.place(offset, self.high_watermark, durably=durably)
        except OSError as error:
            if not is_refusal(error):
                raise self._error(error, "writing a producer snapshot") from error
            logger.warning("no producer snapshot of %s, its log is read instead: %s", self.directory, error)
            with self._lock:
                if self._detached:  # they may be gone when the disk has space again, so the next call tries again
                    self._snapshot_bytes = SNAPSHOT_INTERVAL_BYTES

    def _cut_producers(self, producers: ProducerStates, offset: int) -> None:
        """Go on with the producers known at `offset` (0: none)."""
        self.producers = producers
        self._snapshot_due = None
        self._snapshot_bytes = 0
        self._snapshots.cut(offset)
        self._told_offset = 0

    # Retention

    def apply_retention(self, now_ms: int) -> int:
        """Detach the segments that have outlived retention, and return how many.

        An active segment in which everything has expired is sealed first, so that an idle topic empties.
        """
        if not expired_segments(self._segments.all, self.config, self.last_stable_offset, now_ms):
            return 0
        with self._lock:  # now again, while no append can come between
            self._check_open()
            segments, last_stable_offset = self._segments.all, self.last_stable_offset
            count = expired_segments(segments, self.config, last_stable_offset, now_ms)
            if count == 0:
                return 0
            end_offset = segments[count - 1].next_offset
            assert end_offset <= last_stable_offset, "records that may not be committed or decided never expire"
            if count == len(segments):
                self.roll()
            self._advance_start(end_offset)
            return count

    def delete_records(self, offset: int) -> int:
        """Raise the log start to `offset` and return it; it never goes back, and may pass open transactions.

        It is durable after the manager's next checkpoint.

        Raises:
            OffsetOutOfRange: above the high watermark.
        """
        with self._lock:
            self._check_open()
            if offset > self.high_watermark:
                raise OffsetOutOfRange(
                    f"{self.topic}-{self.partition}: cannot delete up to {offset}, the high watermark is "
                    f"{self.high_watermark}"
                )
            if offset > self.log_start_offset:
                self._advance_start(offset)
            return self.log_start_offset

    def _advance_start(self, offset: int) -> None:
        segments = self._segments
        self.log_start_offset = max(self.log_start_offset, offset)
        count = segments.number_of(self.log_start_offset)
        if count > 0:
            gone = segments.all[:count]
            self._detached += gone
            detached = set(gone)
            self._unflushed = [segment for segment in self._unflushed if segment not in detached]
            self._sealed_bytes -= sum(segment.size for segment in gone)
            self._segments = _Segments.of(segments.all[count:])
        if self.leader_epochs.truncate_from_start(self.log_start_offset):
            self._epochs_version += 1

    def make_room(self) -> bool:
        """Remove the index of one detached segment; return False if no detached segment has one.

        On a disk without space it gives the checkpoint the room that it needs before the segments may go. A crash may
        make the segment part of the log again: then its index is rebuilt.

        Raises:
            StorageError: the log is closed, or its directory offline.
        """
        with self._file_lock, self.judging("removing an index"):
            self._check_open()
            with self._lock:
                detached = list(self._detached)
            return any(segment.remove_index(self._storage) for segment in detached)

    def sweep(self, now_ms: int) -> None:
        """Rename the files of detached segments, and remove files that were renamed long enough ago.

        Segments stay that lie above the log start in the checkpoint, or were detached since the last `store_producers`.

        Raises:
            StorageFull, StorageError: refused; the next sweep tries again.
        """
        with self._file_lock:
            if self.closed or self.log_dir.offline_reason is not None:
                return
            self.finish_swap()
            marks = self.log_dir.marks_of(self._key)
            with self._lock:
                end_offset = 0 if marks is None else min(marks.log_start_offset, self._told_offset)
                gone = [segment for segment in self._detached if segment.next_offset <= end_offset]
                self._detached = [segment for segment in self._detached if segment.next_offset > end_offset]
            try:
                latest_ms = now_ms + self.config.file_delete_delay_ms
                self._rename_away(gone, latest_ms)
                gone = []
                for deadline_ms, path in self._deleted_paths:
                    if deadline_ms <= now_ms:
                        self._storage.remove(path)
                # None later than that: the clock may have been set back since.
                self._deleted_paths = [
                    (min(at_ms, latest_ms), path) for at_ms, path in self._deleted_paths if at_ms > now_ms
                ]
            except OSError as error:
                with self._lock:
                    self._detached = gone + self._detached  # for the next sweep
                raise self._error(error, "removing segments") from error

    def _rename_away(self, segments: list[Segment], deadline_ms: int) -> None:
        """Rename the files of segments, durably, to be removed at `deadline_ms`. Raises OSError; may be repeated."""
        for segment in segments:
            for suffix in SUFFIXES:
                path = segment.stem + suffix
                with contextlib.suppress(FileNotFoundError):
                    self._storage.rename(path, path + DELETED_SUFFIX)
                    self._deleted_paths.append((deadline_ms, path + DELETED_SUFFIX))
            self._cache.forget(segment)
        if segments:
            self._storage.sync_dir(self.directory)

    # Truncation

    @property
    def has_unfinished_cut(self) -> bool:
        """Whether the disk refused a truncation half-way, so that appends are refused until `finish_cut` succeeds."""
        return self._unfinished_cut

    def truncate_to(self, offset: int, *, now_ms: int) -> int:
        """Drop every batch with a record at or above `offset`; return the new log end.

        After an error the caller must try again: the cut may be half-done.

        Raises:
            OffsetOutOfRange: below the log start; `reset_to` starts the log over.
            StorageFull, StorageError: refused; `has_unfinished_cut` says whether the log has changed.
        """
        with self._file_lock:
            self._check_open()
            self.finish_swap()
            if offset < self._end:  # whole batches go, so the cut may lie lower, but not below their segment
                segments = self._segments
                self._cut_cleaned(segments.bases[max(0, segments.number_of(offset))])
            self._delete_at_ms = now_ms + self.config.file_delete_delay_ms
            self.finish_cut()
            while offset < self._end:
                if offset < self.log_start_offset:
                    raise OffsetOutOfRange(
                        f"{self.topic}-{self.partition}: cannot truncate to {offset}, "
                        f"the log starts at {self.log_start_offset}"
                    )
                if self._cut_at(offset, now_ms):
                    self.finish_cut()
                    break
            return self._end

    def reset_to(self, offset: int, *, now_ms: int) -> None:
        """Drop everything and start over at `offset`, which may lie beyond either end (a follower out of range).

        After an error the caller must try again: the log may be empty already.

        Raises:
            StorageFull, StorageError: refused.
        """
        with self._file_lock:
            self._check_open()
            self.finish_swap()
            self._cut_cleaned(0)
            self._delete_at_ms = now_ms + self.config.file_delete_delay_ms
            self.finish_cut()
            self._empty(now_ms)
            if self._end != offset:
                self._move_empty(offset)

    def _cut_at(self, offset: int, now_ms: int) -> bool:
        """Do steps 1 and 2 of a truncation; False: retention or a roll came between, the caller tries again."""
        segments = self._segments
        number = segments.number_of(offset)
        if number < 0:
            return False
        segment = segments.all[number]
        try:
            with self.judging("truncating"):
                opened = self.open_segment(segment)
                end, max_timestamp_ms = cut_point(segment, opened, offset)
                producers = ProducerStates(self.producers.limits)
                if self.producers:
                    with self._lock:
                        left = [*self._detached, *segments.all[: number + 1]]
                    producers = rebuild_producers(
                        self._storage,
                        self.directory,
                        self._snapshots.offsets,
                        left,
                        end.offset,
                        producers.limits,
                        now_ms,
                    )
                with self._lock:
                    if not self._segments.holds(segment):
                        return False
                    self._cut(segment, opened, end, max_timestamp_ms)
                    self._cut_producers(producers, end.offset)
                return True
        except SegmentRemoved:
            return False
        except InvalidBatch as error:
            raise CorruptRecordError(f"{segment.log_path} position {error.position}: {error.reason}") from None

    def _cut(self, segment: Segment, opened: OpenSegment, end: Boundary, max_timestamp_ms: int) -> None:
        """End the log in memory at `end`, where a batch of `segment` begins."""
        segments = self._segments.all
        number = segments.index(segment)
        before, offset = segments[:number], end.offset
        left = set(before)
        self._unfinished_cut = True
        self._truncations += 1
        self._cut_off += segments[:number:-1]
        self._cache.forget(segment)
        segment.cut(opened, end, max_timestamp_ms)
        self._unflushed = [kept for kept in self._unflushed if kept in left]
        self._sealed_bytes = sum(kept.size for kept in before)
        self._active = segment
        self._segments = _Segments.of([*before, segment])
        self._end = offset
        self._flushed_end = min(self._flushed_end, offset)
        self.high_watermark = min(self.high_watermark, offset)
        self.log_start_offset = min(self.log_start_offset, offset)
        if self.leader_epochs.truncate_from_end(offset):
            self._epochs_version += 1
            # the stored entries beyond `offset` must be gone before the recovery point passes it again
            unstored = self._unstored_epoch_start
            self._unstored_epoch_start = offset if unstored is None else min(unstored, offset)

    def finish_cut(self) -> None:
        """Make the disk match a log that was cut in memory (step 3); does nothing where no cut is unfinished.

        Raises:
            StorageFull, StorageError: refused; try again.
        """
        with self._file_lock:
            if not self._unfinished_cut:
                return
            self._check_open()
            segment, opened = self._active, self._active.opened
            assert opened is not None, "the active segment is opened"
            with self.judging("truncating"):
                self.log_dir.update_marks(lambda: {self._key: self.marks()})
                self._rename_away(self._cut_off, self._delete_at_ms)
                self._cut_off = []
                self._snapshots.remove_gone()
                opened.file.truncate(segment.size)
                opened.index.cut_files(self._storage, segment.stem)
                drop_txn_file(self._storage, segment.stem)
                opened.file.datasync()
            self._unfinished_cut = False

    def _empty(self, now_ms: int) -> None:
        """Cut the log back to nothing at the base of its first segment, and drop detached segments."""
        while True:
            base = self._segments.bases[0]
            if base == self._end or self._cut_at(base, now_ms):
                break
        with self._lock:  # an empty log has no committed records and no earlier ones
            self._unfinished_cut = True
            self._flushed_end = self.high_watermark = self._end
            self._cut_off = [*self._detached, *self._cut_off]
            self._detached = []
            self._truncations += 1
            self.leader_epochs.clear()
            self._cut_producers(ProducerStates(self.producers.limits), 0)
            self._epochs_version += 1
            self._unstored_epoch_start = self._end
        self.finish_cut()

    def _move_empty(self, offset: int) -> None:
        """Move an empty log to another offset, into a new segment; its directory holds no other one."""
        segment = Segment(self.directory, offset)
        try:
            segment.create(self._storage)
            assert segment.opened is not None
            segment.opened.index.cut_files(self._storage, segment.stem)
            self._storage.sync_dir(self.directory)
            self._marks_to_be = Marks(offset, offset, offset)
            self.log_dir.update_marks(lambda: {self._key: self.marks()})
            with self._lock:
                self._unfinished_cut = True
                self._truncations += 1
                self._cut_off = [self._active]
                self._active = segment
                self._segments = _Segments.of([segment])
                self._end = self._flushed_end = self.log_start_offset = self.high_watermark = offset
                self._epochs_version += 1
                self._unstored_epoch_start = offset
        except OSError as error:
            with self._lock:  # the new file has to go, and so have marks on the disk that may be the new ones
                self._unfinished_cut = True
                self._cut_off = [segment]
            raise self._error(error, "starting over") from error
        finally:
            self._marks_to_be = None
        self.finish_cut()

    # Compaction; `cleaner.py` says what is compacted

    @property
    def cleaned(self) -> Cleaned:
        """How far the log is clean. Raises StorageError."""
        if self._cleaned is None:
            with self._file_lock:
                if self._cleaned is None:
                    with self.judging("reading the cleaner's checkpoint"):
                        self._cleaned = load_cleaned(self._storage, self.directory)
        return self._cleaned

    def note_cleaned(self, cleaned: Cleaned, truncations: int) -> None:
        """Remember how far the log is clean, durably; does nothing when the log was cut since `truncations`.

        Raises:
            StorageFull, StorageError: refused; then the next cleaning begins where this one did.
        """
        with self._file_lock:
            self._check_open()
            if truncations == self._truncations:
                self._store_cleaned(cleaned)

    def _store_cleaned(self, cleaned: Cleaned) -> None:
        with self.judging("writing the cleaner's checkpoint"):
            store_cleaned(self._storage, self.directory, cleaned)
        self._cleaned = cleaned

    def _cut_cleaned(self, offset: int) -> None:
        """Forget that the log was clean from `offset` on, before other records take the place of the clean ones."""
        cleaned = self.cleaned
        kept = cleaned.cut(offset)
        if kept != cleaned:
            self._store_cleaned(kept)

    def oldest_snapshot_offset(self, default: int) -> int:
        """Return from which offset on the log is read if recovery has to use the oldest producer snapshot."""
        with self._lock:
            return min(self._snapshots.offsets, default=default)

    def producers_at_end(self, sealed: SealedSegments, now_ms: int) -> ProducerStates:
        """Return what these segments, and the snapshots within them, say of producers. Blocking.

        Raises:
            SegmentRemoved: one of the segments was removed meanwhile.
            CorruptRecordError: a batch is damaged, or the log was cut meanwhile (`is_unchanged`).
            StorageError: the log is closed, or the disk failed.
        """
        segments, limits = sealed.segments, self.producers.limits
        if not self.producers:
            return ProducerStates(limits)
        begin_offset, end_offset = segments[0].base_offset, segments[-1].next_offset
        snapshots = [offset for offset in self._snapshots.offsets if offset >= begin_offset]
        try:
            return rebuild_producers(self._storage, self.directory, snapshots, segments, end_offset, limits, now_ms)
        except InvalidBatch as error:
            raise CorruptRecordError(
                f"{self.directory}: position {error.position} of a segment below offset {end_offset}: {error.reason}"
            ) from None
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                for segment in segments:
                    self._check_present(segment)
            raise self._error(error, "reading what segments say of producers") from error

    def sealed_below(self, bound: int) -> SealedSegments:
        """Return the sealed segments that lie below `bound` and are on the disk with their indexes."""
        with self._lock:
            self._check_open()
            found: list[Segment] = []
            unflushed = set(self._unflushed)
            for segment in self._segments.all[:-1]:
                if segment.next_offset > bound or segment in unflushed:
                    break
                found.append(segment)
            return SealedSegments(found, self._truncations)

    def is_unchanged(self, segment: Segment, truncations: int) -> bool:
        """Whether a segment is part of the log as it was at `truncations`; waits for a cut that is under way."""
        with self._file_lock:
            return not self.closed and truncations == self._truncations and self._segments.holds(segment)

    def holds(self, segment: Segment) -> bool:
        """Whether a segment is part of the log."""
        return self._segments.holds(segment)

    def create_aside(self, base_offset: int) -> File:
        """Return an empty file for the compacted segment that begins at `base_offset`.

        Raises:
            StorageFull, StorageError: no space, or the disk.
        """
        self._check_open()
        with self.judging("compacting"):
            file = self._storage.open(cleaned_path(self.directory, base_offset), create=True)
            file.truncate(0)
            return file

    def remove_aside(self, base_offset: int) -> None:
        """Remove that file; a start would remove it as well. Raises StorageError."""
        if not self.closed:  # the directory of a closed log may belong to another log by now
            with self.judging("removing what was compacted"):
                self._storage.remove(cleaned_path(self.directory, base_offset))

    def swap(self, old: SealedSegments, new: Segment, *, now_ms: int) -> bool:
        """Put `new`, opened and written aside, in the place of `old`; False when the log was cut or trimmed meanwhile.

        Raises:
            StorageFull, StorageError: refused; `finish_swap` completes a swap that was decided.
        """
        assert new.opened is not None
        segments = list(old.segments)
        assert new.base_offset == segments[0].base_offset
        assert new.next_offset == segments[-1].next_offset
        swap = Swap(new.base_offset, new.next_offset)
        with self.judging("fsync of what was compacted"):
            new.opened.file.datasync()
        with self._file_lock:
            self._check_open()
            self.finish_swap()
            with self._lock:
                present = self._segments.all
                first = present.index(segments[0]) if segments[0] in present else len(present)
                if old.truncations != self._truncations or present[first : first + len(segments)] != segments:
                    return False
            with self.judging("compacting"):
                self._storage.rename(cleaned_path(self.directory, swap.base_offset), f"{self.directory}/{swap.name}")
            with self._lock:
                self._replace(segments, new)
                self._swap = _UnfinishedSwap(swap, segments, new, now_ms + self.config.file_delete_delay_ms)
            self.finish_swap()
            return True

    def _replace(self, old: list[Segment], new: Segment) -> None:
        """Make `new` part of the log; the first ones of `old` may have been detached since."""
        gone = set(old)
        present = self._segments.all
        if any(segment in gone for segment in present):
            at = next(number for number, segment in enumerate(present) if segment in gone)
            left = [segment for segment in present if segment not in gone]
            self._segments = _Segments.of([*left[:at], new, *left[at:]])
        else:
            self._detached.append(new)
        self._detached = [segment for segment in self._detached if segment not in gone]
        self._sealed_bytes = sum(segment.size for segment in self._segments.all[:-1])
        for segment in old:
            self._cache.forget(segment)

    def finish_swap(self) -> None:
        """Make the disk match a swap that was decided; does nothing where no swap is unfinished.

        Raises:
            StorageError: refused; try again.
        """
        with self._file_lock:
            unfinished = self._swap
            if unfinished is None:
                return
            self._check_open()
            new = unfinished.new
            steps: tuple[Callable[[], None], ...] = (
                lambda: self._storage.sync_dir(self.directory),
                lambda: self._rename_away(unfinished.old, unfinished.delete_at_ms),
                lambda: self._store_index(new, durably=True),
                lambda: self._storage.rename(f"{self.directory}/{unfinished.swap.name}", new.log_path),
                lambda: self._storage.sync_dir(self.directory),
            )
            with self.judging("putting compacted segments in place"):
                for step in steps[unfinished.steps_done :]:
                    step()
                    unfinished.steps_done += 1
            self._swap = None
            assert new.opened is not None
            self._cache.adopt(new, new.opened)

    # Errors

    def _check_open(self) -> None:
        reason = self.log_dir.offline_reason
        if reason is not None:
            raise reason
        if self.closed:
            raise self._closed_error()

    def _closed_error(self) -> StorageError:
        return StorageError(f"the log of {self.topic}-{self.partition} in {self.directory} is closed")

    @contextlib.contextmanager
    def judging(self, doing: str, wanted_bytes: int = 0) -> Iterator[None]:
        """Turn an `OSError` of the disk into StorageFull or StorageError; `doing` names the operation."""
        try:
            yield
        except OSError as error:
            raise self._error(error, doing, wanted_bytes) from error

    def _error(self, error: OSError, doing: str, wanted_bytes: int = 0) -> RaftlogError:
        if isinstance(error, FileNotFoundError):
            if self.closed:  # deletion renames the directory while readers are under way
                return self._closed_error()
            try:
                own, whole = (self._storage.exists(path) for path in (self.directory, self.log_dir.path))
            except OSError as failure:
                return self.log_dir.judge(failure, f"{doing} in {self.directory}")
            if whole and not own:
                return StorageError(
                    f"{doing} failed: {self.directory} is gone although the partition was not deleted; put it back "
                    "and restart the broker, or delete the topic"
                )
        return self.log_dir.judge(error, f"{doing} in {self.directory}", wanted_bytes)
