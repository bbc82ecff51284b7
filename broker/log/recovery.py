"""Opening a log: the files in its directory become segments again, at whatever instant the last process ended.

Below the recovery point everything was fsynced, below the high watermark everything was committed. Bytes that are
missing or do not check there are damage: `CorruptRecordError`, and no file is changed. Above both, the first bytes that
are no batch that may follow are what a crash left half-written: they are cut off, with all later segments.

    sealed, below the recovery point   not read; the closing entry of its index must say how the file ends and where
                                       the next begins, else the whole segment is checked and its index rebuilt
    the others                         every batch is checked, from the last index entry below the recovery point on

Compacted logs. `cleaner-checkpoint` of a partition holds `FIRST_DIRTY_OFFSET`, then lines `OFFSET WALL_MS`
(form: `log_dir.py`). A line says: since then no record below OFFSET is followed by another one of its key below OFFSET.
So a tombstone below it hides nothing any more, and may go once readers from the log start have had
`delete.retention.ms` to come past it (docs/adr/0013). Without the file, or if it is damaged, nothing is known to be
clean, which only costs work.

A compaction under way, which a start finishes or forgets:

    00000000000000000042.cleaned                        being written; meaningless after a restart
    00000000000000000042-00000000000000000099.swap      takes the place of every segment in [42, 99)

The renaming from the first to the second is the decision. The other steps can be repeated until they are done: the
files of the replaced segments are renamed away; that is made durable; then the new file gets the name of a segment. Its
index is written in between, or rebuilt.
"""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from broker.log.index import (
    OFFSET_ENTRY_BYTES,
    TIME_ENTRY_BYTES,
    TXN_SUFFIX,
    UNKNOWN_OFFSET,
    InvalidBatch,
    TxnIndex,
    TxnScan,
    decode_offset_entries,
    decode_time_entries,
    drop_txn_file,
    scan_batches,
    walk_headers,
)
from broker.log.log_dir import Marks, decode_lines, encode_lines, is_refusal, load_leader_epochs
from broker.log.producer_state import ProducerLimits, ProducerStates, rebuild_producers, snapshot_name, snapshot_offsets
from broker.log.segment import DELETED_SUFFIX, SUFFIXES, OpenSegment, Segment, SegmentIndex, rebuild_index, segment_stem
from broker.log.storage import TEMPORARY_SUFFIX, Storage, read_file, replace_file
from raftlog.errors import CorruptRecordError, UnsupportedVersion
from replication.leader_epochs import EpochEntry, LeaderEpochCache

logger = logging.getLogger(__name__)

CLEANER_CHECKPOINT: Final = "cleaner-checkpoint"
_KIND: Final = "cleaner"
_STEPS: Final = 32
"""Times are kept `delete.retention.ms / _STEPS` apart: tombstones may stay longer by so much, never shorter."""


