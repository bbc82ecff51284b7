"""Which records of a compacted log stay, and what becomes of their batches; no disk, no Python loop over records.

Of each key only the last record stays. `LastOffsets` knows the last offset of every key in the section that was written
since the last cleaning (the dirty one); a row goes

    when its key has a later offset there,
    when it is a tombstone (null value) that was there to be read for `delete.retention.ms`,
    when it has no key: nothing says what it would replace (Kafka does so as well).

Batches keep their place (docs/adr/0013): every batch begins where the one before ended. So one of which rows are gone
still covers its whole range, with the column `offset_delta` (raftlog/format/columns.py), and what is left of neighbours
is merged into one batch that covers all their ranges, up to `MERGED_BYTES` (`batch_parts.py`).

    of an aborted transaction            nothing of them stays; their keys replace nothing
    of a committed one                   as any other, and transactional no more, also where all of it stays
    control batches                      as they are, or nothing of them stays (`cleaner.py` says when)
    pinned: a producer's last ones       lose rows, but keep their header's numbers and range, and are not merged
    others, nothing gone nearby          byte for byte
    others                               merged with their neighbours of the same epoch, codec and kind of timestamp

What is compacted lies below the last stable offset, so of every transaction there it is known how it ended. Behind the
cleaner no batch is transactional any more: that is why markers may go in the end, and who reads such a log from its
begin (recovery, a new follower) finds no transaction open that was decided long ago.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from broker.log.batch_parts import CleanedBatch, EncodingFailed, Part, Run, emptied, kind_of, reduced, rows_of, whole
from broker.log.last_offsets import LastOffsets
from broker.log.source_batch import LIMITS, Bools, Int64s, SourceBatch, read_batch
from raftlog.format import DEFAULT_LIMITS, Buffer, decode_batch

MERGED_BYTES: Final = DEFAULT_LIMITS.ratio_floor_bytes * 15 // 16
"""Bytes of columns, before compression, at which a merged batch is closed: below it may expand as far as it likes."""
MAX_PARTS: Final = 4096
"""Batches of which rows are merged into one, so that there is a bound on what their headers take meanwhile."""
MAX_SPAN: Final = (1 << 31) - 1
"""Offsets that a merged batch covers at most: relative offsets in the index are u32, and u32 is the header's field."""


class Compactor:
    """Batches in, in the order of the log and with no gap between them; batches out, likewise.

    What is held back between two calls is a copy of at most `MERGED_BYTES` of rows, or one batch.
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
        """Bytes of rows, before compression, that are held back."""
        return self._run.bytes if self._run is not None else 0

    def compact(self, batches: Sequence[SourceBatch]) -> Iterator[CleanedBatch]:
        """Take the next batches; what comes out may lag behind by the batch that is being merged.

        Raises:
            EncodingFailed: what is left of a batch cannot be written.
        """
        for part, is_pinned in self._parts(batches):
            yield from self._take(part, is_pinned)
        if self._run is not None:
            self._run.detach()

    def finish(self) -> Iterator[CleanedBatch]:
        """Let out what was held back. Raises as `compact`."""
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
        keys = pa.chunked_array([batch.column("key") for batch in batches], pa.binary())
        keep = ~self._last_offsets.superseded(keys, offsets)
        if keys.null_count:
            keep &= keys.is_valid().to_numpy()
        if batches[0].header.base_offset < self._tombstones_below:
            values = pa.chunked_array([batch.column("value") for batch in batches], pa.binary())
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
        """Whether a batch may go into the same one as those before it. Of those without rows only the epoch counts."""
        header = part.header
        if header.leader_epoch != run.first.leader_epoch or header.next_offset - run.first.base_offset > MAX_SPAN:
            return False
        if not run.filled or not part.rows:
            return True
        if run.bytes + part.bytes > self._merged_bytes or len(run.filled) >= MAX_PARTS:
            return False
        return kind_of(run.filled[0].header) == kind_of(header)


def cut_front(batch: Buffer, offset: int) -> bytes:
    """Return what a merged batch says of `offset` and above, as a batch that begins there.

    For a follower whose log ends within the range of a batch that its leader has merged: what lies below it has, in the
    batches that were merged.

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
