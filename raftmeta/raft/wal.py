"""The write-ahead log: a durable journal for PySyncObj.

Changes take effect in memory at once and are collected; `take`, `write` and `done` make everything collected so far
durable with one sync. The owner of the node holds back messages that depend on it until then
(`RaftNode.take_durable`). After a start Raft determines the commit index anew with a quorum; a stored one must not be
trusted. The known commit index is still written along with other changes, to detect a leader that would replace
committed entries.

`has_room` tells whether that many more bytes fit, and reserves them. The last part of every reservation is kept for
terms and votes, which are written without a reservation.

The layout on the disk: files of frames.

    wal-<first sequence, 20 digits>, little-endian      frame, little-endian
      0   8  magic           b"RLRAFTW1"                  0   4  magic     b"RLWF"
      8  16  directory id    of meta.properties           4   4  length    u32, bytes of the payload
     24   8  first sequence  u64, of the first frame      8   8  sequence  u64, rising by one
     32   4  crc32c          u32 of bytes 0-31           16   4  crc32c    u32 of header's bytes 8-31, then the
                                                                           frame's 4-15, then the payload
                                                         20   n  payload   records, one after the other

    record, little-endian
      0   1  kind            1 entry     8 index, 8 term, 4 length, then the entry's data
                             2 vote      8 term, 4 voted for (i32; -1 none, -2 none for the rest of the term)
                             3 truncate  8 index: entries from there on are gone
                             4 reset     all entries are gone; the next one may have any index
                             5 commit    8 index: entries up to there were committed, and are never replaced

One sync makes one frame durable, and the next frame is written only after the sync. So a crash leaves at most one bad
frame, the last of the last file; a bad frame before a valid one is damage to durable data. The first frame of a file
begins with a vote record, so that older files can be removed. The space behind the last frame is reserved and zero. A
file gets its name once its first frame and ALLOCATION_BYTES behind it are durable, and never shrinks; a shorter one was
not cut by a crash. The checksum covers the directory id and the file's first sequence, so that the bytes of a frame
inside a command are not taken for one.
"""

from __future__ import annotations

import logging
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import overload

import google_crc32c
from pysyncobj.journal import Journal

from raftlog.errors import CorruptRecordError, RaftlogError, StorageError, StorageFull, UnsupportedVersion
from raftmeta.disk import DAMAGE_REMEDY, NO_SPACE, MetadataDisk

PREFIX = "wal-"
TMP = ".tmp"
"""Suffix of a file that is being made."""
_FILE_MAGIC = b"RLRAFTW1"
_FRAME_MAGIC = b"RLWF"
_HEADER = struct.Struct("<8s16sQI")
_FRAME = struct.Struct("<4sIQI")
_COVERED = struct.Struct("<IQ")
HEADER_BYTES = _HEADER.size
FRAME_OVERHEAD_BYTES = _FRAME.size
assert HEADER_BYTES == 36
assert FRAME_OVERHEAD_BYTES == 20

ENTRY, VOTE, TRUNCATE, RESET, COMMIT = 1, 2, 3, 4, 5
ENTRY_RECORD = struct.Struct("<BQQI")
VOTE_RECORD = struct.Struct("<BQi")
TRUNCATE_RECORD = COMMIT_RECORD = struct.Struct("<BQ")
RESET_RECORD = bytes([RESET])

ALLOCATION_BYTES = 4 << 20
"""Space reserved at a time, and the least size of a file under its final name."""

Record = tuple[int, int, int, bytes]
"""(kind, index or term, term or voted for, data), zero and empty where the kind has none."""


def file_name(first_sequence: int) -> str:
    """Return the name of the file that begins with this frame."""
    return f"{PREFIX}{first_sequence:020d}"