@dataclass(frozen=True, slots=True)
class Cleaned:
    """How far a log is clean: below `first_dirty_offset`. `times`: (offset, wall clock in ms), ascending in both."""

    first_dirty_offset: int = 0
    times: tuple[tuple[int, int], ...] = ()

    def tombstones_below(self, now_ms: int, delete_retention_ms: int) -> int:
        """Return the offset below which tombstones have been clean for `delete_retention_ms`."""
        return max((offset for offset, at_ms in self.times if now_ms - at_ms >= delete_retention_ms), default=0)

    def reached(self, offset: int, now_ms: int, delete_retention_ms: int) -> Cleaned:
        """Return the state after a cleaning up to `offset`.

        The number of times stays bounded: of times that are due, only the last one is kept, and of times close together
        the first one. The newest always stays.
        """
        due = self.tombstones_below(now_ms, delete_retention_ms)
        times = [(below, at_ms) for below, at_ms in self.times if due <= below < offset and at_ms <= now_ms]
        if self.times and self.times[-1][0] == offset:  # clean since then, as no record was added
            times.append(self.times[-1])
        else:
            times.append((offset, now_ms))
        kept = times[:1]
        for time in times[1:-1]:
            if time[1] - kept[-1][1] >= max(1, delete_retention_ms // _STEPS):
                kept.append(time)
        return Cleaned(offset, (*kept, *times[1:][-1:]))

    def cut(self, offset: int) -> Cleaned:
        """Return the state after other records may have taken the place of those from `offset` on."""
        times = [(min(below, offset), at_ms) for below, at_ms in self.times]
        kept = {below: at_ms for below, at_ms in reversed(times) if below > 0}  # of several, the earliest time
        return Cleaned(min(self.first_dirty_offset, offset), tuple(sorted(kept.items())))


def load_cleaned(storage: Storage, directory: str) -> Cleaned:
    """Return how far a log is clean; `Cleaned()` without a good checkpoint."""
    path = f"{directory}/{CLEANER_CHECKPOINT}"
    data = read_file(storage, path)
    if data is None:
        return Cleaned()
    try:
        first, *times = decode_lines(path, _KIND, data)
        pairs = tuple((int(below), int(at_ms)) for below, at_ms in map(str.split, times))
        return Cleaned(int(first), pairs)
    except (CorruptRecordError, UnsupportedVersion, ValueError) as error:
        logger.warning("a log is compacted from its start again: %s", error)
        return Cleaned()


def store_cleaned(storage: Storage, directory: str, cleaned: Cleaned) -> None:
    """Replace the checkpoint of a partition, durably."""
    lines = [str(cleaned.first_dirty_offset), *(f"{below} {at_ms}" for below, at_ms in cleaned.times)]
    replace_file(storage, directory, CLEANER_CHECKPOINT, encode_lines(_KIND, lines))


CLEANED_SUFFIX: Final = ".cleaned"
_SEGMENT_FILE: Final = re.compile(r"(\d{20})(\.log|\.index|\.timeindex|\.txnindex)")
_SWAP: Final = re.compile(r"(\d{20})-(\d{20})\.swap")


class Swap(NamedTuple):
    """A new file in place of the segments that begin in [base_offset, next_offset)."""

    base_offset: int
    next_offset: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.base_offset:020d}-{self.next_offset:020d}.swap"


def cleaned_path(directory: str, base_offset: int) -> str:
    """Return the path of a compacted segment that is being written."""
    return segment_stem(directory, base_offset) + CLEANED_SUFFIX


def finish_swaps(storage: Storage, directory: str, sizes: dict[str, int]) -> dict[str, int]:
    """Finish decided swaps and remove unfinished files; return the sizes of the files that remain, by name.

    `sizes`: the result of `list_sizes` for the directory. Raises OSError.
    """
    swaps = [Swap(int(found[1]), int(found[2])) for found in map(_SWAP.fullmatch, sizes) if found]
    halves = [name for name in sizes if name.endswith(CLEANED_SUFFIX)]
    if not swaps and not halves:
        return sizes
    for name in halves:
        storage.remove(f"{directory}/{name}")
    for swap in sorted(swaps):
        for name in sorted(storage.list_sizes(directory)):
            found = _SEGMENT_FILE.fullmatch(name)
            if found and swap.base_offset <= int(found[1]) < swap.next_offset:
                storage.rename(f"{directory}/{name}", f"{directory}/{name}{DELETED_SUFFIX}")
        storage.sync_dir(directory)
        storage.rename(f"{directory}/{swap.name}", segment_stem(directory, swap.base_offset) + ".log")
        storage.sync_dir(directory)
    return storage.list_sizes(directory)


@dataclass(slots=True)
class RecoveredLog:
    """The parts of an opened log, all durable; the last segment is the active one, opened."""

    detached: list[Segment]
    """Segments wholly below the log start, in order; they may hold the only copy of what is known of producers."""
    segments: list[Segment]
    log_start_offset: int
    high_watermark: int
    leader_epochs: LeaderEpochCache
    epochs_stored: bool
    """Whether the checkpoint of the leader epochs is up to date."""
    leftover_paths: list[str] = field(default_factory=list)
    """Renamed files that may be removed after `file.delete.delay.ms`."""
    producers: ProducerStates = field(default_factory=ProducerStates)
    snapshots: list[int] = field(default_factory=list)
    """Offsets of the producer snapshots, in order."""


