"""Compacting logs in the background: which log, how far, and piece by piece; `compaction.py` has the rules for batches.

    clean  (first_dirty_offset)  dirty                      (bound) active segment, or not committed
    |-- no key twice ------------|-- written since then ----|-------------------------------------->

Only whole sealed segments below the bound are rewritten. A cleaning first reads the keys of the dirty section, as far
as they fit into memory. Then it rewrites everything from the start up to there, segment by segment, and puts each one
in place before the next (`PartitionLog.swap`). Neighbours that have shrunk are merged into one segment; a segment that
loses nothing is left alone. The progress is noted last, so that a crash only costs a repetition.

The bound is at most the last stable offset, so the end of every transaction below it is known. Readers from the log
start need its marker while its batches are still transactional, and so does recovery. So a control batch goes only if

    it lies below a point up to which the log was clean `delete.retention.ms` ago: then all batches that it decides on
        have been cleaned, and no reader is between them and the marker (as with tombstones);
    no producer snapshot from before it is left, which may know one of its transactions as open;
    a later entry below the bound says more of each of its producers (see below): else a fenced producer would be
        fenced no more;
    every assigned replica holds it durably, as their leader has learned in its present term (`Plan.markers_below`).
        So only the leader of a partition drops markers; a follower keeps its own until it leads.

What the log says of producers stays, wherever it ends later: a truncation or a power failure may take everything above
the high watermark, and a new replica has no snapshots. So the state of producers at the end of the segments that are
cleaned (`PartitionLog.producers_at_end`), not the present one, decides which markers and which sequence numbers are
superseded. What is written later may supersede more; the next cleaning sees it. A producer that has expired needs
nothing.

The last condition is for a follower that was away. It may have batches of a transaction as they were produced, but not
the marker. It continues in a log that was cleaned, where only the marker still says how the transaction ended. With
the marker it is safe, whatever else was cleaned meanwhile:

    The other batches of the transaction are transactional no more. They follow its first batch, so the transaction
        stays open there until the marker, which says where it began.
    Rows of an aborted transaction are gone. The marker aborts those that the follower has, too.
    Replaced records are gone, and so are the records that replaced them: as without transactions.

So neither clearing the attribute nor dropping rows has to wait for the follower. A new replica gets no transactional
batch below a marker that went: all of those were cleaned before. A replica can still miss a marker if it lost its disk
and copies first from a leader whose log was not cleaned and then from one whose log was; if it was removed from the
replicas and came back with its old log; or if it lost records that `flush.messages` had left unflushed. It notices at
the producer's next marker (`OpenTransactions.check_followed`), and is then copied as a whole.

The background work handles one log at a time, the one that has been due for longest (`next_in_line`):

    idle  -- log.cleaner.backoff.ms have passed (`tick`) -->  looking, in a thread
          -- a log is due -->  a piece, in a thread  -->  pausing  --> ... -->  looking again
          -- none is due -->  idle

The pauses keep to `log.cleaner.io.max.bytes.per.second`. A log whose cleaning failed is skipped for a while, so that it
does not hold up the others; one that is clean is skipped for log.cleaner.backoff.ms, however soon it is dirty again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, NamedTuple

from broker.clock import Clock
from broker.log.compaction import CleanedBatch, Compactor, LastOffsets, SourceBatch, read_batch
from broker.log.index import MAX_RELATIVE_OFFSET, TxnIndex
from broker.log.integrity import OnDamaged
from broker.log.manager import LogManager
from broker.log.partition_log import PartitionLog, SealedSegments, SegmentRemoved
from broker.log.producer_state import ProducerStates
from broker.log.recovery import Cleaned
from broker.log.segment import BEFORE_ALL_TIME_MS, OpenSegment, Segment, SegmentIndex
from broker.log.storage import File
from raftlog._core.security.acls import INTERNAL_PREFIX
from raftlog.errors import CorruptRecordError, OffsetOutOfRange, RaftlogError
from raftlog.format import HEADER_BYTES, BatchHeader, Buffer, parse_header
from raftlog.format.aborted import AbortedRanges
from raftlog.format.control import Marker, placed_markers

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 16 << 20
"""The least that is read and rewritten in one go; more when there are many keys, to look them up less often."""
MAX_PIECE_BYTES: Final = 64 << 20
SYNC_BYTES: Final = 64 << 20
"""Written between two fsyncs: more dirty pages would delay the fsyncs of producers."""

WallClock = Callable[[], int]


class Plan(NamedTuple):
    """What a cleaning would do. `is_due`: whether it should run now."""

    log: PartitionLog
    sealed: SealedSegments
    cleaned: Cleaned
    first_dirty_offset: int
    dirty_ratio: float
    is_due: bool
    markers_below: int = 0
    """Markers at or above it stay; every replica holds those below it durably."""


class CleaningAbandoned(Exception):
    """The log was cut, trimmed or closed meanwhile; only the work is lost."""


def plan_cleaning(log: PartitionLog, bound: int, now_ms: int) -> Plan | None:
    """Plan the cleaning of a compacted log; None when it has no dirty sealed segment below `bound`. Blocking.

    It is due when more than `min.cleanable.dirty.ratio` of the bytes below the bound are dirty, or the first dirty
    record is older than `max.compaction.lag.ms`.

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
            first = parse_header(_read(log, log.open_segment(segment).file, HEADER_BYTES, 0))
            return now_ms - first.max_timestamp_ms > limit_ms
    return False


