"""What a partition's log remembers of its producers, as it grows, is cut and is opened again.

    append           noted, under the lock of the log
    roll             what is known at that moment is put aside, and written after the next flush
    after a flush    written anew when there are `SNAPSHOT_INTERVAL_BYTES` since the last snapshot
    checkpoint       likewise, and when segments are about to go: then their records cannot tell any more (KIP-360)
    clean stop       written, so that the next start reads no log for it
    truncation       read again: a snapshot below, and the batches behind it; snapshots above go (`log_cut.py`)

A snapshot that cannot be written for want of space is left out: the log says the same. Where segments go meanwhile, it
is tried again until there is space.

There may be very many producers, so nothing that takes longer for that is done on the event loop, or under a lock that
an append or a flush waits for, but what cutting the log needs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final

from broker.log.batch_scan import InvalidBatch
from broker.log.faults import is_refusal
from broker.log.log_state import LogState
from broker.log.producer_snapshots import (
    KEPT_SNAPSHOTS,
    SNAPSHOT_INTERVAL_BYTES,
    encode_producers,
    load_snapshot,
    place_snapshot,
    rebuild_producers,
    snapshot_name,
    write_snapshot,
)
from broker.log.producer_state import Duplicate, ProducerState, ProducerStates
from broker.log.segment import Segment
from broker.log.transactions import MarkerFate
from broker.log.txn_index import TxnIndex
from raftlog.errors import RaftlogError
from raftlog.format.control import Marker
from raftlog.format.header import BatchHeader

logger = logging.getLogger(__name__)

EXPIRED_AT_ONCE: Final = 1_000
"""Producers that are forgotten under one hold of the lock of the log."""
_PAUSE_S: Final = 0.0005


class ProducerLog(LogState):
    """A log that knows its idempotent producers (`producers`)."""

    def check_producer(self, header: BatchHeader, now_ms: int) -> Duplicate | None:
        """Return where a batch that is to be appended is already, None: append it. Only a leader asks.

        Raises:
            RaftlogError: it may not be appended, see `ProducerStates.check`.
        """
        with self._lock:  # housekeeping may be forgetting producers
            return self.producers.check(header, now_ms)

    def check_markers(self, markers: Sequence[Marker], now_ms: int) -> list[MarkerFate | RaftlogError]:
        """Return what becomes of markers; see `ProducerStates.check_markers`. Only a leader asks."""
        with self._lock:
            return self.producers.check_markers(markers, now_ms)

    def producers_now(self) -> list[tuple[int, ProducerState]]:
        """Return (producer id, state) of all producers, the longest idle first."""
        with self._lock:
            return list(self.producers.items())

    def expire_producers(self, now_ms: int) -> int:
        """Forget the producers that have been idle for longer than `producer.id.expiration.ms`; return how many.

        In pieces, with a pause between them: the event loop waits for the lock meanwhile, and takes it then.
        """
        count = 0
        while True:
            with self._lock:
                forgotten = self.producers.expire(now_ms, EXPIRED_AT_ONCE)
            count += forgotten
            if forgotten < EXPIRED_AT_ONCE:
                return count
            time.sleep(_PAUSE_S)

    def store_producers(self, *, closing: bool = False) -> None:
        """Write the snapshot that is due, if one is; `closing`: anyway, if anything is new. The file lock is not held.

        One that is written at the end is not fsynced, unless segments are about to go: there may be thousands, and a
        torn one is passed over.

        Raises:
            StorageError: the log is closed, or its directory offline.
        """
        with self._storing:
            self._check_open()
            many = self._snapshot_bytes >= SNAPSHOT_INTERVAL_BYTES
            if not closing and (many or self._snapshot_due is not None or self._detached):
                self._make_sure()
            with self._lock:
                due = self._snapshot_due
                leaves = self._detached[-1].next_offset if self._detached else 0
                if (
                    self._snapshot_bytes >= SNAPSHOT_INTERVAL_BYTES
                    or (due is None and leaves > self._snapshot_offset)
                    or (closing and self._end != (self._snapshots[-1] if self._snapshots else 0))
                ):
                    due = self._take_snapshot(self._active)
                    self._snapshot_bytes = 0
                self._snapshot_due = None
                truncations = self._truncations
            if due is not None:
                offset, frozen, txn_index = due
                together = frozen.together()
                data = encode_producers(together, frozen.undecided, () if txn_index is None else txn_index.entries)
                # Of what segments said that are about to go, nothing else may be left on the disk.
                self._store_snapshot(offset, data, truncations, durably=not closing or leaves > self._snapshot_offset)
                with self._lock:
                    self.producers.replace_layers(frozen, together)
                frozen.release()
            if leaves > self._newest_committed():
                with self._file_lock:
                    self._check_open()
                    self._store_leaving()
            with self._lock:
                if truncations == self._truncations:
                    self._told_offset = leaves

    def _make_sure(self) -> None:
        """See to it that the snapshots found at the start hold what they should, durably, or go. Raises StorageError.

        Before one of them is removed because a newer one is there, or segments because a snapshot tells of them.
        """
        for offset in sorted(self._unsure_snapshots):
            path = f"{self.directory}/{snapshot_name(offset)}"
            try:
                found, _ = load_snapshot(self._storage, self.directory, [offset], offset, self.producers.limits)
                if found == offset:
                    with contextlib.suppress(FileNotFoundError):  # cut off meanwhile
                        self._storage.open(path).datasync()
                else:
                    self._storage.remove(path)
                    with self._lock:
                        self._snapshots = [kept for kept in self._snapshots if kept != offset]
            except OSError as error:
                raise self._error(error, "reading a producer snapshot") from error
            self._unsure_snapshots.discard(offset)

    def _newest_committed(self) -> int:
        """Return the offset of the newest snapshot that no truncation can take away, 0: there is none."""
        with self._lock:
            return max((offset for offset in self._snapshots if offset <= self.high_watermark), default=0)

    def _store_leaving(self) -> None:
        """Write what segments say that are about to go: a truncation may take away every snapshot that has it."""
        with self._lock:
            detached = list(self._detached)
            newest_ms, limits = self.producers.newest_append_ms, self.producers.limits
            if not detached or not self.producers:
                return
        offset = detached[-1].next_offset
        txn_index = TxnIndex(detached[-1].base_offset)
        try:
            producers = rebuild_producers(
                self._storage, self.directory, self._snapshots, detached, offset, limits, newest_ms, txn_index
            )
        except InvalidBatch as error:  # damage of what goes anyway
            logger.warning("no producer snapshot of %s at offset %d: %s", self.directory, offset, error)
            return
        except OSError as error:
            raise self._error(error, "reading what segments say of producers") from error
        data = encode_producers(producers, producers.transactions.undecided, txn_index.entries)
        self._store_snapshot(offset, data, self._truncations, durably=True)

    def _store_snapshot(self, offset: int, data: bytes, truncations: int, *, durably: bool) -> None:
        """Write a snapshot aside, and make it one unless the log was cut since there were `truncations`."""
        self._check_open()
        try:
            write_snapshot(self._storage, self.directory, offset, data, durably=durably)
            with self._file_lock:
                self._check_open()
                if truncations != self._truncations:  # the next start removes what was written
                    return
                place_snapshot(self._storage, self.directory, offset, durably=durably)
                with self._lock:
                    self._snapshots = sorted({*self._snapshots, offset})
                    self._snapshot_offset = max(self._snapshot_offset, offset)
                    spare = self._spare_snapshots()
                for old in spare:
                    self._storage.remove(f"{self.directory}/{snapshot_name(old)}")
                with self._lock:
                    self._snapshots = [kept for kept in self._snapshots if kept not in spare]
        except OSError as error:
            if not is_refusal(error):
                raise self._error(error, "writing a producer snapshot") from error
            logger.warning("no producer snapshot of %s, its log is read instead: %s", self.directory, error)
            with self._lock:
                if self._detached:  # which tell nothing any more when there is space again
                    self._snapshot_bytes = SNAPSHOT_INTERVAL_BYTES

    def _spare_snapshots(self) -> list[int]:
        """Return all but the last ones, and one that no truncation reaches: what is committed is not cut.

        None while some are unsure.
        """
        if self._unsure_snapshots:
            return []
        committed = [offset for offset in self._snapshots if offset <= self.high_watermark]
        return [offset for offset in self._snapshots[:-KEPT_SNAPSHOTS] if offset not in committed[-1:]]

    def _producers_below(self, segments: Sequence[Segment], offset: int, now_ms: int) -> ProducerStates:
        """Return what is to be remembered when the log is cut at `offset`, where a batch of the last segment ends.

        Raises:
            InvalidBatch, OSError: the log cannot be read.
        """
        if not self.producers:
            return ProducerStates(self.producers.limits)
        with self._lock:
            there = [*self._detached, *segments]
        return rebuild_producers(
            self._storage, self.directory, self._snapshots, there, offset, self.producers.limits, now_ms
        )

    def _cut_producers(self, producers: ProducerStates, offset: int) -> None:
        """Go on with what is left at `offset` (0: nothing is); the snapshots above are removed by `_drop_snapshots`."""
        self.producers = producers
        self._snapshot_due = None
        self._snapshot_bytes = 0
        self._snapshots_gone += [gone for gone in self._snapshots if gone > offset or offset == 0]
        self._snapshots = [kept for kept in self._snapshots if kept not in self._snapshots_gone]
        if self._snapshot_offset not in self._snapshots:
            self._snapshot_offset = 0
        self._told_offset = 0

    def _drop_snapshots(self) -> None:
        """Remove the snapshots of what was cut off, durably: later the log grows over their offsets. Raises OSError."""
        if self._snapshots_gone:
            for offset in self._snapshots_gone:
                self._storage.remove(f"{self.directory}/{snapshot_name(offset)}")
            self._storage.sync_dir(self.directory)
            self._snapshots_gone = []