def recover_log(
    storage: Storage,
    directory: str,
    marks: Marks | None,
    index_interval_bytes: int,
    limits: ProducerLimits,
    now_ms: int,
    *,
    was_clean: bool = False,
) -> RecoveredLog:
    """Open the log in `directory`; `marks` is None for a log without checkpoint. `now_ms`: wall clock.

    `was_clean`: the last process fsynced the log and its names before it ended, so what ends at the recovery point is
    not fsynced again: thousands of logs would need as many fsyncs before a broker is ready.

    Raises:
        CorruptRecordError: damage below the recovery point or the high watermark; names file and position.
    """
    recovery = _Recovery(storage, directory, marks, index_interval_bytes, was_clean=was_clean)
    recovered = recovery.run()
    recovery.read_producers(recovered, limits, now_ms)
    return recovered


class _Recovery:
    def __init__(
        self, storage: Storage, directory: str, marks: Marks | None, index_interval_bytes: int, *, was_clean: bool
    ) -> None:
        self.storage = storage
        self.was_synced = was_clean and marks is not None
        """Whether everything up to the recovery point, and the files' names, are on the disk."""
        self.directory = directory
        self.marks = marks
        self.index_interval_bytes = index_interval_bytes
        self.recovery_point = marks.recovery_point if marks else 0
        self.safe_end = max(marks) if marks else 0
        """Below it no record may be missing."""
        self.sizes: dict[str, int] = {}
        self.epochs = LeaderEpochCache()
        self.leftovers: list[str] = []
        self.previous: Segment | None = None
        """The sealed segment before the present one."""

    def run(self) -> RecoveredLog:
        self.sizes = finish_swaps(self.storage, self.directory, self.storage.list_sizes(self.directory))
        bases = self._segment_bases()
        log_start_offset = self.marks.log_start_offset if self.marks else (bases[0] if bases else 0)
        detached, bases = self._detach_below(bases, log_start_offset)
        stored_epochs = self._stored_epochs(log_start_offset)

        segments = [Segment(self.directory, base) for base in bases]
        first_scanned = len(segments) - 1
        # a segment that ends exactly at the recovery point may have unsynced bytes after its last batch
        while first_scanned > 0 and bases[first_scanned] >= self.recovery_point:
            first_scanned -= 1
        for segment, following in zip(segments[:first_scanned], bases[1:], strict=False):
            segment.end = (following, self.sizes[f"{segment.base_offset:020d}.log"])
            segment.has_txn_index = f"{segment.base_offset:020d}{TXN_SUFFIX}" in self.sizes
            self._check_sealed(segment)
            self.previous = segment
        if stored_epochs is None:
            for segment in segments[:first_scanned]:
                self._read_epochs(segment, segment.size)
        segments = segments[:first_scanned] + self._scan_all(
            segments[first_scanned:], epochs_known=stored_epochs is not None
        )

        log_end_offset = segments[-1].next_offset
        self.epochs.truncate_from_end(log_end_offset)
        self.epochs.truncate_from_start(log_start_offset)
        if log_start_offset == log_end_offset:  # epochs without records drop out
            self.epochs.clear()
        return RecoveredLog(
            detached,
            segments,
            log_start_offset,
            self.marks.high_watermark if self.marks else log_start_offset,
            self.epochs,
            epochs_stored=self.epochs.entries == stored_epochs,
            leftover_paths=self.leftovers,
        )

    def read_producers(self, recovered: RecoveredLog, limits: ProducerLimits, now_ms: int) -> None:
        """Restore what is known of producers, from a snapshot and the headers of the batches after it.

        Detached segments that cannot be read are dropped, as their records are deleted anyway.
        """
        segments = recovered.segments
        log_end_offset = segments[-1].next_offset
        offsets = snapshot_offsets(self.sizes)
        recovered.snapshots = [offset for offset in offsets if offset <= log_end_offset]
        stale = [offset for offset in offsets if offset > log_end_offset]
        for offset in stale:
            self.storage.remove(f"{self.directory}/{snapshot_name(offset)}")
        if stale:  # durably: the log will grow over their offsets, with other batches
            self.storage.sync_dir(self.directory)
        active, txn_index = segments[-1], TxnIndex(segments[-1].base_offset)
        while True:
            there, snapshots = [*recovered.detached, *segments], recovered.snapshots
            try:
                recovered.producers = rebuild_producers(
                    self.storage, self.directory, snapshots, there, log_end_offset, limits, now_ms, txn_index
                )
                break
            except InvalidBatch as error:
                if not recovered.detached:
                    raise CorruptRecordError(
                        f"{self.directory}: position {error.position} of a segment: {error.reason}; it lies below the "
                        "recovery point, so this is damage and nothing is cut off: restore the replica from another one"
                    ) from None
                logger.warning(
                    "%s: the segments below the log start are unreadable and dropped: %s", self.directory, error
                )
                self._rename_away([segment.base_offset for segment in recovered.detached])
                recovered.detached.clear()
        if len(txn_index):
            assert active.opened is not None, "the active segment is opened"
            active.opened.txn_index, active.has_txn_index = txn_index, True

    # Files

    def _segment_bases(self) -> list[int]:
        """Return the base offsets of the segments in order, and remove files of no use."""
        bases = []
        for name in self.sizes:
            matched = _SEGMENT_FILE.fullmatch(name)
            if matched and matched[2] == ".log":
                bases.append(int(matched[1]))
            elif (matched and f"{matched[1]}.log" not in self.sizes) or name.endswith(
                (DELETED_SUFFIX, TEMPORARY_SUFFIX)
            ):
                self.storage.remove(f"{self.directory}/{name}")
        if not bases:
            if self.safe_end > 0:
                raise CorruptRecordError(
                    f"{self.directory} has no segment, offsets up to {self.safe_end} should be there"
                )
            self.storage.open(segment_stem(self.directory, 0) + ".log", create=True)
            self.storage.sync_dir(self.directory)
            self.sizes[f"{0:020d}.log"] = 0
            bases.append(0)
        return sorted(bases)

    def _detach_below(self, bases: list[int], log_start_offset: int) -> tuple[list[Segment], list[int]]:
        """Return the segments wholly below the log start, and the bases of the others.

        The last process had not renamed them, or the renaming was not durable. They are removed like all detached
        segments (`partition_log.py`): once a snapshot has what they say of producers.
        """
        keep, detached = 0, []
        while keep + 1 < len(bases) and bases[keep + 1] <= log_start_offset:
            segment = Segment(self.directory, bases[keep])
            segment.end = (bases[keep + 1], self.sizes[f"{bases[keep]:020d}.log"])
            detached.append(segment)
            keep += 1
        if bases[keep] > log_start_offset:
            raise CorruptRecordError(
                f"{self.directory} begins at offset {bases[keep]}, offsets from {log_start_offset} on should be there"
            )
        return detached, bases[keep:]

    def _rename_away(self, bases: list[int]) -> None:
        for base in bases:
            for suffix in SUFFIXES:
                if f"{base:020d}{suffix}" in self.sizes:
                    path = segment_stem(self.directory, base) + suffix
                    self.storage.rename(path, path + DELETED_SUFFIX)
                    self.leftovers.append(path + DELETED_SUFFIX)
        if bases:
            self.storage.sync_dir(self.directory)

    # Epochs

    def _stored_epochs(self, log_start_offset: int) -> tuple[EpochEntry, ...] | None:
        try:
            entries = load_leader_epochs(self.storage, self.directory)
        except CorruptRecordError as error:  # the log says the same, but takes longer to read
            logger.warning("leader epochs are read from the log instead: %s", error)
            return None
        if not entries or entries[0].start_offset > log_start_offset:  # the crash has set the log start back
            return None
        self.epochs = LeaderEpochCache(entries)
        return tuple(entries)

    def _read_epochs(self, segment: Segment, end_position: int) -> None:
        try:
            for _, header in walk_headers(self.storage.open(segment.log_path), 0, end_position):
                self.epochs.assign(max(header.leader_epoch, self.epochs.latest_epoch), header.base_offset)
        except InvalidBatch as error:
            raise self._corrupt(segment, error) from None

    # Below the recovery point

    def _check_sealed(self, segment: Segment) -> None:
        base, closing = segment.base_offset, (segment.next_offset - segment.base_offset, segment.size)
        offsets = decode_offset_entries(base, self._last_bytes(segment.stem + ".index", OFFSET_ENTRY_BYTES))
        times = decode_time_entries(base, self._last_bytes(segment.stem + ".timeindex", TIME_ENTRY_BYTES))
        if len(offsets) and len(times) and times[0]["relative_offset"] == closing[0]:
            entry = offsets[0]
            if (int(entry["relative_offset"]), int(entry["position"])) == closing:
                segment.max_timestamp_ms = int(times[0]["max_timestamp_ms"])
                return
        logger.warning("the indexes of %s are missing or wrong, rebuilding them", segment.log_path)
        opened = OpenSegment(self.storage.open(segment.log_path), SegmentIndex(base))
        scan = TxnScan(base, self._carried())
        opened.index = rebuild_index(segment, opened, self.index_interval_bytes, scan)
        segment.max_timestamp_ms = opened.index.last_max_timestamp_ms
        self._store_indexes(segment, opened, scan)

    def _last_bytes(self, path: str, count: int) -> bytes:
        size = self.sizes.get(path.rpartition("/")[2], 0)
        if size < count or size % count:
            return b""
        return self.storage.open(path).read(count, size - count)

    def _carried(self) -> int | None:
        """Return the first offset of the oldest transaction that is open at the end of `previous`; see `TxnScan`."""
        before = self.previous
        if before is None or not before.has_txn_index:
            return None
        index = TxnIndex.load(self.storage, before.stem, before.base_offset, before.next_offset)
        if index is None:
            return UNKNOWN_OFFSET
        return None if index.end_stable_offset == before.next_offset else index.end_stable_offset

    def _store_indexes(self, segment: Segment, opened: OpenSegment, scan: TxnScan) -> None:
        txn_index, index = scan.finish(segment.next_offset), opened.index
        segment.has_txn_index = txn_index is not None
        try:
            if txn_index is not None:  # first: the closing entries of the others rely on it
                txn_index.store(self.storage, segment.stem, segment.next_offset)
            else:
                drop_txn_file(self.storage, segment.stem)
            index.store(self.storage, segment.stem)
            index.sync(self.storage, segment.stem)
        except OSError as error:
            if not is_refusal(error):
                raise
            logger.warning("indexes of %s not stored, they are rebuilt when needed: %s", segment.log_path, error)

    # From the recovery point on

    def _scan_all(self, segments: list[Segment], *, epochs_known: bool) -> list[Segment]:
        """Check `segments`; return those that remain, the last one active."""
        for number, segment in enumerate(segments):
            if number == 0:
                index = self._usable_index(segment)
                self.epochs.truncate_from_end(index.last.offset)
                if not epochs_known:
                    self._read_epochs(segment, index.last.position)
            else:
                index = SegmentIndex(segment.base_offset)
            rest = segments[number + 1 :]
            scan = self._begun_scan(segment, index.last.position) if rest else None
            self._scan(segment, index, scan)
            if scan is not None and segment.next_offset == rest[0].base_offset and segment.size > 0:
                assert segment.opened is not None
                segment.seal()
                self._store_indexes(segment, segment.opened, scan)
                segment.opened = None
                self.previous = segment
                continue
            if segment.next_offset < self.safe_end:
                raise CorruptRecordError(
                    f"{segment.log_path} position {segment.size}: the log ends at offset {segment.next_offset}, "
                    f"offsets up to {self.safe_end} were fsynced or committed and are missing"
                )
            if rest:
                logger.warning(
                    "%s: %d segments from offset %d on do not follow offset %d and are dropped",
                    self.directory,
                    len(rest),
                    rest[0].base_offset,
                    segment.next_offset,
                )
                self._rename_away([dropped.base_offset for dropped in reversed(rest)])
            if not (self.was_synced and index.fills(self.sizes)):
                index.cut_files(self.storage, segment.stem)
            empty = segment.size == 0 and not self.was_synced
            if number > 0 or empty or segment.next_offset > self.recovery_point:
                self.storage.sync_dir(self.directory)  # the last process may have ended before it
            return [*segments[:number], segment]
        raise AssertionError("the last segment has no rest")

    def _usable_index(self, segment: Segment) -> SegmentIndex:
        """Return the index up to the recovery point; empty if no batch begins where its last entry says."""
        size = self.sizes[f"{segment.base_offset:020d}.log"]
        index = SegmentIndex.load(self.storage, segment.stem, segment.base_offset)
        index.truncate(self.recovery_point)
        last = index.last
        if last.position == size:
            return index
        if last.position < size:
            with contextlib.suppress(InvalidBatch):
                found = next(scan_batches(self.storage.open(segment.log_path), last.position, size))
                if found.header.base_offset == last.offset:
                    return index
        return SegmentIndex(segment.base_offset)

    def _begun_scan(self, segment: Segment, end_position: int) -> TxnScan:
        """Return a scan of the batches that are known to be good, up to `end_position`."""
        scan, file = TxnScan(segment.base_offset, self._carried()), self.storage.open(segment.log_path)
        try:
            for position, header in walk_headers(file, 0, end_position):
                scan.add(file, position, header)
        except InvalidBatch as error:
            raise self._corrupt(segment, error) from None
        return scan

    def _scan(self, segment: Segment, index: SegmentIndex, scan: TxnScan | None) -> None:
        """Check every batch after the last entry of `index`, give it to `scan`, and cut off an invalid tail."""
        file = self.storage.open(segment.log_path)
        size = self.sizes[f"{segment.base_offset:020d}.log"]
        expected, position = index.last
        max_timestamp_ms = index.last_max_timestamp_ms
        try:
            for start, header in scan_batches(file, position, size):
                if header.base_offset != expected:
                    raise InvalidBatch(start, f"offset {header.base_offset} where {expected} must follow")
                if header.leader_epoch < self.epochs.latest_epoch:
                    raise InvalidBatch(
                        start, f"leader epoch {header.leader_epoch} after epoch {self.epochs.latest_epoch}"
                    )
                if start - index.last_position >= self.index_interval_bytes and start:
                    index.append(expected, start, max_timestamp_ms)
                self.epochs.assign(header.leader_epoch, expected)
                if scan is not None:
                    scan.add(file, start, header)
                max_timestamp_ms = max(max_timestamp_ms, header.max_timestamp_ms)
                expected = header.next_offset
                position = start + header.size
        except InvalidBatch as error:
            if expected < self.safe_end:
                raise self._corrupt(segment, error) from None
            logger.warning(
                "%s: %d bytes from position %d on are no whole batch (%s) and are cut off; the log ends at offset %d",
                segment.log_path,
                size - position,
                position,
                error.reason,
                expected,
            )
            file.truncate(position)
        if not (self.was_synced and position == size and expected <= self.recovery_point):
            file.datasync()  # its bytes and its length may be in the page cache only
        segment.end = (expected, position)
        segment.max_timestamp_ms = max_timestamp_ms
        segment.opened = OpenSegment(file, index)

    def _corrupt(self, segment: Segment, error: InvalidBatch) -> CorruptRecordError:
        return CorruptRecordError(
            f"{segment.log_path} position {error.position}: {error.reason}; offsets up to {self.safe_end} were fsynced "
            "or committed, so this is damage and nothing is cut off: restore the replica from another one"
        )
