"""Putting compacted segments in the place of the old ones, and remembering how far a log is clean.

    written aside  -- renamed: decided (swap_files.py) -->  in memory the new segment is part of the log
                   -- names synced, the old files renamed away, the new one in its place -->  done

Readers that hold an old file go on with it; who finds its segment gone chooses again (`log_state.py`). A disk that
refuses in the middle (no descriptors) is asked again before the next cut, sweep or cleaning: until then the new file is
read under the name that it has, and a start would finish the swap as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from broker.log.cleaned import Cleaned, load_cleaned, store_cleaned
from broker.log.damage import CheckableLog
from broker.log.segment import Segment
from broker.log.storage import File
from broker.log.swap_files import Swap, cleaned_path
from broker.log.txn_index import TxnIndex


class SealedSegments(NamedTuple):
    """What may be rewritten, oldest first; `truncations` tells later whether the log was cut since."""

    segments: Sequence[Segment]
    truncations: int


class _UnfinishedSwap:
    """A swap that has been decided. `steps_done`: of those in `SwappableLog.finish_swap`."""

    def __init__(self, swap: Swap, old: Sequence[Segment], new: Segment, delete_at_ms: int) -> None:
        self.swap = swap
        self.old = list(old)
        self.new = new
        self.delete_at_ms = delete_at_ms
        self.steps_done = 0


class SwappableLog(CheckableLog):
    """A log of which sealed segments can be replaced. All of it is blocking work."""

    _swap: _UnfinishedSwap | None = None
    _cleaned: Cleaned | None = None

    @property
    def cleaned(self) -> Cleaned:
        """How far the log is clean."""
        if self._cleaned is None:
            with self._file_lock:
                if self._cleaned is None:
                    try:
                        self._cleaned = load_cleaned(self._storage, self.directory)
                    except OSError as error:
                        raise self._error(error, "reading the cleaner's checkpoint") from error
        return self._cleaned

    def remembers(self, producer_id: int, base_offset: int) -> bool:
        """Whether a producer's state needs the numbers of the batch at `base_offset`."""
        return self.producers.remembers(producer_id, base_offset)

    def needs_epoch(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether a marker of this epoch may be what tells last of a producer that is still remembered."""
        state = self.producers.get(producer_id)
        return state is not None and state.epoch <= producer_epoch

    def oldest_snapshot_offset(self, default: int) -> int:
        """Return from where on the log is read again, should that have to begin at the oldest producer snapshot."""
        with self._lock:
            return min(self._snapshots, default=default)

    def txn_index_of(self, segment: Segment) -> TxnIndex | None:
        """Return what is known of the transactions that were aborted in a segment. Raises as `open_source`."""
        return self._open_segment(segment).txn_index

    def sealed_below(self, bound: int) -> SealedSegments:
        """Return the segments that lie below `bound`, are sealed, and rest on the disk with their indexes."""
        with self._lock:
            self._check_open()
            found: list[Segment] = []
            for segment in self._segments[1][:-1]:
                if segment.next_offset > bound or segment in self._unflushed:
                    break
                found.append(segment)
            return SealedSegments(found, self._truncations)

    def is_unchanged(self, segment: Segment, truncations: int) -> bool:
        """Whether a segment is part of the log as it was at `truncations`; waits for a cut that is under way."""
        with self._file_lock:
            return not self.closed and truncations == self._truncations and segment in self._segments[1]

    def open_source(self, segment: Segment) -> File:
        """Return the file of a sealed segment, which can be read whatever becomes of the segment.

        Raises:
            SegmentRemoved: it is no part of the log any more.
            StorageError: the log is closed, or the disk.
        """
        return self._open_segment(segment).file

    def read_source(self, file: File, size: int, position: int) -> bytes:
        """Read from such a file. Raises StorageError."""
        try:
            return file.read(size, position)
        except OSError as error:
            raise self._error(error, "compacting") from error

    def create_aside(self, base_offset: int) -> File:
        """Return an empty file for the segment that will begin at `base_offset`.

        Raises:
            StorageFull, StorageError: no space, or the disk.
        """
        self._check_open()
        try:
            file = self._storage.open(cleaned_path(self.directory, base_offset), create=True)
            file.truncate(0)
        except OSError as error:
            raise self._error(error, "compacting") from error
        return file

    def write_aside(self, file: File, data: Sequence[bytes | bytearray | memoryview], position: int) -> None:
        """Write to such a file. Raises as `create_aside`."""
        try:
            file.write(data, position)
        except OSError as error:
            raise self._error(error, "compacting", sum(map(len, data))) from error

    def sync_aside(self, file: File) -> None:
        """Make what was written to such a file durable. Raises StorageError."""
        try:
            file.datasync()
        except OSError as error:
            raise self._error(error, "fsync of what was compacted") from error

    def forget_aside(self, base_offset: int) -> None:
        """Remove such a file, if the disk lets it go; the next start does so in any case."""
        if self.closed:  # the directory may be another log's by now
            return
        try:
            self._storage.remove(cleaned_path(self.directory, base_offset))
        except OSError as error:
            raise self._error(error, "removing what was compacted") from error

    def swap(self, old: SealedSegments, new: Segment, *, now_ms: int) -> bool:
        """Put `new`, opened and written aside, in the place of `old`; False when the log was cut or trimmed meanwhile.

        Raises:
            StorageFull, StorageError: refused; `finish_swap` says what then.
        """
        assert new.opened is not None
        segments = list(old.segments)
        assert new.base_offset == segments[0].base_offset
        assert new.next_offset == segments[-1].next_offset
        swap = Swap(new.base_offset, new.next_offset)
        self.sync_aside(new.opened.file)
        with self._file_lock:
            self._check_open()
            self.finish_swap()
            with self._lock:
                present = self._segments[1]
                first = present.index(segments[0]) if segments[0] in present else len(present)
                if old.truncations != self._truncations or present[first : first + len(segments)] != segments:
                    return False
            try:
                self._storage.rename(cleaned_path(self.directory, swap.base_offset), f"{self.directory}/{swap.name}")
            except OSError as error:
                raise self._error(error, "compacting") from error
            with self._lock:
                self._replace(segments, new)
                self._swap = _UnfinishedSwap(swap, segments, new, now_ms + self.config.file_delete_delay_ms)
            self.finish_swap()
            return True

    def _replace(self, old: list[Segment], new: Segment) -> None:
        """Make `new` part of the log; of `old`, those in front may have been detached since."""
        gone = set(old)
        present = self._segments[1]
        if any(segment in gone for segment in present):
            at = next(number for number, segment in enumerate(present) if segment in gone)
            left = [segment for segment in present if segment not in gone]
            self._set_segments([*left[:at], new, *left[at:]])
        else:
            self._detached.append(new)
        self._detached = [segment for segment in self._detached if segment not in gone]
        self._sealed_bytes = sum(segment.size for segment in self._segments[1][:-1])
        for segment in old:
            self._cache.forget(segment)

    def finish_swap(self) -> None:
        """Bring the disk to where a swap has the log already; nothing happens where none is unfinished.

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
            try:
                for step in steps[unfinished.steps_done :]:
                    step()
                    unfinished.steps_done += 1
            except OSError as error:
                raise self._error(error, "putting compacted segments in place") from error
            self._swap = None
            assert new.opened is not None
            self._cache.adopt(new, new.opened)

    def note_cleaned(self, cleaned: Cleaned, truncations: int) -> None:
        """Remember how far the log is clean, durably; nothing happens when it was cut since.

        Raises:
            StorageFull, StorageError: refused; then the next cleaning begins where this one did.
        """
        with self._file_lock:
            self._check_open()
            if truncations == self._truncations:
                self._store_cleaned(cleaned)

    def _store_cleaned(self, cleaned: Cleaned) -> None:
        try:
            store_cleaned(self._storage, self.directory, cleaned)
        except OSError as error:
            raise self._error(error, "writing the cleaner's checkpoint") from error
        self._cleaned = cleaned

    def _cut_cleaned(self, offset: int) -> None:
        """Forget that anything from `offset` on was clean, before it may become something else."""
        cleaned = self.cleaned
        kept = cleaned.cut(offset)
        if kept != cleaned:
            self._store_cleaned(kept)

    # What else changes files

    def truncate_to(self, offset: int, *, now_ms: int) -> int:
        """Drop every batch with a record at or above `offset`; see `CuttableLog`."""
        with self._file_lock:
            self._check_open()
            self.finish_swap()
            if offset < self._end:  # whole batches go, so the cut may lie lower, but not below their segment
                bases = self._segments[0]
                self._cut_cleaned(bases[max(0, bisect_right(bases, offset) - 1)])
            return super().truncate_to(offset, now_ms=now_ms)

    def reset_to(self, offset: int, *, now_ms: int) -> None:
        """Drop everything and start over at `offset`; see `CuttableLog`."""
        with self._file_lock:
            self._check_open()
            self.finish_swap()
            self._cut_cleaned(0)
            super().reset_to(offset, now_ms=now_ms)

    def sweep(self, now_ms: int) -> None:
        """Rename and remove the files of detached segments; see `TrimmableLog`."""
        with self._file_lock:
            if not self.closed and self.log_dir.offline_reason is None:
                self.finish_swap()
            super().sweep(now_ms)

    def store_indexes(self, *, closing: bool = False) -> None:
        """Write index entries that are only in memory; see `FlushableLog`."""
        with self._file_lock:
            self._check_open()
            self.finish_swap()
            super().store_indexes(closing=closing)