def first_sequences(names: list[str]) -> list[int]:
    """Return the first sequences of the log's files, rising."""
    rests = (name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    return sorted(int(rest) for rest in rests if len(rest) == 20 and rest.isdecimal())


class Segment:
    """Encodes and decodes one file."""

    def __init__(self, directory_id: bytes, first_sequence: int) -> None:
        assert len(directory_id) == 16
        self.first_sequence = first_sequence
        self.name = file_name(first_sequence)
        covered = struct.pack("<16sQ", directory_id, first_sequence)
        head = _FILE_MAGIC + covered
        self.header = head + struct.pack("<I", google_crc32c.value(head))
        self._seed: int = google_crc32c.value(covered)

    def frame(self, sequence: int, payload: bytes) -> bytes:
        """Return records as a frame."""
        length = len(payload)
        crc = google_crc32c.extend(google_crc32c.extend(self._seed, _COVERED.pack(length, sequence)), payload)
        return _FRAME.pack(_FRAME_MAGIC, length, sequence, crc) + payload

    def split(self, data: bytes, where: str) -> tuple[list[bytes], int]:
        """Return the payloads of the file's frames, and the position behind the last one.

        Zeros or a torn write follow it; no valid frame begins there.

        Raises:
            UnsupportedVersion: the magic is of a later format.
            CorruptRecordError: the header is not this file's, or a bad frame has a valid one behind it.
        """
        self._check_header(data, where)
        payloads: list[bytes] = []
        position = HEADER_BYTES
        while (payload := self._payload_at(data, position, self.first_sequence + len(payloads))) is not None:
            payloads.append(payload)
            position += FRAME_OVERHEAD_BYTES + len(payload)
        later = data.find(_FRAME_MAGIC, position + 1)
        while later >= 0:
            if self._payload_at(data, later, None) is not None:
                raise CorruptRecordError(
                    f"{where} is damaged at byte {position}: a bad frame with a valid one behind it, at byte {later}; "
                    f"{DAMAGE_REMEDY}"
                )
            later = data.find(_FRAME_MAGIC, later + 1)
        return payloads, position

    def _check_header(self, data: bytes, where: str) -> None:
        found = data[:HEADER_BYTES]
        if found == self.header:
            return
        if found[:7] == _FILE_MAGIC[:7] and found[7:8] > _FILE_MAGIC[7:]:
            raise UnsupportedVersion(f"{where} has a newer format than this version reads")
        raise CorruptRecordError(
            f"{where} is damaged at byte 0: its header is not that of this file in this directory; {DAMAGE_REMEDY}"
        )

    def _payload_at(self, data: bytes, position: int, expected: int | None) -> bytes | None:
        start = position + FRAME_OVERHEAD_BYTES
        if start > len(data):
            return None
        magic, length, sequence, crc = _FRAME.unpack_from(data, position)
        if magic != _FRAME_MAGIC or start + length > len(data) or expected not in (None, sequence):
            return None
        payload = data[start : start + length]
        covered = google_crc32c.extend(self._seed, data[position + 4 : position + 16])
        return payload if google_crc32c.extend(covered, payload) == crc else None


def torn_entries(data: bytes) -> int:
    """Return how many entries can be recognized in a frame that a crash has torn, and whose checksum is wrong."""
    found = 0
    if data[:4] == _FRAME_MAGIC:
        try:
            for kind, index, _, _ in split_records(data[FRAME_OVERHEAD_BYTES:].rstrip(b"\0"), ""):
                found += kind == ENTRY and index > 0
        except CorruptRecordError:
            pass  # to be expected: it is torn
    return found


def split_records(payload: bytes, where: str) -> Iterator[Record]:
    """Yield the records of a frame.

    Raises:
        CorruptRecordError: the checksum is right but the content is invalid: another program wrote it.
    """
    position = 0
    try:
        while position < len(payload):
            kind = payload[position]
            if kind == ENTRY:
                _, index, term, length = ENTRY_RECORD.unpack_from(payload, position)
                position += ENTRY_RECORD.size + length
                if position > len(payload):
                    break
                yield ENTRY, index, term, payload[position - length : position]
            elif kind == VOTE:
                _, term, voted_for = VOTE_RECORD.unpack_from(payload, position)
                position += VOTE_RECORD.size
                yield VOTE, term, voted_for, b""
            elif kind in (TRUNCATE, COMMIT):
                _, index = TRUNCATE_RECORD.unpack_from(payload, position)
                position += TRUNCATE_RECORD.size
                yield kind, index, 0, b""
            elif kind == RESET:
                position += 1
                yield RESET, 0, 0, b""
            else:
                raise CorruptRecordError(f"{where} has a record of the unknown kind {kind}; {DAMAGE_REMEDY}")
    except struct.error:
        position = len(payload) + 1
    if position != len(payload):
        raise CorruptRecordError(f"{where} has a record that is longer than its frame; {DAMAGE_REMEDY}")


logger = logging.getLogger(__name__)

Entry = tuple[bytes, int, int]
"""(data, index, term), as PySyncObj has it."""

NO_OP = b"\x01"
"""The data of an entry without a command: a leader's first one of its term."""
FIRST_ENTRY: Entry = (NO_OP, 1, 0)
"""Every log begins with this entry, so it is not written."""
NOBODY = -1


@dataclass(slots=True)
class RecoveredLog:
    """The content of a log's files, and the position where the last one continues."""

    segment: Segment
    entries: list[Entry]
    term: int = 0
    voted_for: int = NOBODY
    position: int = 0
    allocated: int = 0
    next_sequence: int = 1
    closed: list[tuple[str, int]] = field(default_factory=list)
    """Older files, and the highest index that each has an entry for."""
    highest_in_segment: int = 0
    committed: int = 1

    def replay(self, record: Record, where: str) -> None:
        """Apply a record."""
        kind, first, second, data = record
        entries = self.entries
        if kind == ENTRY:
            if entries and first != entries[-1][1] + 1:
                raise CorruptRecordError(f"{where}: entry {first} follows entry {entries[-1][1]}; {DAMAGE_REMEDY}")
            entries.append((data, first, second))
            self.highest_in_segment = max(self.highest_in_segment, first)
        elif kind == VOTE:
            self.term, self.voted_for = first, second
        elif kind == COMMIT:
            self.committed = max(self.committed, first)
        elif kind == TRUNCATE:
            if entries:
                del entries[max(0, first - entries[0][1]) :]
        else:
            entries.clear()


def read_log(disk: MetadataDisk, directory_id: bytes) -> RecoveredLog | None:
    """Return the log, None if there is none yet; a torn tail is cut off.

    Raises:
        OSError: the disk failed.
        CorruptRecordError, UnsupportedVersion: the log cannot be read; nothing was changed.
    """
    names = disk.names()
    firsts = first_sequences(names)
    found: RecoveredLog | None = None
    end, data = 0, b""
    for at, first in enumerate(firsts):
        segment = Segment(directory_id, first)
        where = f"{disk.path}/{segment.name}"
        data = disk.read(segment.name)
        payloads, end = segment.split(data, where)
        if len(data) < ALLOCATION_BYTES:
            raise CorruptRecordError(
                f"{where} is damaged: it was cut off at {len(data)} bytes, and a crash leaves at least "
                f"{ALLOCATION_BYTES}; {DAMAGE_REMEDY}"
            )
        following = first + len(payloads)
        if at < len(firsts) - 1 and following != firsts[at + 1]:
            raise CorruptRecordError(
                f"{where} is damaged at byte {end}: it ends with frame {following - 1}, and the next file begins with "
                f"{firsts[at + 1]}; {DAMAGE_REMEDY}"
            )
        if found is None:
            found = RecoveredLog(segment, [FIRST_ENTRY] if first == 1 else [])
        else:
            found.closed.append((found.segment.name, found.highest_in_segment))
        found.segment, found.position, found.allocated = segment, end, len(data)
        found.next_sequence, found.highest_in_segment = following, 0
        for payload in payloads:
            for record in split_records(payload, where):
                found.replay(record, where)
    if found is not None:
        if not found.entries:
            raise CorruptRecordError(f"{disk.path}: the log has no entry; {DAMAGE_REMEDY}")
        _make_durable(disk, found, data[end:].rstrip(b"\0"))
    for name in names:
        if name.startswith(PREFIX) and name.endswith(TMP):
            disk.remove(name)
    return found


def _make_durable(disk: MetadataDisk, found: RecoveredLog, torn: bytes) -> None:
    """Overwrite a torn tail with zeros, and sync, since unsynced writes of a killed process count from now on."""
    name = found.segment.name
    if torn:
        logger.warning(
            "%s/%s: dropped the %d bytes that a crash left of an unfinished write at byte %d, with %d entries to be "
            "in them; none of them was acknowledged",
            disk.path,
            name,
            len(torn),
            found.position,
            torn_entries(torn),
        )
        disk.write_at(name, found.position, bytes(len(torn)))
    disk.sync(name)
    disk.sync_dir()


def has_log(names: list[str]) -> bool:
    """Whether there is a log among these files."""
    return bool(first_sequences(names))


def unused_log(disk: MetadataDisk) -> uuid.UUID | None:
    """Return the directory id in a log without entry, term and vote; None if there is no such log.

    Raises:
        CorruptRecordError, UnsupportedVersion: it cannot be read.
    """
    if first_sequences(disk.names()) != [1]:
        return None
    name = Segment(bytes(16), 1).name
    data, where = disk.read(name), f"{disk.path}/{name}"
    directory_id = data[8:24].ljust(16, b"\0")
    payloads, end = Segment(directory_id, 1).split(data, where)
    blank = VOTE_RECORD.pack(VOTE, 0, NOBODY)
    return uuid.UUID(bytes=directory_id) if payloads == [blank] and not data[end:].rstrip(b"\0") else None


__all__ = ["ABSTAINED", "FIRST_ENTRY", "NO_OP", "Entry", "PendingWrite", "WriteAheadLog"]

ENTRY_OVERHEAD_BYTES = ENTRY_RECORD.size
ABSTAINED = -2
"""The node gave no vote in the term, and must give none."""

SEGMENT_BYTES = 8 << 20
RESERVE_BYTES = 64 << 10
"""Room for about two thousand changes of term and vote on a full disk."""
assert RESERVE_BYTES < ALLOCATION_BYTES


@dataclass(slots=True)
class PendingWrite:
    """The result of `take`, for `write` and then `done`."""

    segment: Segment
    position: int
    data: bytes
    rotation: tuple[Segment, bytes] | None
    """A new file and its first bytes; without one, or without space for it, `data` goes into `segment`."""
    obsolete: list[str]
    """Files to remove once this is durable."""
    rotated: bool = False


class WriteAheadLog(Journal):  # type: ignore[misc] # PySyncObj has no types
    """Entries, term and vote of one node. Call `open` first; all calls but `write` in one thread."""

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
        """The last entry that the log knows to be committed."""
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
        """Make the log's first file durable, if there is none, before `meta.properties` refers to it.

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
        """Whether collected changes are not being written yet."""
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
        except OSError as error:  # after any error the kernel may have dropped the dirty pages
            raise self._failed(error) from error

    def _begin_file(self, segment: Segment, data: bytes, must: bool) -> bool:
        temporary = segment.name + TMP
        try:
            self._disk.write(temporary, data)
            self._disk.allocate(temporary, len(data) + ALLOCATION_BYTES)
        except OSError as error:
            if must or error.errno not in NO_SPACE:
                raise
            self._remove_if_made(temporary)
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
            self._position, self._allocated = len(data), len(data) + ALLOCATION_BYTES
            # Entries of this frame and later ones; those before it may lie in either file.
            self._highest_in_segment = self.last_index
        else:
            self._position = pending.position + len(pending.data)
            self._allocated = max(self._allocated, self._position)
        self._synced_index = self.last_index if self._first_unsynced is None else self._first_unsynced - 1
        self._synced_term = self._taken_term

    def sync(self) -> None:
        """Make all collected changes durable; blocking."""
        if self._collected:
            pending = self.take()
            self.write(pending)
            self.done(pending)

    def has_room(self, size_bytes: int) -> bool:
        """Reserve space for this many more bytes of records; False if the disk has none."""
        needed = len(self._collected) + FRAME_OVERHEAD_BYTES + size_bytes + RESERVE_BYTES
        pending = self._in_flight
        if pending is not None:
            # A file that is just being begun comes with so much; if it finds no space, all goes into the old one.
            if pending.rotation is not None and (needed > ALLOCATION_BYTES or self._segment is None):
                return needed <= ALLOCATION_BYTES
            needed += len(pending.data)
        if self._segment is not None and self._position + needed <= self._allocated:
            return True
        try:
            if self._segment is None:
                self._create()
            if self._position + needed > self._allocated:
                assert self._segment is not None
                size = self._position + needed + ALLOCATION_BYTES
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
            if error.errno in NO_SPACE:
                self._remove_if_made(segment.name + TMP)
            raise
        self._next_sequence += 1
        self._segment = segment
        self._position, self._allocated = len(data), len(data) + ALLOCATION_BYTES

    def _remove_if_made(self, name: str) -> None:
        """Remove a file that got no space: without a free inode there is none."""
        if name in self._disk.names():
            self._disk.remove(name)

    def _failed(self, error: OSError) -> RaftlogError:
        if error.errno in NO_SPACE:
            return StorageFull(
                f"no space is left in {self._disk.path} for the metadata log: {error}; make room and restart"
            )
        return StorageError(f"the metadata log in {self._disk.path} failed: {error}; repair the disk and restart")

    def note_committed(self, index: int) -> None:
        """Record with the next write that entries up to this one are committed."""
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
        """Drop entries before `first_index`, which a snapshot covers."""
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
        self._synced_index = min(self._synced_index, entry[1] - 1)
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
        """Do nothing: PySyncObj counts entries that are not durable yet; see `note_committed`."""

    def getRaftCommitIndex(self) -> int:
        """Return the index that is committed without a quorum: the first."""
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
        """Return the node that has this node's vote in the term."""
        return None if self._voted_for == NOBODY else self._voted_for

    def _destroy(self) -> None:
        """Do nothing: the directory's owner closes the files."""
