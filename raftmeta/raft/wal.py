"""The write-ahead log: PySyncObj's journal, durable. `segments` has the layout of the files.

Changes are made in memory at once and collected; `take`, `write` and `done` make everything collected so far durable
with one sync. Nothing that promises something to another node may leave before that: the owner of the node keeps those
messages back (`RaftNode.take_durable`). After a start Raft finds the commit index again: to trust a kept one would be
to do without a quorum. What was known to be committed is all the same written along with whatever else is written, to
notice a leader that would replace it.

Space is reserved before it is promised: `has_room` says whether that much more fits, and reserves it. The last part of
every reservation is kept for terms and votes, which are written without asking.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import overload

from pysyncobj.journal import Journal

from raftlog.errors import RaftlogError, StorageError, StorageFull
from raftmeta.disk import NO_SPACE, MetadataDisk
from raftmeta.raft import segments
from raftmeta.raft.recovery import FIRST_ENTRY, NO_OP, NOBODY, Entry, read_log
from raftmeta.raft.segments import (
    COMMIT,
    COMMIT_RECORD,
    ENTRY,
    ENTRY_RECORD,
    FRAME_OVERHEAD_BYTES,
    RESET_RECORD,
    TMP,
    TRUNCATE,
    TRUNCATE_RECORD,
    VOTE,
    VOTE_RECORD,
    Segment,
)

__all__ = ["ABSTAINED", "FIRST_ENTRY", "NO_OP", "Entry", "PendingWrite", "WriteAheadLog"]

ENTRY_OVERHEAD_BYTES = ENTRY_RECORD.size
ABSTAINED = -2
"""No vote was given in the term, and none may be."""

SEGMENT_BYTES = 8 << 20
RESERVE_BYTES = 64 << 10
"""Room for about two thousand changes of term and vote on a full disk."""
assert RESERVE_BYTES < segments.ALLOCATION_BYTES


@dataclass(slots=True)
class PendingWrite:
    """What `take` hands out, for `write` and then `done`."""

    segment: Segment
    position: int
    data: bytes
    rotation: tuple[Segment, bytes] | None
    """A new file, and what to begin it with; in its place, or if it finds no space, `data` goes into `segment`."""
    obsolete: list[str]
    """Files to remove once this is durable."""
    rotated: bool = False


class WriteAheadLog(Journal):  # type: ignore[misc] # PySyncObj has no types
    """Entries, term and vote of one node. `open` first; one thread, but for `write`."""

    def __init__(self, disk: MetadataDisk, directory_id: uuid.UUID, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._disk = disk
        self._directory_id = directory_id.bytes
        self._segment_bytes = segment_bytes
        self._entries: list[Entry] = [FIRST_ENTRY]
        self._term = 0
        self._voted_for = NOBODY
        self._collected = bytearray()
        self._segment: Segment | None = None
        self._position = 0
        self._allocated = 0
        self._next_sequence = 1
        self._closed: list[tuple[str, int]] = []
        """Older files, and the highest index that each has an entry for."""
        self._highest_in_segment = 1
        self._obsolete: list[str] = []
        self._in_flight: PendingWrite | None = None
        self._first_unsynced: int | None = None
        """The lowest index that changed since the last `take`."""
        self.known_committed = self._committed_written = 1
        """Entries up to this one were committed, as far as the log has been told."""
        self._synced_index = 1
        self._synced_term = self._taken_term = 0
        self.appended_bytes = 0
        """Bytes of entries added since the start."""

    # Start

    def open(self) -> None:
        """Read the log back.

        Raises:
            StorageError: the disk failed.
            CorruptRecordError, UnsupportedVersion: the log cannot be read; nothing was changed.
        """
        try:
            self._recover()
        except OSError as error:
            raise self._failed(error) from error

    def _recover(self) -> None:
        found = read_log(self._disk, self._directory_id)
        if found is None:
            return
        self._entries, self._term, self._voted_for = found.entries, found.term, found.voted_for
        self._segment, self._position, self._allocated = found.segment, found.position, found.allocated
        self._next_sequence, self._closed = found.next_sequence, found.closed
        self._highest_in_segment = found.highest_in_segment
        self.known_committed = self._committed_written = found.committed
        self._synced_index = self._entries[-1][1]
        self._synced_term = self._taken_term = self._term

    def begin(self) -> None:
        """Make the log's first file durable, unless there is one: before `meta.properties` says that there is a log.

        Raises:
            StorageError, StorageFull: the disk failed, or has no room for it.
        """
        if self._segment is not None:
            return
        try:
            self._create()
        except OSError as error:
            raise self._failed(error) from error

    # Making durable

    @property
    def dirty(self) -> bool:
        """Whether something was collected that is not being written yet."""
        return bool(self._collected)

    @property
    def synced_index(self) -> int:
        """Entries up to this one are durable."""
        return self._synced_index

    @property
    def synced_term(self) -> int:
        """The latest durable term."""
        return self._synced_term

    def take(self) -> PendingWrite:
        """Return everything collected as one write; the next one only after `done`."""
        assert self._in_flight is None
        assert self._collected
        if self.known_committed > self._committed_written:
            self._committed_written = self.known_committed
            self._collected += COMMIT_RECORD.pack(COMMIT, self.known_committed)
        payload = bytes(self._collected)
        self._collected.clear()
        sequence = self._next_sequence
        self._next_sequence += 1
        segment, data, rotation = self._segment, b"", None
        if segment is not None:
            data = segment.frame(sequence, payload)
        if segment is None or self._position + len(data) > self._segment_bytes:
            rotation = self._beginning(sequence, payload)
            segment = segment or rotation[0]
        pending = PendingWrite(segment, self._position, data, rotation, self._obsolete)
        self._obsolete = []
        self._in_flight = pending
        self._taken_term = self._term
        self._first_unsynced = None
        return pending

    def _beginning(self, sequence: int, payload: bytes) -> tuple[Segment, bytes]:
        segment = Segment(self._directory_id, sequence)
        vote = VOTE_RECORD.pack(VOTE, self._term, self._voted_for)
        return segment, segment.header + segment.frame(sequence, vote + payload)

    def write(self, pending: PendingWrite) -> None:
        """Make a write durable; blocking, in any thread.

        Raises:
            StorageError: final; whether it is durable is unknown until the next start.
        """
        try:
            if pending.rotation is not None:
                pending.rotated = self._begin_file(*pending.rotation, must=not pending.data)
            if not pending.rotated:
                self._disk.write_at(pending.segment.name, pending.position, pending.data)
                self._disk.sync(pending.segment.name)
            if pending.obsolete:
                # Oldest first, each durable before the next: what is left must have no gap.
                for name in pending.obsolete:
                    self._disk.remove(name)
                    self._disk.sync_dir()
        except OSError as error:  # whatever the error: the kernel may have dropped the dirty pages
            raise self._failed(error) from error

    def _begin_file(self, segment: Segment, data: bytes, must: bool) -> bool:
        temporary = segment.name + TMP
        try:
            self._disk.write(temporary, data)
            self._disk.allocate(temporary, len(data) + segments.ALLOCATION_BYTES)
        except OSError as error:
            if must or error.errno not in NO_SPACE:
                raise
            self._disk.remove(temporary)
            return False
        self._disk.sync(temporary)
        self._disk.rename(temporary, segment.name)
        self._disk.sync_dir()
        return True

    def done(self, pending: PendingWrite) -> None:
        """Note that a write is durable."""
        assert self._in_flight is pending
        self._in_flight = None
        if pending.rotated:
            assert pending.rotation is not None
            segment, data = pending.rotation
            if self._segment is not None:
                self._closed.append((self._segment.name, self._highest_in_segment))
            self._segment = segment
            self._position, self._allocated = len(data), len(data) + segments.ALLOCATION_BYTES
            # Entries of this frame and later ones; those before it may lie in either file.
            self._highest_in_segment = self.last_index
        else:
            self._position = pending.position + len(pending.data)
            self._allocated = max(self._allocated, self._position)
        self._synced_index = self.last_index if self._first_unsynced is None else self._first_unsynced - 1
        self._synced_term = self._taken_term

    def sync(self) -> None:
        """Make everything collected durable, here and now."""
        if self._collected:
            pending = self.take()
            self.write(pending)
            self.done(pending)

    def has_room(self, size_bytes: int) -> bool:
        """Reserve space for so many more bytes of records; False when the disk has none."""
        needed = len(self._collected) + FRAME_OVERHEAD_BYTES + size_bytes + RESERVE_BYTES
        pending = self._in_flight
        if pending is not None:
            # A file that is just being begun comes with so much; if it finds no space, all goes into the old one.
            if pending.rotation is not None and (needed > segments.ALLOCATION_BYTES or self._segment is None):
                return needed <= segments.ALLOCATION_BYTES
            needed += len(pending.data)
        if self._segment is not None and self._position + needed <= self._allocated:
            return True
        try:
            if self._segment is None:
                self._create()
            if self._position + needed > self._allocated:
                assert self._segment is not None
                size = self._position + needed + segments.ALLOCATION_BYTES
                self._disk.allocate(self._segment.name, size)
                self._allocated = size
        except OSError as error:
            if error.errno in NO_SPACE:
                return False
            raise self._failed(error) from error
        return True

    def _create(self) -> None:
        """Make the first file, with the vote as it is: what was collected goes behind it."""
        segment, data = self._beginning(self._next_sequence, b"")
        try:
            self._begin_file(segment, data, must=True)
        except OSError as error:
            if error.errno in NO_SPACE and segment.name + TMP in self._disk.names():
                self._disk.remove(segment.name + TMP)
            raise
        self._next_sequence += 1
        self._segment = segment
        self._position, self._allocated = len(data), len(data) + segments.ALLOCATION_BYTES

    def _failed(self, error: OSError) -> RaftlogError:
        if error.errno in NO_SPACE:
            return StorageFull(
                f"no space is left in {self._disk.path} for the metadata log: {error}; make room and restart"
            )
        return StorageError(f"the metadata log in {self._disk.path} failed: {error}; repair the disk and restart")

    def note_committed(self, index: int) -> None:
        """Have the next write say that entries up to this one are committed."""
        self.known_committed = max(self.known_committed, index)

    # Entries

    @property
    def first_index(self) -> int:
        """Index of the oldest entry."""
        return self._entries[0][1]

    @property
    def last_index(self) -> int:
        """Index of the newest entry."""
        return self._entries[-1][1]

    @property
    def last_term(self) -> int:
        """Term of the newest entry."""
        return self._entries[-1][2]

    def term_at(self, index: int) -> int | None:
        """Return the term of the entry at `index`, None if it is not in the log."""
        at = index - self._entries[0][1]
        return self._entries[at][2] if 0 <= at < len(self._entries) else None

    def entry(self, index: int) -> Entry:
        """Return the entry at `index`, which is in the log."""
        at = index - self._entries[0][1]
        assert at >= 0
        return self._entries[at]

    def entries(self, first_index: int, end_index: int) -> list[Entry]:
        """Return the entries from `first_index`, which is in the log, to before `end_index`."""
        base = self._entries[0][1]
        assert first_index >= base
        return self._entries[first_index - base : end_index - base]

    def trim(self, first_index: int) -> None:
        """Forget entries before `first_index`; a snapshot covers them."""
        count = min(first_index - self.first_index, len(self._entries) - 1)
        if count <= 0:
            return
        del self._entries[:count]
        while self._closed and self._closed[0][1] < self.first_index:
            self._obsolete.append(self._closed.pop(0)[0])

    def reset(self, entry: Entry) -> None:
        """Begin anew with one entry, the last one of a snapshot."""
        self._collected += RESET_RECORD
        self._entries.clear()
        self._first_unsynced = 0
        self._obsolete += [name for name, _ in self._closed]
        self._closed.clear()
        self.add(*entry)

    # PySyncObj's journal

    def add(self, command: bytes, idx: int, term: int) -> None:
        """Append an entry."""
        if self._first_unsynced is None or idx < self._first_unsynced:
            self._first_unsynced = idx
        if idx > self._highest_in_segment:
            self._highest_in_segment = idx
        size = len(command)
        self.appended_bytes += size
        self._entries.append((command, idx, term))
        self._collected += ENTRY_RECORD.pack(ENTRY, idx, term, size)
        self._collected += command

    def deleteEntriesFrom(self, entryFrom: int) -> None:
        """Drop the entries from this position in the log on."""
        if entryFrom >= len(self._entries):
            return
        index = self._entries[entryFrom][1]
        self._collected += TRUNCATE_RECORD.pack(TRUNCATE, index)
        del self._entries[entryFrom:]
        self._synced_index = min(self._synced_index, index - 1)
        if self._first_unsynced is None or index < self._first_unsynced:
            self._first_unsynced = index

    @overload
    def __getitem__(self, item: int) -> Entry: ...

    @overload
    def __getitem__(self, item: slice) -> list[Entry]: ...

    def __getitem__(self, item: int | slice) -> Entry | list[Entry]:
        return self._entries[item]

    def __len__(self) -> int:
        return len(self._entries)

    def setRaftCommitIndex(self, raftCommitIndex: int) -> None:
        """Not taken from here: PySyncObj counts what is not durable yet; see `note_committed`."""

    def getRaftCommitIndex(self) -> int:
        """Return what is committed without asking anybody."""
        return 1

    def setCurrentTerm(self, term: int, votedForNodeId: int | None) -> None:
        """Note term and vote; they are durable before any message that shows them leaves."""
        voted_for = NOBODY if votedForNodeId is None else votedForNodeId
        if (term, voted_for) != (self._term, self._voted_for):
            assert term >= self._term
            self._term, self._voted_for = term, voted_for
            self._collected += VOTE_RECORD.pack(VOTE, term, voted_for)

    def getCurrentTerm(self) -> int:
        """Return the term."""
        return self._term

    def getVotedForNodeId(self) -> int | None:
        """Return who has this node's vote in the term."""
        return None if self._voted_for == NOBODY else self._voted_for

    def _destroy(self) -> None:
        """The log has no file of its own to close: the directory's owner closes it."""
