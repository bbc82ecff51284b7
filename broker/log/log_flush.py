"""Making a log durable: tickets for the event loop, fsync for a thread.

A flush covers, for everything appended when its ticket was drawn: the contents of the segments, the names of new
segment files, the leader epochs, and the indexes of segments that were sealed meanwhile.
"""

from __future__ import annotations

import logging
from typing import Final

from broker.log.checkpoints import store_leader_epochs
from broker.log.faults import is_refusal
from broker.log.log_producers import ProducerLog
from broker.log.segment import OpenSegment, Segment
from broker.log.txn_index import drop_txn_file
from raftlog.errors import RaftlogError
from replication.leader_epochs import EpochEntry

logger = logging.getLogger(__name__)


class FlushTicket:
    """A flush that was begun: `run` it in a thread, then give it to `finish_flush`."""

    __slots__ = ("_log", "active", "end_offset", "epochs", "epochs_version", "names", "sealed", "truncations")

    def __init__(
        self,
        log: FlushableLog,
        end_offset: int,
        sealed: list[Segment],
        active: Segment | None,
        names: int,
        epochs: tuple[EpochEntry, ...] | None,
        epochs_version: int,
        truncations: int,
    ) -> None:
        self._log: Final = log
        self.end_offset = end_offset
        self.sealed = sealed
        """Sealed when the ticket was drawn: this flush is their last."""
        self.active = active
        """Active then, if it had records; it may have grown and been sealed since."""
        self.names = names
        self.epochs = epochs
        self.epochs_version = epochs_version
        self.truncations = truncations

    def run(self) -> None:
        """Wait for the disk. A failing fsync takes the log directory offline: nothing is retried on dirty pages.

        Raises:
            StorageError: the log directory is offline, by this flush or before; or the flush could not begin for a
                reason that passes (no descriptors), then the next one covers everything that this one should have.
        """
        self._log._run_flush(self)

    def tidy(self) -> None:
        """Do what may follow a flush, and what nobody waits for: the snapshot of the producers. Raises nothing."""
        try:
            self._log.store_producers()
        except RaftlogError as error:  # the directory is offline, and whoever uses it hears of it, or the log is gone
            logger.debug("no producer snapshot of %s: %s", self._log.directory, error)
        except Exception:  # the log says the same: nothing of it is in doubt
            logger.exception("no producer snapshot of %s", self._log.directory)


class FlushableLog(ProducerLog):
    """A log that can be flushed. Any number of tickets may be out at once."""

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

    def finish_flush(self, ticket: FlushTicket) -> int:
        """Count what a ticket that ran made durable, and return the flushed end offset."""
        with self._lock:
            self._synced_names = max(self._synced_names, ticket.names)
            if ticket.truncations == self._truncations and not self.closed:
                self._flushed_end = max(self._flushed_end, ticket.end_offset)
                done = [segment for segment in self._unflushed if segment in ticket.sealed]
                self._unflushed = [segment for segment in self._unflushed if segment not in ticket.sealed]
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

    def _run_flush(self, ticket: FlushTicket) -> None:
        with self._file_lock:
            self._check_open()
            try:
                for segment in (*ticket.sealed, ticket.active):
                    opened = None if segment is None else segment.opened
                    if opened is not None:  # None: flushed by another ticket and closed since
                        opened.file.datasync()
            except OSError as error:
                raise self._error(error, "fsync") from error
            if ticket.truncations == self._truncations:  # else it may be cut off by now, its names another one's
                for segment in ticket.sealed:
                    self._store_index(segment, durably=True)
            if ticket.epochs is not None and ticket.truncations == self._truncations:
                self._store_epochs(ticket.epochs, ticket.epochs_version)
            if ticket.names > self._synced_names:
                try:
                    self._storage.sync_dir(self.directory)
                except OSError as error:
                    raise self._error(error, "fsync of the names") from error

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
        with self._lock:  # a roll would close it
            count = len(opened.index)
            ends = closing or segment is not self._active
        try:
            if ends and not opened.txn_stored:  # first: the closing entries of the others vouch for it
                self._store_txn_index(segment, opened)
            if opened.index.store(self._storage, segment.stem, count) and durably:
                opened.index.sync(self._storage, segment.stem)
        except OSError as error:
            if not is_refusal(error):
                raise self._error(error, "writing indexes") from error
            logger.warning("indexes of %s not stored, they are rebuilt when needed: %s", segment.log_path, error)

    def _store_txn_index(self, segment: Segment, opened: OpenSegment) -> None:
        if opened.txn_index is not None:
            opened.txn_index.store(self._storage, segment.stem, segment.next_offset)
        else:
            drop_txn_file(self._storage, segment.stem)
        opened.txn_stored = True

    def store_indexes(self, *, closing: bool = False) -> None:
        """Write index entries that are only in memory; `closing` adds what tells where the log ends.

        They save the next start work and are checked entry by entry, so this is not fsynced.
        """
        with self._file_lock:
            self._check_open()
            if closing and self._active.size and self._active.opened is not None:
                active = self._active
                self._active.opened.index.append(active.next_offset, active.size, active.max_timestamp_ms)
                self._close_txn_index(active)
            self._store_index(self._active, durably=False, closing=closing)
            for segment in self._segments[1][:-1]:  # sealed ones for which there was no space or descriptor before
                if segment.opened is not None and segment not in self._unflushed:
                    self._store_index(segment, durably=True)