def _read(log: PartitionLog, file: File, size: int, position: int) -> bytes:
    with log.judging("compacting"):
        return file.read(size, position)


def clean(plan: Plan, *, dedupe_bytes: int, clock: WallClock) -> Iterator[int]:
    """Carry out a plan; yield after each piece how many bytes were read and written. Blocking.

    Raises:
        CleaningAbandoned: the log has changed; plan anew.
        CorruptRecordError: a batch is damaged; names file and position.
        StorageFull, StorageError: refused. Segments in place stay; the next cleaning does the rest.
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
        self._producers = ProducerStates()
        """What the segments of the plan say of producers."""
        self._output: _Output | None = None
        self._markers_below = 0
        """Control batches below it may go."""
        self._spent: set[int] = set()
        """Offsets of the markers that go."""

    def run(self) -> Iterator[int]:
        end_offset = self._plan.sealed.segments[-1].next_offset
        for batches, size in self._dirty_pieces():
            self._last_offsets.add(batches)
            yield size
            if self._last_offsets.is_full(self._dedupe_bytes):
                end_offset = batches[-1].header.next_offset
                break
        self._producers = self._producers_at_end()
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

    def _producers_at_end(self) -> ProducerStates:
        try:
            return self._log.producers_at_end(self._plan.sealed, self._clock())
        except SegmentRemoved as error:
            raise CleaningAbandoned(str(error)) from error
        except CorruptRecordError as error:
            self._check_unchanged(self._plan.sealed.segments[-1], error)
            raise

    @property
    def _piece_bytes(self) -> int:
        return min(max(PIECE_BYTES, self._last_offsets.memory_bytes // 2), MAX_PIECE_BYTES)

    def _dirty_pieces(self) -> Iterator[tuple[list[SourceBatch], int]]:
        for segment in self._plan.sealed.segments:
            if segment.next_offset > self._plan.first_dirty_offset:
                yield from self._pieces(segment, self._open(segment), self._plan.first_dirty_offset)

    def _open(self, segment: Segment) -> File:
        if self._log.closed or not self._log.holds(segment):
            raise CleaningAbandoned(f"{segment.log_path} is no part of {self._log!r} any more")
        try:
            return self._log.open_segment(segment).file
        except SegmentRemoved as error:
            raise CleaningAbandoned(str(error)) from error
        except CorruptRecordError as error:
            self._check_unchanged(segment, error)
            raise

    def _check_unchanged(self, segment: Segment, error: RaftlogError) -> None:
        """Abandon the cleaning if `error` may come from a cut of the file. Raises CleaningAbandoned."""
        if not self._log.is_unchanged(segment, self._plan.sealed.truncations):
            raise CleaningAbandoned(f"{self._log!r} was cut or trimmed: {error}") from error

    def _pieces(self, segment: Segment, file: File, from_offset: int = 0) -> Iterator[tuple[list[SourceBatch], int]]:
        """Yield the batches of a segment that end above `from_offset`, in pieces, with the bytes read for each."""
        position, expected, size = 0, segment.base_offset, segment.size
        try:
            aborted = AbortedRanges(self._log.aborted_transactions(segment.base_offset, segment.next_offset))
        except OffsetOutOfRange as error:
            raise CleaningAbandoned(str(error)) from error
        wanted = 0
        while position < size:
            data = memoryview(_read(self._log, file, max(wanted, min(self._piece_bytes, size - position)), position))
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
                        batches.append(read_batch(batch, header, self._is_pinned, aborted, self._are_spent))
                        inflated += batches[-1].columns.nbytes if batches[-1].columns is not None else 0
                    at += wanted
                    wanted = 0
                if not at and len(data) < max(wanted, HEADER_BYTES):
                    if len(data) < min(self._piece_bytes, size - position) or size - position < HEADER_BYTES:
                        raise CorruptRecordError(
                            f"{len(data)} bytes follow where {size - position} should, and hold no whole batch"
                        )
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
        if any(self._needs_marker(marker) for _, marker in markers):
            return False
        self._spent.update(placed.offset for placed in markers)
        return True

    def _is_pinned(self, header: BatchHeader) -> bool:
        return self._needs(header.producer_id, lambda producers: producers.remembers(header))

    def _needs_marker(self, marker: Marker) -> bool:
        producer_id, epoch = marker.producer_id, marker.producer_epoch
        return self._needs(producer_id, lambda producers: producers.needs_epoch(producer_id, epoch))

    def _needs(self, producer_id: int, by: Callable[[ProducerStates], bool]) -> bool:
        """Whether what an entry says of a producer has to stay; `by` asks the state that the segments give."""
        if self._log.producers.get(producer_id) is None:  # it has expired
            return False
        there = self._producers
        return there.get(producer_id) is None or by(there)  # `producer.ids.max` may leave some out there

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
    """The segment that replaces some others. It writes no file as long as the first segment stays as it is."""

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
        """Whether the result differs from the first segment."""
        return self._file is not None

    def has_room_for(self, segment: Segment, pending_bytes: int) -> bool:
        """Whether another segment would fit in full, after `pending_bytes` that are still to be written."""
        span = segment.next_offset - self.segments[0].base_offset
        size = self._size + pending_bytes + segment.size
        return size <= self._log.config.segment_bytes and span <= MAX_RELATIVE_OFFSET

    def join(self, segment: Segment) -> int:
        """Add another segment; return the bytes read and written."""
        moved = self._write_first()
        self.segments.append(segment)
        return moved

    def _write_first(self) -> int:
        """Copy the batches that were unchanged so far; return the bytes read and written."""
        if self._file is not None:
            return 0
        self._file = self._log.create_aside(self.segments[0].base_offset)
        for position in range(0, self._size, PIECE_BYTES):
            data = _read(self._log, self._source, min(PIECE_BYTES, self._size - position), position)
            self._write(self._file, (data,), position)
        return 2 * self._size

    def add(self, batches: Iterable[CleanedBatch]) -> int:
        """Append batches; return the bytes read and written."""
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
            self._write(self._file, waiting, start)
            moved += self._size - start
            if self._size - self._synced_size >= SYNC_BYTES:
                with self._log.judging("fsync of what was compacted"):
                    self._file.datasync()
                self._synced_size = self._size
        return moved

    def _write(self, file: File, data: Sequence[Buffer], position: int) -> None:
        with self._log.judging("compacting", sum(map(len, data))):
            file.write(data, position)

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
        """Return the entries of the old indexes whose markers stay: a reader of the old batches may still need them."""
        made = TxnIndex(self.segments[0].base_offset)
        for segment in self.segments:
            made.end_stable_offset = segment.next_offset
            index = self._log.open_segment(segment).txn_index
            if index is not None:
                made.end_stable_offset = index.end_stable_offset
                for entry in index.entries:
                    if entry.last_offset not in spent:
                        made.append(entry)
        return made if len(made) or made.end_stable_offset < self.segments[-1].next_offset else None

    def discard(self) -> None:
        """Remove the file, if any was written."""
        if self._file is not None:
            try:
                self._log.remove_aside(self.segments[0].base_offset)
            except RaftlogError as error:  # the next start removes it
                logger.warning("the file of an abandoned compaction stays for now: %s", error)


FAILED_PAUSE_MS: Final = 60_000.0
"""Time until a log is tried again whose cleaning failed or was abandoned."""


def committed_end(log: PartitionLog) -> int:
    """Return the offset from which on nothing is compacted, as records may still be cut or aborted there."""
    return log.last_stable_offset


def next_in_line(
    due: Iterable[Plan], due_since: Mapping[PartitionLog, float], last: PartitionLog | None
) -> Plan | None:
    """Return the plan to carry out next: that of the log that has been due for longest. Pure.

    A log that becomes due later comes later, however dirty it is. So no log waits for ever, whatever users do with
    others. Of those that were first seen to be due together, the dirtiest comes first. Logs of internal topics, which
    groups and transactions wait for at a start, take turns with all others: `last` is the log that was compacted last.
    """
    others_turn = last is not None and _is_internal(last)
    return min(
        due,
        key=lambda plan: (_is_internal(plan.log) == others_turn, due_since[plan.log], -plan.dirty_ratio),
        default=None,
    )


def _is_internal(log: PartitionLog) -> bool:
    return log.topic.startswith(INTERNAL_PREFIX)


class Cleaner:
    """Compacts the logs of compacted topics. On the loop; `on_damaged` is called there."""

    def __init__(
        self,
        logs: LogManager,
        disk: Executor,
        clock: Clock,
        on_damaged: OnDamaged,
        *,
        bytes_per_second: int,
        backoff_ms: float,
        dedupe_bytes: int,
        bound_of: Callable[[PartitionLog], int] = committed_end,
        markers_below_of: Callable[[PartitionLog], int] = lambda log: 0,
    ) -> None:
        """`markers_below_of`: the offset below which all replicas of a log have every marker; called on the loop."""
        self._logs = logs
        self._disk = disk
        self._clock = clock
        self._on_damaged = on_damaged
        self._bytes_per_second = bytes_per_second
        self._backoff_ms = backoff_ms
        self._dedupe_bytes = dedupe_bytes
        self._bound_of = bound_of
        self._markers_below_of = markers_below_of
        self._loop = asyncio.get_running_loop()
        self._next_look_ms = clock.monotonic_ms() + backoff_ms
        self._busy = False
        self._let_alone: dict[PartitionLog, float] = {}
        """Logs that are skipped, and until when by the monotonic clock."""
        self._due_since: dict[PartitionLog, float] = {}
        """Logs that the last look found to be due, and when a look first did, by the monotonic clock."""
        self._last: PartitionLog | None = None
        """The log that was compacted last."""
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a log is being chosen or compacted."""
        return self._busy

    def tick(self) -> None:
        """Look for a log to compact, if it is time; returns at once."""
        if not self._closed and not self._busy and self._clock.monotonic_ms() >= self._next_look_ms:
            self._look()

    def _look(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._let_alone = {log: until for log, until in self._let_alone.items() if until > now_ms and not log.closed}
        let_alone = frozenset(self._let_alone)

        def look() -> None:
            due: list[Plan] = []
            try:
                due = self._due(let_alone)
            except Exception:
                logger.exception("looking for a log to compact failed")
            self._loop.call_soon_threadsafe(self._choose, due)

        self._submit(look)

    def _due(self, let_alone: frozenset[PartitionLog]) -> list[Plan]:
        """Return the plans that are due."""
        due = []
        for log in self._logs.logs():
            if log.config.compacts and log not in let_alone:
                try:
                    plan = plan_cleaning(log, self._bound_of(log), self._clock.now_ms())
                except RaftlogError as error:  # closed meanwhile, or a failing disk, which is reported elsewhere
                    logger.debug("%r cannot be compacted: %s", log, error)
                    continue
                if plan is not None and plan.is_due:
                    due.append(plan)
        return due

    def _choose(self, due: Sequence[Plan]) -> None:
        self._busy = False
        if self._closed:
            return
        now_ms = self._clock.monotonic_ms()
        self._due_since = {plan.log: self._due_since.get(plan.log, now_ms) for plan in due}
        plan = next_in_line(due, self._due_since, self._last)
        if plan is None:
            self._next_look_ms = now_ms + self._backoff_ms
            return
        self._last = plan.log
        del self._due_since[plan.log]  # if it is not clean after this, it goes to the end of the line
        plan = plan._replace(markers_below=self._markers_below_of(plan.log))
        self._go_on(plan, clean(plan, dedupe_bytes=self._dedupe_bytes, clock=self._clock.now_ms))

    def _go_on(self, plan: Plan, pieces: Iterator[int]) -> None:
        self._timer = None
        if self._closed:
            return

        def work() -> None:
            result: int | Exception | None
            try:
                result = next(pieces, None)
            except Exception as error:  # judged on the loop
                result = error
            self._loop.call_soon_threadsafe(self._worked, plan, pieces, result)

        self._submit(work)

    def _worked(self, plan: Plan, pieces: Iterator[int], result: int | Exception | None) -> None:
        self._busy = False
        if self._closed:
            return
        if isinstance(result, int):
            self._busy = True
            self._timer = self._loop.call_later(result / self._bytes_per_second, self._go_on, plan, pieces)
            return
        if result is not None:
            self._failed(plan.log, result)
        elif plan.log.cleaned.first_dirty_offset >= plan.sealed.segments[-1].next_offset:
            self._let_alone[plan.log] = self._clock.monotonic_ms() + self._backoff_ms
        self._look()

    def _failed(self, log: PartitionLog, error: Exception) -> None:
        self._let_alone[log] = self._clock.monotonic_ms() + FAILED_PAUSE_MS
        if isinstance(error, CleaningAbandoned) or log.closed:
            logger.info("compaction was abandoned: %s", error)
        elif isinstance(error, CorruptRecordError):
            self._on_damaged(log, error)
        elif isinstance(error, RaftlogError):
            logger.warning("%r is not compacted: %s", log, error)
        else:
            logger.error("compacting %r failed", log, exc_info=error)

    def _submit(self, work: Callable[[], None]) -> None:
        self._busy = True
        try:
            self._disk.submit(work)
        except RuntimeError:  # shut down
            self.close()

    def close(self) -> None:
        """Stop. A cleaning under way is dropped; the next start removes its file."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
